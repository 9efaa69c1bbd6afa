"""Every configuration key that gymjax acts on, by section, with its default.

Names and defaults are LLaMA-Factory's and the Hugging Face Trainer's. Where ours differ, the comment says so.
A key has one flat namespace: `lora_rank: 8` in a file reaches `config.adapter.lora_rank`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"]
When = Literal["no", "steps", "epoch"]
REMAT = ("full", "none", "selective", "offload", "auto")
# What of a layer can be kept by name.
KEPT_NAMES = (
    "q",
    "k",
    "v",
    "q_product",
    "k_product",
    "attention",
    "attention_lse",
    "middle",
    "gate",
    "up",
    "rows",
    "hidden",
)


@dataclass(frozen=True)
class ModelConfig:
    """The base model and how it is held in memory."""

    model_name_or_path: str = ""  # a folder, a .gguf file or a hub id; load() requires it
    adapter_name_or_path: str | None = None  # a PEFT adapter folder to continue from, generate with or merge
    model_revision: str | None = None  # branch, tag or commit of a hub id; None = main
    cache_dir: str | None = None  # where hub downloads go; None = huggingface_hub's own place
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = None  # extends the context to cutoff_len
    flash_attn: Literal["auto", "fa", "cudnn", "disabled"] = "auto"  # fa = this project's kernel, disabled = XLA
    enable_liger_kernel: bool = True  # ours: on; fused loss, norms, RoPE and gates; false = plain JAX, to compare
    quantization_bit: int | None = None  # 4 = frozen base in 4 bits
    quantization_type: Literal["nf4"] = "nf4"
    double_quantization: bool = True


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, and which tokens are trained."""

    dataset: tuple[str, ...] = ()  # names in dataset_dir/dataset_info.json, files, folders or hub ids
    dataset_dir: str = "data"
    eval_dataset: tuple[str, ...] = ()
    template: str | None = None  # None = the tokenizer's own chat template
    default_system: str | None = None
    cutoff_len: int = 2048  # tokens
    max_samples: int | None = None  # rows of each dataset
    val_size: float = 0.0  # below 1: a share of the rows; else a number of rows
    train_on_prompt: bool = False
    mask_history: bool = False  # train the last assistant turn only
    packing: bool | None = None  # load() fills it: true with stage pt; packed documents never see each other
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = "concat"
    interleave_probs: tuple[float, ...] = ()
    overwrite_cache: bool = False
    tokenized_path: str | None = None  # folder of the tokenized cache
    disable_shuffling: bool = False


@dataclass(frozen=True)
class AdapterConfig:
    """Which weights are trained, and through what."""

    finetuning_type: Literal["lora", "full", "freeze"] = "lora"
    lora_rank: int = 8
    lora_alpha: int | None = None  # load() fills it: 2 * lora_rank
    lora_dropout: float = 0.0
    lora_target: tuple[str, ...] = ("all",)  # all = every linear layer of the blocks
    use_rslora: bool = False
    use_dora: bool = False  # trains the length of every output row beside its direction
    pissa_init: bool = False  # A and B start as the base's principal directions, and the base keeps the rest
    pissa_iter: int = 16  # subspace iterations of the fast SVD; -1 = exact SVD
    pissa_convert: bool = False  # writes plain LoRA of twice the rank for the original base, instead of residual_base
    loftq_init: bool = False  # ours (PEFT: init_lora_weights: loftq): A and B start as what quantizing the base loses
    loftq_iter: int = 1  # alternations of quantizing and SVD
    loraplus_lr_ratio: float | None = None  # learning rate of B over that of A
    additional_target: tuple[str, ...] = ()  # modules trained whole and saved with the adapter (PEFT modules_to_save)
    lora_rank_pattern: Mapping[str, int] = field(default_factory=dict)
    lora_alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    freeze_trainable_layers: int = 2  # the last n; negative = the first n
    freeze_trainable_modules: tuple[str, ...] = ("all",)
    freeze_extra_modules: tuple[str, ...] = ()  # outside the blocks: embed_tokens, norm, lm_head


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    learning_rate: float = 5e-5
    optim: Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "muon"] = "adamw"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 = no clipping
    lr_scheduler_type: Schedule = "linear"
    min_lr_ratio: float = 0.0  # lowest learning rate over learning_rate (cosine, cosine_with_min_lr)
    warmup_ratio: float = 0.0  # share of all steps
    warmup_steps: int = 0


