"""Root-mean-square normalisation."""

from pallas_kernels.rms_norm.api import explain, rms_norm

__all__ = ["explain", "rms_norm"]
