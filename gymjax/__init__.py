"""gymjax: fine-tune and run open-weight language models on NVIDIA GPUs, in JAX."""

__version__ = "0.1.0"
