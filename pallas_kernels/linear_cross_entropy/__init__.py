"""Cross-entropy of a linear head, without the logits of all tokens in memory."""

from pallas_kernels._int8 import Int8Weight, pack_int8
from pallas_kernels.linear_cross_entropy.api import (
    TokenMetrics,
    explain,
    linear_cross_entropy,
    logprob,
    stores_exponentials,
)
from pallas_kernels.linear_cross_entropy.mosaic_gpu import tokens_at_a_time

__all__ = [
    "Int8Weight",
    "TokenMetrics",
    "explain",
    "linear_cross_entropy",
    "logprob",
    "pack_int8",
    "stores_exponentials",
    "tokens_at_a_time",
]
