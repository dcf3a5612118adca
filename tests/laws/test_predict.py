"""Answers of a fit against brute force, and fit.json there and back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import parcae
from parcae.config import ConfigError
from parcae.experiments.paper_runs import paper_table
from parcae.files import FileError, read_sealed, write_sealed
from parcae.laws import predict
from parcae.laws.fit import fit, read_fit
from parcae.laws.forms import TRAINING, UNIFIED
from parcae.laws.isoflop import flops_for, frontier

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result():
    return fit(paper_table(("370m",)), starts=100, unified_starts=100, bootstrap_samples=60)


@pytest.fixture(scope="module")
def path(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    assert result.save(folder, figures=False) == ["fit.json", "summary.md"]
    return folder / "fit.json"


@pytest.fixture(scope="module")
def model(path):
    return read_fit(path)["parcae-370m"]


def loss_by_hand(model, loops, tokens):
    v = model.laws["training"].values
    params = model.cost.effective_params(loops)
    return v["E"] + v["X"] * params ** -v["x"] + v["Y"] * tokens ** -v["y"]


def test_what_is_stored_is_what_was_fitted(result, model):
    one = result.models["parcae-370m"]
    for name, law in one.laws.items():
        back = model.laws[name]
        assert back.law is law.law
        assert back.values == law.values
        assert back.left_out == law.left_out
        assert back.quality == law.quality
    drawn = model.laws["training"].samples.values["x"]
    np.testing.assert_allclose(drawn, one.laws["training"].samples.values["x"], rtol=1e-8)
    assert model.cost == one.cost
    assert model.warnings == one.warnings
    assert model.power_laws == one.power_laws


def test_the_contents_of_the_file(path, result):
    tree = json.loads(path.read_text())
    assert tree["data"]["rows"] == len(result.data)
    fitted = tree["models"]["parcae-370m"]["fitted"]
    assert set(fitted["cost"]["measured"]) == {"1", "2", "4", "6", "8", "10", "12"}
    low, high = fitted["laws"]["training"]["intervals"]["x"]
    assert low < fitted["laws"]["training"]["values"]["x"] < high


def test_a_recommendation_is_the_lowest_point_of_the_law(model):
    answer = predict.recommend(model, 64e18)
    loops = np.geomspace(2, 60, 20_000)
    losses = loss_by_hand(model, loops, 64e18 / model.cost.smooth_flops_per_token(loops))
    assert answer.loops.value == pytest.approx(loops[losses.argmin()], rel=2e-3)
    assert answer.loss.value == pytest.approx(losses.min(), abs=1e-7)
    spent = answer.tokens.value * model.cost.smooth_flops_per_token(answer.loops.value)
    assert spent == pytest.approx(64e18, rel=1e-6)
    assert answer.loops.low < answer.loops.value < answer.loops.high
    whole = np.arange(1, 40)
    losses = loss_by_hand(model, whole, 64e18 / model.cost.flops_per_token(whole))
    assert answer.whole_loops == whole[losses.argmin()]
    assert answer.whole_loss == pytest.approx(losses.min(), abs=1e-9)
    assert answer.notes == []
    assert predict.recommend(model, 1e21).notes  # far beyond the grid


def test_the_loss_of_a_run_with_and_without_t(model):
    trained = predict.loss_at(model, 8, 29.6e9)
    assert trained.estimate.value == pytest.approx(loss_by_hand(model, 8, 29.6e9))
    assert trained.estimate.low < trained.estimate.value < trained.estimate.high
    tested = predict.loss_at(model, 8, 29.6e9, 4)
    values = model.laws["unified"].values
    at = model.cost.points_at(8, 29.6e9, 4)
    assert tested.estimate.value == pytest.approx(float(UNIFIED.predict(values, at)[0]))
    assert tested.estimate.value > trained.estimate.value
    assert "is outside the runs" in predict.loss_at(model, 8, 1e13).notes[0]


def test_an_optimum_at_the_end_of_the_search_has_the_loss_there(model):
    """A vertex beyond the grid would be lower than any loss the law has."""
    for flops, end in ((1e10, 1.0), (1e40, 256.0)):
        loops, loss = frontier(model.laws["training"].values, model.cost, flops)
        assert loops[0] == pytest.approx(end)
        tokens = flops / float(model.cost.smooth_flops_per_token(end))
        assert loss[0] == pytest.approx(loss_by_hand(model, end, tokens), rel=1e-12)


def test_the_whole_number_of_loops_is_within_the_search(model):
    best = predict.recommend(model, 1e40)
    assert best.loops.value == pytest.approx(256)
    assert best.whole_loops <= 256


def test_the_loops_worth_using(model):
    answer = predict.saturation_loops(model, 8, 29.6e9, 1e-3)
    floor = TRAINING.predict(
        {n: model.laws["unified"].values[n] for n in "EXxYy"}, model.cost.points_at(8, 29.6e9)
    )[0]
    there = predict.loss_at(model, 8, 29.6e9, answer.estimate.value).estimate.value
    assert there / floor - 1 == pytest.approx(1e-3, rel=1e-3)
    assert predict.saturation_loops(model, 8, 29.6e9, 0.9).estimate.value == 1


def test_the_cost_of_a_loss_is_the_inverse_of_the_frontier(model):
    values = model.laws["training"].values
    for flops in (4e19, 1e20):
        loops, loss = frontier(values, model.cost, flops)
        assert flops_for(values, model.cost, float(loss[0]))[0][0] == pytest.approx(flops, rel=1e-4)
        answer = predict.flops_needed(model, float(loss[0]))
        assert answer.estimate.value == pytest.approx(flops, rel=1e-4)
        assert answer.estimate.low < flops < answer.estimate.high
        assert loops[0] > 1
    with pytest.raises(ConfigError, match="never reaches 2: with unlimited data"):
        predict.flops_needed(model, 2.0)


def test_the_parabolas_answer_has_an_interval(model, result):
    """Widest outside the budgets, and missing without bootstrap samples."""
    law = result.models["parcae-370m"].power_laws["loops"]
    near, far = (predict.recommend(model, flops).by_parabolas for flops in (6.4e19, 6.4e20))
    assert near.loops.value == pytest.approx(float(law(6.4e19)))
    for one in (near.loops, near.tokens, far.loops):
        assert one.low < one.value < one.high
    assert far.loops.high / far.loops.low > near.loops.high / near.loops.low
    low, high = result.models["parcae-370m"].power_law_intervals["loops"]
    assert low < law.exponent < high
    bare = {name: replace(one, samples=()) for name, one in model.power_laws.items()}
    assert predict.recommend(replace(model, power_laws=bare), 6.4e19).by_parabolas.loops.low is None


@pytest.mark.parametrize("loops", [0.0, 0.5, float("nan")])
def test_less_than_one_loop_is_refused(model, loops):
    for ask in (
        lambda: predict.loss_at(model, loops, 1e10),
        lambda: predict.loss_at(model, 8, 1e10, loops),
        lambda: predict.saturation_loops(model, loops, 1e10, 0.01),
    ):
        with pytest.raises(ConfigError, match="must be at least 1"):
            ask()


@pytest.mark.parametrize("flops", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_refused(model, flops):
    with pytest.raises(ConfigError, match="must be above 0"):
        predict.recommend(model, flops)


def test_what_was_not_fitted_says_why(model):
    bare = replace(model, laws={}, not_fitted={"training": "Too few runs."})
    with pytest.raises(ConfigError, match=r"'training' was not fitted\. Too few runs"):
        predict.recommend(bare, 1e19)
    bare = replace(bare, not_fitted={"training": f"{model.model}: too few runs."})
    with pytest.raises(ConfigError) as caught:
        predict.recommend(bare, 1e19)
    assert str(caught.value) == f"{model.model}: the law 'training' was not fitted. Too few runs."


def test_a_fit_may_be_named_by_its_folder_or_its_sweep(path, tmp_path):
    assert read_fit(path.parent).keys() == read_fit(path).keys()
    (tmp_path / "fit").symlink_to(path.parent)
    assert read_fit(tmp_path).keys() == read_fit(path).keys()


def test_a_model_is_chosen_or_named(path):
    models = read_fit(path)
    assert predict.choose_model(models, None).model == "parcae-370m"
    with pytest.raises(ConfigError, match="Did you mean parcae-370m"):
        predict.choose_model(models, "parcae-37m")


@pytest.mark.parametrize("value", ["x", None, [1.0], 10**400], ids=["text", "none", "list", "huge"])
def test_values_of_wrong_types_are_refused(value, path, tmp_path):
    for change in ({"factor": value}, {"samples": [[value, 1.0]]}, {"budgets": [value]}):
        tree = read_sealed(path, "")
        for law in tree["models"]["parcae-370m"]["fitted"]["power_laws"].values():
            law.update(change)
        write_sealed(tmp_path / "fit.json", tree)
        with pytest.raises(FileError, match="not a fit"):
            read_fit(tmp_path / "fit.json")


def test_a_file_that_was_changed_is_refused(path, tmp_path):
    tree = json.loads(path.read_text())
    tree["models"]["parcae-370m"]["fitted"]["laws"]["training"]["values"]["E"] = 1.0
    (tmp_path / "fit.json").write_text(json.dumps(tree))
    with pytest.raises(FileError, match="changed since it was written"):
        read_fit(tmp_path / "fit.json")
    write_sealed(tmp_path / "other.json", {"format": 3, "models": {"m": {"fitted": {}}}})
    with pytest.raises(FileError, match="not a fit"):
        read_fit(tmp_path / "other.json")
    with pytest.raises(FileError, match="no such file"):
        read_fit(tmp_path / "none.json")


def test_the_library_answers_from_a_result_a_file_or_a_folder(result, path):
    questions = {"flops": 64e18, "loss": 2.7, "loops": 8, "tokens": 29.6e9, "test_loops": 4}
    sources = (result, path, str(path.parent))
    answers = [parcae.predict(source, **questions, tolerance=1e-3) for source in sources]
    model = result.models["parcae-370m"]
    assert answers[0].model == "parcae-370m"
    assert answers[0].recommendation == predict.recommend(model, 64e18)
    assert answers[0].flops == predict.flops_needed(model, 2.7)
    assert answers[0].loss == predict.loss_at(model, 8, 29.6e9, 4)
    assert answers[0].saturation_loops == predict.saturation_loops(model, 8, 29.6e9, 1e-3)
    assert answers[1] == answers[2]
    assert answers[1].loss.estimate.value == answers[0].loss.estimate.value
    rows = {row["quantity"]: row for row in answers[0].table()}
    assert rows["loops"]["value"] == answers[0].recommendation.loops.value
    assert rows["loss of the run"]["low"] == answers[0].loss.estimate.low
    assert set(parcae.predict(result, flops=64e18).to_dict()) == {"model", "recommendation"}


def test_a_result_has_a_row_for_every_parameter(result):
    rows = result.table()
    law = result.models["parcae-370m"].laws["training"]
    listed = {
        r["parameter"]: r for r in rows if (r["model"], r["law"]) == ("parcae-370m", "training")
    }
    assert {name: row["value"] for name, row in listed.items()} == law.values
    assert (listed["x"]["low"], listed["x"]["high"]) == law.intervals["x"]
    assert any(row["low"] is None for row in rows if row["law"] == "unified/frozen")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"starts": 0}, "starts: 0 is out of range"),
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"bootstrap_samples": 3}, "bootstrap_samples: 3 are too few"),
    ],
)
def test_settings_are_checked_by_the_library(settings, message):
    with pytest.raises(ConfigError, match=message):
        parcae.fit([], **settings)


def test_a_fit_without_any_law_says_why(model):
    reason = "m: all runs have the same tokens."
    models = {"m": replace(model, laws={}, not_fitted={"training": reason})}
    with pytest.raises(ConfigError) as error:
        predict.choose_model(models, None)
    assert str(error.value) == f"fit: it has no law of any model. {reason}"
