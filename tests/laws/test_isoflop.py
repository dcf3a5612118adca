"""Parabolas and power laws against curves whose optimum is known."""

from __future__ import annotations

import numpy as np
import pytest

from parcae.laws.isoflop import bootstrap_parabolas, fit_parabolas, fit_power_law
from parcae.laws.table import FitError

LOOPS = np.array([2.0, 4, 6, 8, 10, 12])
BUDGETS = np.array([1e18, 4e18, 16e18])


def curves(optimum=lambda c: 3 * (c / 1e18) ** 0.4, noise=0.0, seed=0):
    where = np.tile(LOOPS, 3)
    budget = np.repeat(BUDGETS, 6)
    loss = 3 + 0.05 * (np.log(where) - np.log(optimum(budget))) ** 2 - 0.02 * np.log(budget / 1e18)
    loss += noise * np.random.default_rng(seed).standard_normal(len(loss))
    return where, loss, budget


def test_a_parabolas_optimum_and_the_power_law_of_optima_come_back():
    found = fit_parabolas(*curves())
    assert [one.budget for one in found] == list(BUDGETS)
    for one in found:
        assert one.optimum == pytest.approx(3 * (one.budget / 1e18) ** 0.4, rel=1e-6)
        assert one.is_convex
        assert one.is_inside
    law = fit_power_law(found)
    assert law.exponent == pytest.approx(0.4, rel=1e-6)
    assert float(law(4e18)) == pytest.approx(3 * 4**0.4, rel=1e-6)


def test_optima_beyond_the_grid_are_left_out():
    found = fit_parabolas(*curves(lambda c: 5 * (c / 1e18) ** 0.4))
    assert [one.is_inside for one in found] == [True, True, False]
    assert fit_power_law(found).budgets == (1e18, 4e18)
    far = fit_parabolas(*curves(lambda c: 30 * (c / 1e18) ** 0.4))
    with pytest.raises(FitError, match="the optimum lies within the runs at 0 of 3 budgets"):
        fit_power_law(far)


def test_a_parabola_that_opens_downwards_has_no_optimum():
    where, loss, budget = curves()
    found = fit_parabolas(where, 6 - loss, budget)
    assert not any(one.is_convex or one.is_inside for one in found)
    assert all(np.isnan(one.optimum) for one in found)


def test_three_points_make_no_parabola():
    where, loss, budget = curves()
    few = np.isin(where, (2, 6, 12))
    with pytest.raises(
        FitError,
        match=r"no budget has looped runs at 4 or more depths; the most is 3\. mean_loops = 1",
    ):
        fit_parabolas(where[few], loss[few], budget[few])


@pytest.mark.slow
def test_bootstrap_samples_spread_as_the_noise_does():
    truth = 3 * (BUDGETS / 1e18) ** 0.4
    repeated = [fit_parabolas(*curves(noise=2e-3, seed=seed)) for seed in range(300)]
    spread = np.std([[np.log(one.optimum) for one in found] for found in repeated], axis=0)
    ratios = []
    for seed in range(20):
        data = curves(noise=2e-3, seed=seed)
        drawn = bootstrap_parabolas(fit_parabolas(*data), *data, samples=60)
        optima = np.array([[one.optimum for one in sample] for sample in drawn])
        ratios.append(np.log(optima).std(0) / spread)
    assert np.mean(ratios, 0) == pytest.approx(1.0, abs=0.2)
    exact = curves()
    still = bootstrap_parabolas(fit_parabolas(*exact), *exact, samples=5)
    assert all(one.optimum == pytest.approx(t) for one, t in zip(still[0], truth, strict=True))
