"""Softmax attention with grouped queries, windows and packed documents."""

from pallas_kernels.flash_attention.api import explain, flash_attention

__all__ = ["explain", "flash_attention"]
