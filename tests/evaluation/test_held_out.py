"""The suite `val` on a run: what training validated on, at any depth."""

from __future__ import annotations

import json

import pytest

from parcae import cli
from parcae.training import trainer
from parcae.training.peak import Peak
from training import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "find_peak", lambda *_: Peak(1e12))
        recipe = runs.recipe(runs.write_text(folder), budget={"steps": 2})
        trainer.train(recipe, folder / "run")
    return folder / "run"


def held_out(run, out, *words) -> dict:
    assert cli.main(["eval", str(run), "--suite", "val", "--out", str(out), *words]) == 0
    return json.loads((out / "result.json").read_text())["suites"]["val"]


@pytest.mark.slow
def test_a_run_is_measured_as_it_validates(run, tmp_path):
    told = json.loads((run / "result.json").read_text())["validation"]
    found = held_out(run, tmp_path, "--loops", ",".join(told))
    assert found["rows"] == 4
    for depth, want in told.items():
        assert found["by_loops"][depth]["loss"] == pytest.approx(want["loss"], abs=1e-5)


@pytest.mark.slow
def test_rows_are_those_that_were_read(run, tmp_path):
    """Not those that were asked for, of which there may be fewer."""
    assert held_out(run, tmp_path / "one", "--limit", "1")["rows"] == 1
    assert 4 < held_out(run, tmp_path / "all", "--limit", "100000")["rows"] < 1000


def test_a_drawn_state_is_drawn_here_too(run, tmp_path):
    zero = held_out(run, tmp_path / "zero", "--loops", "1")
    drawn = held_out(run, tmp_path / "drawn", "--loops", "1", "--state", "like-init")
    again = held_out(run, tmp_path / "again", "--loops", "1", "--state", "like-init")
    assert drawn["by_loops"] == again["by_loops"] != zero["by_loops"]
