"""NF4 (QLoRA, arXiv 2305.14314 section 3) with double quantization, in bitsandbytes' exact bits and file keys.

Dequantizing lives with the kernels: `pallas_kernels.dequantize`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from pallas_kernels.nf4_linear import DYNAMIC_CODE, NF4_CODE, NF4Weight

BLOCK = 64
NESTED_BLOCK = 256
_CHUNK = 1 << 17  # elements quantized at a time: the working set stays in the CPU's cache
_LOOKUP_SIZE = 1 << 16
_F32 = np.float32

# The value half-way between neighbours; a value that lies on it takes the lower code.
_NF4_MIDPOINTS = (np.asarray(NF4_CODE, _F32)[:-1] + np.asarray(NF4_CODE, _F32)[1:]) / _F32(2)


def quantize(w: Shaped[np.ndarray, "O I"], *, double_quant: bool = True, dtype: str = "bfloat16") -> NF4Weight:
    """Pack a weight into NF4, equal bit for bit to bitsandbytes' CPU quantizer.

    Blocks of 64 run over the flattened weight, across row ends: `absmax = max|w|` of the block,
    `code = number of NF4 midpoints strictly below w / absmax`, first element in the high nibble. With double
    quantization `absmax - mean(absmax)` is stored in 8-bit dynamic codes, blocks of 256.
    Source: arXiv 2305.14314, section 3; bitsandbytes 0.50 `quantize_4bit`.

    Args:
        w: (O, I) f32, f16 or bf16.
        double_quant: also quantize the block scales: 4.127 bits a weight in place of 4.5.
        dtype: what the weight dequantizes to.

    Returns:
        NF4Weight of NumPy arrays.

    Raises:
        ValueError: w is not a matrix, is empty, or holds a value that is not finite.
    """
    if w.ndim != 2 or w.size == 0:
        raise ValueError(f"NF4 packs matrices; w must have two axes and at least one element, got shape {w.shape}")
    codes, absmax = _quantize_blocks(np.ascontiguousarray(w).reshape(-1))
    nested_absmax = offset = None
    if double_quant:
        offset = np.asarray(_torch_order_sum(absmax) / _F32(absmax.size), _F32)
        absmax, nested_absmax = _quantize_dynamic(absmax - offset)
    return _packed(codes, absmax, nested_absmax, offset, w.shape, dtype)


def packed_zeros(
    shape: tuple[int, int], leading: tuple[int, ...] = (), *, double_quant: bool = True, dtype: str = "bfloat16"
) -> NF4Weight:
    """A packed weight of JAX arrays of zeros, as wide as `quantize` makes them; for shapes under jax.eval_shape.

    Args:
        shape: (O, I).
        leading: axes of stacked layers and experts.
        double_quant: as in `quantize`; likewise dtype.
    """
    size = math.prod(shape)
    blocks = -(-size // BLOCK)
    codes = jnp.zeros((*leading, -(-size // 2)), jnp.uint8)
    if not double_quant:
        return _packed(codes, jnp.zeros((*leading, blocks), jnp.float32), None, None, shape, dtype)
    nested = jnp.zeros((*leading, -(-blocks // NESTED_BLOCK)), jnp.float32)
    absmax = jnp.zeros((*leading, blocks), jnp.uint8)
    return _packed(codes, absmax, nested, jnp.zeros(leading, jnp.float32), shape, dtype)


def _packed(codes: Any, absmax: Any, nested_absmax: Any, offset: Any, shape: Sequence[int], dtype: str) -> NF4Weight:
    """A weight of NumPy arrays, which become JAX's when they are placed on a device."""
    out_width, in_width = shape
    return NF4Weight(codes, absmax, nested_absmax, offset, (out_width, in_width), BLOCK, dtype)


