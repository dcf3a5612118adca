"""The rules of the verdicts, on made-up numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from parcae.experiments.verdicts import (
    always,
    describe,
    differences,
    interval,
    lower,
    positive,
    together,
    within,
)

FINITE = st.floats(-10, 10, allow_nan=False)
OPPOSITE = {"shown": "contradicted", "contradicted": "shown"}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([], "not run yet"),
        ([0.04, 0.05, 0.06], "shown"),
        ([0.01, 0.05, 0.12], "shown weakly"),
        ([0.05], "shown weakly"),
        ([-0.05], "not shown at this scale"),
        ([0.05, -0.01, 0.02], "not shown at this scale"),
        ([-0.01, -0.05, -0.12], "not shown at this scale"),
        ([-0.04, -0.05, -0.06], "contradicted"),
        ([math.inf, math.inf, math.inf], "shown"),
        ([-math.inf, -math.inf], "contradicted"),
        ([math.inf, -math.inf], "not shown at this scale"),
        ([math.inf, 0.1, 0.1], "shown weakly"),
        ([math.nan, 0.1, 0.1], "not shown at this scale"),
    ],
)
def test_positive_differences(values, verdict):
    assert positive(values) == verdict


@pytest.mark.slow
@given(st.lists(FINITE, min_size=2, max_size=6))
def test_the_interval_is_students(values):
    mean, half = interval(values)
    t = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    if np.std(values) > 1e-3:
        assert (mean - half, mean + half) == pytest.approx((t.low, t.high), abs=1e-9)


@pytest.mark.slow
@given(st.lists(FINITE, min_size=1, max_size=6))
def test_the_opposite_claim_gets_the_opposite_verdict(values):
    verdict = positive(values)
    if verdict in OPPOSITE:
        assert positive([-value for value in values]) == OPPOSITE[verdict]


def test_seeds_are_paired_and_divergence_is_an_infinite_loss():
    assert differences({0: 3.0, 1: 4.0, 5: 9.0}, {1: 3.5, 0: 2.0}) == [1.0, 0.5]
    stable, unstable = {0: 3.0, 1: 3.1}, {0: math.inf, 1: math.inf}
    assert lower(stable, unstable) == "shown"
    assert lower(unstable, stable) == "contradicted"
    assert lower(unstable, unstable) == "not shown at this scale"
    assert lower({0: 3.0}, {}) == "not run yet"


def test_a_margin_must_be_exceeded():
    smaller, larger = {0: 3.0, 1: 3.0, 2: 3.0}, {0: 3.05, 1: 3.06, 2: 3.05}
    assert lower(smaller, larger) == "shown"
    assert lower(smaller, larger, margin=0.1) == "contradicted"


def test_within():
    assert within([0.01, -0.01, 0.0], 0.1) == "shown"
    assert within([0.5, 0.51, 0.52], 0.1) == "contradicted"


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        ([], "not run yet"),
        ([True], "shown weakly"),
        ([True] * 5, "shown"),
        ([True] * 4 + [False], "shown weakly"),
        ([True, False], "not shown at this scale"),
        ([False] * 3, "contradicted"),
    ],
)
def test_rules_without_spread(held, verdict):
    assert always(held) == verdict


def test_parts_that_conflict_show_nothing():
    assert together(["shown", "shown"]) == "shown"
    assert together(["shown", "shown weakly"]) == "shown weakly"
    assert together(["shown", "contradicted"]) == "not shown at this scale"
    assert together(["contradicted", "contradicted"]) == "contradicted"
    assert together(["shown", "not run yet"]) == "not run yet"
    assert together([]) == "not run yet"


def test_describe():
    assert describe([]) == "–"
    assert describe([1.0]) == "1.000 (1 seed)"
    assert describe([0.41, 0.97], 2) == "0.41, 0.97 (2 seeds)"
    assert describe([1.0, 1.1, 1.2], 2) == "1.10 ± 0.25 (3 seeds)"
    assert describe([math.inf, 1.0]) == "diverged (2 seeds)"
