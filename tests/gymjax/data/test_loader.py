import numpy as np
import pytest

from gymjax.data.chat import Example
from gymjax.data.errors import DataError
from gymjax.data.loader import Loader, dataset_of

CUTOFF = 128


def make_dataset(count=37, seed=0, longest=CUTOFF):
    """Examples whose token says which example and position it is, with random weights."""
    generator = np.random.default_rng(seed)
    examples = []
    for number in range(count):
        length = int(generator.integers(2, longest + 1))
        ids = (number * 1000 + np.arange(length)).astype(np.int32)
        weights = generator.integers(0, 2, length).astype(np.float32)
        examples.append(Example(ids, weights, f"d.jsonl:{number + 1}"))
    return dataset_of(examples)


def epoch(loader, number=0):
    start = number * loader.steps_per_epoch
    return [loader.batch(step) for step in range(start, start + loader.steps_per_epoch)]


def documents(batch):
    """(ids, targets, weights, positions) of every document of a batch."""
    for row in np.ndindex(batch["tokens"].shape[:2]):
        segments = batch["segment_ids"][row]
        for segment in range(1, segments.max(initial=0) + 1):
            where = np.flatnonzero(segments == segment)
            assert np.array_equal(where, np.arange(where[0], where[-1] + 1))
            yield tuple(batch[name][row][where] for name in ("tokens", "targets", "loss_weights", "positions"))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("rows", "accumulation"), [(1, 1), (4, 1), (3, 2)])
def test_every_document_is_seen_once_an_epoch_and_nothing_crosses(packing, rows, accumulation):
    dataset = make_dataset()
    loader = Loader(dataset, rows, accumulation=accumulation, cutoff_len=CUTOFF, packing=packing, seed=3)
    for number in range(2):
        seen = []
        for batch, sources in epoch(loader, number):
            width = batch["tokens"].shape[2]
            assert width in loader.buckets
            assert all(array.shape == (accumulation, rows, width) for array in batch.values())
            assert len(sources) == rows * accumulation
            found = list(documents(batch))
            named = [source for row in sources for source in row.split("; ") if row]
            assert [f"d.jsonl:{ids[0] // 1000 + 1}" for ids, *_ in found] == named
            for ids, targets, weights, positions in found:
                example = dataset[int(ids[0]) // 1000]
                np.testing.assert_array_equal(ids, example.ids)
                np.testing.assert_array_equal(targets, [*example.ids[1:], 0])
                np.testing.assert_array_equal(weights, [*example.weights[1:], 0])
                np.testing.assert_array_equal(positions, np.arange(len(ids)))
            padding = batch["segment_ids"] == 0
            assert not any(array[padding].any() for array in batch.values())
            seen += named
        assert sorted(seen) == sorted(dataset.sources)


@pytest.mark.parametrize("packing", [False, True])
def test_supervised_tokens_are_the_same_packed_or_padded(packing):
    dataset = make_dataset()
    loader = Loader(dataset, 4, cutoff_len=CUTOFF, packing=packing)
    assert sum(int((batch["loss_weights"] > 0).sum()) for batch, _ in loader) == dataset.supervised


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_depends_on_seed_and_step_alone(packing):
    dataset = make_dataset()
    settings = {"accumulation": 2, "cutoff_len": CUTOFF, "packing": packing}
    first, resumed = (Loader(dataset, 3, seed=5, **settings) for _ in range(2))
    steps = list(range(2 * first.steps_per_epoch))
    straight = [first.batch(step) for step in steps]
    for step in reversed(steps):  # any order, and a loader that never saw the steps before
        batch, sources = resumed.batch(step)
        assert sources == straight[step][1]
        for name, array in batch.items():
            np.testing.assert_array_equal(array, straight[step][0][name])
    half = first.steps_per_epoch
    assert [s for _, s in straight[:half]] != [s for _, s in straight[half:]]
    other = Loader(dataset, 3, seed=6, **settings)
    assert [s for _, s in epoch(other)] != [s for _, s in straight[:half]]


def test_packing_needs_fewer_rows_and_one_shape():
    dataset = make_dataset(200, longest=40)
    packed = Loader(dataset, 4, cutoff_len=CUTOFF, packing=True)
    padded = Loader(dataset, 4, cutoff_len=CUTOFF)
    assert packed.buckets == (CUTOFF,)
    assert packed.steps_per_epoch < padded.steps_per_epoch / 4
    # Best fit decreasing of lengths up to a third of the row leaves less than a tenth empty, but for the last rows.
    batches = [batch for batch, _ in packed]
    used = sum(int((batch["segment_ids"] > 0).sum()) for batch in batches) / (len(packed.bins) * CUTOFF)
    assert used > 0.9


def test_without_shuffle_rows_are_in_order_and_the_last_step_is_filled_up():
    dataset = make_dataset(5)
    loader = Loader(dataset, 2, cutoff_len=CUTOFF, shuffle=False)
    sources = [source for _, rows in loader for source in rows]
    assert sources == [*dataset.sources, ""]
    assert loader.batch(2)[0]["segment_ids"][0, 1].max() == 0
    assert loader.batch(3)[1] == loader.batch(0)[1]


def test_width_is_the_shortest_bucket_that_holds_the_step():
    dataset = dataset_of(Example(np.ones(n, np.int32), np.ones(n, np.float32), str(n)) for n in (10, 64, 65, 97, 128))
    loader = Loader(dataset, 1, cutoff_len=2048, shuffle=False)
    assert loader.buckets == (64, 96, 128)
    assert [batch["tokens"].shape[-1] for batch, _ in loader] == [64, 64, 96, 128, 128]
    together = Loader(dataset, 1, accumulation=5, cutoff_len=2048).batch(0)[0]
    assert together["tokens"].shape == (5, 1, 128)


def test_dataset_counts_and_fingerprint():
    dataset = dataset_of([Example(np.arange(3, dtype=np.int32), np.ones(3, np.float32), "a")] * 2)
    assert len(dataset) == 2
    assert dataset.supervised == 4  # nothing predicts the first token of a document
    assert dataset.fingerprint() == make_copy(dataset).fingerprint()
    assert dataset.fingerprint() != make_dataset(2).fingerprint()
    with pytest.raises(IndexError, match="example 2 of 2"):
        dataset[2]


def make_copy(dataset):
    return dataset_of([dataset[index] for index in range(len(dataset))])


def test_arrays_have_the_types_of_the_step():
    batch, _ = Loader(make_dataset(4), 2, cutoff_len=CUTOFF).batch(0)
    assert batch["loss_weights"].dtype == np.float32
    assert all(batch[name].dtype == np.int32 for name in ("tokens", "targets", "segment_ids", "positions"))


def test_bad_loader_inputs():
    with pytest.raises(DataError, match="the dataset has no example to train or evaluate on"):
        Loader(dataset_of([]), 1, cutoff_len=8)
    with pytest.raises(
        DataError, match=r"d\.jsonl:\d+: \d+ tokens, more than cutoff_len 8; prepare with this cutoff_len"
    ):
        Loader(make_dataset(), 1, cutoff_len=8)
    with pytest.raises(DataError, match=r"rows \(0\) and accumulation \(1\) must be at least 1"):
        Loader(make_dataset(), 0, cutoff_len=CUTOFF)
