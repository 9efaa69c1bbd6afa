"""Gated activation silu(gate) * up."""

from pallas_kernels.swiglu.api import explain, swiglu

__all__ = ["explain", "swiglu"]
