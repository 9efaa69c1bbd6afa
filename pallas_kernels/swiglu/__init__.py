"""Gated activation: silu(gate) * up, or GELU in silu's place."""

from pallas_kernels.swiglu.api import Activation, explain, swiglu

__all__ = ["Activation", "explain", "swiglu"]
