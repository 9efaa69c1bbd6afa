"""bitsandbytes' 8-bit AdamW."""

import bitsandbytes as bnb
import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map


def adamw_8bit(inputs, out, lr, decay, steps):
    """Updates the weight of an .npz of p and g0, g1, ...; writes maps, and after each step weight, codes and absmax."""
    arrays = np.load(inputs)
    weight = torch.nn.Parameter(torch.from_numpy(arrays["p"].copy()))
    optimizer = bnb.optim.AdamW8bit([weight], lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=decay)
    result = {"signed": create_dynamic_map(True).numpy(), "unsigned": create_dynamic_map(False).numpy()}
    for i in range(steps):
        weight.grad = torch.from_numpy(arrays[f"g{i}"].copy())
        optimizer.step()
        state = optimizer.state[weight]
        result[f"p{i}"] = weight.detach().numpy().copy()
        for name in ("state1", "state2", "absmax1", "absmax2"):
            if name in state:
                result[f"{name}_{i}"] = state[name].numpy().copy()
    np.savez(out, **result)


CALLS = (adamw_8bit,)
