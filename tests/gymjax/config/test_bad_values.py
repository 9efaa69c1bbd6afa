import pytest

CASES = [
    # unknown keys
    ({"lora_rnk": 8}, "unknown key lora_rnk; did you mean lora_rank?"),
    ({"learning_rates": 1}, "unknown key learning_rates; did you mean learning_rate?"),
    ({"output_directory": "x"}, "unknown key output_directory; did you mean output_dir?"),
    ({"zzzqqq": 1}, "unknown key zzzqqq; gymjax/config/sections.py lists all keys"),
    # types
    ({"lora_rank": "eight"}, "lora_rank must be a whole number, is 'eight'"),
    ({"lora_rank": 8.5}, "lora_rank must be a whole number, is '8.5'"),
    ({"lora_rank": True}, "lora_rank must be a whole number, is 'true'"),
    ({"lora_r": "x"}, "lora_r must be a whole number, is 'x'"),
    ({"learning_rate": "fast"}, "learning_rate must be a number, is 'fast'"),
    ({"learning_rate": "nan"}, "learning_rate must be a number, is 'nan'"),
    ({"learning_rate": float("inf")}, "learning_rate must be a number, is 'inf'"),
    ({"learning_rate": "1e999"}, "learning_rate must be a number, is '1e999'"),
    ({"learning_rate": False}, "learning_rate must be a number, is 'false'"),
    ({"packing": 1}, "packing must be true or false, is '1'"),
    ({"bf16": "maybe"}, "bf16 must be true or false, is 'maybe'"),
    ({"model_name_or_path": ["a", "b"]}, "model_name_or_path must be one text, is ['a', 'b']"),
    ({"dataset": {"a": "b"}}, "dataset must be a comma list, is the mapping {'a': 'b'}"),
    ({"lora_rank_pattern": "q_proj"}, "lora_rank_pattern must be a mapping such as {q_proj: 16}, is 'q_proj'"),
    ({"lora_rank_pattern": {"q_proj": "x"}}, "lora_rank_pattern entry q_proj: must be a whole number, is 'x'"),
    ({"lora_target": "[q_proj"}, "lora_target '[q_proj' is not valid YAML"),
    ({"interleave_probs": "0.5,x"}, "interleave_probs must be a number, is 'x'"),
    ({"resume_from_checkpoint": ["a"]}, "resume_from_checkpoint must be true or false or a text, is 'a'"),
    # choices
    ({"flash_attn": "fa9"}, "flash_attn must be one of auto, fa, cudnn, disabled, is 'fa9'"),
    ({"optim": "adamx"}, "optim must be one of adamw, adamw_8bit, adafactor, lion, sgd, muon, is 'adamx'"),
    ({"lr_scheduler_type": "zigzag"}, "lr_scheduler_type must be one of linear, cosine, constant,"),
    ({"save_strategy": True}, "save_strategy must be one of no, steps, epoch, is 'true'"),
    (
        {"gradient_checkpointing": "some"},
        "gradient_checkpointing must be one of full, none, selective, offload, auto, or names of q, k, v, q_product, "
        "k_product, attention, attention_lse, middle, gate, up, rows, hidden joined by commas; is 'some'",
    ),
    ({"gradient_checkpointing": "q, v, q"}, "joined by commas; is 'q, v, q'"),
    ({"gradient_checkpointing": "offload,q"}, "joined by commas; is 'offload,q'"),
    ({"metric_for_best_model": "bleu"}, "metric_for_best_model must be one of eval_loss, is 'bleu'"),
    ({"export_dtype": "int4"}, "export_dtype must be one of bfloat16, float16, float32, is 'int4'"),
    ({"adapter": "ia3"}, "adapter must be one of lora, qlora, is 'ia3'; or set finetuning_type, quantization_bit"),
    ({"saves_per_epoch": -1}, "saves_per_epoch must be at least 0, is -1"),
    ({"saves_per_epoch": 4, "save_steps": 10}, "saves_per_epoch and save_steps both say how often; keep one"),
    (
        {"datasets": [{"path": "a", "split": ["train", "test"]}]},
        "datasets[0].split must be one text, is ['train', 'test']",
    ),
    ({"datasets": [{"path": "a", "data_files": {"train": "b"}}]}, "datasets[0].data_files must be one text or a list"),
    ({"load_in_4bit": "4"}, "load_in_4bit must be one of true, false, is '4'; or set quantization_bit"),
    # ranges
    ({"seed": 2**63}, "seed must be at least 0 and below 2^63, is 9223372036854775808"),
    ({"learning_rate": 0}, "learning_rate must be above 0 and at most 1, is 0.0"),
    ({"learning_rate": "-1e-4"}, "learning_rate must be above 0 and at most 1, is -0.0001"),
    ({"learning_rate": 5}, "learning_rate must be above 0 and at most 1, is 5.0"),
    ({"lora_rank": 0}, "lora_rank must be at least 1, is 0"),
    ({"lora_alpha": 0}, "lora_alpha must be at least 1, is 0"),
    ({"lora_dropout": 1}, "lora_dropout must be at least 0 and below 1, is 1.0"),
    ({"lora_dropout": -0.1}, "lora_dropout must be at least 0 and below 1, is -0.1"),
    ({"lora_rank_pattern": {"q_proj": 0}}, "lora_rank_pattern must be at least 1 for q_proj, is 0"),
    ({"loraplus_lr_ratio": 0}, "loraplus_lr_ratio must be above 0, is 0.0"),
    ({"cutoff_len": 1}, "cutoff_len must be at least 2 tokens, is 1"),
    ({"max_samples": 0}, "max_samples must be at least 1, is 0"),
    ({"val_size": -1}, "val_size must be at least 0, is -1.0"),
    ({"val_size": 2.5}, "val_size must be a share below 1 or a whole number of rows, is 2.5"),
    ({"adam_beta2": 1}, "adam_beta2 must be at least 0 and below 1, is 1.0"),
    ({"adam_epsilon": 0}, "adam_epsilon must be above 0, is 0.0"),
    ({"max_grad_norm": -1}, "max_grad_norm must be at least 0, is -1.0"),
    ({"warmup_ratio": 1.5}, "warmup_ratio must be at least 0 and below 1, is 1.5"),
    ({"warmup_steps": -5}, "warmup_steps must be at least 0, is -5"),
    ({"warmup_steps": "some"}, "warmup_steps must be a whole number, is 'some'"),
    ({"num_train_epochs": 0}, "num_train_epochs must be above 0, is 0.0"),
    ({"max_steps": 0}, "max_steps must be -1 (num_train_epochs decides) or at least 1, is 0"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, is 0"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, is 0"),
    ({"save_total_limit": 0}, "save_total_limit must be at least 1, is 0"),
    ({"logging_steps": 0}, "logging_steps must be a whole number of steps, or a share of the run below 1, is 0"),
    ({"fsdp_size": 0}, "fsdp_size must be -1 or at least 1, is 0"),
    ({"quantization_bit": 7}, "quantization_bit must be 4, or not given, is 7"),
    ({"profile_steps": "5-3"}, "profile_steps must be first-last with first at least 1, such as 3-5, is 5-3"),
    ({"profile_steps": "x"}, "profile_steps must be first-last with first at least 1, such as 3-5, is x"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, is 0.0"),
    ({"temperature": -1}, "temperature must be at least 0 (0 = greedy), is -1.0"),
    ({"export_size": 0}, "export_size must be above 0, is 0.0"),
    ({"model_name_or_path": None}, "model_name_or_path must be given: a folder, a .gguf file or a hub id"),
    # known, not done
    ({"lora_bias": "all"}, "lora_bias: all is known, not supported yet; biases stay frozen"),
    ({"finetuning_type": "dora"}, "is dora: known, not supported yet; use finetuning_type: lora with use_dora: true"),
    ({"init_lora_weights": "olora"}, "olora is known, not supported yet; use true, pissa, pissa_niter_N or loftq"),
    ({"init_lora_weights": "pissa_niter_x"}, "init_lora_weights must be a whole number, is 'x'"),
    ({"loftq_bits": 8}, "loftq_bits must be one of 4, is '8'"),
    ({"loftq_config": {"loftq_bits": 2}}, "loftq_config.loftq_bits must be 4, is 2; the base is packed into NF4"),
    ({"loftq_config": {"bits": 4}}, "loftq_config takes loftq_bits and loftq_iter, has bits"),
    ({"peft": {"r": 4}}, "peft takes loftq_config, is {'r': 4}"),
    ({"pissa_init": True, "pissa_iter": 0}, "pissa_iter must be -1 (exact) or at least 1, is 0"),
    ({"use_galore": True}, "use_galore: true is known, not supported yet; use optim: adamw, adamw_8bit, adafactor,"),
    ({"galore_rank": 16}, "galore_rank: 16 is known, not supported yet; use optim: adamw, adamw_8bit, adafactor,"),
    ({"deepspeed": "ds_z3.json"}, "deepspeed: ds_z3.json is known, not supported yet; set fsdp_size"),
    ({"fsdp_config": {"a": 1}}, "fsdp_config is known, not supported yet; set fsdp_size"),
    ({"streaming": True}, "streaming: true is known, not supported yet; rows are read into memory"),
    ({"predict_with_generate": True}, "predict_with_generate: true is known, not supported yet; run python -m"),
    ({"rope_theta": 1e6}, "rope_theta: 1000000.0 is known, not supported yet; the model's config.json decides"),
    ({"rope_scaling": "longrope"}, "rope_scaling must be one of linear, dynamic, yarn, llama3"),
    ({"pure_bf16": True}, "pure_bf16: true is known, not supported yet; use bf16: true"),
    ({"push_to_hub": True}, "push_to_hub: true is known, not supported yet; upload output_dir with `hf upload`"),
    ({"export_hub_model_id": "a/b"}, "export_hub_model_id: a/b is known, not supported yet; upload"),
    ({"quantization_method": "hqq"}, "quantization_method: hqq is known, not supported yet; use quantization_bit: 4"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 is known, not supported yet; set fsdp_size"),
    ({"special_tokens": {"eos_token": "x"}}, "special_tokens is known, not supported yet (but pad_token)"),
    ({"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "plugins: axolotl.integrations.spectrum."),
    ({"stage": "dpo"}, "stage is dpo: known, not supported yet; use stage: sft or pt"),
    ({"finetuning_type": "oft"}, "finetuning_type is oft: known, not supported yet; use finetuning_type: lora"),
    ({"quantization_bit": 8}, "quantization_bit is 8: known, not supported yet; use quantization_bit: 4"),
    ({"quantization_type": "fp4"}, "quantization_type is fp4: known, not supported yet; use quantization_type: nf4"),
    ({"optim": "paged_lion_8bit"}, "optim is paged_lion_8bit: known, not supported yet; use optim: adamw"),
    ({"optimizer": "adamw_torch_4bit"}, "optimizer is adamw_torch_4bit: known, not supported yet; use optim: adamw"),
    ({"report_to": "wandb"}, "report_to is wandb: known, not supported yet; use report_to: tensorboard"),
    ({"report_to": ["wandb"]}, "report_to is wandb: known, not supported yet; use report_to: tensorboard"),
    ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type is polynomial: known, not supported yet; use linear"),
    # Axolotl's structured keys
    ({"datasets": [{"type": "alpaca"}]}, "datasets[0] must be a path or a mapping with a path, is {'type': 'alpaca'}"),
    ({"datasets": [{"path": "a", "type": "alpaca_chat.load_qa"}]}, "datasets[0].type: alpaca_chat.load_qa is known"),
    ({"datasets": [{"path": "a", "shards": 3}]}, "datasets[0].shards: 3 is known, not supported yet"),
    ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs takes min_lr or min_lr_rate, has num_cycles"),
]


@pytest.mark.parametrize(("values", "message"), CASES, ids=[f"{i}-{next(iter(c[0]))}" for i, c in enumerate(CASES)])
def test_bad_value(refusal, values, message):
    assert message in refusal(**values)


def test_bad_values_are_shown_together(refusal):
    lines = refusal(lora_rnk=1, learning_rate="x", lora_bias="all").splitlines()
    assert [line.split()[0] for line in lines] == ["unknown", "learning_rate", "lora_bias:"]


def test_bad_alias_that_contradicts_its_key(refusal):
    message = refusal(lora_rank=8, lora_r=16)
    assert message == "lora_rank and lora_r both set lora_rank, to 8 and 16; keep one"


def test_bad_pair_of_aliases(refusal):
    message = refusal(adapter="qlora", finetuning_type="full")
    assert "adapter and finetuning_type both set finetuning_type, to lora and full; keep one" in message
