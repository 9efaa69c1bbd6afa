"""What every operation's folder promises, and how an implementation is picked."""

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import _dispatch, _platform, _profile, bench
from pallas_kernels._profile import added_medians

ROOT = Path(pallas_kernels.__file__).parent


def test_package_imports_no_kernel_and_kernels_import_no_system() -> None:
    script = (
        "import sys, pallas_kernels; assert not [m for m in sys.modules if m.startswith('pallas_kernels.')];"
        "import importlib; [importlib.import_module(f'pallas_kernels.{op}.cases') for op in pallas_kernels.OPS];"
        "assert not {'flax', 'gymjax', 'torch', 'jax_triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("op", pallas_kernels.OPS)
def test_folder_has_the_same_names(op: str) -> None:
    files = {path.name for path in (ROOT / op).glob("*.py")}
    optional = {"mosaic_gpu.py", "jax_triton.py", "cudnn.py"}
    optional |= {name for name in files if name.startswith("mosaic_gpu_")} | {"bounds.py", "checks.py"}  # of long ones
    optional |= {"layers.py", "gated.py"}  # what several products make together
    assert files - optional == {"__init__.py", "api.py", "reference.py", "cases.py"}
    module = importlib.import_module(f"pallas_kernels.{op}")
    assert callable(getattr(module, op))
    if op not in ("flash_attention", "grouped_matmul"):  # whose answers depend on their arguments
        assert module.explain().startswith(f"{op}: xla")


@pytest.mark.parametrize("op", pallas_kernels.OPS)
def test_tiny_cases_agree_with_their_naive_peer(op: str) -> None:
    cases = importlib.import_module(f"pallas_kernels.{op}.cases")
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    for case in cases.TINY:
        args, arrays, static = bench.build(case)
        ours_and_theirs = (partial(f, **static) for f in (function, cases.PEERS["naive"].call))
        got, want = jax.jit(lambda fs, args, arrays: [f(*args, **arrays) for f in fs], static_argnums=0)(
            tuple(ours_and_theirs), args, arrays
        )
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert ours.shape == theirs.shape
            # bf16 has 8 bits: two computations that round at different places differ by a few 2^-8 of the values' size
            np.testing.assert_allclose(
                np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=0.03, atol=0.03, err_msg=case.name
            )
    names = [case.name for case in (*cases.TINY, *cases.CASES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", pallas_kernels.OPS)
def test_a_missing_or_unknown_implementation_is_refused(op: str) -> None:
    case = importlib.import_module(f"pallas_kernels.{op}.cases").TINY[0]
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), op)
    args, arrays, static = bench.build(case)
    kwargs = arrays | static
    with pytest.raises(
        NotImplementedError, match=rf"{op}: there is no 'jax_triton' implementation.*usable here: 'xla'"
    ):
        function(*args, **kwargs, implementation="jax_triton")
    with pytest.raises(ValueError, match=rf"{op}: implementation='cuda' is unknown; name one of mosaic_gpu, "):
        function(*args, **kwargs, implementation="cuda")


def test_choose_takes_the_first_that_accepts() -> None:
    refusals = {"mosaic_gpu": "it needs Hopper", "cudnn": None, "xla": None}
    assert _dispatch.choose("op", None, refusals) == "cudnn"
    assert _dispatch.choose("op", "xla", refusals) == "xla"
    assert _dispatch.explain("op", refusals) == "op: cudnn (mosaic_gpu refuses: it needs Hopper)"


def test_choose_says_why_and_what_is_usable() -> None:
    with pytest.raises(NotImplementedError, match="op: 'cudnn' refuses: no GPU; usable here: 'xla'"):
        _dispatch.choose("op", "cudnn", {"cudnn": "no GPU", "xla": None})
    with pytest.raises(NotImplementedError, match="no implementation accepts these arguments: cudnn refuses: no GPU"):
        _dispatch.choose("op", None, {"cudnn": "no GPU"})
    assert _dispatch.explain("op", {"cudnn": "no GPU"}) == "op: nothing (cudnn refuses: no GPU)"


def test_operations_can_be_left_to_xla_for_a_while() -> None:
    refusals = {"mosaic_gpu": None, "xla": None}
    with _dispatch.left_to_xla("op"), _dispatch.left_to_xla("other"):
        assert _dispatch.choose("op", None, refusals) == "xla"
        assert _dispatch.choose("op", "mosaic_gpu", refusals) == "mosaic_gpu"  # who asks by name gets it
        assert _dispatch.choose("third", None, refusals) == "mosaic_gpu"
        assert _dispatch.explain("op", refusals) == "op: xla (left to XLA)"
    assert _dispatch.choose("op", None, refusals) == "mosaic_gpu"


def test_platform_names_the_device() -> None:
    assert _platform.why_not_gpu() == "it needs an NVIDIA GPU and the default device is cpu"
    assert _platform.compute_capability() is None
    with jax.default_device(jax.devices("cpu")[0]):
        assert "cpu" in _platform.why_not_gpu()


def test_bench_writes_lines_with_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "swiglu.jsonl"
    out.parent.mkdir()
    out.write_text("earlier\n")
    bench.main(["swiglu", "tiny-M6-F32", "--tiny", "--out", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert ["earlier", *printed] == out.read_text().splitlines()
    lines = [json.loads(line) for line in printed]
    keys = ["bench", "case", "implementation", "metric", "value", "peer", "peer_value", "ratio"]
    keys += ["device", "jax", "commit", "time"]
    assert all(list(line) == keys for line in lines)
    assert [line["metric"] for line in lines] == ["gbps", "gbps_bwd", "peak_gib"]
    assert {(line["implementation"], line["peer"]) for line in lines} == {("xla", "naive")}
    assert lines[0]["ratio"] == lines[0]["value"] / lines[0]["peer_value"]
    assert lines[2]["ratio"] == lines[2]["peer_value"] / lines[2]["value"]


def test_bench_skips_what_refuses_and_names_unknown_cases(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["flash_attention", "tiny-B1-S9-N2-K1-D8-full", "--tiny"])
    captured = capsys.readouterr()
    assert "'cudnn' refuses: it needs an NVIDIA GPU" in captured.err
    assert len(captured.out.splitlines()) == 3
    with pytest.raises(SystemExit, match="has no case 'B9'; name one of B4-S2048"):
        bench.main(["flash_attention", "B9"])


def test_a_calls_kernels_take_their_medians() -> None:
    three_calls = [("a", 2.0), ("a", 3.0), ("b", 5.0)] * 2 + [("a", 90.0), ("a", 3.0), ("b", 7.0)]
    assert added_medians(three_calls, 3) == 2 * 3.0 + 5.0
    with pytest.raises(RuntimeError, match="saw no kernel"):
        added_medians([], 3)


def test_a_settled_gpu_is_timed_on_arguments_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the profiler, whose kernels take longer the later they begin."""
    seen: list[int] = []

    def traced(call):
        before = len(seen)
        call()
        return [SimpleNamespace(name="kernel", start_ns=i, duration_ns=i) for i in reversed(range(len(seen) - before))]

    monkeypatch.setattr(_profile, "traced_kernels", traced)
    monkeypatch.setattr(_profile, "SETTLED", 0.01)
    x = jnp.zeros(2**24)  # 64 MiB, so that four are more than the cache
    seconds = _profile.kernel_seconds(lambda y: seen.append(y.unsafe_buffer_pointer()), x)
    assert len(set(seen)) == 4
    assert seconds > 20 * 1e-9  # the last 20 calls of more than 40
