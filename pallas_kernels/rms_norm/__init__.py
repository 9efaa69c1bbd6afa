"""Root-mean-square normalisation."""

from pallas_kernels.rms_norm.api import explain, rms_norm, rms_norm_residual

__all__ = ["explain", "rms_norm", "rms_norm_residual"]
