import json

import numpy as np
import pytest
import safetensors.numpy

from gymjax.checkpoint.safetensors_io import DTYPES, Tensor, open_tensors, write_tensors


def arrays():
    rng = np.random.default_rng(0)
    result = {name: rng.integers(0, 2, (3, 4)).astype(dtype) for name, dtype in DTYPES.items()}
    return result | {"scalar": np.array(2, np.float32), "empty": np.zeros((0, 4), np.float32)}


def lazily(values):
    return {name: Tensor(v.shape, v.dtype, lambda v=v: v) for name, v in values.items()}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, lazily({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.int64)}))
    return path


def test_round_trip_of_every_dtype(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, lazily(arrays()))
    for name, value in open_tensors(path).items():
        assert (value.dtype, value.shape) == (arrays()[name].dtype, arrays()[name].shape)
        assert value.tobytes() == arrays()[name].tobytes()


def test_the_safetensors_package_agrees(tmp_path):
    plain = {name: value for name, value in arrays().items() if not name.startswith(("BF16", "F8"))}
    write_tensors(tmp_path / "ours.safetensors", lazily(plain))
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    safetensors.numpy.save_file(plain, tmp_path / "theirs.safetensors")
    ours = open_tensors(tmp_path / "theirs.safetensors")
    for name, value in plain.items():
        np.testing.assert_array_equal(theirs[name], value)
        np.testing.assert_array_equal(ours[name], value)


def test_tensors_are_mapped_not_read(file):
    value = open_tensors(file)["a"]
    while value.base is not None and not isinstance(value, np.memmap):
        value = value.base
    assert isinstance(value, np.memmap)
    assert not value.flags.writeable


def test_tensors_are_written_one_at_a_time(tmp_path):
    alive = []

    def read(i):
        alive.append(i)
        return np.full(3, i, np.float32)

    path = tmp_path / "x.safetensors"
    write_tensors(path, {str(i): Tensor((3,), np.dtype("float32"), lambda i=i: read(i)) for i in range(4)})
    assert alive == [0, 1, 2, 3]
    np.testing.assert_array_equal(open_tensors(path)["2"], [2, 2, 2])


def rewrite_header(file, change):
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_bad_file_cut_short(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.safetensors is cut short or damaged.*Fetch or copy the file again"):
        open_tensors(file)


def test_bad_header(file):
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xfe[]"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"its header is not JSON"):
        open_tensors(file)


def test_bad_header_with_a_name_twice(file):
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    text = header[:-1] + b', "a": ' + json.dumps(json.loads(header)["a"]).encode() + b"}"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ValueError, match=r"x\.safetensors is cut short or damaged: .* \(a stands there twice\)"):
        open_tensors(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [-3, -4], "data_offsets": [0, 48]}, "entry of tensor a is malformed"),
        ({"dtype": "F32", "shape": [3.0, 4.0], "data_offsets": [0, 48]}, "entry of tensor a is malformed"),
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": ["0", 48]}, "entry of tensor a is malformed"),
        ({"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 48]}, r"a of shape \(3, 5\) takes 60 bytes, not 48"),
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": [48, 0]}, "damaged"),
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": [1000, 1048]}, "ends at byte 1048, but the file holds 88"),
        ({"dtype": "F32", "shape": [3, 4]}, "entry of tensor a is malformed"),
        ({"dtype": "C64", "shape": [3, 2], "data_offsets": [0, 48]}, "tensor a has dtype C64; read are F64"),
    ],
)
def test_bad_entry(file, entry, message):
    rewrite_header(file, lambda header: header.update(a=entry))
    with pytest.raises(ValueError, match=message):
        open_tensors(file)


def test_bad_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist"):
        open_tensors(tmp_path / "none.safetensors")


def test_data_that_differs_from_its_declaration_is_refused(tmp_path):
    wrong = Tensor((3,), np.dtype("float32"), lambda: np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"declared float32\(3,\), but is float32\(4,\)"):
        write_tensors(tmp_path / "x.safetensors", {"a": wrong})
