"""Intervals: whether they hold the truth, and what the replicas are made of."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm, t

import coverage_of_intervals as coverage
from parcae.experiments.paper_runs import NOISE, paper_table
from parcae.laws.bootstrap import bootstrap, expansion, interval, replica_errors
from parcae.laws.design import design_of
from parcae.laws.fit import fit
from parcae.laws.forms import TRAINING, UNIFIED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "law", "draws"),
    [
        ("parcae-140m", TRAINING, 20),
        ("parcae-370m", TRAINING, 20),
        ("parcae-140m", UNIFIED, 10),
        ("parcae-370m", UNIFIED, 14),
    ],
    ids=["140m-training", "370m-training", "140m-unified", "370m-unified"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(model, law, draws):
    found = coverage.measure(model, law, draws, replicas=100)
    assert 0.8 <= found.losses.mean() <= 0.97, found
    assert 0.8 <= found.loops.mean() <= 0.97, found
    assert found.error < NOISE[model]


@pytest.fixture(scope="module")
def unified():
    design = design_of(paper_table(("370m",)), "parcae-370m")
    return fit(UNIFIED, design.points.take(design.learns))


@pytest.mark.slow
def test_the_losses_of_a_run_err_together(unified):
    errors = replica_errors(unified, 400, np.random.default_rng(0))
    assert errors.shape == (400, 180)
    run = unified.points.run
    same, other = run == run[0], run == run[20]
    together = np.corrcoef(errors.T)
    assert np.median(together[np.ix_(same, same)]) > 0.85
    assert np.abs(together[np.ix_(same, other)]).max() < 0.25
    inflated = np.std(unified.residuals()) * np.sqrt(18 / 13) * t.ppf(0.95, 13) / norm.ppf(0.95)
    assert errors.std() == pytest.approx(inflated, rel=0.1)


@pytest.mark.parametrize("freedom", [7, 13, 31, 200])
def test_the_expansion_is_students_quantile(freedom):
    expected = t.ppf(0.95, freedom) / norm.ppf(0.95)
    assert expansion(freedom) == pytest.approx(expected, rel=3e-3)


@pytest.mark.slow
def test_replicas_scatter_around_the_fit_and_repeat_with_the_seed(unified):
    drawn = bootstrap(unified, 100, seed=3)
    assert len(drawn) == 100
    assert drawn.converged > 0.9
    for name in ("E", "Z", "z", "y"):
        low, high = interval(drawn.values[name])
        assert low < unified.values[name] < high
    again = bootstrap(unified, 100, seed=3)
    np.testing.assert_array_equal(drawn.values["E"], again.values["E"])
    other = bootstrap(unified, 100, seed=4)
    assert not np.array_equal(drawn.values["E"], other.values["E"])


def test_replicas_equal_fits_of_the_same_data(unified):
    """The batch of warm starts against one fit from random starts."""
    from dataclasses import replace

    drawn = bootstrap(unified, 3, seed=1)
    errors = replica_errors(unified, 3, np.random.default_rng(1))
    losses = np.exp(np.log(unified.predict(unified.points)) + errors[2])
    alone = fit(UNIFIED, replace(unified.points, loss=losses))
    ours = UNIFIED.predict({n: float(v[2]) for n, v in drawn.values.items()}, unified.points)
    np.testing.assert_allclose(ours, alone.predict(unified.points), rtol=2e-5)


def test_an_interval_is_the_middle_of_the_draws():
    assert interval(np.arange(101.0)) == (5.0, 95.0)
    assert interval(np.array([1.0] * 10 + [np.inf] * 90)) == (1.0, np.inf)
