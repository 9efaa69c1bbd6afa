"""Linear layer with a low-rank adapter over a frozen weight."""

from pallas_kernels.lora_linear.api import Projection, explain, lora_linear, lora_linears

__all__ = ["Projection", "explain", "lora_linear", "lora_linears"]
