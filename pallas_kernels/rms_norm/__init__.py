"""Root-mean-square normalisation."""

from pallas_kernels.rms_norm.api import add_rms_norm, explain, rms_norm, rms_norm_residual

__all__ = ["add_rms_norm", "explain", "rms_norm", "rms_norm_residual"]