def _quantize_blocks(flat: Shaped[np.ndarray, " n"]) -> tuple[UInt8[np.ndarray, " m"], Float[np.ndarray, " b"]]:
    """Packed codes and f32 block maxima of a flat weight."""
    codes = np.empty((flat.size + 1) // 2, np.uint8)
    absmax = np.empty(-(-flat.size // BLOCK), _F32)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(_F32)
        full = chunk.size // BLOCK * BLOCK
        blocks = chunk[:full].reshape(-1, BLOCK)
        largest = np.abs(blocks).max(axis=1, initial=0)
        if not (np.isfinite(largest).all() and np.isfinite(chunk[full:]).all()):
            bad = start + int(np.flatnonzero(~np.isfinite(chunk))[0])
            raise ValueError(f"w must be finite to be quantized; element {bad} of the flattened weight is {flat[bad]}")
        scaled = (blocks * (_F32(1) / np.maximum(largest, _F32(1e-38)))[:, None]).reshape(-1)
        if full < chunk.size:  # bitsandbytes divides in the last, partial block where it multiplies in whole ones
            tail = np.maximum(np.abs(chunk[full:]).max(), _F32(1e-38))
            largest = np.append(largest, tail)
            scaled = np.append(scaled, chunk[full:] / tail)
        block = start // BLOCK
        absmax[block : block + largest.size] = largest
        packed = _pack(_nf4_code(scaled))
        codes[start // 2 : start // 2 + packed.size] = packed
    return codes, absmax


def _nf4_code(x: Float[np.ndarray, " n"]) -> UInt8[np.ndarray, " n"]:
    """Number of NF4 midpoints strictly below x: fifteen vector comparisons are several times faster than a search."""
    code = np.zeros(x.size, np.uint8)
    for midpoint in _NF4_MIDPOINTS:
        code += x > midpoint
    return code


def _pack(code: UInt8[np.ndarray, " n"]) -> UInt8[np.ndarray, " m"]:
    """Two codes a byte, first in the high nibble; an odd end is filled with the code of zero."""
    if code.size % 2:
        code = np.append(code, np.uint8(7))
    return (code[::2] << 4) | code[1::2]


def _torch_order_sum(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, ""]:
    """Sum in f32 in the order of PyTorch's CPU reduction on one thread, so that the mean has the same bits.

    Four interleaved accumulators of eight lanes; the running sums are carried up four levels every `step` rows.
    """
    lanes = 8 if x.size >= 8 else 1
    vectors = x.size // lanes
    rows = vectors // 4
    level = x[: rows * 4 * lanes].reshape(rows, 4 * lanes)
    step = 1 << max(4, (max(rows, 1) - 1).bit_length() // 4)
    total = np.zeros(4 * lanes, _F32)
    for _ in range(3):
        whole = level.shape[0] // step * step
        total = total + _row_sum(level[whole:])
        level = _row_sum(level[:whole].reshape(-1, step, 4 * lanes).swapaxes(0, 1))
    total = (total + _row_sum(level)).reshape(4, lanes)
    total[0] = _row_sum(x[rows * 4 * lanes : vectors * lanes].reshape(-1, lanes), start=total[0])
    lane_sums = _row_sum(total)
    return _row_sum(np.concatenate([x[vectors * lanes :], lane_sums]))


def _row_sum(
    rows: Float[np.ndarray, "n ..."], start: Float[np.ndarray, "..."] | None = None
) -> Float[np.ndarray, "..."]:
    """Sum over the first axis, strictly one row after the other."""
    total = np.zeros(rows.shape[1:], _F32) if start is None else start
    for row in rows:
        total = total + row
    return total


def _dynamic_lookup() -> UInt8[np.ndarray, " 65536"]:
    """Code of the dynamic-map value nearest to each of 65,536 points from -1 to 1."""
    code = np.asarray(DYNAMIC_CODE, _F32)
    points = _F32(-1) + np.arange(_LOOKUP_SIZE, dtype=_F32) * _F32(2) / _F32(_LOOKUP_SIZE - 1)
    return np.searchsorted(_F32(0.5) * (code[:-1] + code[1:]), points, side="left").astype(np.uint8)


_DYNAMIC_LOOKUP = _dynamic_lookup()


def _quantize_dynamic(x: Float[np.ndarray, " n"]) -> tuple[UInt8[np.ndarray, " n"], Float[np.ndarray, " b"]]:
    """8-bit codes of the signed dynamic map and block maxima, through the 65,536-entry table bitsandbytes' CPU uses."""
    blocks = np.zeros((-(-x.size // NESTED_BLOCK), NESTED_BLOCK), _F32)
    blocks.reshape(-1)[: x.size] = x
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (_F32(1) / np.where(absmax > 0, absmax, _F32(1)))[:, None]
    index = (scaled.clip(-1, 1) + _F32(1)) * _F32(0.5) * _F32(_LOOKUP_SIZE - 1) + _F32(0.5)
    codes = _DYNAMIC_LOOKUP[index.astype(np.int32)]
    codes[absmax == 0] = 0
    return codes.reshape(-1)[: x.size], absmax


def to_bitsandbytes(w: NF4Weight, name: str) -> dict[str, np.ndarray]:
    """The safetensors entries that bitsandbytes and transformers store for a packed weight.

    Args:
        w: one matrix, not stacked.
        name: full name of the weight, such as `model.layers.0.mlp.up_proj.weight`.

    Returns:
        `name` (codes, one column) and `name.absmax`, `.quant_map`, `.nested_absmax`, `.nested_quant_map`,
        `.quant_state.bitsandbytes__nf4` (UTF-8 JSON).
    """
    state = {"quant_type": "nf4", "blocksize": w.block_size, "dtype": w.dtype, "shape": list(w.shape)}
    tensors = {
        name: np.asarray(w.codes).reshape(-1, 1),
        f"{name}.absmax": np.asarray(w.absmax),
        f"{name}.quant_map": np.asarray(NF4_CODE, _F32),
    }
    if w.nested_absmax is not None:
        tensors[f"{name}.nested_absmax"] = np.asarray(w.nested_absmax)
        tensors[f"{name}.nested_quant_map"] = np.asarray(DYNAMIC_CODE, _F32)
        offset = np.asarray(w.offset).item()
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors


def from_bitsandbytes(tensors: Mapping[str, np.ndarray], name: str) -> NF4Weight:
    """Read a weight that bitsandbytes packed.

    Args:
        tensors: entries of the checkpoint, by name; may hold others too.
        name: full name of the weight.

    Raises:
        ValueError: an entry that the weight needs is missing or no JSON, FP4, another block size, another code table,
            or sizes that disagree with the shape.
    """
    key = f"{name}.quant_state.bitsandbytes__nf4"
    if key not in tensors:
        if f"{name}.quant_state.bitsandbytes__fp4" in tensors:
            raise ValueError(f"{name} is packed in FP4; only NF4 is read: save the model with bnb_4bit_quant_type nf4")
        raise ValueError(f"{key} is missing: the checkpoint's 4-bit weight has no quantization state")
    state = _read_state(key, tensors[key])
    nested = "nested_blocksize" in state
    _check_state(name, state, nested, tensors)
    shape = tuple(state["shape"])
    codes = np.asarray(tensors[name]).reshape(-1).view(np.uint8)
    absmax = np.asarray(tensors[f"{name}.absmax"]).reshape(-1)
    size, blocks = shape[0] * shape[1], -(-shape[0] * shape[1] // BLOCK)
    if codes.size != (size + 1) // 2 or absmax.size != blocks:
        raise ValueError(
            f"{name} of shape {shape} needs {(size + 1) // 2} bytes of codes and {blocks} block scales, "
            f"but the checkpoint holds {codes.size} and {absmax.size}: it is damaged, fetch it again"
        )
    nested_absmax = np.asarray(tensors[f"{name}.nested_absmax"], _F32).reshape(-1) if nested else None
    offset = np.asarray(state["nested_offset"], _F32) if nested else None
    return _packed(codes, absmax, nested_absmax, offset, shape, state["dtype"])


def _read_state(key: str, entry: np.ndarray) -> dict[str, Any]:
    try:
        state = json.loads(np.asarray(entry).tobytes())
        rows, columns = state["shape"]
        needed = {"blocksize": int, "dtype": str} | (
            {"nested_offset": int | float} if "nested_blocksize" in state else {}
        )
        if all(isinstance(state[name], kind) for name, kind in needed.items()) and rows > 0 and columns > 0:
            return state
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{key} is no quantization state: the checkpoint is damaged, fetch it again")


def _check_state(name: str, state: dict, nested: bool, tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse a packed weight whose format this project does not decode."""
    maps = {f"{name}.quant_map": NF4_CODE} | ({f"{name}.nested_quant_map": DYNAMIC_CODE} if nested else {})
    required = [name, f"{name}.absmax", *maps, *([f"{name}.nested_absmax"] if nested else [])]
    missing = [key for key in required if key not in tensors]
    if missing:
        raise ValueError(
            f"4-bit weight {name} lacks {', '.join(missing)}: the checkpoint is incomplete, fetch it again"
        )
    if state["blocksize"] != BLOCK or (nested and state["nested_blocksize"] != NESTED_BLOCK):
        raise ValueError(
            f"{name} has blocks of {state['blocksize']} (nested {state.get('nested_blocksize')}); "
            f"only {BLOCK} and {NESTED_BLOCK} are read: quantize the model with bitsandbytes' defaults"
        )
    for key, table in maps.items():
        if not np.allclose(np.asarray(tensors[key]).astype(_F32), np.asarray(table, _F32), rtol=0, atol=1e-6):
            raise ValueError(f"{key} is not the table of NF4 with the dynamic 8-bit map; this checkpoint is not read")
