"""Matrix product of each group of rows with a weight of its own (the experts of a mixture)."""

from pallas_kernels.grouped_matmul.api import explain, grouped_matmul
from pallas_kernels.grouped_matmul.gated import grouped_mlp
from pallas_kernels.grouped_matmul.layers import GroupedLayer, grouped_layers

__all__ = ["GroupedLayer", "explain", "grouped_layers", "grouped_matmul", "grouped_mlp"]
