"""Random models, their logits, tokenizers."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def make_model(folder, config, seed=0, dtype="float32", original_format=True):
    """Saves a random model of a config; norms and biases are random too, so that mixing them up shows.

    Tensors are named as on the hub, or as transformers 5 holds them.
    """
    torch.manual_seed(seed)
    config = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1, or at 0 where 1 is added; biases at 0
                parameter.normal_(float(parameter.mean()), 0.2)
            else:
                parameter.normal_(0.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, save_original_format=original_format)


def load(folder, gguf_file=None, dtype="float32"):
    options = {"gguf_file": gguf_file} if gguf_file else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, **options
    )
    trouble = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if trouble:
        raise ValueError(f"{folder}: {trouble}")
    return model.eval()


def logits(folder, tokens, out, gguf_file=None, dtype="float32"):
    """Writes the logits (B, T, V) of token ids."""
    with torch.no_grad():
        result = load(folder, gguf_file, dtype)(torch.tensor(tokens)).logits
    np.save(out, result.float().numpy())


def gradients(folder, tokens, out):
    """Writes the gradient of every parameter, by its name, of the mean next-token loss."""
    model, tokens = load(folder), torch.tensor(tokens)
    scores = model(tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    np.savez(out, **{name: parameter.grad.numpy() for name, parameter in model.named_parameters()})


def tokenize(folder, texts, gguf_file=None, messages=None):
    """Token ids of texts, and of rendered conversations."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf_file} if gguf_file else {}))
    rendered = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages or []]
    return {
        "ids": [tokenizer(text)["input_ids"] for text in texts],
        "rendered": rendered,
        "special": tokenizer.special_tokens_map,
    }


def router_loss(folder, tokens, mask):
    """The auxiliary loss of a model's routers, over the tokens that mask keeps."""
    with torch.no_grad():
        output = load(folder)(
            torch.tensor(tokens), attention_mask=torch.tensor(mask), output_router_logits=True, use_cache=False
        )
    return float(output.aux_loss)


CALLS = (make_model, logits, gradients, tokenize, router_loss)
