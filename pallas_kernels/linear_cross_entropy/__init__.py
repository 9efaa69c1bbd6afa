"""Cross-entropy of a linear head, without the logits of all tokens in memory."""

from pallas_kernels.linear_cross_entropy.api import explain, linear_cross_entropy

__all__ = ["explain", "linear_cross_entropy"]
