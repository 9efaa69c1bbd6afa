"""Linear layer over a frozen weight stored in 4-bit NormalFloat (NF4)."""

from pallas_kernels.nf4_linear.api import (
    DYNAMIC_CODE,
    NF4_CODE,
    NF4Weight,
    decodes_inside,
    dense,
    dequantize,
    explain,
    join,
    nf4_linear,
    product,
    refuses,
)

__all__ = [
    "DYNAMIC_CODE",
    "NF4_CODE",
    "NF4Weight",
    "decodes_inside",
    "dense",
    "dequantize",
    "explain",
    "join",
    "nf4_linear",
    "product",
    "refuses",
]
