"""Kernels compiled ahead of their program: what is found in it, when threads start, and what their errors do."""

import threading

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from gymjax.training import kernels_ahead as ahead
from gymjax.training.compile import _HIT, _cache_events, compile_program

DEVICE = jax.devices("cpu")[0]


def kernel(name, size):
    flags = dict.fromkeys(("use_custom_barrier", "skip_device_barrier", "uses_xla_collective_metadata"), False)
    return {"kernel_hash": name * 32, "module": bytes(range(256)) * size, **flags}


SMALL, LARGE = kernel(b"s", 1), kernel(b"\xff", 3)


def lowered(*kernels, inner=True, platform="cuda"):
    """A program that calls kernels by turns, some of them in a loop, as layers do."""

    def call(x, attributes):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call(ahead.TARGET, like)(x, **attributes)

    def program(x):
        for each in kernels:
            x = jax.lax.fori_loop(0, 3, lambda _, x, each=each: call(x, each), x) if inner else call(x, each)
        return x

    return jax.jit(program).trace(jnp.ones(4)).lower(lowering_platforms=(platform,))


@pytest.fixture
def compiled(monkeypatch):
    """What threads were to compile, in place of compiling it; set `compiled.error` to have them fail."""

    class Calls(list):
        error = None

    calls = Calls()

    def compile_kernel(kernel, device):
        assert threading.current_thread() is not threading.main_thread()
        calls.append(kernel["kernel_hash"])
        if calls.error is not None:
            raise calls.error

    monkeypatch.setattr(ahead, "compile_kernel", compile_kernel)
    return calls


def compile_in(program, folder=None):
    with ahead.kernels_ahead(program, DEVICE, folder) as futures:
        for future in futures:
            future.exception(timeout=30)
    return len(futures)


def test_this_jax_lowers_kernels_to_the_call_that_is_looked_for():
    add = plgpu.kernel(
        lambda x, y: y.__setitem__(..., x[...] + 1),
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid=(1,),
        grid_names=("block",),
    )
    program = jax.jit(lambda x: add(add(x))).trace(jnp.ones(128)).lower(lowering_platforms=("cuda",))
    (found,) = ahead.distinct_kernels(program)
    assert found.keys() == SMALL.keys()
    assert ahead.distinct_kernels(ahead.lower_kernel(found, DEVICE)) == [found]


@pytest.mark.parametrize("inner", [False, True])
def test_each_kernel_of_a_program_is_found_once_the_longest_first(inner):
    assert ahead.distinct_kernels(lowered(SMALL, LARGE, SMALL, inner=inner)) == [LARGE, SMALL]


def test_a_program_of_one_kernel_holds_it_as_it_was():
    assert ahead.distinct_kernels(ahead.lower_kernel(LARGE, DEVICE)) == [LARGE]


def test_other_programs_start_nothing(compiled):
    program = jax.jit(jnp.sin).lower(1.0)
    assert ahead.distinct_kernels(program) == []
    assert compile_in(program) == 0
    with ahead.kernels_ahead(lowered(SMALL), None) as futures:  # arguments that tell no device
        assert futures == []
    assert compiled == []


def test_kernels_are_compiled_while_the_program_is(compiled):
    assert compile_in(lowered(SMALL, LARGE)) == 2
    assert sorted(compiled) == [SMALL["kernel_hash"], LARGE["kernel_hash"]]


def test_a_program_that_the_cache_holds_starts_no_thread(compiled, tmp_path):
    folder = str(tmp_path)
    assert compile_in(lowered(SMALL, LARGE), folder) == 2
    compiled.clear()
    assert compile_in(lowered(SMALL, LARGE), folder) == 0
    assert compiled == []
    assert compile_in(lowered(SMALL, LARGE, LARGE), folder) == 2  # another program
    assert compile_in(lowered(SMALL, LARGE)) == 2  # no cache


def test_a_program_that_failed_is_not_taken_for_cached(compiled, tmp_path):
    program = lowered(SMALL, LARGE)
    with pytest.raises(KeyError), ahead.kernels_ahead(program, DEVICE, str(tmp_path)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert compile_in(program, str(tmp_path)) == 2


def test_an_error_in_a_thread_does_not_matter(compiled, tmp_path):
    compiled.error = RuntimeError("no such target")
    assert compile_in(lowered(SMALL, LARGE), str(tmp_path)) == 2
    assert len(compiled) == 2


def test_kernels_that_cannot_be_compiled_here_are_left_to_xla():
    assert compile_in(lowered(SMALL, LARGE)) == 2  # the CPU knows no such call: each future holds an error


def test_a_folder_that_cannot_be_written_to_does_not_matter(compiled, tmp_path):
    assert compile_in(lowered(SMALL), str(tmp_path / "missing")) == 1


def test_a_representation_that_we_do_not_know_starts_nothing(compiled, monkeypatch):
    monkeypatch.setattr(ahead, "distinct_kernels", lambda _: {}["kernel_hash"])
    assert compile_in(lowered(SMALL)) == 0


def test_compile_program_opens_it_for_the_arguments_device(monkeypatch):
    seen = []

    def recorded(program, device, folder):
        seen.append((program, device, folder))
        return ahead.kernels_ahead(program, device, folder)

    monkeypatch.setattr("gymjax.training.compile.kernels_ahead", recorded)
    program = compile_program(jax.jit(lambda x, y: x + y), jax.ShapeDtypeStruct((), jnp.float32), jnp.ones(()))
    assert program.call(jnp.ones(()), jnp.ones(())) == 2
    assert [device for _, device, _ in seen] == [DEVICE]


def test_what_other_threads_find_in_the_cache_is_not_the_programs():
    with _cache_events() as events:
        other = threading.Thread(target=jax.monitoring.record_event, args=(_HIT,))
        other.start()
        other.join()
        assert events == []
        jax.monitoring.record_event(_HIT)
    assert events == [_HIT]
