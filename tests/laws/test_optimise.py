"""Fits against published coefficients, scipy, and laws that the points were made from."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from fitting import chinchilla_points, plain_function
from parcae.experiments import paper_runs as paper
from parcae.experiments.paper_runs import paper_table
from parcae.laws import forms as laws
from parcae.laws.model_runs import runs_of_model
from parcae.laws.optimise import Objective, Search, descend, fit_law, halve, huber, random_starts
from parcae.laws.table import FitError


@pytest.fixture(scope="module")
def chinchilla(shared_data):
    return chinchilla_points(shared_data)


@pytest.fixture(scope="module")
def grids():
    """By law and model: points on the paper's grids, as noisy as the paper's."""
    table = paper_table()
    found = {}
    for model in paper.COEFFICIENTS:
        runs = runs_of_model(table, model)
        found["training", model] = (laws.TRAINING, runs.points.take(runs.training()))
        found["unified", model] = (laws.UNIFIED, runs.points.take(runs.fitted))
    return found


def noiseless(model, law, values):
    runs = runs_of_model(paper_table((model.partition("-")[2],)), model)
    rows = runs.training() if law is laws.TRAINING else runs.fitted
    points = runs.points.take(rows)
    return replace(points, loss=law.predict(values, points))


def test_the_published_refit_of_chinchilla_to_three_digits(chinchilla, shared_data):
    folder = shared_data / "data" / "scaling" / "chinchilla_epoch"
    listed = json.loads((folder / "PUBLISHED_COEFFICIENTS.json").read_text())
    published = next(value for name, value in listed.items() if "240pts" in name)
    assert len(chinchilla) == 240
    found = fit_law(laws.CHINCHILLA, chinchilla)
    for name in ("E", "A", "alpha", "B", "beta"):
        assert found.values[name] == pytest.approx(published[name], rel=5e-4), name
    assert found.objective == pytest.approx(published["objective"], rel=1e-5)
    residuals = np.log(found.predict(chinchilla)) - np.log(chinchilla.loss)
    assert found.objective == pytest.approx(huber(residuals).sum(), rel=1e-9)
    starts = found.starts
    assert starts.tried == 500
    assert 2 <= starts.followed == starts.converged == starts.agreeing <= 128  # halving


@pytest.mark.slow
def test_no_worse_than_scipy_on_the_same_objective_from_the_same_starts(chinchilla):
    problem = Objective(laws.CHINCHILLA, chinchilla)
    starts = random_starts(problem, 30, np.random.default_rng(7))
    function = plain_function(problem)
    value, gradient = problem(starts[:, :1])
    by_hand = function(starts[:, 0])
    assert value[0] == pytest.approx(by_hand[0])
    np.testing.assert_allclose(gradient[:, 0], by_hand[1], rtol=1e-9)
    options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 10_000, "maxfun": 100_000}
    with np.errstate(all="ignore"):
        theirs = min(
            (
                minimize(function, start, jac=True, method="L-BFGS-B", options=options)
                for start in starts.T
            ),
            key=lambda one: one.fun,
        )
    found, best = descend(problem, starts, halving=False)
    assert best.values[0] <= theirs.fun * (1 + 1e-9)
    np.testing.assert_allclose(best.theta[:, 0], theirs.x, atol=1e-3)
    assert found.converged.all()
    assert found.followed.all()


@pytest.mark.parametrize("model", paper.COEFFICIENTS)
def test_coefficients_come_back_from_points_without_noise(model):
    truth = dict(paper.COEFFICIENTS[model])
    found = fit_law(laws.TRAINING, noiseless(model, laws.TRAINING, truth))
    for name, value in truth.items():
        assert found.values[name] == pytest.approx(value, rel=2e-2), name
    assert found.objective < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("law", laws.CONDITIONINGS, ids=lambda law: law.name)
def test_the_decay_comes_back_jointly_and_with_the_training_law_frozen(law):
    truth = {**paper.COEFFICIENTS["parcae-370m"], **paper.TEST_TIME}
    truth |= {"gamma": 1.19} if "gamma" in law.parameters else {}
    truth |= {"z": 0.9} if law is laws.UNIFIED_PLAIN else {}
    points = noiseless("parcae-370m", law, truth)
    frozen = {name: truth[name] for name in laws.TRAINING.parameters}
    held = fit_law(law, points, Search(starts=200), frozen=frozen)
    assert held.frozen == laws.TRAINING.parameters
    assert {name: held.values[name] for name in frozen} == pytest.approx(frozen, rel=1e-9)
    joint = fit_law(law, points, Search(starts=200))
    for found in (held, joint):
        for name in ("Z", "z", "gamma"):
            if name in truth and name in law.parameters:
                assert found.values[name] == pytest.approx(truth[name], rel=1e-3), name
        assert found.objective < 1e-9


@pytest.mark.slow
def test_halving_is_no_worse_than_following_every_start(grids, chinchilla):
    sets = [grids["training", "parcae-140m"], grids["unified", "parcae-370m"]]
    sets.append((laws.CHINCHILLA, chinchilla))
    for draw, (law, points) in enumerate(sets):
        problem = Objective(law, points)
        starts = random_starts(problem, 140, np.random.default_rng(draw))
        whole, best = descend(problem, starts, halving=False)
        halved, halved_best = descend(problem, starts, halving=True)
        assert halved_best.values[0] <= best.values[0] * (1 + 1e-9)
        assert whole.converged.mean() > 0.98
        assert 2 <= halved.followed.sum() < 20
        assert halved.evaluations < whole.evaluations / 3


def test_halving_keeps_the_best():
    values = np.random.default_rng(0).permutation(200).astype(float)
    kept = halve(8, values)
    assert set(values[kept]) == set(range(128))
    assert halve(9, values) is None
    assert halve(8, values[:100]) is None


@pytest.mark.slow
def test_a_seed_gives_the_same_fit_and_another_the_same_optimum(grids):
    law, points = grids["training", "parcae-140m"]
    first, again = fit_law(law, points), fit_law(law, points)
    assert first.values == again.values
    other = fit_law(law, points, Search(seed=5))
    assert other.objective == pytest.approx(first.objective, rel=1e-9)


def test_more_parameters_than_points_are_refused(grids):
    law, points = grids["training", "parcae-140m"]
    with pytest.raises(
        FitError, match=r"5 points cannot determine 5 parameters\. Measure at least 6"
    ):
        fit_law(law, points.take(np.arange(5)))
