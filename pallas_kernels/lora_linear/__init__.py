"""Linear layer with a low-rank adapter over a frozen weight."""

from pallas_kernels.lora_linear.api import Projection, explain, lora_linear, lora_linears, room
from pallas_kernels.lora_linear.reference import LOW_NAME

__all__ = ["LOW_NAME", "Projection", "explain", "lora_linear", "lora_linears", "room"]
