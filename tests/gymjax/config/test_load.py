import pytest

from gymjax import config

LLAMA_FACTORY = """\
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: chats.jsonl
    ds_type: json
    type: chat_template
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules:
wandb_project:
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 1
saves_per_epoch: 1
early_stopping_patience: 3
dp_shard_size: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""


def test_llama_factory_file_loads_unchanged(write):
    run = config.load(write(LLAMA_FACTORY))
    assert run.model.model_name_or_path == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert (run.adapter.lora_rank, run.adapter.lora_alpha, run.adapter.lora_target) == (8, 16, ("all",))
    assert run.data.dataset == ("identity", "alpaca_en_demo")
    assert (run.data.template, run.data.max_samples, run.data.overwrite_cache) == ("llama3", 1000, True)
    assert run.optim.learning_rate == 1e-4
    assert run.optim.lr_scheduler_type == "cosine"
    assert run.train.bf16 is True
    assert run.train.resume_from_checkpoint is None
    assert run.train.report_to == "none"
    assert run.train.eval_strategy == "no"
    assert [note.partition(":")[0] for note in run.notes] == [
        "trust_remote_code",
        "preprocessing_num_workers",
        "dataloader_num_workers",
        "ddp_timeout",
    ]


def test_axolotl_qlora_file_loads(write):
    run = config.load(write(AXOLOTL))
    assert run.model.quantization_bit == 4
    assert run.adapter.finetuning_type == "lora"
    assert (run.adapter.lora_rank, run.adapter.lora_alpha, run.adapter.lora_target) == (32, 16, ("all",))
    assert run.data.dataset == ("teknium/GPT4-LLM-Cleaned", "chats.jsonl")
    assert (run.data.val_size, run.data.packing, run.data.tokenized_path) == (0.1, True, "last_run_prepared")
    assert (run.optim.optim, run.optim.learning_rate, run.optim.min_lr_ratio) == ("adamw", 2e-4, 0.1)
    assert (run.optim.warmup_steps, run.optim.warmup_ratio) == (10, 0.0)
    assert (run.train.save_strategy, run.train.eval_strategy) == ("epoch", "epoch")
    assert (run.train.per_device_train_batch_size, run.train.early_stopping_steps) == (2, 3)
    assert run.train.bf16 is None
    assert run.train.gradient_checkpointing == "full"


def test_axolotl_file_without_adapter_trains_all_weights(write):
    run = config.load(write("base_model: tiny\nlearning_rate: 1e-5\n"))
    assert run.adapter.finetuning_type == "full"
    assert any("base_model without adapter" in note for note in run.notes)


def test_axolotl_default_yields_to_an_override(write):
    run = config.load(write("base_model: tiny\n"), ["finetuning_type=lora"])
    assert run.adapter.finetuning_type == "lora"


@pytest.mark.parametrize(
    "arguments",
    [
        ["lora_rank=16", "learning_rate=1e-3", "plot_loss=true"],
        ["--lora_rank=16", "--learning_rate=1e-3", "--plot_loss=true"],
        ["--lora_rank", "16", "--learning_rate", "1e-3", "--plot_loss"],
        ["--plot-loss", "--lora-rank", "16", "learning_rate=1e-3"],
        ["--plot_loss", "lora_r=16", "learning_rate=.001"],
    ],
)
def test_overrides_win_in_every_spelling(write, arguments):
    run = config.load(write(LLAMA_FACTORY.replace("plot_loss: true", "plot_loss: false")), arguments)
    assert (run.adapter.lora_rank, run.adapter.lora_alpha) == (16, 32)
    assert run.optim.learning_rate == 1e-3
    assert run.train.plot_loss is True


def test_the_last_override_wins():
    assert config.load(None, ["model_name_or_path=a", "lora_rank=4", "lora_r=5"]).adapter.lora_rank == 5


@pytest.mark.parametrize("unset", ["", "null", "~", "None"])
def test_an_override_can_restore_a_default(write, unset):
    run = config.load(write("model_name_or_path: tiny\nquantization_bit: 4\nlora_rank: 4\n"), [f"lora_rank={unset}"])
    assert run.adapter.lora_rank == 8
    assert "lora_rank" not in run.explicit


@pytest.mark.parametrize("written", ["1e-4", "1.0e-4", "0.0001", ".0001", "1E-4", "'1e-4'", "1.e-4"])
def test_numbers_in_yaml(write, written):
    assert config.load(write(f"model_name_or_path: tiny\nlearning_rate: {written}\n")).optim.learning_rate == 1e-4


def test_negative_override_values():
    run = config.load(None, ["model_name_or_path=a", "--max_steps", "-1", "--freeze_trainable_layers", "-3",
                             "finetuning_type=freeze"])  # fmt: skip
    assert run.adapter.freeze_trainable_layers == -3


def test_texts_keep_their_spelling(write):
    run = config.load(write("model_name_or_path: 007\ndefault_system: 'yes: no'\nrun_name: 1e3\n"))
    assert (run.model.model_name_or_path, run.data.default_system, run.train.run_name) == ("007", "yes: no", "1e3")
    run = config.load(None, ["model_name_or_path=a", "default_system=You are: a [bot]"])
    assert run.data.default_system == "You are: a [bot]"


def test_lists_and_mappings_from_both_sides(write):
    text = 'model_name_or_path: tiny\nlora_target: [q_proj, v_proj]\nlora_rank_pattern: {q_proj: 4}\nstop: ["a,b"]\n'
    run = config.load(write(text))
    assert run.adapter.lora_target == ("q_proj", "v_proj")
    assert run.adapter.lora_rank_pattern == {"q_proj": 4}
    assert run.generate.stop == ("a,b",)
    run = config.load(write(text), ["lora_target=q_proj, k_proj", "lora_alpha_pattern={v_proj: 7}", "stop=[x, y]"])
    assert run.adapter.lora_target == ("q_proj", "k_proj")
    assert run.adapter.lora_alpha_pattern == {"v_proj": 7}
    assert run.generate.stop == ("x", "y")


def test_python_values(make):
    run = make(learning_rate=1e-3, packing=True, lora_target=["q_proj"], max_samples=None, num_train_epochs=2)
    assert (run.optim.learning_rate, run.data.packing, run.adapter.lora_target) == (1e-3, True, ("q_proj",))
    assert run.train.num_train_epochs == 2.0


@pytest.mark.parametrize(
    ("given", "section", "key", "meant"),
    [
        ({"optim": "adamw_torch"}, "optim", "optim", "adamw"),
        ({"optimizer": "adamw_hf"}, "optim", "optim", "adamw"),
        ({"use_muon": True}, "optim", "optim", "muon"),
        ({"gradient_checkpointing": True}, "train", "gradient_checkpointing", "full"),
        ({"gradient_checkpointing": False}, "train", "gradient_checkpointing", "none"),
        ({"gradient_checkpointing": "selective"}, "train", "gradient_checkpointing", "selective"),
        ({"gradient_checkpointing": "auto"}, "train", "gradient_checkpointing", "auto"),
        ({"gradient_checkpointing": "q, k, v"}, "train", "gradient_checkpointing", "q, k, v"),
        ({"optim": "adamw_bnb_8bit"}, "optim", "optim", "adamw_8bit"),
        ({"optimizer": "adamw_8bit"}, "optim", "optim", "adamw_8bit"),
        ({"gradient_checkpointing": "unsloth"}, "train", "gradient_checkpointing", "offload"),
        ({"use_unsloth_gc": True}, "train", "gradient_checkpointing", "offload"),
        ({"disable_gradient_checkpointing": True}, "train", "gradient_checkpointing", "none"),
        ({"save_strategy": "no"}, "train", "save_strategy", "no"),
        ({"save_strategy": False}, "train", "save_strategy", "no"),
        ({"report_to": ["tensorboard"]}, "train", "report_to", "tensorboard"),
        ({"use_tensorboard": True}, "train", "report_to", "tensorboard"),
        ({"auto_resume_from_checkpoints": False}, "train", "resume_from_checkpoint", False),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "train", "resume_from_checkpoint", "out/checkpoint-5"),
        ({"resume_from_checkpoint": "true"}, "train", "resume_from_checkpoint", True),
        ({"neat_packing": True}, "data", "packing", True),
        ({"stage": "pt"}, "data", "packing", True),
        ({"stage": "pt", "packing": False}, "data", "packing", False),
        ({"warmup_steps": 0.1}, "optim", "warmup_ratio", 0.1),
        ({"seed": 7}, "train", "data_seed", 7),
        ({"attn_implementation": "eager"}, "model", "flash_attn", "disabled"),
        ({"peft_use_dora": True}, "adapter", "use_dora", True),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter", "pissa_iter", 4),
        ({"peft_init_lora_weights": "pissa"}, "adapter", "pissa_iter", -1),
        ({"init_lora_weights": "pissa"}, "adapter", "pissa_init", True),
        ({"init_lora_weights": True}, "adapter", "pissa_init", False),
        ({"load_in_4bit": True, "peft": {"loftq_config": {"loftq_bits": 4}}}, "adapter", "loftq_init", True),
        (
            {"load_in_4bit": True, "init_lora_weights": "loftq", "loftq_config": "{loftq_bits: 4, loftq_iter: 3}"},
            "adapter",
            "loftq_iter",
            3,
        ),
        ({"adapter": "qlora"}, "model", "quantization_bit", 4),
        ({"quantization_bit": 4, "quantization_method": "bnb"}, "model", "quantization_bit", 4),
        ({"chat_template": "tokenizer_default"}, "data", "template", None),
        ({"chat_template": "chatml"}, "data", "template", "chatml"),
        ({"test_datasets": [{"path": "held.jsonl"}]}, "data", "eval_dataset", ("held.jsonl",)),
        ({"shuffle_merged_datasets": False}, "data", "disable_shuffling", True),
        ({"val_size": 0.1, "eval_steps": 5, "save_strategy": "epoch"}, "train", "eval_strategy", "steps"),
        ({"val_size": 0.1, "save_strategy": "epoch"}, "train", "eval_strategy", "epoch"),
        ({"val_size": 0.1, "save_steps": 50}, "train", "eval_steps", 50),
        ({"val_size": 0.1}, "train", "do_eval", True),
        ({"profile_steps": "3-5"}, "train", "profile_range", (3, 5)),
        ({"profile_steps": 4}, "train", "profile_range", (4, 4)),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            "optim",
            "min_lr_ratio",
            pytest.approx(0.1, rel=1e-12),  # one division in float64
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "{min_lr_rate: 0.2}"},
            "optim",
            "min_lr_ratio",
            0.2,
        ),
    ],
)
def test_spellings_and_filled_values(make, given, section, key, meant):
    assert getattr(getattr(make(**given), section), key) == meant


@pytest.mark.parametrize("name", ["sdpa", "fa2", "fa3"])
def test_attention_names_map_with_a_note(make, name):
    run = make(flash_attn=name)
    assert run.model.flash_attn == "auto"
    assert run.notes == (f"flash_attn: {name} means auto here; the fastest kernel that accepts the shapes runs",)


def test_alias_and_key_may_agree(make):
    assert make(lora_rank=4, lora_r=4).adapter.lora_rank == 4


def test_keys_unset_or_off_ask_for_nothing(make):
    off = {"use_dora": False, "deepspeed": None, "fsdp": [], "fsdp_config": {}, "shift_attn": "no", "wandb_project": ""}
    assert make(**off).notes == ()


def test_anchors_are_shared_and_finite(write):
    run = config.load(write("model_name_or_path: &m tiny\nrun_name: *m\nlora_target: [q_proj]\n"))
    assert run.train.run_name == "tiny"


def test_change_fills_again_and_checks(make):
    run = make(lora_rank=4)
    assert run.adapter.lora_alpha == 8
    assert config.change(run, lora_rank=32).adapter.lora_alpha == 64
    with pytest.raises(config.ConfigError, match="lora_rank must be at least 1, is 0"):
        config.change(run, lora_rank=0)
