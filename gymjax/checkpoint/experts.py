"""Experts that a file stores fused, all of a layer's in one tensor, as tensors of one expert each, and back.

transformers 5 holds experts fused and can save them so; hubs hold Mixtral's, OLMoE's and Qwen's one by one and gpt-oss'
fused, in bf16 or in MXFP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.typing import DTypeLike

from gymjax.checkpoint.safetensors_io import Tensor, rounded
from gymjax.checkpoint.source import Source
from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.expert_names import expert_linears, experts_name, router_name
from gymjax.models.names import layer_places, node_at
from gymjax.nn.moe import MoEConfig
from gymjax.quant.mxfp4 import dequantize_mxfp4
from pallas_kernels.nf4_linear import NF4Weight

_FUSED = "mlp.experts"  # transformers 5 has one name for all families
_ROUTER = "mlp.gate"


_Cut = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One expert's part of a fused tensor, or of the blocks and scales that MXFP4 cuts it into: `cut` of its slice."""

    tensors: tuple[str, ...]
    expert: int
    cut: _Cut
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SplitSource:
    """A source whose fused experts are read one by one.

    Attributes:
        source: with the fused tensors.
        shapes: as `Source.shapes`, each expert's tensors in place of the fused ones.
        pieces: name of an expert's tensor -> where it is.
        renamed: name wanted -> name in the source, of other tensors.
    """

    source: Source
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, _Piece]
    renamed: Mapping[str, str]

    @property
    def origin(self) -> str:
        """Path to name in errors."""
        return self.source.origin

    def read(self, name: str) -> np.ndarray | NF4Weight:
        """One tensor; of a fused one a view of what belongs to the expert."""
        if name not in self.pieces:
            return self.source.read(self.renamed.get(name, name))
        piece = self.pieces[name]
        parts = [piece.cut(np.asarray(self.source.read(tensor))[piece.expert]) for tensor in piece.tensors]
        return parts[0] if len(parts) == 1 else dequantize_mxfp4(parts[0], parts[1], name)


def split_experts(cfg: DecoderConfig, source: Source) -> Source:
    """The source with its fused experts one by one; the same source where none are fused."""
    pieces: dict[str, _Piece] = {}
    renamed: dict[str, str] = {}
    for i, kind in enumerate(cfg.kinds):
        prefix = f"model.layers.{i}"
        if kind.experts is not None and any(name.startswith(f"{prefix}.{_FUSED}.") for name in source.shapes):
            pieces |= _layer_pieces(kind.experts, prefix, source)
            ours, theirs = f"{prefix}.{router_name(kind.experts)}.weight", f"{prefix}.{_ROUTER}.weight"
            if ours not in source.shapes and theirs in source.shapes:
                renamed[ours] = theirs
    if not pieces:
        return source
    gone = {tensor for piece in pieces.values() for tensor in piece.tensors} | set(renamed.values())
    shapes = {name: shape for name, shape in source.shapes.items() if name not in gone}
    shapes |= {name: piece.shape for name, piece in pieces.items()}
    shapes |= {ours: source.shapes[theirs] for ours, theirs in renamed.items()}
    return SplitSource(source, shapes, pieces, renamed)


def _layer_pieces(moe: MoEConfig, prefix: str, source: Source) -> dict[str, _Piece]:
    """Pieces of those of a layer's fused tensors that the source has."""
    pieces: dict[str, _Piece] = {}
    for tensors, part, suffix, cut in _cuts(moe, f"{prefix}.{_FUSED}"):
        if not all(tensor in source.shapes for tensor in tensors):
            continue
        experts, *slices = source.shapes[tensors[0]]
        shape = cut(np.broadcast_to(np.uint8(0), slices)).shape
        if len(tensors) == 2:
            shape = (shape[0], int(np.prod(shape[1:])) * 2)  # two elements a byte
        for expert in range(experts):
            module = next(name for name, path in expert_linears(moe, expert).items() if path[-1] == part)
            pieces[f"{prefix}.{module}.{suffix}"] = _Piece(tensors, expert, cut, shape)
    return pieces


def _cuts(moe: MoEConfig, fused: str) -> Iterator[tuple[tuple[str, ...], str, str, _Cut]]:
    """(fused tensors, projection, "weight" or "bias", what of one expert's slices is the projection's).

    Mixtral's and its relatives' are (E, out, in), gate's outputs before up's; gpt-oss' (E, in, out), packed ones
    (E, out, in), gate's and up's outputs in turn.
    """
    gate_up, down = f"{fused}.gate_up_proj", f"{fused}.down_proj"
    if moe.layout != "fused":
        yield (gate_up,), "gate", "weight", lambda w: w[: moe.ffn_width]
        yield (gate_up,), "up", "weight", lambda w: w[moe.ffn_width :]
        yield (down,), "down", "weight", lambda w: w
        return
    for tensor, part, start, step in ((gate_up, "gate", 0, 2), (gate_up, "up", 1, 2), (down, "down", 0, 1)):
        outputs = slice(start, None, step)
        yield (tensor,), part, "weight", lambda w, outputs=outputs: w.T[outputs]
        yield (f"{tensor}_blocks", f"{tensor}_scales"), part, "weight", lambda w, outputs=outputs: w[outputs]
        yield (f"{tensor}_bias",), part, "bias", lambda b, outputs=outputs: b[outputs]


def fused_tensors(model: Decoder, dtype: DTypeLike) -> Iterator[tuple[str, Tensor]]:
    """The experts of every layer whose family's files hold them fused; read one tensor at a time."""
    dtype = np.dtype(dtype)
    for i, (s, p, r) in enumerate(layer_places(model.cfg)):
        moe = model.cfg.stacks[s].pattern[p].experts
        if moe is None or moe.layout != "fused":
            continue
        block, prefix = ("stacks", s, p, "mlp"), f"model.layers.{i}.{experts_name(moe)}"
        E, F, D = moe.experts, moe.ffn_width, model.cfg.width

        def row(*path: str, block: tuple = block, r: int = r, prefix: str = prefix) -> np.ndarray:
            """One layer's variable, dense, on the host."""
            value = jax.tree.map(lambda leaf: np.asarray(leaf[r]), node_at(model, (*block, *path)).get_value())
            return rounded(value, dtype, f"{prefix}.{'.'.join(path)}")

        def gate_up(kind: str, row: Callable = row) -> np.ndarray:
            """Gate's and up's outputs in turn."""
            pair = np.stack([row("gate", kind), row("up", kind)], axis=2)
            return pair.reshape(pair.shape[0], -1, *pair.shape[3:])

        yield f"{prefix}.gate_up_proj", Tensor((E, D, 2 * F), dtype, lambda f=gate_up: _transposed(f("w")))
        yield f"{prefix}.gate_up_proj_bias", Tensor((E, 2 * F), dtype, lambda f=gate_up: f("b"))
        yield f"{prefix}.down_proj", Tensor((E, F, D), dtype, lambda f=row: _transposed(f("down", "w")))
        yield f"{prefix}.down_proj_bias", Tensor((E, D), dtype, lambda f=row: f("down", "b"))


def _transposed(w: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(w.swapaxes(1, 2))
