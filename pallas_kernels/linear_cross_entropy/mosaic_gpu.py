"""The loss' passes over the logits on Hopper, as one kernel between the two matrix products.

A block has one row of logits at a time. Its warpgroups take the row's pieces in turn, each through a ring of slots of
its own in shared memory, which the copy engine fills ahead of use, on into the next row. The first pass keeps a maximum
and a sum of exponentials for each lane, joined when the row is through. The second finds the last pieces still in
shared memory and reads the others again, newest first, as the L2 cache has them; so device memory sees each logit read
once and each gradient written once.

A row is lines of 128 logits: whole pieces, and a rest of at least 4 lines with a place of its own in shared memory,
where it stays for both passes. A group of 4 lines is what a warpgroup takes into registers at once, 16 bytes a thread.
"""

import dataclasses
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform
from pallas_kernels._hopper import launch_in_place

LINE = 128  # logits
GROUP = 4  # lines
LOG2E = math.log2(math.e)
TOP, TOTAL, LABEL, SUM, STATISTICS = 0, 1, 2, 3, 4  # rows of the statistics
_LOWEST = float(jnp.finfo(jnp.float32).min)
_EACH = plgpu.Layout.TILED(  # a group: lines over warps, 4 logits a lane
    plgpu.Tiling(((GROUP, LINE), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the kernel.

    Attributes:
        lines: of a piece; a multiple of 4.
        slots: of each warpgroup's ring.
        warpgroups: of a block.
        blocks: that share the rows; None for as many as the GPU has multiprocessors.
    """

    lines: int = 24
    slots: int = 4
    warpgroups: int = 4
    blocks: int | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """What of the loss the kernel has to know: see linear_cross_entropy.

    Attributes:
        scale: factor on the products, above 0.
        softcap: bound on the logits after it, or None.
        smoothing: label smoothing.
        z_loss: weight of the squared log-sum-exp.
    """

    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def unit(self) -> float:
        """Factor from what the passes work with to exponents of 2: products, or bounded logits."""
        return LOG2E * (self.scale if self.softcap is None else 1.0)

    def bounded(self, products: Array) -> Array:
        """Logits of products where there is a bound, else the products.

        tanh by an exponential, as the hardware's own instruction is right to 11 bits only.
        """
        if self.softcap is None:
            return products
        return self.softcap * (1 - 2 / (1 + jnp.exp2(products * (2 * LOG2E * self.scale / self.softcap))))


def refuses_rows(vocabulary: int, dtype: Any, form: Form) -> str | None:
    """Return why the kernel cannot take rows of such logits, with gradients of this dtype, or None."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and x is {dtype}"
    if vocabulary % LINE or vocabulary < GROUP * LINE:
        return f"the vocabulary must be a multiple of {LINE} of at least {GROUP * LINE}, and is {vocabulary}"
    if not form.scale > 0:
        return f"the scale must be above 0, and is {form.scale}"
    return None


def refuses(
    vocabulary: int, dtype: Any, form: Form, *, rows: int = 0, metrics: bool = False, bias: bool = False
) -> str | None:
    """Return why the kernel cannot take such a call, with at most so many rows at once, here, or None."""
    if metrics:
        return "it has neither accuracy nor entropy"
    if bias:
        return "it adds no bias, which XLA does on its way"
    if rows * vocabulary >= 2**31:
        return (
            f"a group must have fewer than 2**31 logits, and has up to {rows} rows of {vocabulary}; pass group_tokens"
        )
    return refuses_rows(vocabulary, dtype, form) or _platform.why_not_hopper(one_device=True)


def statistics(
    products: Float[Array, "M V"], labels: Int[Array, " M"], form: Form, tiles: Tiles = Tiles()
) -> Float[Array, "4 M"]:
    """Return what the loss needs of each row.

    Args:
        products: x @ head.T in f32.
        labels: int32; of one outside the vocabulary, LABEL is some other product.
        form: of the loss.
        tiles: sizes.

    Returns:
        TOP the largest logit, TOTAL the sum of the exponentials below it, LABEL the label's product, and with smoothing
        SUM the logits' sum: with a bound in bounded logits, without one in products, but for LABEL, always a product.
    """
    return _run(products, labels, None, None, None, 0, form, tiles)[0]


def statistics_and_gradient(
    products: Float[Array, "M V"],
    labels: Int[Array, " M"],
    factor: Float[Array, " M"],
    room: Float[Array, "N M V"],
    index: Int[Array, ""] | int,
    form: Form,
    tiles: Tiles = Tiles(),
) -> tuple[Float[Array, "4 M"], Float[Array, "N M V"]]:
    """Return `statistics` and `room` with the gradient of the sum of factor / scale * losses by the products at index.

    Args:
        products, labels, form, tiles: as in `statistics`.
        factor: f32; of a row of factor 0 the gradient is exactly 0.
        room: bf16 or f16, written in place.
        index: where in room.
    """
    return _run(products, labels, factor, None, room, index, form, tiles)


def gradient(
    products: Float[Array, "M V"],
    labels: Int[Array, " M"],
    factor: Float[Array, " M"],
    lse: Float[Array, " M"],
    room: Float[Array, "N M V"],
    index: Int[Array, ""] | int,
    form: Form,
    tiles: Tiles = Tiles(),
) -> Float[Array, "N M V"]:
    """As `statistics_and_gradient` where the log-sum-exp of each row's logits is known: one pass."""
    return _run(products, labels, factor, lse, room, index, form, tiles)[1]


def _run(products, labels, factor, lse, room, index, form: Form, tiles: Tiles) -> Any:
    """Launch the passes that are asked for: the first without `lse`, the second with `room`."""
    rows, vocabulary = products.shape
    dtype = jnp.bfloat16 if room is None else room.dtype
    if why := refuses_rows(vocabulary, dtype, form):
        raise ValueError(f"linear_cross_entropy: {why}")
    lines = vocabulary // LINE
    count = max(0, (lines - GROUP) // tiles.lines)  # whole pieces
    rest = lines - count * tiles.lines
    blocks = min(rows, tiles.blocks or _platform.multiprocessors())
    first, second = lse is None, room is not None
    args = {"products": products.reshape(rows, lines, LINE), "labels": labels.astype(jnp.int32)}
    out = {}
    if first:
        out["statistics"] = jnp.zeros((STATISTICS, rows), jnp.float32)
    else:
        args["lse"] = lse.astype(jnp.float32)
    if second:
        args |= {"factor": factor.astype(jnp.float32), "index": jnp.asarray(index, jnp.int32).reshape(1)}
        out["room"] = room.reshape(room.shape[0], rows, lines, LINE)

    def kernel(refs, scratch):
        named: dict[str, Any] = dict(zip((*args, *out), refs, strict=True))
        products_ref, labels_ref = named["products"], named["labels"]
        slots, rest_smem, parts, ready, rest_ready, joined = scratch
        block, mine = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        my_rows = lax.div(rows - 1 - block, jnp.int32(blocks)) + 1
        whole = lax.div(count - 1 - mine + tiles.warpgroups, jnp.int32(tiles.warpgroups))  # pieces of this warpgroup
        kept = jnp.minimum(whole, tiles.slots) if first and second else jnp.int32(0)
        loads = 2 * whole - kept if first and second else whole  # of a row
        owns_rest = mine == count % tiles.warpgroups
        places = _places()

        def row_of(turn):
            return block + turn * blocks

        def line_of(n):
            """Where this warpgroup's n-th piece begins."""
            return (n * tiles.warpgroups + mine) * tiles.lines

        def slot_of(visit):
            return mine * tiles.slots + lax.rem(visit, jnp.int32(tiles.slots))

        def load(visit):
            turn = lax.div(visit, jnp.maximum(loads, 1))
            n = visit - turn * loads
            n = jnp.where(n < whole, n, 2 * whole - kept - 1 - n)  # the second pass goes backwards
            source = products_ref.at[row_of(turn), pl.ds(line_of(n), tiles.lines)]
            slot = slot_of(visit)
            plgpu.copy_gmem_to_smem(source, slots.at[slot], ready.at[slot])

        def load_rest(turn):
            source = products_ref.at[row_of(turn), pl.ds(count * tiles.lines, rest)]
            plgpu.copy_gmem_to_smem(source, rest_smem, rest_ready)

        def free(visit):
            """Fill the slot of a visit anew, once every thread has read it."""
            plgpu.commit_smem()
            pl.when(visit + tiles.slots < my_rows * loads)(lambda: load(visit + tiles.slots))

        lax.fori_loop(0, jnp.minimum(tiles.slots, my_rows * loads), lambda visit, _: load(visit), None)
        pl.when(owns_rest)(lambda: load_rest(0))

        def measure(turn, row):
            """The first pass: maximum, sum of exponentials and, for smoothing, sum of a row's logits."""

            def piece(n, carry):
                visit = turn * loads + n
                slot = slot_of(visit)
                plgpu.barrier_wait(ready.at[slot])
                carry = _fold(carry, _groups(slots.at[slot], tiles.lines, form), form)
                pl.when(n < whole - kept)(lambda: free(visit))
                return carry

            parity = lax.rem(turn, 2)
            _put(parts.at[parity, mine], lax.fori_loop(0, whole, piece, _nothing(form)), form)

            @pl.when(owns_rest)
            def _measure_rest():
                plgpu.barrier_wait(rest_ready)
                groups = _groups(rest_smem, rest, form)
                if again := -rest % GROUP:  # lines of the last group that the one before it had
                    groups[-1] = jnp.where(places >= again * LINE, groups[-1], _LOWEST)
                _put(parts.at[parity, tiles.warpgroups], _fold(_nothing(form), groups, form, -rest % GROUP), form)
                if not second:
                    plgpu.commit_smem()
                    pl.when(turn + 1 < my_rows)(lambda: load_rest(turn + 1))

            plgpu.barrier_arrive(joined)
            plgpu.barrier_wait(joined)
            top, *sums = _join(parts.at[parity], tiles.warpgroups + 1, form)

            @pl.when(mine == 0)
            def _tell():
                label = jnp.clip(labels_ref[row], 0, vocabulary - 1)
                label_product = products_ref[row, lax.div(label, jnp.int32(LINE)), lax.rem(label, jnp.int32(LINE))]
                for field, value in zip((TOP, TOTAL, LABEL, SUM), (top, sums[0], label_product, *sums[1:])):
                    named["statistics"][field, row] = value

            return top, sums[0]

        def differentiate(turn, row, top, total):
            """The second pass: writes a row of the gradient."""
            room_ref, factor_ref = named["room"].at[named["index"][0]], named["factor"]
            label, factor = labels_ref[row], factor_ref[row]
            weight = factor / total
            if form.z_loss:
                lse = (top * form.unit + jnp.log2(total)) / LOG2E
                weight *= 1 + 2 * form.z_loss * lse

            def write(source, lines, begin):
                for at in _starts(lines):
                    values = form.bounded(_load(source.at[pl.ds(at, GROUP)]))
                    y = jnp.exp2((values - top) * form.unit) * weight
                    if form.smoothing:
                        y -= factor * (form.smoothing / vocabulary)
                    here = places == label - (begin + at) * LINE
                    y -= jnp.where(here, factor * (1 - form.smoothing), 0.0)
                    if form.softcap is not None:
                        y *= 1 - (values / form.softcap) * (values / form.softcap)
                    room_ref[row, pl.ds(begin + at, GROUP)] = y.astype(room_ref.dtype)

            def piece(n, _):
                visit = turn * loads + whole - kept + n if first else turn * loads + n
                slot = slot_of(visit)
                if first:
                    pl.when(n >= kept)(lambda: plgpu.barrier_wait(ready.at[slot]))
                    place = jnp.where(n < kept, whole - kept + n, whole - 1 - n)
                else:
                    plgpu.barrier_wait(ready.at[slot])
                    place = n
                write(slots.at[slot], tiles.lines, line_of(place))
                free(visit)

            lax.fori_loop(0, whole, piece, None)

            @pl.when(owns_rest)
            def _write_rest():
                if not first:
                    plgpu.barrier_wait(rest_ready)
                write(rest_smem, rest, count * tiles.lines)
                plgpu.commit_smem()
                pl.when(turn + 1 < my_rows)(lambda: load_rest(turn + 1))

        def one_row(turn, _):
            row = row_of(turn)
            top, total = measure(turn, row) if first else (named["lse"][row] * (LOG2E / form.unit), jnp.float32(1))
            if second:
                differentiate(turn, row, top, total)

        lax.fori_loop(0, my_rows, one_row, None)

    kinds = 3 if form.smoothing else 2
    scratch = (
        plgpu.SMEM((tiles.warpgroups * tiles.slots, tiles.lines, LINE), jnp.float32),
        plgpu.SMEM((rest, LINE), jnp.float32),
        plgpu.SMEM((2, tiles.warpgroups + 1, kinds, GROUP), jnp.float32),  # of two rows in turn
        plgpu.Barrier(num_barriers=tiles.warpgroups * tiles.slots),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=tiles.warpgroups),
    )
    shape: dict[str, Any] = {"grid": {"blocks": blocks}, "warpgroups": tiles.warpgroups}

    @sequential_vmap
    def run(args: tuple[Array, ...], out: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(launch_in_place(kernel, scratch, *args, out=out, auto_barriers=False, **shape))

    found = dict(zip(out, run(tuple(args.values()), tuple(out.values())), strict=True))
    return found.get("statistics"), found["room"].reshape(room.shape) if second else None


def _places() -> Array:
    """Each logit's position in its group."""
    line, column = (plgpu.broadcasted_iota(jnp.int32, (GROUP, LINE), axis, layout=_EACH) for axis in (0, 1))
    return line * LINE + column


def _load(ref) -> Array:
    return plgpu.load(ref, layout=_EACH, optimized=False)


def _starts(lines: int) -> list[int]:
    """First lines of the groups; the last may overlap the one before it."""
    return [min(at, lines - GROUP) for at in range(0, lines, GROUP)]


def _groups(ref, lines: int, form: Form) -> list[Array]:
    return [form.bounded(_load(ref.at[pl.ds(at, GROUP)])) for at in _starts(lines)]


def _full(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((GROUP, LINE), value, jnp.float32), _EACH)


def _nothing(form: Form) -> tuple[Array, ...]:
    """Of no logits, for each place in a group: maximum, sum of exponentials below it, and with smoothing the sum."""
    return (_full(_LOWEST), _full(0.0), *([_full(0.0)] if form.smoothing else []))


def _fold(carry: tuple[Array, ...], groups: list[Array], form: Form, again: int = 0) -> tuple[Array, ...]:
    """Add groups to the running maximum and sums; `again` first lines of the last one count for neither sum."""
    top, total, *sums = carry
    above = top
    for group in groups:
        above = jnp.maximum(above, group)
    total *= jnp.exp2((top - above) * form.unit)
    for group in groups:
        total += jnp.exp2((group - above) * form.unit)
    for i, group in enumerate(groups if sums else []):
        last = again and i == len(groups) - 1
        sums[0] += jnp.where(_places() >= again * LINE, group, 0.0) if last else group
    return above, total, *sums


def _put(ref, carry: tuple[Array, ...], form: Form) -> None:
    """Reduce over each warp's line and store."""
    top, total, *sums = carry
    line_top = jnp.max(top, axis=1)
    above = lax.broadcast_in_dim(line_top, top.shape, (0,))
    ref[0] = line_top
    ref[1] = jnp.sum(total * jnp.exp2((top - above) * form.unit), axis=1)
    for one in sums:
        ref[2] = jnp.sum(one, axis=1)


def _join(ref, parts: int, form: Form) -> tuple[Array, ...]:
    """Maximum and sums over all parts."""
    where = [(part, line) for part in range(parts) for line in range(GROUP)]
    tops = [ref[part, 0, line] for part, line in where]
    top = tops[0]
    for one in tops[1:]:
        top = jnp.maximum(top, one)
    total = jnp.float32(0)
    for (part, line), one in zip(where, tops, strict=True):
        total += ref[part, 1, line] * jnp.exp2((one - top) * form.unit)
    if not form.smoothing:
        return top, total
    return top, total, sum((ref[part, 2, line] for part, line in where), jnp.float32(0))
