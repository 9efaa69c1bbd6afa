"""Times one LoRA or QLoRA training step of a peer (torch) for bench_train.py, which starts one process per measurement.

Usage: python scripts/peer_step.py make FOLDER '{"hidden_size": ...}'      writes a random model of that shape
       python scripts/peer_step.py config FOLDER '{"hidden_size": ...}'    its config alone, which hf in bf16 needs
       python scripts/peer_step.py hf-liger|hf|unsloth FOLDER nf4|bf16 ROWSxLENGTH ...

Prints one line "RESULT {...}" for every batch, in their order; an error of one where that one failed.
"""

# Unsloth must be imported before transformers: imports stand where they are needed.
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # parameters: all experts of a layer in one tensor


def write_config(folder: str, shape: dict) -> None:
    """Writes the config.json of a shape; one that names no family is a Llama."""
    from transformers import AutoConfig

    shape = dict(shape)
    rope = {"rope_type": "default", "rope_theta": shape.pop("rope_theta", 10000.0)}
    options = {"max_position_embeddings": 131072, "rope_parameters": rope, "tie_word_embeddings": False}
    config = AutoConfig.for_model(shape.pop("model_type", "llama"), **shape, **options)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    config.save_pretrained(folder)


def random_model(folder: str):
    """The model of a folder's config with normal(0, 0.02) weights in bf16, made on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, initialization

    config = AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), initialization.no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
    return model


def make(folder: str, shape: dict) -> None:
    """Writes a random model of the given shape and a word-level tokenizer of that vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_config(folder, shape)
    model = random_model(folder)
    model.save_pretrained(folder, max_shard_size="4GB")
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"t{i}": i for i in range(3, shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def load_unsloth(folder: str, base: str, length: int):
    """Unsloth's model and adapter with its own checkpointing."""
    import torch
    import unsloth

    options = {"max_seq_length": length, "dtype": torch.bfloat16, "local_files_only": True}
    model, _ = unsloth.FastLanguageModel.from_pretrained(folder, load_in_4bit=base == "nf4", **options)
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        target_modules=TARGETS,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    unsloth.FastLanguageModel.for_training(model)
    return model


def load_hf_liger(folder: str, base: str, length: int):
    """What load_hf gives, with Liger's kernels, which are Llama's."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return load_hf(folder, base, length)


def load_hf(folder: str, base: str, length: int):
    """transformers + PEFT + bitsandbytes with SDPA attention.

    PEFT adapts experts through the tensor that holds a layer's. There gate and up are one projection, whose adapter has
    one down-projection of RANK for both, where gymjax trains one for each: a third less to train in gate and up.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    packed = None
    if base == "nf4":
        packed = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if list(Path(folder).glob("*.safetensors")):
        options: dict = {"dtype": torch.bfloat16, "device_map": {"": 0}, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, **options)
    elif packed is None:
        model = random_model(folder)
    else:
        raise SystemExit(f"{folder} has no weights to pack; write them with peer_step.py make")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    targets: dict = {"target_modules": TARGETS}
    if hasattr(model.config, "num_experts_per_tok"):
        targets = {"target_modules": TARGETS[:4], "target_parameters": EXPERTS}
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, task_type="CAUSAL_LM", **targets))
    print(f"{sum(w.numel() for w in model.parameters() if w.requires_grad):,} weights are trained", flush=True)
    return model.train()


def time_step(model, rows: int, length: int, steps: int = 8) -> dict:
    """Median of the steps after three to warm up: forward, backward, fused AdamW on the adapter."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, fused=True)
    tokens = torch.randint(3, model.config.vocab_size, (rows, length), device="cuda")
    seconds, losses = [], []
    for _ in range(3 + steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
    median = statistics.median(seconds[3:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"tok_s": rows * length / median, "seconds": median, "peak_gib": peak, "loss": losses[-1]}


def main(arguments: list[str]) -> None:
    """Makes the model, or times one peer."""
    if arguments[0] in ("make", "config"):
        write = make if arguments[0] == "make" else write_config
        write(arguments[1], json.loads(arguments[2]))
        return
    peer, folder, base, *batches = arguments
    sizes = [tuple(map(int, batch.split("x"))) for batch in batches]
    load = {"unsloth": load_unsloth, "hf-liger": load_hf_liger, "hf": load_hf}[peer]
    model = load(folder, base, max(length for _, length in sizes))
    for rows, length in sizes:
        try:
            result = time_step(model, rows, length)
        except RuntimeError as error:  # too little memory; the other batches are still timed
            result = {"error": str(error)[:200]}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
