"""Goodness of fit by hand, and warnings where the data does not say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parcae.experiments.paper_runs import paper_table
from parcae.laws.bootstrap import bootstrap
from parcae.laws.design import design_of
from parcae.laws.fit import FitError, Search, fit
from parcae.laws.forms import TRAINING
from parcae.laws.quality import leave_one_budget_out, quality, warnings

QUICK = Search(starts=60)


def grid(noise=1.0):
    design = design_of(paper_table(("140m",), noise=noise), "parcae-140m")
    rows = design.training()
    return design.points.take(rows), design.budget[rows]


def test_goodness_by_hand():
    points, _ = grid()
    found = fit(TRAINING, points, QUICK)
    scores = quality(found)
    predicted = found.predict(points)
    logs = np.log(points.loss)
    expected = 1 - ((logs - np.log(predicted)) ** 2).sum() / ((logs - logs.mean()) ** 2).sum()
    assert scores.r_squared == pytest.approx(expected)
    assert scores.max_error == pytest.approx(np.abs(predicted / points.loss - 1).max())
    assert scores.points == 36
    assert scores.r_squared > 0.999
    assert 1 < scores.condition < 1e8


def test_a_budget_left_out_is_predicted_by_the_others():
    points, budget = grid()
    errors = leave_one_budget_out(TRAINING, points, budget, QUICK)
    assert sorted(errors) == sorted(set(budget.tolist()))
    rest = fit(TRAINING, points.take(budget != 64e18), QUICK)
    left = points.take(budget == 64e18)
    expected = np.abs(rest.predict(left) / left.loss - 1).mean()
    assert errors[64e18] == pytest.approx(expected)
    assert max(errors.values()) < 5e-3
    two = np.isin(budget, (1e18, 2e18))
    assert leave_one_budget_out(TRAINING, points.take(two), budget[two], QUICK) == {}


def test_good_data_give_no_warning():
    found = fit(TRAINING, grid(noise=0.3)[0], QUICK)
    assert warnings(found, bootstrap(found, 60)) == []


@pytest.mark.slow
def test_noise_that_hides_the_law_is_told():
    found = fit(TRAINING, grid(noise=10.0)[0], QUICK)
    said = " ".join(warnings(found, bootstrap(found, 60)))
    assert "training: x is not identified: its interval runs from" in said


def test_a_term_that_explains_nothing_is_told():
    points, _ = grid()
    flat = replace(points, loss=2.6 + 5e5 * points.effective_params**-0.77)
    found = fit(TRAINING, flat, QUICK)
    tiny = {**found.values, "Y": found.values["Y"] * 1e-9}
    said = " ".join(warnings(replace(found, values=tiny), None))
    assert "the term Y is nowhere above" in said
    assert "Y and y are not identified" in said


def test_a_floor_that_went_to_zero_is_told():
    found = fit(TRAINING, grid()[0], QUICK)
    said = " ".join(warnings(replace(found, values={**found.values, "E": 1e-8}), None))
    assert "E went to zero" in said


def test_a_flat_optimum_is_told():
    found = fit(TRAINING, grid()[0], QUICK)
    flat = replace(found, values={**found.values, "x": 1e-9, "X": 0.4})  # as good as a second floor
    assert "do not fix all parameters" in " ".join(warnings(flat, None))


def test_a_feature_that_never_varies_is_refused():
    points, _ = grid()
    same = replace(points, effective_params=np.full(len(points), 2e8))
    with pytest.raises(FitError, match="all points have the same effective_params, so X and x"):
        fit(TRAINING, same, QUICK)
    held = fit(TRAINING, same, QUICK, frozen={"X": 5e5, "x": 0.77})
    assert held.values["y"] > 0
