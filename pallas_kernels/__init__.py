"""Accelerator kernels for language models, usable without the rest of gymjax.

Each operation is a folder with the same names in it: `api.py` (the public function, its checks and its
gradient), `reference.py` (plain jnp: the oracle and the implementation named "xla"), `cases.py` (named
shapes for tests and the bench) and one file for each further implementation. A missing file means that
this implementation does not exist. Some have `layers.py` too: what several of its products make together.

    from pallas_kernels.flash_attention import flash_attention
    python -m pallas_kernels.bench flash_attention --tiny

Importing this package imports no kernel.
"""

from typing import Literal

Implementation = Literal["mosaic_gpu", "jax_triton", "cudnn", "xla"]
"""How an operation is done: Hopper kernel, portable kernel, NVIDIA's own, or what XLA compiles from plain jnp."""

OPS = (
    "flash_attention",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "swiglu",
    "lora_linear",
    "nf4_linear",
    "grouped_matmul",
)
