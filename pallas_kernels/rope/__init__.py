"""Rotary position embedding of queries and keys."""

from pallas_kernels.rope.api import explain, rope

__all__ = ["explain", "rope"]
