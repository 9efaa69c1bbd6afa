"""bitsandbytes' NF4, alone and inside transformers."""

import bitsandbytes.functional as bnb
import numpy as np
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def nf4(weight, out, double_quant, dtype="float32"):
    """Quantizes a matrix; writes codes, absmax, nested_absmax, offset and the dequantized matrix."""
    w = torch.from_numpy(np.load(weight)).to(getattr(torch, dtype))
    codes, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=double_quant, quant_type="nf4")
    result = {"codes": codes.reshape(-1).numpy(), "absmax": state.absmax.numpy()}
    if double_quant:
        result |= {"nested_absmax": state.state2.absmax.numpy(), "offset": state.offset.numpy()}
    result["dequantized"] = bnb.dequantize_4bit(codes, state).float().numpy()
    np.savez(out, **result)


def load_nf4(folder, double_quant=None, dtype="float32"):
    """Loads a folder in NF4; double_quant None: the folder holds NF4 already."""
    options = {}
    if double_quant is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map="cpu", **options)
    return evaluating(model)


def evaluating(model):
    """eval(), but for packed layers: there bitsandbytes rounds block scales to bf16 on CPUs with AVX512-BF16."""
    model.eval()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.training = True
    return model


def save_nf4(folder, to, double_quant, tokens, out):
    """Quantizes a folder while loading, saves it packed, writes its logits."""
    model = load_nf4(folder, double_quant)
    with torch.no_grad():
        np.save(out, model(torch.tensor(tokens)).logits.float().numpy())
    model.save_pretrained(to)


def logits_nf4(folder, tokens, out):
    """Writes the logits of a folder that holds NF4 weights."""
    model = load_nf4(folder)
    kinds = sorted({type(m).__name__ for m in model.modules() if "Linear" in type(m).__name__})
    with torch.no_grad():
        np.save(out, model(torch.tensor(tokens)).logits.float().numpy())
    return kinds


CALLS = (nf4, save_nf4, logits_nf4)
