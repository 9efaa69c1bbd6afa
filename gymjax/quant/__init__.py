"""Weights stored in fewer bits, and the product with them."""

from gymjax.quant.matmul import matmul, weight_bytes
from gymjax.quant.nf4 import from_bitsandbytes, quantize, to_bitsandbytes

__all__ = ["from_bitsandbytes", "matmul", "quantize", "to_bitsandbytes", "weight_bytes"]
