"""Test-time curves against scipy's least squares."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import least_squares

from parcae.laws import loop_curves as module
from parcae.laws.forms import EXPONENTIAL, PURE_POWER, TEST_TIME
from parcae.laws.loop_curves import compare_forms, fit_curves, recovery
from parcae.laws.model_runs import make_points


def curve(loops=8, floor=2.95, amplitude=0.85, rate=7.5, noise=1e-4, upto=24, seed=0):
    depth = np.arange(1, upto + 1)
    loss = floor + amplitude * np.exp(-rate * depth / loops)
    loss *= np.exp(noise * np.random.default_rng(seed).standard_normal(upto))
    return make_points(
        loss=loss, mean_loops=loops, tokens=1e10, test_loops=depth, run=np.zeros(upto)
    )


@pytest.fixture(scope="module")
def several():
    return [curve(loops, seed=loops) for loops in (4, 6, 8, 12)] + [curve(8, upto=16)]


@pytest.mark.slow
@pytest.mark.parametrize("law", TEST_TIME, ids=lambda law: law.name)
def test_every_curve_gets_the_least_squares_fit(law, several):
    for found in fit_curves(law, several):
        data = found.curve

        def residuals(theta, data=data):
            values = {n: float(v[0]) for n, v in law.values(theta[:, None]).items()}
            return np.log(law.predict(values, data)) - np.log(data.loss)

        start = law.coordinates(found.values)[:, 0]
        best = min(
            least_squares(residuals, start + shift, method="lm", xtol=1e-14, ftol=1e-14).cost
            for shift in (0.0, 0.1, -0.1)
        )
        assert 0.5 * (residuals(start) ** 2).sum() <= best * (1 + 1e-6) + 1e-15


@pytest.mark.slow
def test_few_starts_find_what_many_find(several, monkeypatch):
    few = fit_curves(EXPONENTIAL, several)
    monkeypatch.setattr(module, "STARTS", 200)
    many = fit_curves(EXPONENTIAL, several, seed=9)
    for one, other in zip(few, many, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-4)


@pytest.mark.slow
def test_an_exponential_curve_prefers_the_exponential(several):
    scores = compare_forms(several)
    assert [score.law for score in scores] == list(TEST_TIME)
    best, *others = scores
    assert all(best.inside < 0.1 * other.inside for other in others)
    assert all(best.beyond < 0.1 * other.beyond for other in others)
    assert scores[-1].law is PURE_POWER
    assert scores[-1].inside == max(score.inside for score in scores)
    assert best.curves == best.curves_beyond == 5


@pytest.mark.slow
def test_beyond_mu_is_judged_only_where_enough_lies_before_it():
    scores = compare_forms([curve(2), curve(8)])
    assert scores[0].curves == 2
    assert scores[0].curves_beyond == 1
    scores = compare_forms([curve(2)])
    assert scores[0].beyond is None


@pytest.mark.slow
def test_the_floor_is_near_the_loss_at_mu(several):
    found = recovery(fit_curves(EXPONENTIAL, several))
    assert found.curves == 5
    expected = 0.85 * np.exp(-7.5) / 2.95
    assert found.mean == pytest.approx(expected, abs=1.5e-4)
    assert found.largest >= found.mean
