"""Tile sizes of the turned product over packed weights, and how its work is shared among blocks."""

import dataclasses
import itertools

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import DEPTH, ROWS
from pallas_kernels.nf4_linear.mosaic_gpu_shares import Shares

WIDTH = WARPGROUPS * ROWS  # columns of a tile of the result
LEAST = 32  # rows that a block writes of a tile


@dataclasses.dataclass(frozen=True)
class TurnedTiles:
    """Tile sizes and schedule.

    Attributes:
        rows: of a tile of the result; 64, 128 or 256.
        stages: slots of the ring.
        unit: steps of the sum that stay in one block, an even number that divides them; None for all of a tile's.
        parts: equal runs of a tile's steps, each in another block of a cluster, which has this tile only; 1, 2 or 4.
            There are stages enough for what blocks send each other, and `unit` does not count.
        pair: whether the blocks of a cluster of two take neighbouring columns and share x's tiles.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        staged: whether operands go through shared memory and array operations decode, for the interpreter.
    """

    rows: int = 256
    stages: int = 4
    unit: int | None = 2
    parts: int = 1
    pair: bool = True
    blocks: int | None = None
    staged: bool = False


def suitable_turned(rows: int, depth: int, width: int) -> TurnedTiles:
    """Tiles, parts and units of work that should take the fewest cycles, by what goes through shared memory."""
    in_pairs, steps = width % (2 * WIDTH) == 0, depth // DEPTH
    multiprocessors = _platform.multiprocessors()

    def cycles(tiles: TurnedTiles) -> float:
        """Those of a block: a step reads x's tile twice and writes it once, and decodes; parts go to other blocks.

        Of a tile they are 4 bytes an element: through memory each way 64 a cycle, and one block reads those of all
        others after its own; within a cluster 14 a cycle, of what a block does not own. Clusters of four and eight
        leave multiprocessors idle, as each stands in one group of 16 or so: 32 of four took two rounds. The other
        numbers are fitted to the forms that scripts/tune_nf4.py timed on an H200, 512 rows.
        """
        team, elements = 2 if tiles.pair else 1, tiles.rows * WIDTH
        items = -(-rows // tiles.rows) * (width // (team * WIDTH))
        step = (3 * tiles.rows + 550) * (1 if tiles.pair else 1.05)
        if tiles.parts > 1:
            blocks = team * tiles.parts
            at_once = (multiprocessors - (2 * blocks if blocks > 2 else 0)) // blocks
            sent = elements * 4 / 14 * (tiles.parts - 1) / tiles.parts
            return -(-items // at_once) * (steps // tiles.parts * step + sent + 19000)
        shares = Shares(items, steps, tiles.unit or steps, multiprocessors // team)
        parts = (1 - -steps // shares.longest) * (elements // 16)
        return shares.longest * step + shares.cut * (30000 + parts) + shares.tiles * 15000

    units = [2, *(steps // parts for parts in (2, 3, 4, 8) if steps % (2 * parts) == 0), None]
    slots = {size: stages for size, stages in ((64, 8), (128, 8), (256, 4)) if size < 2 * rows or size == 64}
    found = [TurnedTiles(size, slots[size], unit, pair=in_pairs) for size in slots for unit in units]
    for size, parts, pair in itertools.product(slots, (2, 4), {in_pairs, False}):
        if steps % (2 * parts) == 0 and size % (parts * LEAST) == 0:
            found.append(TurnedTiles(size, slots[size], None, parts, pair))
    return min(found, key=cycles)
