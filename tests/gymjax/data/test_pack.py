import numpy as np
import pytest

from gymjax.data.pack import bins, buckets, buckets_for


@pytest.mark.parametrize("cutoff_len", [2, 64, 100, 1000, 2048, 8192, 32768])
def test_buckets_are_few_and_reach_cutoff_len(cutoff_len):
    lengths = buckets(cutoff_len)
    assert 1 <= len(lengths) <= 8
    assert lengths[-1] == cutoff_len
    assert list(lengths) == sorted(set(lengths))
    steps = np.array(lengths[1:]) / lengths[:-1]
    assert np.all(steps <= 1.5)  # no row is padded by more than half, above the shortest bucket
    assert lengths[0] >= min(64, cutoff_len)


def test_buckets_follow_the_rule():
    assert buckets(256) == (64, 96, 128, 192, 256)
    assert buckets(300) == (64, 96, 128, 192, 256, 300)
    assert buckets(2048) == (192, 256, 384, 512, 768, 1024, 1536, 2048)


@pytest.mark.parametrize(
    ("longest", "cutoff_len", "last"),
    [(10, 2048, 64), (65, 2048, 96), (150, 2048, 192), (900, 1000, 1000), (10, 32, 32)],
)
def test_buckets_end_at_the_longest_row(longest, cutoff_len, last):
    assert buckets_for(longest, cutoff_len) == buckets(last)


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_each_document_once_and_fit(seed):
    lengths = np.random.default_rng(seed).integers(1, 513, size=400)
    rows = bins(lengths, 512, seed)
    assert sorted(index for row in rows for index in row) == list(range(400))
    used = np.array([lengths[row].sum() for row in rows])
    assert np.all(used <= 512)
    # Best fit decreasing uses at most 11/9 of the optimum, which is at least the tokens over the row length.
    assert len(rows) <= 11 / 9 * -(-lengths.sum() // 512) + 1


def test_bins_are_a_function_of_the_seed():
    lengths = np.random.default_rng(0).integers(1, 20, size=200)
    assert bins(lengths, 64, 1) == bins(lengths, 64, 1)
    assert bins(lengths, 64, 1) != bins(lengths, 64, 2)


def test_bins_of_full_and_tiny_rows():
    assert bins([8, 8], 8, 0) in ([[0], [1]], [[1], [0]])
    assert sorted(bins([1] * 8, 8, 0)[0]) == list(range(8))
    assert bins([], 8, 0) == []
