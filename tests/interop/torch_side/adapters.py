"""PEFT adapters: logits with one, making one, training one."""

import numpy as np
import torch
from models import load
from peft import LoraConfig, PeftModel, get_peft_model
from quantized import evaluating, load_nf4


def base_of(folder, nf4, stored_nf4):
    if stored_nf4:
        return load_nf4(folder)
    return load_nf4(folder, double_quant=True) if nf4 else load(folder)


def adapter_logits(folder, adapter, tokens, out, nf4=False, stored_nf4=False):
    """Writes the logits of a base with an adapter folder on top; returns the modules that carry an adapter.

    The base is used as it is, packed into NF4 (nf4), or packed in its folder already (stored_nf4).
    """
    model = evaluating(PeftModel.from_pretrained(base_of(folder, nf4, stored_nf4), adapter))
    with torch.no_grad():
        np.save(out, model(torch.tensor(tokens)).logits.float().numpy())
    config = model.peft_config["default"]
    return {
        "adapted": sorted(name for name, module in model.named_modules() if hasattr(module, "lora_A")),
        "scaling": {n: m.scaling["default"] for n, m in model.named_modules() if hasattr(m, "lora_A")},
        "modules_to_save": config.modules_to_save,
    }


def make_adapter(folder, adapter, settings, tokens, out, seed=0):
    """Makes a random adapter, saves it, writes its logits."""
    torch.manual_seed(seed)
    model = get_peft_model(load(folder), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
        np.save(out, model.eval()(torch.tensor(tokens)).logits.float().numpy())
    model.save_pretrained(adapter)


def train_adapter(folder, adapter, batches, learning_rate, weight_decay=0.0, max_grad_norm=None):
    """Continues an adapter with AdamW on one batch a step; returns the loss before each update.

    Every batch is {tokens, targets}: targets[t] is the token to predict at t, -100 where none.
    """
    model = PeftModel.from_pretrained(load(folder), adapter, is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for batch in batches:
        tokens, targets = torch.tensor(batch["tokens"]), torch.tensor(batch["targets"])
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms}


class FixedDropout(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def dora_layer(arrays, alpha, out):
    """One DoRA layer while training: its result, gradients of x, A, B and magnitude, and the merged weight.

    `arrays` holds x, dy, w, bias, a, b, magnitude and, to stand in for dropout, mask (what x is multiplied with).
    """
    given = {name: torch.from_numpy(value) for name, value in np.load(arrays).items()}
    linear = torch.nn.Linear(given["w"].shape[1], given["w"].shape[0])
    linear.weight.data, linear.bias.data = given["w"], given["bias"]
    config = LoraConfig(r=len(given["a"]), lora_alpha=alpha, target_modules=["0"], use_dora=True)
    model = get_peft_model(torch.nn.Sequential(linear), config).train()
    layer = model.base_model.model[0]
    magnitude = layer.lora_magnitude_vector["default"]
    first = magnitude.weight.detach().clone()
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = given["a"], given["b"]
    magnitude.weight.data = given["magnitude"]
    if "mask" in given:
        layer.lora_dropout["default"] = FixedDropout(given["mask"])
    x = given["x"].requires_grad_()
    y = model(x)
    y.backward(given["dy"])
    grads = {
        "dx": x.grad,
        "da": layer.lora_A["default"].weight.grad,
        "db": layer.lora_B["default"].weight.grad,
        "dmagnitude": magnitude.weight.grad,
    }
    merged = model.merge_and_unload()[0].weight
    arrays = {"y": y.detach(), "merged": merged.detach(), "first_magnitude": first, **grads}
    np.savez(out, **{name: value.numpy() for name, value in arrays.items()})


def merge_adapter(folder, adapter, to):
    """Saves a base with an adapter merged in by PEFT."""
    PeftModel.from_pretrained(load(folder), adapter).merge_and_unload().save_pretrained(to)


CALLS = (adapter_logits, make_adapter, train_adapter, dora_layer, merge_adapter)
