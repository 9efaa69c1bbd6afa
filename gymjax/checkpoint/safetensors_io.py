"""The safetensors format: mapped for reading, streamed for writing.

Written here, not with the safetensors package, because that one writes only what is in memory all at once, and its
messages name neither file nor remedy. Source: https://github.com/huggingface/safetensors, "Format".
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.nf4_linear import NF4Weight, dequantize

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write: `read()` is called once, when its turn comes, so that one is in memory at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file as a read-only view of the mapped file; nothing is read before it is used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, damaged or of an unknown dtype; the message names it and the remedy.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; fetch the model's weights again")
    size = path.stat().st_size
    header, start = _read_header(path, size)
    data = np.memmap(path, np.uint8, mode="r", offset=start) if size > start else np.empty(0, np.uint8)
    return {name: _view(path, name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(_damaged(path, f"its header should take {length} bytes, but the file has {size}"))
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except ValueError as error:
        raise ValueError(_damaged(path, f"its header is not JSON with every name once ({error})")) from None
    if not isinstance(header, dict):
        raise ValueError(_damaged(path, "its header is not a JSON object"))
    return header, 8 + length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return found


def _view(path: Path, name: str, entry: Any, data: np.ndarray) -> np.ndarray:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError
        count = math.prod(shape)
    except (KeyError, TypeError, ValueError):
        raise ValueError(_damaged(path, f"the entry of tensor {name} is malformed: {entry}")) from None
    if dtype_name not in DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {dtype_name}; read are {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[dtype_name])
    if not 0 <= begin <= end <= data.size:
        raise ValueError(
            _damaged(path, f"tensor {name} ends at byte {end}, but the file holds {data.size} bytes of data")
        )
    if end - begin != count * dtype.itemsize:
        raise ValueError(
            _damaged(path, f"tensor {name} of shape {shape} takes {count * dtype.itemsize} bytes, not {end - begin}")
        )
    return data[begin:end].view(dtype).reshape(shape)


def _damaged(path: Path, what: str) -> str:
    return f"{path} is cut short or damaged: {what}. Fetch or copy the file again"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file, one tensor in memory at a time.

    Args:
        path: the file; replaced if it exists.
        tensors: in the order in which they are laid out.
        metadata: texts for the header; transformers expects {"format": "pt"}, the default.

    Raises:
        ValueError: a tensor's data differs from its declared shape or dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _NAMES[np.dtype(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, tensor in tensors.items():
            value = np.asarray(tensor.read())
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} was declared {np.dtype(tensor.dtype)}{tensor.shape}, but is {value.dtype}{value.shape}"
                )
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def rounded(value: np.ndarray | NF4Weight, dtype: DTypeLike, name: str) -> np.ndarray:
    """A tensor in the dtype to save, a packed one's values rounded once from f32.

    Raises:
        ValueError: a finite number of it is beyond what float16 holds.
    """
    if isinstance(value, NF4Weight):
        value = np.asarray(dequantize(value, dtype=np.float32))
    with np.errstate(over="ignore"):
        result = value.astype(dtype)
    if result.dtype == np.float16 and (np.isinf(result) & ~np.isinf(value)).any():
        largest = np.abs(value[~np.isinf(value)].astype(np.float32)).max()
        raise ValueError(f"{name} holds {largest:g}, beyond float16's 65504; set export_dtype: bfloat16 or float32")
    return result


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensor data, without headers."""
    return sum(tensor.nbytes for tensor in tensors)
