"""A compiler for an H200 on a machine without a GPU: JAX's CUDA plugin, CUDA's assembler, and a stand-in driver.

All come from PyPI into the cache folder on first use (about 600 MB unpacked); a C compiler builds the stand-in, which
answers what the plugin asks about the device. Nothing can be run, but programs compile, and their memory is known.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gymjax" / "hopper"
WHEELS = (
    "jax-cuda13-plugin=={jax}",
    "jax-cuda13-pjrt=={jax}",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-nvdisasm",
)

# What the plugin asks of a driver: a device of compute capability 9.0 (attributes 75 and 76) that takes any program.
DRIVER = """
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int n) { *d = 0; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
int cuGetErrorName(int e, const char **s) { *s = ""; return 0; }
int cuGetErrorString(int e, const char **s) { *s = ""; return 0; }
int cuModuleLoadData(void **m, const void *i) { *m = (void *)1; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)1; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuModuleUnload(void *m) { return 0; }
"""


def tools() -> Path:
    """The cache folder, filled on first use."""
    done = CACHE / f"jax-{jax.__version__}"
    if done.exists():
        return CACHE
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        names = [wheel.format(jax=importlib.metadata.version("jax")) for wheel in WHEELS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", folder, *names], check=True)
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(CACHE)
        driver = Path(folder) / "driver.c"
        driver.write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(CACHE / "libcuda.so.1"), str(driver)], check=True)
    for program in CACHE.glob("nvidia/*/bin/*"):
        program.chmod(0o755)
    for program in CACHE.glob("nvidia/*/nvvm/bin/*"):
        program.chmod(0o755)
    done.touch()
    return CACHE


# What XLA wants to know of an H200 SXM. Memory: what a program may use of its 141 GB.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
}
"""


def prepare() -> None:
    """Makes the plugin and the stand-in driver known to this process; call it before Pallas is imported."""
    folder = tools()
    sys.path.insert(0, str(folder))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = f"--xla_gpu_cuda_data_dir={cuda_root()} --xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def mosaic_environment() -> dict[str, str]:
    """What Mosaic's compiler reads from the environment; it wants to know of NVSHMEM even where none is used."""
    runtime = tools() / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"
    without = {"MOSAIC_GPU_NVSHMEM_BC_PATH": "none", "MOSAIC_GPU_NVSHMEM_SO_PATH": "none"}
    return {"MOSAIC_GPU_CUDA_ROOT": str(cuda_root()), "MOSAIC_GPU_RUNTIME_LIB_PATH": str(runtime)} | without


def cuda_root() -> Path:
    """Where the assembler and libdevice lie."""
    return next(tools().glob("nvidia/*/bin/ptxas")).parent.parent


def device() -> Any:
    """One H200 to compile for, after `prepare`."""
    from jax.experimental import topologies

    return topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=TARGET).devices[0]
