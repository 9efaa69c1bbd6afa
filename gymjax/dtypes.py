"""Mixed-precision policies: which dtype holds the frozen weights, the computation and the reductions."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Policy:
    """The dtypes of one run; weights that are trained and optimizer state are f32 under every policy.

    Attributes:
        param: frozen base weights.
        compute: activations and matrix products.
        reduce: softmax, norms, loss, RoPE tables and gradient accumulation.
    """

    param: DTypeLike
    compute: DTypeLike
    reduce: DTypeLike


_POLICIES = {
    "bf16": Policy(jnp.bfloat16, jnp.bfloat16, jnp.float32),
    "fp16": Policy(jnp.float16, jnp.float16, jnp.float32),
    "fp32": Policy(jnp.float32, jnp.float32, jnp.float32),
}


def policy(name: Precision) -> Policy:
    """Look up a policy by name.

    Raises:
        ValueError: name is not "bf16", "fp16" or "fp32".
    """
    if name not in _POLICIES:
        raise ValueError(f"precision must be one of {', '.join(_POLICIES)}, is {name!r}")
    return _POLICIES[name]


def resolve_precision(bf16: bool | None, fp16: bool | None, on_gpu: bool) -> Precision:
    """Choose the policy's name from the two configuration keys, where None means "auto".

    Args:
        bf16: True asks for bfloat16, False rules it out.
        fp16: True asks for float16, False rules it out.
        on_gpu: whether the run's devices are GPUs; "auto" is bf16 there and fp32 elsewhere.

    Raises:
        ValueError: both keys are True.
    """
    if bf16 and fp16:
        raise ValueError("bf16: true and fp16: true exclude each other; keep one")
    if fp16:
        return "fp16"
    if bf16:
        return "bf16"
    if bf16 is None and on_gpu:
        return "bf16"
    return "fp32"
