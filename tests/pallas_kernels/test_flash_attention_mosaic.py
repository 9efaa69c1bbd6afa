"""The Hopper kernels in the GPU interpreter, with race detection, against float64; and their tile ranges.

The interpreter runs neither products whose left side is in registers nor accumulation in place: `staged=True` sends
both through shared memory. What the real kernels' schedule adds is checked on the GPU by scripts/check_gpu.py.
"""

import dataclasses
import importlib.metadata
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels.flash_attention import explain, flash_attention, mosaic_gpu
from pallas_kernels.flash_attention.bounds import key_tiles, number_documents, query_tiles, row_bounds
from pallas_kernels.flash_attention.mosaic_gpu_forward_wide import forward_wide
from pallas_kernels.flash_attention.mosaic_gpu_items import Forward, ForwardTiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Order, Scores
from pallas_kernels.flash_attention.reference import attention_mask


def oracle(q, k, v, dout, dlse, seen, scale, softcap, sinks):
    """Output, log-sum-exp and gradients of q, k, v and sinks in float64, and their sizes; seen is (T, S).

    A sink's gradient is a sum over queries whose terms cancel: its size is that of the terms.
    """
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    sinks = np.full(q.shape[2], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    group = q.shape[2] // k.shape[2]
    out, dq, dk, dv, dsinks = (
        np.zeros_like(q),
        np.zeros_like(q),
        np.zeros_like(k),
        np.zeros_like(v),
        np.zeros(len(sinks)),
    )
    lse, terms = np.zeros_like(dlse), 0.0
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            keys, values = k[b, :, n // group], v[b, :, n // group]
            score, slope = q[b, :, n] @ keys.T * scale, 1.0
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
                slope = 1 - (score / softcap) ** 2
            score = np.where(seen, score, -np.inf)
            top = np.maximum(np.maximum(score.max(-1, keepdims=True), sinks[n]), -1e300)
            p, sink = np.exp(score - top), np.exp(sinks[n] - top)
            total = np.maximum(p.sum(-1, keepdims=True) + sink, 1e-300)
            p, sink = p / total, sink / total
            lse[b, n] = np.where(p.sum(-1) + sink[:, 0] > 0.5, np.log(total[:, 0]) + top[:, 0], -np.inf)
            out[b, :, n] = p @ values
            dp = dout[b, :, n] @ values.T
            delta = (p * dp).sum(-1, keepdims=True) - dlse[b, n][:, None]
            ds = p * (dp - delta) * slope * scale
            dq[b, :, n] = ds @ keys
            dk[b, :, n // group] += ds.T @ q[b, :, n]
            dv[b, :, n // group] += p.T @ dout[b, :, n]
            dsinks[n] -= (sink * delta).sum()
            terms += (
                (sink[:, 0] * np.linalg.norm(out[b, :, n], axis=-1) * np.linalg.norm(dout[b, :, n], axis=-1)) ** 2
            ).sum()
    sizes = [*map(np.linalg.norm, (out, dq, dk, dv)), terms**0.5]
    return lse, zip((out, dq, dk, dv, dsinks), sizes, strict=True)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case; keys None: as many as tokens; documents: their lengths, the rest is padding."""

    tokens: int
    keys: int | None = None
    heads: int = 1
    kv_heads: int = 1
    width: int = 64
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    sinks: bool = False
    dtype: jnp.dtype = jnp.bfloat16
    deterministic: bool = False


# The fused backward runs at widths 64 and 128, the pair elsewhere and where asked for; the forward scores ahead but at
# 64, with slots of queries for each warpgroup at 256.
CASES = {
    "grouped heads, 3 tiles of keys": Shape(300, heads=2, kv_heads=1),
    "one token": Shape(1, width=128),
    "few tokens, more keys, soft-cap, sinks": Shape(5, keys=140, softcap=2.0, sinks=True, heads=4, kv_heads=2),
    "width 128, odd length": Shape(130, width=128),
    "full, more keys than a tile": Shape(100, keys=200, causal=False),
    "width 128, more keys than queries, window": Shape(70, keys=300, width=128, window=150),
    "window": Shape(200, window=37, dtype=jnp.float16),
    "width 128, documents and padding": Shape(256, width=128, documents=(100, 3, 120), heads=2, kv_heads=1),
    "documents and window": Shape(150, documents=(70, 60), window=20),
    "width 96": Shape(130, width=96, documents=(70, 50), heads=2, kv_heads=1),
    "width 256, three items a block": Shape(130, width=256, heads=3, kv_heads=1),
    "width 256, more keys than queries, soft-cap, sinks": Shape(
        70, keys=200, width=256, softcap=2.0, sinks=True, heads=2, kv_heads=1
    ),
    "width 256, documents, padding, window": Shape(
        150, width=256, documents=(70, 3, 60), window=50, dtype=jnp.float16, heads=2, kv_heads=1
    ),
    "soft-cap, documents": Shape(140, softcap=2.0, documents=(70, 60), heads=2, kv_heads=1),
    "width 128, soft-cap": Shape(140, width=128, softcap=2.0, heads=2, kv_heads=1),
    "a soft-cap beyond what is raised as it is": Shape(70, softcap=60.0),
    "width 128, soft-cap and sinks": Shape(
        140, width=128, softcap=2.0, sinks=True, heads=2, kv_heads=1, dtype=jnp.float16
    ),
    "pair: grouped heads, causal": Shape(256, heads=2, kv_heads=1, deterministic=True),
    "pair: more keys than queries": Shape(70, keys=200, deterministic=True),
    "pair: documents, padding, soft-cap, sinks": Shape(
        256, documents=(100, 3, 120), softcap=2.0, sinks=True, heads=2, kv_heads=1, deterministic=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels(name, capfd):
    case = CASES[name]
    keys = case.keys or case.tokens
    shapes = [(case.tokens, case.heads), *[(keys, case.kv_heads)] * 2, (case.tokens, case.heads)]
    draws = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (1, length, heads, case.width), case.dtype)
        for key, (length, heads) in zip(draws, shapes, strict=True)
    )
    dlse = jax.random.normal(jax.random.key(1), (1, case.heads, case.tokens))
    sinks = jnp.linspace(-1.0, 3.0, case.heads) if case.sinks else None
    ids = None
    if case.documents:
        numbers = np.repeat(np.arange(len(case.documents)) + 1, case.documents)
        ids = jnp.asarray(np.pad(numbers, (0, case.tokens - len(numbers))), jnp.int32)[None]
    seen = attention_mask(case.tokens, keys, case.causal, case.window, ids, ids)
    seen = np.ones((case.tokens, keys), bool) if seen is None else np.asarray(seen[0])
    scale = case.width**-0.5
    options = {"causal": case.causal, "window": case.window, "segment_ids": ids, "scale": scale, "staged": True}
    options |= {"softcap": case.softcap, "deterministic": case.deterministic}

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        (out, lse), back = jax.vjp(lambda q, k, v, s: mosaic_gpu.forward(q, k, v, sinks=s, **options), q, k, v, sinks)
        got = jax.block_until_ready((out, *back((dout, dlse))))
    assert "RACE" not in capfd.readouterr().out  # the interpreter goes on after it has said so

    exact_lse, exact = oracle(q, k, v, dout, dlse, seen, scale, case.softcap, sinks)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)  # f32, from products of 16-bit numbers
    for ours, (truth, size) in zip(got, exact, strict=True):
        if ours is None:
            continue
        ours = np.asarray(ours, np.float64)
        # 16-bit weights and outputs: dense bf16 attention is off by 0.0023, fp16 by 0.0003, whatever the shape.
        assert np.linalg.norm(ours - truth) <= 1.5 * 0.0024 * size + 1e-12
    hidden = ~seen.any(0)
    assert not np.asarray(got[2], np.float32)[:, hidden].any()  # a key that nobody sees gets exactly no gradient
    assert not np.asarray(got[0], np.float32)[:, ~seen.any(1)].any()


@pytest.mark.parametrize(
    ("width", "tiles", "kind"),
    [
        (64, ForwardTiles(), "growing"),
        (64, ForwardTiles(), "small"),
        (64, ForwardTiles(block_kv=64, stages=4), "small"),
        (64, ForwardTiles(stages=3), "growing"),
        (256, ForwardTiles(block_kv=64), "growing"),
        (256, ForwardTiles(block_kv=80), "growing"),
        (256, ForwardTiles(block_kv=80), "small"),
    ],
)
def test_other_forms_of_the_forward(width, tiles, kind, monkeypatch, capfd):
    """Slots that do not divide the keys; weights whose reference rises on the way, or is far below 0."""
    q, k, v = (jax.random.normal(key, (1, 290, 2, width)) for key in jax.random.split(jax.random.key(0), 3))
    if kind == "growing":
        k = k * jnp.where(jnp.arange(290) < 90, 1.0, 20.0)[:, None, None]
    else:  # by 200 nats, and some keys by 150
        q = q.at[..., 0].set(width**0.5)
        k = k.at[..., 0].set(jnp.where(jnp.arange(290) % 100 < 90, -200.0, -150.0)[:, None])
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    ids = jnp.repeat(jnp.asarray([1, 2, 0]), jnp.asarray([30, 210, 50]))[None]
    options = {"causal": True, "window": None, "segment_ids": ids, "scale": width**-0.5, "staged": True}
    run = forward_wide if width == 256 else mosaic_gpu.FORWARDS[width][0]
    monkeypatch.setitem(mosaic_gpu.FORWARDS, width, (run, tiles))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, lse = jax.block_until_ready(mosaic_gpu.forward(q, k, v, **options))
    assert "RACE" not in capfd.readouterr().out

    seen = np.asarray(attention_mask(290, 290, True, None, ids, ids)[0])
    exact_lse, exact = oracle(q, k, v, out, np.zeros_like(lse), seen, width**-0.5, None, None)
    exact_out, size = next(exact)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-5)
    assert np.linalg.norm(np.asarray(out, np.float64) - exact_out) <= 1.5 * 0.0024 * size


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("softcap", "width", "forward"),
    [
        *itertools.product((None, 30.0), mosaic_gpu.WIDTHS, (None,)),
        (1e25, mosaic_gpu.WIDTHS[0], None),
        (None, 256, (forward_wide, ForwardTiles(block_kv=80))),
    ],
)
def test_the_kernels_of_the_gpu_lower(softcap, width, forward, deterministic, monkeypatch):
    """What the interpreter cannot run: products from registers, sums in place, adding copies, inline assembly."""
    monkeypatch.setitem(mosaic_gpu.FORWARDS, width, forward or mosaic_gpu.FORWARDS[width])
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, width), jnp.bfloat16) for heads in (4, 2))
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32) if softcap is None else None

    def gradients(q, k, v, sinks, dout):
        options = {"causal": True, "window": 100, "segment_ids": None, "scale": 0.1}
        options |= {"softcap": softcap, "deterministic": deterministic}
        return jax.vjp(lambda *args: mosaic_gpu.forward(*args[:3], sinks=args[3], **options)[0], q, k, v, sinks)[1](
            dout
        )

    lowered = jax.jit(gradients).trace(q, k, k, sinks, q).lower(lowering_platforms=("cuda",)).as_text()
    fused = not deterministic and width in mosaic_gpu.FUSED_WIDTHS
    assert lowered.count("@mosaic_gpu_v2") == (2 if fused else 3)


def test_ranges_hold_every_visible_tile_and_clear_ones_are_clear():
    rng = np.random.default_rng(0)
    of_queries, of_keys = jax.jit(key_tiles, static_argnums=(2, 3)), jax.jit(query_tiles, static_argnums=(2, 3, 4))
    for _ in range(40):
        tokens, causal = int(rng.choice([64, 128, 192])), bool(rng.integers(2))
        window = int(rng.integers(1, tokens)) if causal and rng.integers(2) else None
        ids = None
        if rng.integers(2):
            cuts = np.sort(rng.integers(0, tokens, 3))
            ids = jnp.asarray(np.searchsorted(cuts, np.arange(tokens), side="right") + 1, jnp.int32)[None]
            ids = jnp.where(ids == 4, 0, ids)
        lo, hi = row_bounds(tokens, tokens, causal=causal, window=window, segment_ids=ids)
        mask = attention_mask(tokens, tokens, causal, window, ids, ids)
        mask = np.ones((tokens, tokens), bool) if mask is None else np.asarray(mask[0])
        key = np.arange(tokens)
        np.testing.assert_array_equal((key >= lo[0][:, None]) & (key <= hi[0][:, None]), mask)
        for block_q, block_kv in ((16, 32), (32, 16)):
            tiles = mask.reshape(tokens // block_q, block_q, tokens // block_kv, block_kv)
            for ranges, some, every in (
                (of_queries(lo, hi, block_q, block_kv), tiles.any((1, 3)), tiles.all((1, 3))),
                (of_keys(lo, hi, tokens, block_q, block_kv), tiles.any((1, 3)).T, tiles.all((1, 3)).T),
            ):
                for (begin, clear_begin, clear_end, end), seen, clear in zip(
                    np.asarray(ranges[0]), some, every, strict=True
                ):
                    other = np.arange(len(seen))
                    assert ((other[seen] >= begin) & (other[seen] < end)).all()
                    assert clear[clear_begin:clear_end].all()


@pytest.mark.parametrize(("items", "blocks"), [(1024, 132), (132, 132), (7, 7), (1000, 7), (3, 2)])
def test_blocks_share_the_items_of_the_forward_evenly(items, blocks):
    """Each item once; of items as long as causal rows' no block has more than the others by over the longest one."""
    q, lo = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 128, items, 64), (1, 128)))
    tiles = ForwardTiles(blocks=blocks)
    call = Forward.of(q, q, lo, None, Scores(1.0), tiles)
    of_block = [[int(call.number(b, jnp.int32(n))) for n in range(call.of_block(b))] for b in range(blocks)]
    assert sorted(number for numbers in of_block for number in numbers) == list(range(items))
    loads = [sum(items - number for number in numbers) for numbers in of_block]
    assert max(loads) - min(loads) <= items


@pytest.mark.parametrize("last", [0, 1, 3])
def test_the_last_tiles_come_at_the_end(last):
    """Each tile of each head and row once; by head, then those at the end by tile."""
    order = Order(heads=2, tiles=3, batch=2, last=last)
    (count,) = order.grid.values()
    places = jnp.stack(jax.vmap(lambda _: order.place(), axis_name="blocks")(jnp.arange(count)), axis=1).tolist()
    by_head = [[head, tile, row] for head in range(2) for tile in range(3 - last) for row in range(2)]
    by_tile = [[head, tile, row] for tile in range(3 - last, 3) for head in range(2) for row in range(2)]
    assert places == by_head + by_tile


def test_a_document_is_a_run_of_equal_ids():
    np.testing.assert_array_equal(number_documents(jnp.asarray([[7, 7, 0, 7, 2, 2, 0]])), [[1, 1, 0, 3, 4, 4, 0]])
    q = jax.random.normal(jax.random.key(0), (1, 6, 1, 8))
    again, apart = (
        flash_attention(q, q, q, segment_ids=jnp.asarray([ids])) for ids in ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3])
    )
    np.testing.assert_array_equal(again, apart)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float32}, "it needs bfloat16 or float16, and q is float32"),
        ({"width": 80}, r"the head width must be one of \(64, 96, 128, 256\), and is 80"),
        ({"own": True}, "keys with segment ids of their own are not done yet"),
        ({}, "it needs an NVIDIA GPU"),
    ],
)
def test_refusals(change, message):
    q = jnp.ones((1, 8, 2, change.get("width", 64)), change.get("dtype", jnp.bfloat16))
    ids = jnp.ones((1, 8), jnp.int32) if change.get("own") else None
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' refuses: {message}"):
        flash_attention(q, q, q, segment_ids=ids, kv_segment_ids=ids, implementation="mosaic_gpu")


