"""What the default device is, for implementations that need a GPU."""

import importlib.metadata
import os

import jax


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def why_not_gpu() -> str | None:
    """Return None where arrays go to an NVIDIA GPU by default, else the reason as a clause."""
    device = _default_device()
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU and the default device is {device.platform}"
    if "cuda" not in device.client.platform_version.lower():
        return f"it needs CUDA and the default device runs {device.client.platform_version.splitlines()[0]}"
    return None


def compute_capability() -> tuple[int, int] | None:
    """Return the default GPU's compute capability, (9, 0) for Hopper, or None without an NVIDIA GPU."""
    if why_not_gpu() is not None:
        return None
    major, minor = _default_device().compute_capability.split(".")
    return int(major), int(minor)


def why_not_hopper(*, one_device: bool = False) -> str | None:
    """Return None where Hopper kernels run by default, else the reason as a clause.

    `one_device` is for kernels that XLA cannot split over several.
    """
    capability = compute_capability()
    if capability is None:
        return why_not_gpu()
    if capability[0] != 9:
        return f"it needs Hopper (compute capability 9.0); this GPU has {capability}"
    if one_device and jax.device_count() > 1:
        return f"it runs on one device, as XLA cannot split its work, and there are {jax.device_count()}"
    return miscompiles()


def deterministic() -> bool:
    """Return whether XLA_FLAGS ask for the same bits in every run, as XLA's own operations then give."""
    values = {"": True, "=true": True, "=1": True, "=false": False, "=0": False}
    flag, asked = "--xla_gpu_deterministic_ops", False
    for word in os.environ.get("XLA_FLAGS", "").split():  # as XLA does, the last one counts
        if word.startswith(flag):
            asked = values.get(word.removeprefix(flag).lower(), asked)
    return asked


def multiprocessors() -> int:
    """Return how many multiprocessors the default GPU has; an H100's or H200's 132 without a GPU."""
    return 132 if why_not_gpu() is not None else int(_default_device().core_count)


def miscompiles() -> str | None:
    """Return why the assembler of the installed CUDA 12 is not to be trusted with Hopper kernels, or None.

    ptxas of CUDA 12.8.0 to 12.9.0 miscompiles kernels of this kind (JAX's own attention kernel refuses the same
    versions); the first that does not is 12.9.1, whose package has version 12.9.86.
    """
    try:
        version = importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None
    if not (12, 8) <= tuple(int(part) for part in version.split(".")[:3]) < (12, 9, 86):
        return None
    return (
        f"ptxas of CUDA 12.8.0 to 12.9.0 miscompiles it; nvidia-cuda-nvcc-cu12 is {version}, install 12.9.86 or newer"
    )
