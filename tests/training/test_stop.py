"""How runs stop: signals, a second one, errors, and what is left behind."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

import pytest
import torch

from parcae import cli, console
from parcae.machine import SAME_REQUEST_SECONDS
from parcae.recipe import write_toml
from parcae.runs import read_result
from parcae.training import trainer
from parcae.training.run import read_recipe, train
from parcae.training.settings import recipe_to_dict
from parcae.training.trainer import Trainer
from training import runs

QUIET = {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 0}


def command(words, log, pause, stuck_at=None):
    """`parcae` with its output in a file, slowly enough to be interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have ignored it
    torch.set_num_threads(1)
    trainer.peak_flops = lambda *_: 1e12
    real = Trainer._train_step

    def one_step(self):
        real(self)
        time.sleep(60 if self.learner.step == stuck_at else pause)

    Trainer._train_step = one_step
    with log.open("w") as stream:
        sys.stderr = stream
        console.out.file = stream
        sys.exit(cli.main(list(map(str, words))))


def start(*arguments, **options):
    process = runs.clean_processes().Process(target=command, args=arguments, kwargs=options)
    process.start()
    return process


def wait_for_step(run, step, process):
    metrics = run / "metrics.jsonl"
    while process.exitcode is None:
        if metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise AssertionError("it ended before it could be interrupted")


@pytest.fixture
def recipe_file(text, tmp_path):
    recipe, path = runs.recipe(text, budget={"steps": 16}), tmp_path / "recipe.toml"
    path.write_text(write_toml(recipe_to_dict(recipe)))
    return recipe, path


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(
    how, recipe_file, tmp_path, one_thread
):
    (recipe, path), run, log = recipe_file, tmp_path / "run", tmp_path / "log"
    own = tmp_path / "my ideas.py"
    own.touch()
    process = start(["train", path, "--out", run, "--import", own], log, pause=0.05)
    wait_for_step(run, 4, process)
    os.kill(process.pid, how)
    process.join(timeout=30)
    assert process.exitcode == 0, log.read_text()
    command = f"parcae train --resume {run} --import '{own}'"
    assert f"saved. Continue with: {command}" in log.read_text()
    assert "Traceback" not in log.read_text()
    result = read_result(run)
    assert result.status == "interrupted"
    assert 4 <= result.steps < 16
    assert (run / "checkpoints" / f"step-{result.steps:08d}").exists()

    again = train(recipe, run, resume=True)
    whole = train(recipe, tmp_path / "whole")
    assert again.status == "finished"
    assert again.seconds > result.seconds, "the time of both parts counts"
    assert runs.curve(run) == runs.curve(tmp_path / "whole")
    differing = {"seconds"}
    assert {k: v for k, v in again.to_dict().items() if k not in differing} == {
        k: v for k, v in whole.to_dict().items() if k not in differing
    }
    ours, theirs = runs.weights(run, 16), runs.weights(tmp_path / "whole", 16)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_second_sigterm_of_the_same_moment_changes_nothing(text, tmp_path, monkeypatch):
    """A cluster sends one to every process, and the launcher passes its own on to them."""
    real = Trainer._train_step

    def one_step(run):
        real(run)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    assert train(runs.recipe(text), tmp_path / "run").status == "interrupted"
    assert runs.weights(tmp_path / "run", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_at_once(first, second, code, recipe_file, tmp_path):
    (_, path), run, log = recipe_file, tmp_path / "run", tmp_path / "log"
    process = start(["train", path, "--out", run], log, pause=0, stuck_at=4)
    wait_for_step(run, 4, process)
    os.kill(process.pid, first)
    time.sleep(SAME_REQUEST_SECONDS + 0.1)
    assert process.exitcode is None, "the first waits for the end of the step"
    for _ in range(60):  # on a busy machine two that come close may count as one
        os.kill(process.pid, second)
        process.join(timeout=1)
        if process.exitcode is not None:
            break
    assert process.exitcode == code
    assert ("parcae: stopped." in log.read_text()) == (second == signal.SIGINT)
    assert not (run / "result.json").exists()
    checkpoints = [p.name for p in (run / "checkpoints").iterdir() if not p.name.startswith(".")]
    assert checkpoints == ["step-00000003"]
    assert train(read_recipe(run), run, resume=True).steps == 16


@pytest.mark.slow
def test_a_signal_that_was_ignored_stays_ignored(text, tmp_path, monkeypatch):
    """As SIGHUP is under nohup."""
    real, before = Trainer._train_step, signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def one_step(run):
        real(run)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    try:
        recipe = runs.recipe(text, budget={"steps": 2}, run=QUIET)
        assert train(recipe, tmp_path / "run").status == "finished"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert train(recipe, tmp_path / "other").status == "interrupted"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_does_not_keep_a_run_from_saving(text, tmp_path, monkeypatch):
    real = Trainer._train_step

    def one_step(run):
        real(run)
        monkeypatch.setattr(console, "print_text", fail)
        signal.raise_signal(signal.SIGHUP)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    try:
        result = train(runs.recipe(text, run=QUIET), tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.status == "interrupted"
    assert runs.weights(tmp_path / "run", 1)


@pytest.mark.slow
def test_a_signal_in_the_last_step_does_not_make_a_finished_run_an_interrupted_one(
    text, tmp_path, monkeypatch
):
    real = Trainer._train_step

    def one_step(self):
        real(self)
        if self.learner.step == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    result = train(runs.recipe(text, budget={"steps": 4}, run=QUIET), tmp_path / "run")
    assert result.status == "finished"
    assert result.validation


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(text, tmp_path, capsys):
    recipe, run = runs.recipe(text, budget={"steps": 6}), tmp_path / "run"
    result = train(recipe, run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert train(recipe, run, resume=True) == result
    said = capsys.readouterr().out
    assert "Resumed at step 6, the last one: nothing is left to do." in said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_the_callers_process_is_left_as_it_was(text, tmp_path):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    modes = []
    recipe = runs.recipe(text, budget={"steps": 1}, run=QUIET)
    for number, mode in enumerate(["default", "warn"]):
        torch.set_deterministic_debug_mode(mode)
        try:
            train(recipe, tmp_path / str(number))
            modes.append(torch.get_deterministic_debug_mode())
        finally:
            torch.set_deterministic_debug_mode("default")
    assert modes == [0, 1]
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
def test_an_error_in_a_step_leaves_no_thread_and_no_lock(text, tmp_path, monkeypatch):
    import threading

    real = Trainer._train_step

    def one_step(self):
        real(self)
        if self.learner.step == 2:
            raise RuntimeError("in a step")

    before, recipe = threading.active_count(), runs.recipe(text, budget={"steps": 4})
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", one_step)
        with pytest.raises(RuntimeError, match="in a step"):
            train(recipe, tmp_path / "run")
    assert threading.active_count() == before
    assert train(recipe, tmp_path / "run", resume=True).status == "finished"