@pytest.mark.parametrize("width", mosaic_gpu.WIDTHS)
def test_hopper_picks_ours_for_packed_rows_and_long_ones_and_cudnn_for_short_ones(width, monkeypatch):
    short, long = (jax.ShapeDtypeStruct((1, tokens, 2, width), jnp.bfloat16) for tokens in (255, 256))
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    assert explain(short, short, packed=True) == explain(long, long) == "flash_attention: mosaic_gpu"
    assert explain(short, short) == "flash_attention: cudnn"
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (8, 0))
    assert explain(long, long).startswith(f"flash_attention: {'xla' if width > 128 else 'cudnn'} (mosaic_gpu refuses: ")
    assert "it needs Hopper" in explain(long, long)


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("", False),
        ("--xla_dump_to=/tmp --xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=1 --xla_gpu_deterministic_ops=false", False),
    ],
)
def test_determinism_follows_xlas_flag(flags, asked, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert _platform.deterministic() is asked


@pytest.mark.parametrize(
    ("version", "refused"),
    [("12.6.85", False), ("12.8.61", True), ("12.8.93", True), ("12.9.41", True), ("12.9.86", False), (None, False)],
)
def test_an_assembler_that_miscompiles_is_refused(version, refused, monkeypatch):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", installed)
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    said = explain(q, q, packed=True)
    assert (said == "flash_attention: mosaic_gpu") is not refused
    assert not refused or f"nvidia-cuda-nvcc-cu12 is {version}, install 12.9.86 or newer" in said
