"""Reading run folders: what is tolerated, and what is refused with the file and line."""

from __future__ import annotations

import json
import math
import random

import pytest

import fake_runs as fakes
import parcae
from parcae.files import FileError
from parcae.recipe import write_toml
from parcae.report.runs import column, number, numbers, read_run, read_runs

ONE = fakes.train_line(1, 1, random.Random(0))


def test_lines_by_kind_and_the_final_validation_last(tmp_path):
    run = read_run(fakes.looped_run(tmp_path / "run", steps=60))
    assert len(run.train) == 60
    assert len(run.telemetry) == 10
    assert [event["what"] for event in run.events] == ["skipped", "spike"]
    assert [v.step for v in run.validations] == [12, 24, 36, 48, 60]
    assert run.validations[-1].depths[8].loss == run.result.losses[8]
    assert run.nominal_depth == 8
    assert run.status == "finished"


@pytest.mark.parametrize("tail", ['{"kind":"tr', '{"kind": "event", "message": "\udcc3', "\n\n"])
def test_the_last_line_may_be_cut_off(tmp_path, tail):
    folder = fakes.write_run(tmp_path / "run", [ONE, {**ONE, "step": 2, "train_loss": 2.5}])
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(tail.encode("utf-8", "surrogateescape"))
    run = read_run(folder)
    assert len(run.train) == 2
    assert run.result is None
    assert run.status == "no result yet"
    assert run.amount("steps") == 2
    assert run.train_loss == 2.5
    assert run.parameters == 942_848


def test_the_mean_of_a_model_whose_parts_are_not_imported(tmp_path):
    folder = fakes.looped_run(tmp_path / "run")
    own = {"injection": "of-my-file", "loop": {"sampler": "of-my-file", "mean_loops": 4}}
    (folder / "recipe.toml").write_text(write_toml(fakes.recipe(model=own)))
    run = read_run(folder)
    assert run.config is None
    assert run.nominal_depth == 4
    assert [row["loops"] for row in parcae.compare(folder).table()] == [4]


def test_unknown_kinds_and_keys_do_no_harm(tmp_path):
    lines = [{**ONE, "new": [1, {}]}, {"kind": "weather"}, {"no": "kind"}]
    assert len(read_run(fakes.write_run(tmp_path / "run", lines)).train) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [("{nonsense\n", "line 2: not valid JSON"), ("[1, 2]\n", "line 2: not a JSON object")],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, bad, message):
    folder = fakes.write_run(tmp_path / "run", [ONE], tail=bad + json.dumps(ONE) + "\n")
    with pytest.raises(FileError, match=message) as caught:
        read_run(folder)
    assert "metrics.jsonl" in str(caught.value)


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(FileError, match="no such folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(FileError, match=r"not a run: recipe\.toml is missing"):
        read_runs([tmp_path])
    empty = fakes.write_run(tmp_path / "empty", [])
    with pytest.raises(FileError, match="logged nothing yet"):
        read_runs([empty])
    (empty / "recipe.toml").write_text("[model\n")
    with pytest.raises(FileError, match="not valid TOML"):
        read_runs([empty])
    broken = fakes.write_run(tmp_path / "broken", [ONE])
    (broken / "result.json").write_text('{"status": ')
    with pytest.raises(FileError, match="not valid JSON"):
        read_runs([broken])


def test_equal_names_are_told_apart_by_their_parents(tmp_path):
    places = [tmp_path / p for p in ("a/x/demo", "b/x/demo", "a/other", "demo")]
    for place in places:
        fakes.write_run(place, [ONE])
    names = [run.name for run in read_runs([*places, places[0]])]
    assert names[:3] == ["a/x/demo", "b/x/demo", "other"]
    assert names[3].endswith("/demo")
    assert len(set(names)) == len(names) == 4


def test_an_unfinished_run_that_was_stopped_says_so(tmp_path):
    event = {"kind": "event", "step": 1, "what": "interrupted", "message": "ctrl-c"}
    assert read_run(fakes.write_run(tmp_path / "run", [ONE, event])).status == "interrupted"


def test_a_missing_measurement_in_a_result_stays_missing(tmp_path):
    outcome = fakes.result(1, train_loss=None)
    run = read_run(fakes.write_run(tmp_path / "run", [ONE], outcome=outcome))
    assert run.train_loss != run.train_loss


@pytest.mark.parametrize("value", [None, "3", True, math.inf, -math.inf, math.nan, 10**400, [1]])
def test_what_is_no_finite_number(value):
    assert math.isnan(number(value))


def test_columns_leave_out_what_is_missing():
    lines = [{"step": 1, "x": 2}, {"step": 2, "x": None}, {"x": 4}, {"step": 3, "x": 5.5}]
    steps, values = column(lines, "x")
    assert steps.tolist() == [1, 3]
    assert values.tolist() == [2, 5.5]
    assert len(column([], "x")[0]) == 0
    assert numbers("123").tolist() == numbers(None).tolist() == []