@dataclass(frozen=True)
class TrainConfig:
    """The run: batches, length, evaluation, files, precision and devices."""

    stage: Literal["sft", "pt"] = "sft"
    do_train: bool = True  # ours: the train entry always trains
    do_eval: bool | None = None  # load() fills it: whether there is evaluation data
    output_dir: str = "trainer_output"
    overwrite_output_dir: bool = False
    num_train_epochs: float = 3.0
    max_steps: int = -1  # above 0: overrides num_train_epochs
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    # Steps between two logs, saves or evaluations are a share of the run where they are below 1.
    logging_steps: int | float = 10  # ours: the Trainer's 500 hides the start of the curve
    save_strategy: When = "steps"
    save_steps: int | float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    eval_strategy: When | None = None  # load() fills it. ours: with evaluation data, as often as saving
    eval_steps: int | float | None = None  # load() fills it. ours: save_steps (the Trainer: logging_steps)
    plot_loss: bool = False
    report_to: Literal["none", "tensorboard"] = "none"
    run_name: str | None = None
    resume_from_checkpoint: bool | str | None = None  # None = the newest in output_dir, if any; or a path, true, false
    load_best_model_at_end: bool = False
    metric_for_best_model: Literal["eval_loss"] = "eval_loss"
    early_stopping_steps: int | None = None  # evaluations without a new best
    seed: int = 42
    data_seed: int | None = None  # load() fills it: seed
    gradient_checkpointing: str = "full"  # on, as LLaMA-Factory's; or one of REMAT, or KEPT_NAMES joined by commas
    neftune_noise_alpha: float | None = None
    moe_aux_loss_coef: float | None = None  # of the routers' load-balancing loss, 1 when balanced; 0.01 is usual
    router_z_loss_coef: float | None = None  # of the square of the routers' logsumexp; 0.001 is usual
    bf16: bool | None = None  # None = auto: bf16 on GPUs, fp32 elsewhere
    fp16: bool | None = None
    loss_scale: float = 65536.0  # the first one, with fp16
    profile_steps: str | None = None  # "3-5" writes a JAX profile of these steps to output_dir/profile
    dp_size: int = -1  # data-parallel devices; -1 = all that fsdp_size leaves
    fsdp_size: int = 1  # devices that share one copy of the weights; -1 = all that dp_size leaves
    # ours: compiled steps are kept; None = ~/.cache/gymjax/compiled on GPUs; or none
    compile_cache_dir: str | None = None
    disable_tqdm: bool = False

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """First and last step to profile, both included, or None."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition("-")
        return int(first), int(last or first)


@dataclass(frozen=True)
class GenerateConfig:
    """How answers are sampled."""

    do_sample: bool = True
    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 50  # 0 = no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 1024
    stop: tuple[str, ...] = ()  # texts that end an answer, besides the tokenizer's end tokens


@dataclass(frozen=True)
class ExportConfig:
    """What the export entry writes."""

    export_dir: str | None = None
    export_size: float = 5.0  # GB of a shard
    export_dtype: Literal["bfloat16", "float16", "float32"] | None = None  # None = the base model's


@dataclass(frozen=True)
class Config:
    """One run, resolved and checked.

    Attributes:
        explicit: the keys that a file or an override gave.
        notes: one line for each accepted key that changes nothing here, for the trainer to print.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    adapter: AdapterConfig = AdapterConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    generate: GenerateConfig = GenerateConfig()
    export: ExportConfig = ExportConfig()
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "adapter": AdapterConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "generate": GenerateConfig,
    "export": ExportConfig,
}


def flat(config: Config) -> dict[str, Any]:
    """Return all keys of all sections as one dict, in the order of this file."""
    return {
        f.name: getattr(getattr(config, section), f.name) for section, kind in SECTIONS.items() for f in fields(kind)
    }
