import jax.numpy as jnp
import pytest

from gymjax.dtypes import Policy, policy, resolve_precision


@pytest.mark.parametrize(("name", "low"), [("bf16", jnp.bfloat16), ("fp16", jnp.float16), ("fp32", jnp.float32)])
def test_policies_reduce_in_f32(name, low):
    assert policy(name) == Policy(param=low, compute=low, reduce=jnp.float32)


def test_bad_policy_name():
    with pytest.raises(ValueError, match="precision must be one of bf16, fp16, fp32, is 'fp8'"):
        policy("fp8")


@pytest.mark.parametrize(
    ("bf16", "fp16", "on_gpu", "name"),
    [
        (None, None, True, "bf16"),
        (None, None, False, "fp32"),
        (True, None, False, "bf16"),
        (True, False, True, "bf16"),
        (None, True, True, "fp16"),
        (False, True, False, "fp16"),
        (False, None, True, "fp32"),
        (False, False, True, "fp32"),
        (None, False, True, "bf16"),
    ],
)
def test_precision_follows_keys_and_device(bf16, fp16, on_gpu, name):
    assert resolve_precision(bf16, fp16, on_gpu) == name


def test_bad_pair_of_precisions():
    with pytest.raises(ValueError, match="bf16: true and fp16: true exclude each other; keep one"):
        resolve_precision(True, True, on_gpu=True)
