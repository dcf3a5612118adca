"""`parcae.train` as a library call: what it accepts and what it returns."""

from __future__ import annotations

import json
import shutil

import pytest

import parcae
from parcae.config import ConfigError
from parcae.files import FileError
from parcae.recipe import parse_flags, write_toml
from parcae.runs import read_result
from parcae.training.settings import recipe_to_dict, resolve_recipe
from training import runs

SHORT = {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    recipe = runs.recipe(runs.write_text(folder), run=SHORT)
    return recipe, parcae.train(recipe, folder / "run", budget={"steps": 2})


@pytest.mark.slow
def test_a_result_is_what_result_json_says(finished):
    _, result = finished
    assert result == read_result(result.folder)
    tree = json.loads((result.folder / "result.json").read_text())
    assert tree == {**result.to_dict(), "seal": tree["seal"]}
    assert (result.status, result.steps, result.tokens) == ("finished", 2, 2 * 4 * 16)
    assert list(result.losses) == [1, 3, 6]
    assert result.losses[3] == result.validation[3]["loss"]


@pytest.mark.slow
def test_the_table_has_a_row_per_step_and_plain_columns(finished):
    rows = finished[1].table()
    assert [row["step"] for row in rows] == [1, 2]
    assert {"loss", "lr.muon", "lr.adamw", "tokens"} <= rows[0].keys()
    assert not any(isinstance(value, dict) for row in rows for value in row.values())
    assert [row["losses.3"] for row in finished[1].table("validation")] == [finished[1].losses[3]]
    assert finished[1].table("telemetry") == []


@pytest.mark.slow
def test_a_recipe_may_be_a_file_a_dict_or_a_name(finished, tmp_path, monkeypatch):
    recipe, _ = finished
    path = tmp_path / "mine.toml"
    path.write_text(write_toml(recipe_to_dict(recipe)))
    for source in (recipe, recipe_to_dict(recipe), path, str(path)):
        assert resolve_recipe(source) == recipe
        assert resolve_recipe(source, {"budget": {"steps": 9}}).budget.steps == 9
    assert resolve_recipe("smoke").budget.steps == 12
    with pytest.raises(ConfigError, match=r"no recipe of this name\. Did you mean smoke\?"):
        resolve_recipe("smok")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no recipe of this name\. Did you mean mine\.toml\?"):
        resolve_recipe("mine")


def test_none_unsets_a_setting(finished):
    flags = parse_flags(["--data.tokenizer", "none", "--data.micro_batch=none"])
    given = {"data": {"tokenizer": "t.json", "micro_batch": 1}}
    recipe = resolve_recipe(resolve_recipe(finished[0], given), flags)
    assert (recipe.data.tokenizer, recipe.data.micro_batch) == (None, None)


def test_the_folder_has_the_recipes_name(finished, tmp_path, monkeypatch):
    recipe, first = finished
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(write_toml(recipe_to_dict(recipe)))
    result = parcae.train("mine.toml", budget={"steps": 2})
    assert result.folder.samefile(tmp_path / "runs" / "mine")
    assert result.losses == first.losses
    with pytest.raises(ConfigError, match="out: missing"):
        parcae.train(recipe)


def test_a_run_is_resumed_by_its_folder(finished):
    _, result = finished
    assert parcae.train(result.folder, resume=True) == result
    assert parcae.train(result.folder, resume=True, run={"keep_last": 3}) == result
    with pytest.raises(ConfigError, match=r"budget\.steps: 3, but the run in .* has 2"):
        parcae.train(result.folder, resume=True, budget={"steps": 3})
    with pytest.raises(FileError, match="not a run, but a part of"):
        parcae.train(result.folder / "checkpoints", resume=True)


def test_a_refused_resume_keeps_the_result(finished, tmp_path):
    """The shards of the run are gone, so that nothing can be trained."""
    run = tmp_path / "run"
    shutil.copytree(finished[1].folder, run)
    before = (run / "result.json").read_bytes()
    for shard in (run / "data").rglob("*.shard"):
        shard.unlink()
    with pytest.raises(FileError):
        parcae.train(run, resume=True)
    assert (run / "result.json").read_bytes() == before
    assert read_result(run).status == "finished"


@pytest.mark.slow
def test_a_restart_of_torchrun_continues_the_run(finished, tmp_path, monkeypatch):
    """The same command: processes that are started again do not refuse what they began."""
    recipe, result = finished
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    (run / "result.json").unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ConfigError, match="holds a run"):
        parcae.train(recipe, run, budget={"steps": 2})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = parcae.train(recipe, run, budget={"steps": 2})
    assert (again.status, again.losses) == ("finished", result.losses)
    new = parcae.train(recipe, tmp_path / "new", budget={"steps": 2})
    assert new.losses == result.losses
