import numpy as np
import pytest

from gymjax.data.errors import DataError
from gymjax.data.mix import mix, parse_probs, part, repeat, sample, split

A, B = [f"a{i}" for i in range(10)], [f"b{i}" for i in range(4)]


def test_sample_draws_by_seed_in_file_order():
    drawn = sample(A, 5, None, 0)
    assert drawn == sorted(drawn)
    assert len(set(drawn)) == 5
    assert drawn == sample(A, 5, None, 0) != sample(A, 5, None, 1)
    assert sample(A, 5, 2, 0) == drawn[:2]
    assert sample(A, 99, None, 0) == A


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (None, "20%", A[:2]),
        (None, "25%", A[:2]),  # 2.5 rows, rounded to even
        ("95%", None, []),
        ("-20%", None, A[8:]),
        ("-4%", None, []),  # 0.4 rows: none, not all
        ("3", "5", A[3:5]),
        (None, "-1", A[:9]),
        ("-99", "1_0", A),
        (None, "0", []),
        (None, None, A),
    ],
)
def test_part(begin, end, expected):
    assert part(A, begin, end) == expected


def test_repeat():
    assert repeat(B, 10) == [*B, *B, "b0", "b1"]
    assert repeat(B, 3) == B
    assert repeat([], 3) == []


def test_split_takes_each_row_once():
    for size, count in ((0.25, 4), (3, 3), (0, 0)):
        kept, taken = split([A, B], size, 7)
        assert len(taken) == count
        assert sorted([*kept[0], *kept[1], *taken]) == sorted(A + B)
    assert split([A, B], 3, 7) == split([A, B], 3, 7) != split([A, B], 3, 8)


def test_concat_and_turns():
    assert mix([A, B], "concat", None, 0) == A + B
    assert mix([A, B], "interleave_under", None, 0) == [x for pair in zip(A, B) for x in pair]
    over = mix([A, B], "interleave_over", None, 0)
    assert over[1::2] == (B * 3)[: len(over[1::2])]
    assert [row for row in over if row in A] == A


def test_probabilities_are_kept():
    groups = [list(range(20_000)), list(range(20_000, 40_000))]
    rows = np.array(mix(groups, "interleave_under", [0.8, 0.2], 0))
    # The share's standard deviation is sqrt(0.8 * 0.2 / 25000) = 0.0025: 0.01 is four of them.
    assert abs((rows < 20_000).mean() - 0.8) < 0.01
    assert mix(groups, "interleave_under", [0.8, 0.2], 0) == rows.tolist()
    assert mix(groups, "interleave_under", [0.8, 0.2], 1) != rows.tolist()


def test_interleave_over_uses_every_row():
    assert set(mix([A, B], "interleave_over", [0.5, 0.5], 3)) == set(A + B)


def test_parse_probs():
    assert parse_probs("0.7, 0.3") == parse_probs((0.7, 0.3)) == [0.7, 0.3]
    assert parse_probs(None) is parse_probs("") is parse_probs(()) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mix([A, B], "concatenate", None, 0), "mix_strategy must be one of concat, .*found 'concatenate'"),
        (lambda: mix([A, B], "concat", [0.5, 0.5], 0), "interleave_probs needs mix_strategy: interleave_under"),
        (lambda: mix([A, []], "interleave_over", None, 0), "needs rows in every dataset, number 2 has none"),
        (lambda: mix([A, B], "interleave_under", [1.0], 0), "each of the 2 datasets a share above 0, together 1"),
        (lambda: mix([A, B], "interleave_under", [1.0, 0.0], 0), "a share above 0"),
        (lambda: mix([A, B], "interleave_under", [0.9, 0.3], 0), "together 1; found"),
        (lambda: parse_probs("0.5;0.5"), "interleave_probs must be numbers such as"),
        (lambda: split([A, B], 14, 0), "val_size 14 takes 14 of 14 rows"),
        (lambda: split([A, B], 0.01, 0), "val_size 0.01 takes 0 of 14 rows"),
    ],
)
def test_bad_mix(call, message):
    with pytest.raises(DataError, match=message):
        call()
