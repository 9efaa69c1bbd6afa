"""Root-mean-square normalisation."""

from pallas_kernels.rms_norm.api import RRMS_NAME, add_rms_norm, explain, rms_norm, rms_norm_residual

__all__ = ["RRMS_NAME", "add_rms_norm", "explain", "rms_norm", "rms_norm_residual"]
