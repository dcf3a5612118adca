"""The order of rows: a keyed permutation that is a uniform bijection, and exact shares."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from parcae.data.order import exact_weights, hash64, next_sources, permute


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_it_is_a_permutation(count, some_key):
    assert sorted(permute(np.arange(count), count, some_key)) == list(range(count))


def test_a_part_is_a_part_of_the_whole():
    whole = permute(np.arange(1000), 1000, hash64(1, "a"))
    assert (permute(np.arange(300, 400), 1000, hash64(1, "a")) == whole[300:400]).all()


def test_hundreds_of_millions_need_no_table():
    count = 700_000_001
    sent = permute(np.arange(123_456_789, 123_456_789 + 50_000), count, hash64(0))
    assert len(np.unique(sent)) == 50_000
    assert sent.min() >= 0
    assert sent.max() < count
    assert abs(sent.mean() / count - 0.5) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("count", "draws"), [(2, 400), (3, 1200), (4, 2000), (5, 3000)])
def test_small_permutations_are_all_equally_likely(count, draws):
    seen = Counter(tuple(permute(np.arange(count), count, hash64(n, "x"))) for n in range(draws))
    frequencies = [seen[p] for p in itertools.permutations(range(count))]
    assert chisquare(frequencies).pvalue > 1e-4


def test_neighbours_are_torn_apart():
    """In a random order of n, the mean distance between neighbours is n / 3."""
    count = 40_000
    sent = permute(np.arange(count), count, hash64(3))
    assert np.abs(np.diff(sent)).mean() == pytest.approx(count / 3, rel=0.02)
    assert abs(np.corrcoef(np.arange(count), sent)[0, 1]) < 0.03


def test_the_order_is_for_ever():
    """A state stored years ago must mean the same rows: these numbers may never change."""
    assert hash64(0, "documents", 1) == 10957797862289021001
    assert permute(np.arange(10), 10, 42).tolist() == [8, 6, 1, 0, 4, 5, 2, 9, 7, 3]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 400))
def test_every_prefix_is_within_one_row(weights, rows):
    given_rows = [0] * len(weights)
    for number, source in enumerate(next_sources(weights, given_rows, rows), 1):
        given_rows[source] += 1
        for weight, count in zip(weights, given_rows, strict=True):
            assert abs(count - number * Fraction(weight, sum(weights))) < 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(0, 60))
def test_the_counts_are_the_whole_state(weights, cut):
    whole = next_sources(weights, [0] * len(weights), 100)
    counts = [whole[:cut].count(source) for source in range(len(weights))]
    assert next_sources(weights, counts, 100 - cut) == whole[cut:]


def test_it_is_exact_after_a_billion_rows():
    weights = exact_weights([0.7, 0.2, 0.1])
    many = 10**15
    counts = [7 * many, 2 * many, many]
    assert next_sources(weights, counts, 50) == next_sources(weights, [0, 0, 0], 50)


def test_weights_keep_their_decimal_digits():
    assert exact_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert exact_weights([1, 2]) == [1, 2]
    assert exact_weights([1e-3, 1.0]) == [1, 1000]
