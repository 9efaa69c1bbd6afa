"""Named tensors of a checkpoint into the decoder's tree, and the tree back into named tensors."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from gymjax.adapters.svd_start import Pack
from gymjax.checkpoint.experts import fused_tensors, split_experts
from gymjax.checkpoint.safetensors_io import Tensor, rounded
from gymjax.checkpoint.source import Source
from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.names import HFWeight, Index, hf_weights, node_at
from gymjax.quant.nf4 import packed_zeros, quantize, to_bitsandbytes
from pallas_kernels.nf4_linear import NF4Weight

Place = Callable[[tuple[str | int, ...], Any], Any]
Split = Callable[[str, Any, Pack], Any]
_SPLITS = 4  # weights that are split at a time: each takes several f32 copies, and its products have their own threads
_SHOWN = 12  # names listed of each kind of trouble


def load_decoder(
    cfg: DecoderConfig,
    source: Source,
    *,
    dtype: DTypeLike,
    compute_dtype: DTypeLike | None = None,
    quantize_nf4: bool = False,
    double_quant: bool = True,
    place: Place | None = None,
    split: Split | None = None,
) -> Decoder:
    """Build a decoder from named tensors, one variable of the tree in host memory at a time.

    Args:
        cfg: shape of the model.
        source: its tensors.
        dtype: of dense weights, and what packed ones dequantize to.
        compute_dtype: of activations; default dtype.
        quantize_nf4: pack the linear weights of the blocks into NF4, layer by layer as they are read.
        double_quant: pack the block scales too.
        place: puts a variable's value (array or NF4Weight of NumPy arrays, stacked over layers) on its devices, given
            its path; default `jax.device_put`.
        split: gives (module name, weight, how it would be stored) what is stored of it; called for a few weights at a
            time. See adapters/svd_start.py.

    Raises:
        ValueError: tensors are missing, left over or of the wrong shape; one message names them all.
    """
    weights = hf_weights(cfg)
    source = split_experts(cfg, source)
    check_names(cfg, source, weights)
    place = place or (lambda path, value: jax.device_put(value))
    model = nnx.eval_shape(lambda: Decoder(cfg, dtype=np.dtype(dtype), compute_dtype=np.dtype(compute_dtype or dtype)))
    by_path: dict[tuple, list[HFWeight]] = {}
    for weight in weights:
        by_path.setdefault(weight.path, []).append(weight)

    def read(weight: HFWeight) -> np.ndarray | NF4Weight:
        def store(value: Any) -> np.ndarray | NF4Weight:  # a dense value is rounded where it is stacked
            if not (quantize_nf4 and weight.quantizable) or isinstance(value, NF4Weight):
                return value
            try:
                return quantize(value, double_quant=double_quant, dtype=np.dtype(dtype).name)
            except ValueError as error:
                raise ValueError(f"{source.origin}: {weight.name}: {error}") from None

        value = source.read(weight.name)
        if not isinstance(value, NF4Weight) and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{source.origin}: {weight.name} is stored as {value.dtype}, weights must be floating-point; take the "
                "original model, not one that was quantized in another way"
            )
        if split is None or not (weight.quantizable or weight.path == ("head", "w")):
            return store(value)
        return split(weight.name.removesuffix(".weight"), value, store)

    with ThreadPoolExecutor(None if split is None else _SPLITS) as pool:
        for path, rows in by_path.items():
            value = _stack(rows, read, np.dtype(dtype), pool)
            node_at(model, path).set_value(place(path, value))
    return model


def blank_decoder(
    cfg: DecoderConfig,
    packed: Collection[str],
    *,
    dtype: DTypeLike,
    compute_dtype: DTypeLike | None = None,
    quantize_nf4: bool = False,
    double_quant: bool = True,
) -> Decoder:
    """A decoder of zeros whose arrays are as `load_decoder` makes them; for shapes under jax.eval_shape.

    Args:
        cfg: shape of the model.
        packed: names of the weights that its files hold packed.
        dtype: as in `load_decoder`; likewise the others.
    """
    model = Decoder(cfg, dtype=np.dtype(dtype), compute_dtype=np.dtype(compute_dtype or dtype))
    last = {weight.path: weight for weight in hf_weights(cfg)}
    for path, weight in last.items():
        if (quantize_nf4 and weight.quantizable) or weight.name in packed:
            leading = tuple(i + 1 for i in weight.at)
            out_width, in_width = weight.shape
            zeros = packed_zeros((out_width, in_width), leading, double_quant=double_quant, dtype=np.dtype(dtype).name)
            node_at(model, path).set_value(zeros)
    return model


def _stack(rows: list[HFWeight], read: Callable, dtype: np.dtype, pool: ThreadPoolExecutor) -> np.ndarray | NF4Weight:
    """Read one variable: a single tensor, or its layers into preallocated arrays."""
    first = read(rows[0])
    packed = isinstance(first, NF4Weight)
    if isinstance(first, NF4Weight):
        first = dataclasses.replace(first, dtype=dtype.name)
    if rows[0].index is None:
        return first if packed else np.array(first, dtype)  # a copy: no array outlives the file
    parts, treedef = jax.tree.flatten(first)
    leading = tuple(np.max([row.at for row in rows], axis=0) + 1)
    stacked = [np.empty((*leading, *part.shape), part.dtype if packed else dtype) for part in parts]

    def fill(weight: HFWeight) -> None:
        value = first if weight is rows[0] else read(weight)
        if isinstance(value, NF4Weight) != packed or (packed and len(jax.tree.leaves(value)) != len(parts)):
            raise ValueError(
                f"{weight.name} and {rows[0].name} are stored in different formats, but layers are stacked: "
                "quantize the same modules in every layer, with the same settings"
            )
        for whole, part in zip(stacked, jax.tree.leaves(value)):
            whole[weight.index] = part

    list(pool.map(fill, rows))
    return jax.tree.unflatten(treedef, stacked)


def check_names(cfg: DecoderConfig, source: Source, weights: list[HFWeight]) -> None:
    """Compare a source's tensors with those the model has.

    Raises:
        ValueError: one message with every missing, left-over and wrongly shaped tensor.
    """
    wanted = {weight.name: weight.shape for weight in weights}
    missing = [name for name in wanted if name not in source.shapes]
    extra = [name for name in source.shapes if name not in wanted and not _harmless(cfg, source, name)]
    wrong = [
        f"{name} is {tuple(source.shapes[name])}, must be {shape}"
        for name, shape in wanted.items()
        if name in source.shapes and tuple(source.shapes[name]) != shape
    ]
    kinds = {"missing": missing, "not part of this architecture": extra, "of the wrong shape": wrong}
    found = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if found:
        raise ValueError(
            f"{source.origin}: the tensors do not fit the model that config.json describes. {'. '.join(found)}. "
            "Check that config.json and the weights belong together and that every file was copied"
        )


def _harmless(cfg: DecoderConfig, source: Source, name: str) -> bool:
    """Buffers that old files carry, and a tied head stored twice with equal values."""
    if name.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")):
        return True
    if name == "lm_head.weight" and cfg.tie_embeddings and "model.embed_tokens.weight" in source.shapes:
        head, embed = source.read(name), source.read("model.embed_tokens.weight")
        return isinstance(head, np.ndarray) and isinstance(embed, np.ndarray) and np.array_equal(head, embed)
    return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def hf_tensors(model: Decoder, dtype: DTypeLike, *, keep_packed: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model under its Hugging Face name, in the order of the layers; read one at a time.

    Args:
        model: adapters are not part of it: merge them first.
        dtype: of dense tensors.
        keep_packed: write NF4 weights as bitsandbytes stores them; else they are dequantized to dtype.
    """
    dtype = np.dtype(dtype)
    fused = dict(fused_tensors(model, dtype))
    yield from fused.items()
    for weight in hf_weights(model.cfg):
        if fused and len(weight.at) == 2:  # an expert's, and so a part of a fused one
            continue
        value = node_at(model, weight.path).get_value()
        if keep_packed and isinstance(value, NF4Weight):
            for name, part in to_bitsandbytes(_row(value, weight.index), weight.name).items():
                yield name, Tensor(part.shape, part.dtype, lambda part=part: part)
        else:

            def read(value=value, weight=weight) -> np.ndarray:
                return rounded(_row(value, weight.index), dtype, weight.name)

            yield weight.name, Tensor(weight.shape, dtype, read)


def _row(value: Any, index: Index) -> Any:
    """One layer, or one expert of it, of a stacked value, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf if index is None else leaf[index]), value)
