"""Shares of sources: never a whole row away from what the weights say."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.data.mixture import exact_weights, next_sources


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
def test_the_counts_are_all_it_needs_to_go_on(weights, cut):
    whole = next_sources(weights, [0] * len(weights), 100)
    counts = [whole[:cut].count(source) for source in range(len(weights))]
    assert next_sources(weights, counts, 100 - cut) == whole[cut:]


def test_it_is_exact_after_a_billion_rows():
    weights = exact_weights([0.7, 0.2, 0.1])
    many = 10**15
    counts = [7 * many, 2 * many, many]
    assert next_sources(weights, counts, 50) == next_sources(weights, [0, 0, 0], 50)


def test_weights_mean_what_they_spell():
    assert exact_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert exact_weights([1, 2]) == [1, 2]
    assert exact_weights([1e-3, 1.0]) == [1, 1000]
