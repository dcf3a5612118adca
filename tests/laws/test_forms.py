"""Every law against its formula written out, every gradient against finite differences."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from parcae.laws import forms as laws
from parcae.laws.model_runs import make_points
from parcae.laws.optimise import Objective, huber

BY_HAND = {
    "training": lambda v, p: (
        v["E"] + v["X"] * p.effective_params ** -v["x"] + v["Y"] * p.tokens ** -v["y"]
    ),
    "chinchilla": lambda v, p: (
        v["E"] + v["A"] * p.effective_params ** -v["alpha"] + v["B"] * p.tokens ** -v["beta"]
    ),
    "exponential": lambda v, p: v["L_inf"] + v["Z"] * np.exp(-v["z"] * p.test_loops),
    "shifted-power": lambda v, p: v["L_inf"] + v["Z"] * (1 + p.test_loops) ** -v["z"],
    "power": lambda v, p: v["L_inf"] + v["Z"] * p.test_loops ** -v["z"],
    "pure-power": lambda v, p: v["Z"] * p.test_loops ** -v["z"],
    "unified": lambda v, p: (
        BY_HAND["training"](v, p) + v["Z"] * np.exp(-v["z"] * p.test_loops / p.mean_loops)
    ),
    "unified-gamma": lambda v, p: (
        BY_HAND["training"](v, p)
        + v["Z"] * np.exp(-v["z"] * p.test_loops * p.mean_loops ** -v["gamma"])
    ),
    "unified-plain": lambda v, p: (
        BY_HAND["training"](v, p) + v["Z"] * np.exp(-v["z"] * p.test_loops)
    ),
}
VALUES = {"E": 2.6, "L_inf": 2.9, "X": 5e5, "x": 0.77, "Y": 2.5e4, "y": 0.52, "A": 480.0}
VALUES |= {"alpha": 0.35, "B": 2100.0, "beta": 0.37, "Z": 0.8, "z": 0.6, "gamma": -0.3}
LAWS = list(laws.LAWS.values())


@pytest.fixture
def some_points():
    rng = np.random.default_rng(0)
    loops = rng.integers(1, 13, 17)
    return make_points(
        loss=rng.uniform(2.7, 3.4, 17),
        effective_params=1.4e8 + 1.4e7 * loops,
        tokens=10 ** rng.uniform(8.5, 11, 17),
        mean_loops=loops,
        test_loops=rng.integers(1, 25, 17),
    )


def values_of(law):
    return {name: VALUES[name] for name in law.parameters}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_law_is_its_formula(law, some_points):
    expected = BY_HAND[law.name](VALUES, some_points)
    np.testing.assert_allclose(law.predict(values_of(law), some_points), expected, rtol=1e-12)
    rows = {name: np.array([value, 1.1 * value]) for name, value in values_of(law).items()}
    both = law.predict(rows, some_points)
    np.testing.assert_allclose(both[0], expected, rtol=1e-12)
    scaled = {name: 1.1 * value for name, value in VALUES.items()}
    np.testing.assert_allclose(both[1], BY_HAND[law.name](scaled, some_points), rtol=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("delta", [1e-3, np.inf], ids=["huber", "squares"])
def test_gradients_equal_finite_differences(law, delta, some_points):
    problem = Objective(law, some_points, delta=delta)
    theta = problem.bound.from_plain(law.coordinates(values_of(law)))[:, 0]
    expected = approx_fprime(theta, lambda t: problem(t[:, None])[0][0], 1e-7)
    found = problem(theta[:, None])[1][:, 0]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_derivatives_equal_finite_differences(law, some_points):
    bound = law.bind(some_points, standardised=True)
    theta = bound.from_plain(law.coordinates(values_of(law)))
    _, terms = bound.forward(theta)
    found = bound.derivatives(theta, terms)
    for index in range(len(theta)):
        moved = theta.copy()
        moved[index] += 1e-6
        expected = (bound.forward(moved)[0] - bound.forward(theta)[0]) / 1e-6
        np.testing.assert_allclose(found[index], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_standardised_coordinates_describe_the_same_law(law, some_points):
    plain = law.coordinates(values_of(law))
    bound = law.bind(some_points, standardised=True)
    theta = bound.from_plain(plain)
    assert not np.allclose(theta, plain)
    np.testing.assert_allclose(bound.to_plain(theta), plain, rtol=1e-12)
    expected = law.bind(some_points).forward(plain)[0]
    np.testing.assert_allclose(bound.forward(theta)[0], expected, rtol=1e-10)
    back = law.values(plain)
    assert {name: float(v[0]) for name, v in back.items()} == pytest.approx(values_of(law))


def test_huber_equals_scipys():
    from scipy.special import huber as scipys

    residuals = np.linspace(-0.01, 0.01, 101)
    np.testing.assert_allclose(huber(residuals), scipys(1e-3, residuals), atol=1e-18)


def test_the_objective_is_the_mean_huber_loss_whatever_the_batch(some_points):
    law = laws.TRAINING
    problem = Objective(law, some_points)
    rng = np.random.default_rng(1)
    start = problem.bound.from_plain(law.coordinates(values_of(law)))
    theta = start + 0.1 * rng.standard_normal((5, 3000))  # more rows than a chunk holds
    values, gradient = problem(theta)
    predicted = law.predict(law.values(problem.bound.to_plain(theta)), some_points)
    residuals = np.log(predicted) - np.log(some_points.loss)
    np.testing.assert_allclose(values, huber(residuals).mean(1) / 1e-6, rtol=1e-9)
    alone = [problem(theta[:, [row]]) for row in (0, 1500, 2999)]
    for (value, slope), row in zip(alone, (0, 1500, 2999), strict=True):
        np.testing.assert_allclose(value, values[[row]], rtol=1e-12)
        np.testing.assert_allclose(slope, gradient[:, [row]], rtol=1e-9)
    assert problem.total(values[0]) == pytest.approx(huber(residuals[0]).sum())


def test_rows_may_have_targets_of_their_own(some_points):
    targets = np.log(some_points.loss) + np.array([[0.0], [0.01]])
    problem = Objective(laws.TRAINING, some_points, log_losses=targets)
    theta = problem.bound.from_plain(laws.TRAINING.coordinates(values_of(laws.TRAINING)))
    both, _ = problem(np.repeat(theta, 2, axis=1))
    for row in (0, 1):
        single = Objective(laws.TRAINING, some_points, log_losses=targets[row])
        assert both[row] == pytest.approx(single(theta)[0][0])
        assert problem.take(np.array([row]))(theta)[0][0] == pytest.approx(both[row])


@pytest.mark.slow
def test_nothing_of_it_imports_torch():
    script = (
        "import sys, parcae.laws.fit, parcae.laws.predict, parcae.laws.figures\n"
        "import parcae.laws.page, parcae.laws.summary\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('parcae.model')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
