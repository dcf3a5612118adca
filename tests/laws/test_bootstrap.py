"""Intervals against the truth, bootstrap samples, goodness of fit by hand, and warnings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm, t

import coverage_of_intervals as coverage
from parcae.experiments.paper_runs import NOISE, paper_table
from parcae.laws.bootstrap import (
    bootstrap,
    expansion,
    interval,
    leave_one_budget_out,
    quality,
    sample_errors,
    warnings,
)
from parcae.laws.forms import TRAINING, UNIFIED
from parcae.laws.model_runs import runs_of_model
from parcae.laws.optimise import Search, fit_law
from parcae.laws.table import FitError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "law", "repetitions"),
    [
        ("parcae-140m", TRAINING, 20),
        ("parcae-370m", TRAINING, 20),
        ("parcae-140m", UNIFIED, 10),
        ("parcae-370m", UNIFIED, 14),
    ],
    ids=["140m-training", "370m-training", "140m-unified", "370m-unified"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(model, law, repetitions):
    found = coverage.measure(model, law, repetitions, samples=100)
    assert 0.8 <= found.losses.mean() <= 0.97, found
    assert 0.8 <= found.loops.mean() <= 0.97, found
    assert found.error < NOISE[model]


@pytest.fixture(scope="module")
def unified():
    runs = runs_of_model(paper_table(("370m",)), "parcae-370m")
    return fit_law(UNIFIED, runs.points.take(runs.fitted))


@pytest.mark.slow
def test_the_losses_of_a_run_err_together(unified):
    errors = sample_errors(unified, 400, np.random.default_rng(0))
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
def test_bootstrap_samples_scatter_around_the_fit_and_repeat_with_the_seed(unified):
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


@pytest.mark.slow
def test_bootstrap_samples_equal_fits_of_the_same_data(unified):
    """The batch of warm starts against one fit from random starts."""
    drawn = bootstrap(unified, 3, seed=1)
    errors = sample_errors(unified, 3, np.random.default_rng(1))
    losses = np.exp(np.log(unified.predict(unified.points)) + errors[2])
    alone = fit_law(UNIFIED, replace(unified.points, loss=losses))
    batched = UNIFIED.predict({n: float(v[2]) for n, v in drawn.values.items()}, unified.points)
    np.testing.assert_allclose(batched, alone.predict(unified.points), rtol=2e-5)


def test_an_interval_is_the_middle_of_the_samples():
    assert interval(np.arange(101.0)) == (5.0, 95.0)
    assert interval(np.array([1.0] * 10 + [np.inf] * 90)) == (1.0, np.inf)


QUICK = Search(starts=60)


def grid(noise=1.0):
    design = runs_of_model(paper_table(("140m",), noise=noise), "parcae-140m")
    rows = design.training()
    return design.points.take(rows), design.budget[rows]


def test_goodness_by_hand():
    points, _ = grid()
    found = fit_law(TRAINING, points, QUICK)
    scores = quality(found)
    predicted = found.predict(points)
    logs = np.log(points.loss)
    expected = 1 - ((logs - np.log(predicted)) ** 2).sum() / ((logs - logs.mean()) ** 2).sum()
    assert scores.r_squared == pytest.approx(expected)
    assert scores.max_error == pytest.approx(np.abs(predicted / points.loss - 1).max())
    assert scores.points == 36
    assert scores.r_squared > 0.999
    assert 1 < scores.condition < 1e8


@pytest.mark.slow
def test_a_budget_left_out_is_predicted_by_the_others():
    points, budget = grid()
    errors = leave_one_budget_out(TRAINING, points, budget, QUICK)
    assert sorted(errors) == sorted(set(budget.tolist()))
    rest = fit_law(TRAINING, points.take(budget != 64e18), QUICK)
    left = points.take(budget == 64e18)
    expected = np.abs(rest.predict(left) / left.loss - 1).mean()
    assert errors[64e18] == pytest.approx(expected)
    assert max(errors.values()) < 5e-3
    two = np.isin(budget, (1e18, 2e18))
    assert leave_one_budget_out(TRAINING, points.take(two), budget[two], QUICK) == {}


def test_good_data_give_no_warning():
    found = fit_law(TRAINING, grid(noise=0.3)[0], QUICK)
    assert warnings(found, bootstrap(found, 60)) == []


@pytest.mark.slow
def test_noise_that_hides_the_law_is_a_warning():
    found = fit_law(TRAINING, grid(noise=10.0)[0], QUICK)
    messages = " ".join(warnings(found, bootstrap(found, 60)))
    assert "training: x is not identified: its interval is" in messages


@pytest.mark.slow
def test_a_term_that_explains_nothing_is_a_warning():
    points, _ = grid()
    flat = replace(points, loss=2.6 + 5e5 * points.effective_params**-0.77)
    found = fit_law(TRAINING, flat, QUICK)
    tiny = {**found.values, "Y": found.values["Y"] * 1e-9}
    messages = " ".join(warnings(replace(found, values=tiny), None))
    assert "the term Y is at most" in messages
    assert "Y and y are not identified" in messages


def test_a_floor_that_went_to_zero_is_a_warning():
    found = fit_law(TRAINING, grid()[0], QUICK)
    messages = " ".join(warnings(replace(found, values={**found.values, "E": 1e-8}), None))
    assert "E went to zero" in messages


def test_a_flat_optimum_is_a_warning():
    found = fit_law(TRAINING, grid()[0], QUICK)
    flat = replace(found, values={**found.values, "x": 1e-9, "X": 0.4})  # as good as a second floor
    assert "do not determine all parameters" in " ".join(warnings(flat, None))


def test_a_feature_that_never_varies_is_refused():
    points, _ = grid()
    same = replace(points, effective_params=np.full(len(points), 2e8))
    with pytest.raises(FitError, match="all points have the same effective_params, so X and x"):
        fit_law(TRAINING, same, QUICK)
    held = fit_law(TRAINING, same, QUICK, frozen={"X": 5e5, "x": 0.77})
    assert held.values["y"] > 0
