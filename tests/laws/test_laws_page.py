"""The numbers on the page of the laws against the laws themselves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.interpolate import lagrange

from parcae.experiments.paper_runs import paper_table
from parcae.laws.fit import fit
from parcae.laws.page import page_data
from parcae.laws.predict import loss_at, recommend

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    result = fit(paper_table(("140m",)), starts=60, unified_starts=60, bootstrap_samples=20)
    return result.models["parcae-140m"]


@pytest.fixture(scope="module")
def data(model):
    return page_data(model)


def interpolated(data, flops, values):
    """What the page computes: a cubic through the four nearest nodes; `values` by node."""
    x, nodes = np.log(flops), np.array(data["logFlops"])
    first = np.clip(int((x - nodes[0]) / (nodes[1] - nodes[0])) - 1, 0, len(nodes) - 4)
    part = slice(first, first + 4)
    return float(lagrange(nodes[part] - x, np.array(values)[part])(0.0))


def test_curves_between_the_nodes_are_the_laws_to_a_ten_thousandth(model, data):
    training = model.laws["training"].values
    errors = []
    for flops in data["flops"][::7]:
        for index in (0, 9, 25, 40):
            loops = data["loops"][index]
            tokens = flops / float(model.cost.smooth_flops_per_token(loops))
            size = float(model.cost.effective_params(loops))
            expected = training["E"] + training["X"] * size ** -training["x"]
            expected += training["Y"] * tokens ** -training["y"]
            nodes = [node[0][index] for node in data["byLoops"]]
            errors.append(abs(interpolated(data, flops, nodes) - expected))
        depth = data["depths"].index(8)
        tokens = flops / float(model.cost.flops_per_token(8))
        for index in (0, 3, 9):
            expected = loss_at(model, 8, tokens, data["testLoops"][depth][index]).estimate.value
            nodes = [node[depth][0][index] for node in data["byTestLoops"]]
            errors.append(abs(interpolated(data, flops, nodes) - expected))
    assert max(errors) < 1e-4


def test_the_page_and_predict_give_one_answer(model, data):
    for index in (0, 40, 90):
        best = recommend(model, data["flops"][index])
        assert data["bestLoops"][index] == best.loops.value
        assert f"loss {best.loss.value:.4f} ({best.loss.low:.4f} to" in data["answers"][index]


def test_sliders_stop_at_the_runs(model, data):
    assert set(model.runs.budgets.tolist()) <= set(data["flops"])
    assert {2, 4, 6, 8, 10, 12} <= set(data["depths"])
    assert data["flops"] == sorted(data["flops"])
    assert len(data["answers"]) == len(data["flops"]) == len(data["bestLoops"])
    nominal = [row for row in data["runs"] if row[4]]
    assert all(row[2] == max(1, round(row[0])) for row in nominal)
