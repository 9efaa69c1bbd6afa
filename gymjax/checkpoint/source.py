"""Where a model's tensors come from."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from pallas_kernels.nf4_linear import NF4Weight


class Source(Protocol):
    """Where a model's tensors come from: a folder of safetensors or a GGUF file."""

    @property
    def origin(self) -> str:
        """Path to name in errors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face's name, before any packing."""

    def read(self, name: str) -> np.ndarray | NF4Weight:
        """One tensor, mapped where possible; a weight that is stored packed comes packed."""
