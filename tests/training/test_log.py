"""metrics.jsonl over stops and resumes, and the trackers that may be told as well."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest

from parcae import cli
from parcae.config import ConfigError
from parcae.recipe import write_toml
from parcae.training.log import Log, flat, keep_until, nan_to_none, open_trackers
from parcae.training.run import train
from parcae.training.settings import recipe_to_dict, with_absolute_paths
from training import runs


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_lies_behind_the_checkpoint_is_cut_off(tmp_path):
    log = Log(tmp_path)
    for step in range(1, 6):
        log.write("train", step, loss=1.0 / step)
        log.write("event", step, what="something")
    log.close()
    again = Log(tmp_path, step=3)
    again.write("train", 4, loss=9.0)
    again.close()
    steps = [(line["kind"], line["step"]) for line in read(tmp_path / "metrics.jsonl")]
    assert steps == [(kind, step) for step in (1, 2, 3) for kind in ("train", "event")] + [
        ("train", 4)
    ]


@pytest.mark.parametrize(
    "end",
    [b'{"kind": "train", "st', b'{"kind": "train", "step": 2', b"\0" * 50, b"\xff\xfe{", b"7"],
)
def test_a_last_line_that_was_cut_off(end, tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"kind": "train", "step": 1, "loss": 2.5}\n'
    path.write_bytes(whole + end)
    keep_until(path, 5)
    assert path.read_bytes() == whole
    with_more = Log(tmp_path, step=5)
    with_more.write("train", 6, loss=1.0)
    with_more.close()
    assert [line["step"] for line in read(path)] == [1, 6]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    log = Log(tmp_path)
    log.write("train", 1, loss=math.nan, deep={"a": [math.inf, 1.5], 4: -math.inf}, word="nan")
    log.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": None, "deep": {"a": [None, 1.5], "4": None}}
        | {"word": "nan"}
    ]
    assert nan_to_none((1, True, None, 2.0)) == [1, True, None, 2.0]


def test_numbers_by_their_path():
    values = {
        "loss": 2.0,
        "lr": {"muon": 0.1},
        "skipped": True,
        "word": "x",
        "list": [1],
        "no": None,
    }
    assert flat(values, "train") == [("train/loss", 2.0), ("train/lr/muon", 0.1)]


class Tracker(types.ModuleType):
    """Stands for wandb and trackio: notes what it is told."""

    def __init__(self, name):
        super().__init__(name)
        self.started, self.told, self.ended = [], [], 0

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, numbers, step):
        self.told.append((step, numbers))

    def finish(self):
        self.ended += 1


class Writer:
    """Stands for TensorBoard's."""

    made: list[Writer]

    def __init__(self, folder, purge_step):
        self.folder, self.told, self.closed = folder, [], False
        self.purge_step = purge_step
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.told.append((name, value, step))

    def close(self):
        self.closed = True


@pytest.fixture
def trackers(monkeypatch):
    Writer.made = []
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    found = {name: Tracker(name) for name in ("wandb", "trackio")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.slow
def test_trackers_are_told_what_the_file_is_told(trackers, text, tmp_path):
    names = ["tensorboard", "wandb", "trackio"]
    recipe = runs.recipe(text, budget={"steps": 6}, run={"trackers": names})
    train(recipe, tmp_path / "mine")
    (board,) = Writer.made
    assert board.folder == str(tmp_path / "mine" / "tensorboard")
    assert board.closed
    losses = runs.lines(tmp_path / "mine", "train", "loss")
    assert [(s, v) for name, v, s in board.told if name == "train/loss"] == losses
    for tracker in trackers.values():
        assert tracker.ended == 1
        (options,) = tracker.started
        assert options["project"] == "parcae"
        assert options["name"].startswith("mine")
        expected = recipe_to_dict(with_absolute_paths(recipe))
        expected["run"]["precision"] = "float32"  # which `auto` chooses for so small a model
        assert options["config"] == expected
        seen = [
            (s, numbers["train/loss"]) for s, numbers in tracker.told if "train/loss" in numbers
        ]
        assert seen == losses
        names = {name for _, numbers in tracker.told for name in numbers}
        assert {"train/lr/muon", "telemetry/spectral_radius", "validation/losses/3"} <= names
        assert all(isinstance(v, float) for _, numbers in tracker.told for v in numbers.values())


@pytest.mark.slow
def test_a_tracked_run_that_is_resumed_is_the_same_run(trackers, text, tmp_path):
    recipe = runs.recipe(text, budget={"steps": 3}, run={"trackers": ["wandb"]})
    train(recipe, tmp_path / "mine")
    train(recipe, tmp_path / "mine", resume=True)
    first, second = trackers["wandb"].started
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"


@pytest.mark.slow
def test_another_run_of_the_same_name_is_another_run(trackers, text, tmp_path):
    """Else a run that was deleted and begun anew would be appended to the old one."""
    recipe = runs.recipe(text, budget={"steps": 2}, run={"trackers": ["wandb"]})
    train(recipe, tmp_path / "a" / "mine")
    train(recipe, tmp_path / "b" / "mine")
    first, second = trackers["wandb"].started
    assert first["name"] == second["name"] == "mine"
    assert first["id"] != second["id"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed(name, text, tmp_path, monkeypatch, capsys):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"run.trackers: {name} is not installed"):
        open_trackers([name], tmp_path, {})
    path, run = tmp_path / "recipe.toml", tmp_path / "run"
    path.write_text(write_toml(recipe_to_dict(runs.recipe(text, run={"trackers": [name]}))))
    assert cli.main(["train", str(path), "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert "pip install -e '.[track]'" in error
    assert error.count("\n") == 1
    words = ["train", str(path), "--out", str(run), "--run.trackers", "[]", "--budget.steps", "2"]
    assert cli.main(words) == 0, "nothing had begun, so the folder is free"


def test_sinks_that_were_opened_are_closed_when_another_is_missing(trackers, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError):
        open_trackers(["wandb", "trackio"], tmp_path, {})
    assert trackers["wandb"].ended == 1


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(trackers, text, tmp_path, monkeypatch):
    def fail(self, *_):
        raise ConnectionError("no network")

    monkeypatch.setattr(Writer, "add_scalar", fail)
    recipe = runs.recipe(text, budget={"steps": 2}, run={"trackers": ["tensorboard"]})
    with pytest.warns(UserWarning, match="no network"):
        assert train(recipe, tmp_path / "run").status == "finished"
