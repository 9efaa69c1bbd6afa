"""What base and adapter start from: exact sums, smaller errors than plain NF4, conversion, refusals."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.adapters.lora import LoraSpec
from gymjax.adapters.svd_start import EXACT, SvdStart, as_plain_lora, principal_factors, split_weight
from gymjax.quant import quantize
from pallas_kernels.nf4_linear import dense

NF4 = partial(quantize, dtype="float32")
SPEC = LoraSpec(rank=12, alpha=18)


@pytest.fixture(scope="module")
def w():
    """A matrix whose singular values fall, as those of trained weights do."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(n, 72))).Q for n in (136, 72))
    return (u * np.geomspace(10, 0.05, 72) @ v.T).astype(np.float32)


def split(w, method, iterations, spec=SPEC, pack=NF4, seed=0, name="up_proj"):
    factors = {}
    base = split_weight(SvdStart(method, iterations, seed), spec, factors, name, w, pack)
    a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
    return np.asarray(dense(base, jnp.float32)), a, b


def error(w, base, a, b, spec=SPEC):
    return np.linalg.norm(w - base - spec.factor_of("up_proj") * b @ a)


@pytest.mark.parametrize("iterations", [EXACT, 2])
def test_pissa_over_a_dense_base_changes_nothing(w, iterations):
    base, a, b = split(w, "pissa", iterations, pack=lambda rest: rest)
    assert error(w, base, a, b) < 1e-5 * np.linalg.norm(w)  # f32
    assert (a.dtype, b.dtype) == (np.float32, np.float32)
    # A and B share the singular values in equal parts
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-4)


def test_exact_pissa_takes_the_principal_part(w):
    base, a, _ = split(w, "pissa", EXACT, pack=lambda rest: rest)
    kept, whole = (np.linalg.svd(m, compute_uv=False) for m in (base, w))
    np.testing.assert_allclose(kept[: 72 - 12], whole[12:], rtol=1e-3, atol=1e-5)  # the smallest lie 200 below the norm
    assert a.shape == (12, 72)


def test_fast_svd_is_nearly_the_exact_one(w):
    rng = np.random.default_rng(0)
    best = np.sqrt(np.square(np.linalg.svd(w, compute_uv=False)[12:]).sum())
    left = []
    for iterations in (1, 4, 16):
        a, b = principal_factors(w, 12, 1.5, iterations=iterations, rng=rng)
        left.append(np.linalg.norm(w - 1.5 * b @ a))
    assert best * 0.9999 < left[2] <= left[0] < 1.05 * best
    assert left[1] < 1.001 * best


def test_the_wide_and_the_narrow_matrix_have_the_same_factors(w):
    a, b = principal_factors(w, 4, 1.0, iterations=EXACT, rng=np.random.default_rng(0))
    a_t, b_t = principal_factors(np.ascontiguousarray(w.T), 4, 1.0, iterations=EXACT, rng=np.random.default_rng(0))
    np.testing.assert_allclose(b @ a, (b_t @ a_t).T, atol=1e-4)


def test_starts_lose_less_than_nf4_alone(w):
    plain = np.linalg.norm(w - np.asarray(dense(NF4(w), jnp.float32)))
    pissa = error(w, *split(w, "pissa", EXACT))
    loftq = [error(w, *split(w, "loftq", alternations)) for alternations in (1, 2, 5)]
    assert pissa < 0.5 * plain  # the rest has a smaller range to quantize
    assert loftq[0] < 0.9 * plain
    assert loftq[2] < loftq[1] < loftq[0]


def test_first_alternation_is_the_best_correction_of_nf4(w):
    """The fast SVD inside LoftQ reaches the optimum of Eckart and Young within a percent, on a flat spectrum."""
    lost = np.linalg.svd(w - np.asarray(dense(NF4(w), jnp.float32)), compute_uv=False)
    best = np.sqrt(np.square(lost[12:]).sum())
    assert best <= error(w, *split(w, "loftq", 1)) * 1.0001 < 1.01 * best


def test_factor_is_divided_out(w):
    """rsLoRA's factor as well as alpha / rank: what base and adapter sum to never depends on it."""
    for spec in (LoraSpec(rank=12, alpha=3), LoraSpec(rank=12, alpha=40, use_rslora=True)):
        for method, iterations in (("pissa", EXACT), ("loftq", 1)):
            wanted = error(w, *split(w, method, iterations))
            assert error(w, *split(w, method, iterations, spec), spec) == pytest.approx(wanted, rel=1e-4)


def test_same_seed_same_bits(w):
    first, again, other = (split(w, "pissa", 1, seed=seed) for seed in (0, 0, 1))
    for one, two in zip(first, again):
        assert one.tobytes() == two.tobytes()
    assert np.abs(first[1] - other[1]).max() > 0
    assert np.abs(first[1] - split(w, "pissa", 1, name="layers.7.up_proj")[1]).max() > 0  # own draws for each module


def test_modules_that_are_no_targets_stay_whole(w):
    factors = {}
    spec = LoraSpec(targets=("q_proj",))
    assert split_weight(SvdStart("pissa", EXACT, 0), spec, factors, "up_proj", w, lambda rest: rest) is w
    assert factors == {}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_plain_lora_of_twice_the_rank_is_the_same_function(w, use_rslora):
    spec = LoraSpec(rank=5, alpha=7, use_rslora=use_rslora, rank_pattern={"up_proj": 3}, alpha_pattern={"up_proj": 4})
    start, rng = {}, np.random.default_rng(1)
    base = split_weight(SvdStart("pissa", 2, 0), spec, start, "up_proj", w, lambda rest: rest)
    trained = {name: value + rng.normal(size=value.shape).astype(np.float32) for name, value in start.items()}
    trained["up_proj.lora_magnitude_vector"] = np.ones(136, np.float32)
    plain, tensors = as_plain_lora(spec, trained, start)
    a, b = tensors["up_proj.lora_A.weight"], tensors["up_proj.lora_B.weight"]
    assert (plain.rank, plain.rank_of("up_proj"), a.shape, b.shape) == (10, 6, (6, 72), (136, 6))
    assert plain.factor_of("up_proj") == pytest.approx(spec.factor_of("up_proj"), rel=1e-12)
    assert plain.factor_of("q_proj") == pytest.approx(spec.factor_of("q_proj"), rel=1e-12)
    wanted = base + spec.factor_of("up_proj") * trained["up_proj.lora_B.weight"] @ trained["up_proj.lora_A.weight"]
    np.testing.assert_allclose(w + plain.factor_of("up_proj") * b @ a, wanted, atol=1e-4)  # f32, terms of size 10
    assert tensors["up_proj.lora_magnitude_vector"] is trained["up_proj.lora_magnitude_vector"]


@pytest.mark.parametrize(
    ("method", "weight", "pack", "message"),
    [
        ("pissa", "packed", NF4, "up_proj is quantized already, but pissa starts from 16-bit weights: give the orig"),
        ("loftq", "narrow", NF4, r"lora_rank: 12 of up_proj is more than loftq can fill; its weight is \(136, 8\)"),
        ("loftq", "dense", lambda rest: rest, "loftq_init: up_proj is not quantized, so there is no loss to start"),
    ],
)
def test_bad_weights(w, method, weight, pack, message):
    given = {"packed": NF4(w), "narrow": w[:, :8], "dense": w}[weight]
    with pytest.raises(ValueError, match=message):
        split(given, method, 1, pack=pack)
