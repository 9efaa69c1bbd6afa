"""Matrix product of each group of rows with a weight of its own (the experts of a mixture)."""

from pallas_kernels.grouped_matmul.api import explain, grouped_matmul

__all__ = ["explain", "grouped_matmul"]
