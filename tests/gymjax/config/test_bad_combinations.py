import pytest

CASES = [
    (
        {"quantization_bit": 4, "finetuning_type": "full"},
        "quantization_bit: 4 cannot be trained with finetuning_type: full; a 4-bit base stays frozen",
    ),
    (
        {"quantization_bit": 4, "finetuning_type": "freeze"},
        "quantization_bit: 4 cannot be trained with finetuning_type: freeze",
    ),
    (
        {"lora_rank": 8, "finetuning_type": "full"},
        "lora_rank would do nothing with finetuning_type: full; remove it, or set finetuning_type: lora",
    ),
    (
        {"loraplus_lr_ratio": 16, "finetuning_type": "full"},
        "loraplus_lr_ratio would do nothing with finetuning_type: full",
    ),
    (
        {"lora_r": 8, "use_rslora": True, "finetuning_type": "freeze"},
        "lora_rank, use_rslora would do nothing with finetuning_type: freeze",
    ),
    (
        {"lora_rank_pattern": {"*.q_proj": 4}},
        "lora_rank_pattern: '*.q_proj' is no regular expression (nothing to repeat at position 0); give a module",
    ),
    (
        {"freeze_trainable_layers": 4},
        "freeze_trainable_layers would do nothing with finetuning_type: lora; remove it, or set",
    ),
    (
        {"freeze_trainable_layers": 0, "finetuning_type": "freeze"},
        "freeze_trainable_layers: 0 with finetuning_type: freeze trains no layer; give n (the last n) or -n",
    ),
    (
        {"adapter_name_or_path": "out", "finetuning_type": "full"},
        "adapter_name_or_path needs finetuning_type: lora, is full; merge the adapter first",
    ),
    ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path must be one folder; merge the earlier adapters first"),
    (
        {"use_dora": True, "pissa_init": True, "finetuning_type": "full"},
        "use_dora, pissa_init would do nothing with finetuning_type: full; remove it, or set finetuning_type: lora",
    ),
    ({"pissa_iter": 4}, "pissa_iter would do nothing without pissa_init: true; remove it, or set that"),
    ({"pissa_convert": True}, "pissa_convert would do nothing without pissa_init: true; remove it, or set that"),
    ({"quantization_bit": 4, "loftq_iter": 4}, "loftq_iter would do nothing without loftq_init: true"),
    (
        {"pissa_init": True, "loftq_init": True, "quantization_bit": 4},
        "pissa_init: true and loftq_init: true exclude each other: A and B have one start; keep one",
    ),
    (
        {"init_lora_weights": "loftq"},
        "loftq_init: true has no loss to start from with quantization_bit: null; set quantization_bit: 4, or use pissa",
    ),
    (
        {"loftq_init": True, "quantization_bit": 4, "lora_target": "q_proj,lm_head"},
        "loftq_init: true cannot start lora_target: q_proj, lm_head; lm_head is never quantized: take it out",
    ),
    (
        {"pissa_init": True, "pissa_convert": True, "quantization_bit": 4},
        "pissa_convert: true with quantization_bit: 4 would not be exact: the quantized rest is no part of",
    ),
    ({"lora_target": "all,q_proj"}, "lora_target must be all or names, is all, q_proj"),
    ({"packing": False, "neat_packing": True}, "packing and neat_packing both set packing, to false and true"),
    ({"bf16": True, "fp16": True}, "bf16: true and fp16: true exclude each other; keep one"),
    ({"loss_scale": 1024}, "loss_scale would do nothing without fp16: true; remove it, or set fp16: true"),
    (
        {"train_on_prompt": True, "mask_history": True},
        "train_on_prompt: true and mask_history: true exclude each other",
    ),
    ({"val_size": 0.1, "eval_dataset": "held"}, "val_size: 0.1 and eval_dataset: held exclude each other; keep one"),
    ({"eval_strategy": "steps"}, "eval_strategy: steps has nothing to evaluate on; set val_size (say 0.1) or"),
    ({"do_eval": True}, "do_eval: true has nothing to evaluate on; set val_size (say 0.1) or eval_dataset"),
    (
        {"val_size": 0.1, "do_eval": False, "eval_strategy": "epoch"},
        "do_eval: false and eval_strategy: epoch contradict each other; keep one",
    ),
    ({"early_stopping_steps": 3}, "early_stopping_steps: 3 needs evaluations, eval_strategy is no; set val_size"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end: true needs evaluations, eval_strategy is no"),
    (
        {"load_best_model_at_end": True, "val_size": 0.1, "eval_strategy": "epoch"},
        "load_best_model_at_end: true needs save_strategy and eval_strategy to be the same, they are steps and epoch",
    ),
    (
        {"load_best_model_at_end": True, "val_size": 0.1, "save_steps": 50, "eval_steps": 20},
        "needs save_steps to be a multiple of eval_steps, or the same share, they are 50 and 20",
    ),
    (
        {"warmup_ratio": 0.1, "warmup_steps": 10},
        "warmup_ratio: 0.1 and warmup_steps: 10 exclude each other; keep one",
    ),
    (
        {"warmup_ratio": 0.1, "lr_scheduler_type": "constant"},
        "warmup_ratio would do nothing with lr_scheduler_type: constant; use constant_with_warmup",
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "lr_scheduler_type: cosine_with_min_lr needs min_lr_ratio above 0",
    ),
    (
        {"min_lr_ratio": 0.1},
        "min_lr_ratio: 0.1 would do nothing with lr_scheduler_type: linear; use cosine_with_min_lr",
    ),
    (
        {"min_lr_ratio": 0.1, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
        "min_lr and min_lr_ratio both set the lowest learning rate; keep one",
    ),
    (
        {"dataset": "a,b", "interleave_probs": "0.5,0.5"},
        "interleave_probs: 0.5, 0.5 would do nothing with mix_strategy: concat; use interleave_under",
    ),
    (
        {"dataset": "a,b,c", "interleave_probs": "0.5,0.5", "mix_strategy": "interleave_under"},
        "interleave_probs has 2 numbers for 3 names in dataset; give one for each",
    ),
    (
        {"dataset": "a,b", "interleave_probs": "0.5,0.6", "mix_strategy": "interleave_over"},
        "interleave_probs must be at least 0 and sum to 1, is 0.5, 0.6",
    ),
    ({"dp_size": -1, "fsdp_size": -1}, "dp_size: -1 and fsdp_size: -1 cannot both take the rest; give one a number"),
]


@pytest.mark.parametrize(("values", "message"), CASES, ids=["+".join(values) for values, _ in CASES])
def test_bad_combination(refusal, values, message):
    assert message in refusal(**values)


def test_bad_combinations_are_shown_together(refusal):
    assert len(refusal(bf16=True, fp16=True, do_eval=True, warmup_ratio=0.1, warmup_steps=1).splitlines()) == 3


def test_evaluation_without_data_is_one_mistake(refusal):
    assert refusal(eval_strategy="steps").count("\n") == 0
