"""Linear layer with a low-rank adapter over a frozen weight."""

from pallas_kernels.lora_linear.api import explain, lora_linear

__all__ = ["explain", "lora_linear"]
