"""The base that an adapter brings along: over PiSSA's or LoftQ's weights, which are not those of the original model."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from gymjax.checkpoint.hf import open_folder, read_json
from gymjax.models.decoder import Decoder
from gymjax.models.names import hf_weights, node_at
from gymjax.quant.nf4 import quantize
from pallas_kernels.nf4_linear import NF4Weight, dequantize

CONFIG = "adapter_config.json"
RESIDUAL = "residual_base"


def own_base(adapter: Path) -> Path | None:
    """The model folder that an adapter was trained over, where that is not the original model.

    Its name is `residual_base`; it is looked for in the adapter's folder, one above (an adapter of a checkpoint), and
    where base_model_name_or_path says.

    Args:
        adapter: PEFT folder.

    Returns:
        The folder; None for an adapter over the original model.

    Raises:
        FileNotFoundError: there is none in these places.
    """
    config = adapter / CONFIG
    named = Path(str(read_json(config).get("base_model_name_or_path") or "")) if config.is_file() else Path()
    if named.name != RESIDUAL:
        return None
    places = (adapter / RESIDUAL, adapter.absolute().parent / RESIDUAL, named)
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise FileNotFoundError(
            f"{config}: base_model_name_or_path is {named}, which does not exist; copy the run's folder {RESIDUAL} "
            f"into {adapter}"
        )
    return found


def check_base(model: Decoder, adapter: Path, base: Path, module: str) -> None:
    """Refuses an adapter with a base of its own over another one.

    Args:
        model: what is loaded.
        adapter: folder, for the message.
        base: the adapter's own base.
        module: the adapted module whose weight is compared.

    Raises:
        ValueError: the weights differ.
    """
    weight = next(weight for weight in hf_weights(model.cfg) if weight.name == f"{module}.weight")
    whole = node_at(model, weight.path).get_value()
    loaded = jax.tree.map(lambda leaf: np.asarray(leaf if weight.index is None else leaf[weight.index]), whole)
    if not _same(loaded, open_folder(base).read(weight.name)):
        raise ValueError(
            f"{adapter}: the adapter was trained over the weights in {base}, but others are loaded; give that folder "
            "as model_name_or_path"
        )


def _same(loaded: Any, stored: Any) -> bool:
    """Whether a weight in memory is the stored one, in whatever dtype or packing it was loaded."""
    if isinstance(loaded, NF4Weight):
        packed = stored if isinstance(stored, NF4Weight) else quantize(stored)
        return np.array_equal(loaded.codes, packed.codes)
    dense = dequantize(stored, loaded.dtype) if isinstance(stored, NF4Weight) else stored
    return np.array_equal(loaded, np.asarray(dense).astype(loaded.dtype))
