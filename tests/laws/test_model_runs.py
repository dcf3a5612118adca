"""Which runs laws are fitted to, and which data do not determine a law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from parcae.experiments.paper_runs import cost, paper_table
from parcae.laws import optimise
from parcae.laws.fit import fit
from parcae.laws.forms import UNIFIED_GAMMA
from parcae.laws.model_runs import assign_sets, cost_model_from, group_budgets, runs_of_model
from parcae.laws.table import SETS, FitError, Table, TableError, table_from_rows


def rows_of(budgets=(1e18, 2e18, 4e18), loops=(2, 4, 6, 8), test_loops=None):
    """A grid whose losses follow a law."""
    for budget in budgets:
        for mu in loops:
            params, per_token = cost("parcae-140m", mu)
            tokens = budget / per_token
            for depth in test_loops or (mu,):
                loss = 2.6 + 5e5 * params**-0.77 + 2.5e4 * tokens**-0.52
                loss += 0.8 * np.exp(-7 * depth / mu)
                yield {
                    "model": "m",
                    "mean_loops": mu,
                    "tokens": tokens,
                    "flops": budget,
                    "effective_params": params,
                    "test_loops": depth,
                    "loss": loss,
                }


QUICK = {"starts": 40, "unified_starts": 40, "bootstrap_samples": 0}


def fit_rows(rows):
    return fit(list(rows), **QUICK).models["m"]


def without(table, *names):
    return Table({k: v for k, v in table.columns.items() if k not in names}, table.source)


def test_the_papers_grid_has_its_sizes():
    table = paper_table()
    for model, count in (("parcae-140m", 36), ("parcae-370m", 18)):
        runs = runs_of_model(table, model)
        assert runs.training().sum() == count
        assert runs.fitted.sum() == 10 * count
        assert runs.baselines().sum() == len(runs.budgets)
        assert len(runs.curves(runs.held_out(), 4)) == 7


def test_the_grid_is_found_without_roles():
    table = paper_table()
    guessed = without(table, "set")
    for model in ("parcae-140m", "parcae-370m"):
        given, found = runs_of_model(table, model), runs_of_model(guessed, model)
        np.testing.assert_array_equal(given.fitted, found.fitted)


def test_without_a_grid_laws_are_fitted_to_all_looped_runs():
    rows = [{**one, "flops": one["flops"] * (1 + 0.1 * k)} for k, one in enumerate(rows_of())]
    assert runs_of_model(table_from_rows(rows), "m").fitted.all()


def test_budgets_are_grouped_where_steps_are_whole():
    flops = np.array([1.003e18, 0.998e18, 2.01e18, 1.0e18, 1.99e18])
    groups = group_budgets(flops)
    assert groups[0] == groups[1] == groups[3]
    assert groups[2] == groups[4]
    assert groups[0] == pytest.approx(1e18, rel=2e-3)


@pytest.mark.slow
def test_n_and_flops_are_lines_through_the_table():
    shape = runs_of_model(paper_table(), "parcae-140m").cost
    for loops in (1, 2, 3, 7, 12, 20):
        params, _ = cost("parcae-140m", loops)
        assert float(shape.effective_params(loops)) == pytest.approx(params, rel=1e-9)
    for loops in (1, 2, 3, 4, 7, 12, 20, 6.5):
        per_token = cost("parcae-140m", loops)[1]
        assert float(shape.flops_per_token(loops)) == pytest.approx(per_token, rel=1e-9)
    for loops in (1, 1.5, 2, 4, 12):
        smooth = float(shape.smooth_flops_per_token(loops))
        assert smooth == pytest.approx(cost("parcae-140m", loops)[1], rel=1e-9)


@pytest.mark.parametrize("depths", [(2, 3, 4, 6, 8), (1, 3, 5), (3, 7)])
def test_odd_depths_do_not_bend_the_cost_of_even_ones(depths):
    """A line through 2, 3, 4, 6, 8 gave 5 % too much at 2."""
    counted = np.array([cost("parcae-140m", loops) for loops in depths])
    shape = cost_model_from(np.array(depths, dtype=float), *counted.T)
    assert shape.half_with_gradient
    for loops in range(1, 13):
        per_token = cost("parcae-140m", loops)[1]
        assert float(shape.flops_per_token(loops)) == pytest.approx(per_token, rel=1e-9)


def test_runs_with_other_gradient_loops_are_interpolated():
    """With full backpropagation FLOPs are a line; any cost is exact at the depths of the table."""
    depths = np.array([2.0, 3, 4, 8])
    shape = cost_model_from(depths, depths, 5 + 3 * depths)
    assert not shape.half_with_gradient
    np.testing.assert_allclose(
        shape.flops_per_token(np.array([1, 2, 5, 8, 20])), [8, 11, 20, 29, 65]
    )
    np.testing.assert_allclose(shape.smooth_flops_per_token(depths), 5 + 3 * depths)


def test_sets_are_assigned_by_budget_and_by_tokens():
    loops = np.array([1, 2, 4, 8, 2, 4, 8, 4.0])
    flops = np.array([1, 1, 1.01, 1, 2, 4, 8, 9]) * 1e18
    tokens = np.array([9, 8, 7, 6, 5, 5, 5.01, 4]) * 1e9
    assert assign_sets(loops, tokens, flops).tolist() == [
        *["grid"] * 4,
        *["curve"] * 3,
        "end-to-end",
    ]


def test_the_sets_of_the_papers_table():
    """The end-to-end 140M model has the tokens of the curves; only the column tells it apart."""
    for model in ("parcae-140m", "parcae-370m"):
        runs = runs_of_model(paper_table(), model)
        counts = [len(runs.curves(runs.in_set(name), 4)) for name in SETS]
        assert counts == [36 if model == "parcae-140m" else 18, 6, 1]


def test_one_budget_is_refused():
    one = fit_rows(rows_of(budgets=(1e18,)))
    reason = one.not_fitted["training"]
    assert "all runs have one budget, 1e18 FLOPs" in reason
    assert "Add a second budget" in reason
    assert "training" not in one.laws
    assert one.parabolas["loops"]  # what one budget does carry


def test_one_depth_is_refused():
    rows = list(rows_of(loops=(4,), test_loops=(4,)))
    with pytest.raises(
        FitError, match=r"no law can be fitted: \(1\) .* \(2\) m: all runs have mean_loops 4"
    ):
        fit_rows(rows)


@pytest.mark.slow
def test_a_single_t_is_refused_for_curves():
    one = fit_rows(rows_of())
    assert "single test_loops, so there is no curve" in one.not_fitted["test-time"]
    assert "single test_loops" in one.not_fitted["unified"]
    assert "training" in one.laws


@pytest.mark.slow
def test_too_few_t_are_refused_for_curves():
    rows = [
        r for r in rows_of(test_loops=(1, 2, 4, 6, 8)) if r["test_loops"] in (1, r["mean_loops"])
    ]
    one = fit_rows(rows)
    assert "no run was measured at 4 or more test_loops" in one.not_fitted["test-time"]
    assert "training" in one.laws


@pytest.mark.slow
def test_runs_never_measured_at_their_own_depth_are_named():
    rows = [
        r
        for r in rows_of(test_loops=(1, 2, 4, 6, 8))
        if (r["mean_loops"], r["test_loops"]) != (6, 6)
    ]
    one = fit_rows(rows)
    reason = one.not_fitted["training"]
    assert "no loss at test_loops = mean_loops of 3 runs (mean_loops 6)" in reason


def test_too_few_runs_are_refused():
    rows = list(rows_of(budgets=(1e18, 2e18), loops=(2, 4)))
    study_error = "4 points cannot determine 5 parameters"
    with pytest.raises(FitError, match=study_error):
        fit_rows(rows)


def test_transformers_alone_are_refused():
    rows = [{**r, "model": "transformer-1m"} for r in rows_of()]
    with pytest.raises(FitError, match="no looped models"):
        fit(rows)


@pytest.mark.slow
def test_curves_that_do_not_move_or_rise_are_warnings():
    rows = list(rows_of(test_loops=(1, 2, 4, 6, 8)))
    for r in rows:
        if r["mean_loops"] == 2:
            r["loss"] = 3.0 + r["flops"] * 1e-20
        if r["mean_loops"] == 4:
            r["loss"] = 3.0 + 0.1 * r["test_loops"]
    messages = " ".join(fit_rows(rows).warnings)
    assert "mean_loops 2" in messages
    assert "does not change with T and is not used" in messages
    assert "more loops make models worse" in messages


def test_equal_losses_never_reach_a_fit():
    with pytest.raises(TableError, match="all 12 losses are 3"):
        table_from_rows([{**r, "loss": 3.0} for r in rows_of()])


@pytest.mark.slow
def test_losses_that_never_change_are_no_law():
    """Also where those at other T do, or those of another model."""
    deep = list(rows_of(test_loops=(1, 2, 4, 6, 8, 12)))
    flat = [{**r, "loss": 3.0} if r["test_loops"] == r["mean_loops"] else r for r in deep]
    model = fit_rows(flat)
    assert "all 12 losses at test_loops = mean_loops are 3" in model.not_fitted["training"]
    assert {"parabolas in loops", "parabolas in tokens", "unified"} <= set(model.not_fitted)
    assert not model.laws
    assert not model.parabolas


@pytest.mark.slow
def test_what_the_training_law_lacks_the_unified_one_lacks_too():
    """Four runs at five T: enough losses, too few runs."""
    rows = list(rows_of((1e18, 2e18), (2, 4), test_loops=(1, 2, 4, 6, 8)))
    model = fit_rows(rows)
    assert "4 points cannot determine 5 parameters" in model.not_fitted["training"]
    assert model.not_fitted["unified"] == model.not_fitted["training"]
    assert model.test_time.forms


@pytest.mark.slow
def test_a_conditioning_without_a_fit_costs_no_other(monkeypatch):
    def fit_law(law, *arguments, **options):
        if law is UNIFIED_GAMMA:
            raise FitError("gamma without bound.")
        return optimise.fit_law(law, *arguments, **options)

    monkeypatch.setattr("parcae.laws.fit.fit_law", fit_law)
    model = fit_rows(rows_of(test_loops=(1, 2, 4, 6, 8)))
    assert model.not_fitted["unified-gamma"] == "gamma without bound."
    assert "unified" not in model.not_fitted
    assert model.laws["unified"].values["Z"] == pytest.approx(0.8, rel=0.1)
    assert [row.formula for row in model.conditionings] == ["Z exp(-z T / μ)", "Z exp(-z T)"]


@pytest.mark.slow
def test_a_budget_without_a_loss_at_its_own_loops_is_passed_over():
    rows = list(rows_of(test_loops=(1, 2, 4, 6, 8, 12)))
    kept = [r for r in rows if r["flops"] > 1e18 or r["test_loops"] != r["mean_loops"]]
    model = fit_rows(kept)
    assert "no loss at test_loops = mean_loops" in model.not_fitted["training"]
    assert [one.budget for one in model.fixed_depth] == [2e18, 4e18]


@pytest.mark.slow
def test_a_grid_of_learning_rates_is_not_taken_for_repeats():
    rows = [
        {**one, "run": f"{place}-{rate}", "learning_rate": rate, "loss": one["loss"] * (1 + rate)}
        for rate in (0.0, 0.02)
        for place, one in enumerate(rows_of())
    ]
    everything = fit(rows, **QUICK, best_of=[]).models["m"].warnings[0]
    assert "same loops and FLOPs differ in learning_rate" in everything
    assert "fitted to all of them" in everything
    assert "laws are fitted to the best of them" in fit_rows(rows).warnings[0]
    roles = [{**one, "role": "held-out" if one["learning_rate"] else "fit"} for one in rows]
    assert not any("differ in" in message for message in fit_rows(roles).warnings)
    seeds = [{**one, "seed": seed} for seed in (0, 1) for one in rows_of()]
    assert not any("differ in" in message for message in fit_rows(seeds).warnings)


def test_the_best_rate_of_each_point_is_fitted():
    """It is another one at each number of loops; every rate has two seeds."""
    best = {2: 0.01, 4: 0.02, 6: 0.02, 8: 0.02}
    rows = [
        {
            **one,
            "run": f"{index}-{rate}-{seed}",
            "seed": seed,
            "learning_rate": rate,
            "log_rate": math.log(rate),
            "loss": one["loss"] * (1 + 0.001 * seed + 0.1 * (rate != best[one["mean_loops"]])),
        }
        for index, one in enumerate(rows_of())
        for rate in (0.01, 0.02)
        for seed in (0, 1)
    ]
    table = table_from_rows(rows)
    runs = runs_of_model(table, "m")
    kept = [row for row in rows if row["learning_rate"] == best[row["mean_loops"]]]
    assert sorted(runs.points.loss) == sorted(row["loss"] for row in kept)
    assert len(np.unique(runs.points.run)) == len(kept)
    (message,) = runs.mixed_settings()
    assert "differ in learning_rate; laws are fitted to the best" in message
    assert "learning_rate 0.02 at 9 of 12 points; learning_rate 0.01 at 3 of 12" in message
    assert len(runs_of_model(table, "m", []).points.loss) == len(rows)
    assert len(runs_of_model(table, "m", ["learning_rate"]).points.loss) == len(kept)
    with pytest.raises(FitError, match=r"best_of: no column 'rate'. Columns: model, "):
        runs_of_model(table, "m", ["rate"])


@pytest.mark.slow
def test_a_transformer_without_its_loss_closes_no_gap():
    rows = list(rows_of())
    baseline = {**rows[0], "mean_loops": 1, "test_loops": 1}
    rows += [
        {**baseline, "model": "transformer-m"},
        {**baseline, "model": "transformer-l", "test_loops": 5, "effective_params": 9e8},
    ]
    assert fit(rows, **QUICK).gap_shares == []
