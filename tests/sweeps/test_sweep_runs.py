"""A sweep from one command to one table: whole, killed in the middle, with a run that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import parcae
from parcae.cli import main
from parcae.commands.sweep import _print_result
from parcae.files import lock_folder, write_json
from parcae.laws.table import read_table
from parcae.recipe import merge, write_toml
from parcae.runs import FINAL_STATUSES, last_step, list_checkpoints, read_result, read_status
from parcae.sweeps import launch
from parcae.sweeps.folder import SweepFolder
from parcae.sweeps.launch import LocalWorkers, environments
from parcae.sweeps.run import SweepResult
from training import runs

pytestmark = pytest.mark.slow

SPEED = ("--utilisation", "0.4", "--device-flops", "1e10")
"""Given, so that tests do not try steps."""
NAMES = [f"looped-68.16k-mu{loops}-1.5e9-flops" for loops in (1, 2)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tables are compared to the last digit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    source = {"data": {"sources": [str(runs.write_text(folder))]}}
    quiet = {"run": {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 40}}
    path = folder / "mine.toml"
    path.write_text(write_toml(merge(merge(runs.TREE, source), quiet)))
    return path


def arguments(recipe, out, *more):
    grid = ("--flops", "1.5e9", "--mean-loops", "1,2", "--workers", "2")
    return ["sweep", str(recipe), *grid, "--out", str(out), *SPEED, *more]


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("sweeps") / "whole"
    os.environ["OMP_NUM_THREADS"] = "1"
    assert main(arguments(recipe, out)) == 0
    return out


def test_one_table_of_all_runs_at_all_depths(whole):
    table = read_table(whole / "runs.csv")
    assert len(table) == 2 * 4
    assert sorted(set(table["run"].tolist())) == NAMES
    assert table["flops"] == pytest.approx(1.5e9, rel=0.01)
    assert set(table["budget"].tolist()) == {1.5e9}
    assert sorted(set(table["test_loops"].tolist())) == [1, 2, 3, 4]
    parquet = read_table(whole / "runs.parquet")
    assert parquet["loss"].tolist() == table["loss"].tolist()
    for name in NAMES:
        result = read_result(whole / "runs" / name)
        mine = table["run"] == name
        losses = {
            int(t): loss
            for t, loss in zip(table["test_loops"][mine], table["loss"][mine], strict=True)
        }
        assert losses == result.losses
        assert not (whole / "runs" / name / "data").exists()  # one set of shards serves all
    assert (whole / "data" / "0").is_dir()


def test_scores_of_an_evaluation_join_the_table(whole, tmp_path):
    copy = tmp_path / "sweep"
    shutil.copytree(whole, copy)
    run = copy / "runs" / NAMES[1]
    newest = list_checkpoints(run)[-1]
    score = {"2": {"score": 12.5}, "4": None}
    result = {"checkpoint": str(newest), "limit": 5, "suites": {"core-extended": {}}}
    result["suites"]["core-extended"]["by_loops"] = score
    write_json(run / "evaluation" / "result.json", result)
    assert main(["sweep", str(copy)]) == 0
    table = read_table(copy / "runs.csv")
    scored = np.isfinite(table["core_extended"])
    assert table["core_extended"][scored].tolist() == [12.5]
    assert (table["run"][scored][0], table["test_loops"][scored][0]) == (NAMES[1], 2)
    assert table["eval_limit"][scored].tolist() == [5]
    assert set(table["set"].tolist()) == {"end-to-end"}  # one looped depth
    write_json(run / "evaluation" / "result.json", {**result, "checkpoint": "step-00000001"})
    assert main(["sweep", str(copy)]) == 0
    assert "core_extended" not in read_table(copy / "runs.csv")  # of another checkpoint


def test_what_is_done_is_skipped(whole, recipe, capsys):
    before = {name: (whole / "runs" / name / "result.json").stat().st_mtime_ns for name in NAMES}
    assert main(["sweep", str(whole)]) == 0
    assert main(arguments(recipe, whole)) == 0
    printed = capsys.readouterr().out
    assert "2 finished." in printed
    assert "started" not in printed
    after = {name: (whole / "runs" / name / "result.json").stat().st_mtime_ns for name in NAMES}
    assert after == before


def test_the_library_call_returns_runs_and_table(whole, recipe, capsys):
    result = parcae.sweep(
        recipe, whole, flops=[1.5e9], mean_loops=[1, 2], device_flops=1e10, verbose=False
    )
    assert capsys.readouterr().out == ""
    assert result.table_file == whole / "runs.csv"
    assert not result.interrupted
    assert [run.name for run in result.runs] == NAMES
    for run in result.runs:
        assert run.state == "finished"
        assert run.failure is None
        stored = read_result(run.folder)
        assert run.loss == stored.losses[int(run.mean_loops)]
        assert run.seconds == stored.seconds
    rows = result.table()
    table = read_table(whole / "runs.csv")
    assert [row["loss"] for row in rows] == table["loss"].tolist()
    assert {row["run"] for row in rows} == set(NAMES)


def test_a_dry_run_of_a_larger_grid_writes_nothing(whole, recipe):
    before = sorted(path for path in whole.rglob("*"))
    result = parcae.sweep(
        str(recipe),
        whole,
        flops=[1.5e9],
        mean_loops=[1, 2, 3],
        device_flops=1e10,
        dry_run=True,
        verbose=False,
    )
    assert [run.state for run in result.runs] == ["finished", "finished", "to do"]
    assert result.runs[-1].loss is None
    assert len(result.table()) == 8
    assert sorted(path for path in whole.rglob("*")) == before


def test_a_second_process_is_refused(whole, capsys):
    with lock_folder(whole):
        assert main(["sweep", str(whole)]) == 2
    assert "another process" in capsys.readouterr().err


def wait_for(what, process, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < end
        time.sleep(0.02)


def begin(recipe, out, *more):
    code = "import sys; from parcae.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments(recipe, out, *more)]
    with Path(f"{out}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def owner(run):
    return int((run / ".lock").read_text())


def test_killed_and_resumed_it_gives_the_same_table(recipe, whole, tmp_path, capsys):
    """First one run is killed, which the sweep survives; then the sweep, which its runs do not."""
    out = tmp_path / "sweep"
    sweep = begin(recipe, out)
    first, second = (out / "runs" / name for name in NAMES)
    try:
        wait_for(lambda: last_step(first) > 45, sweep)
        os.kill(owner(first), signal.SIGKILL)
        wait_for(lambda: last_step(second) > 60 and last_step(first) > 0, sweep)
        running = [owner(run) for run in (first, second) if read_status(run) not in FINAL_STATUSES]
    finally:  # also when waiting timed out
        sweep.kill()
        sweep.wait()
    assert running
    assert {read_status(first), read_status(second)} - set(FINAL_STATUSES)
    assert main(["sweep", str(out), "--workers", "2", *SPEED]) == 0
    assert (out / "runs.csv").read_text() == (whole / "runs.csv").read_text()
    logs = "".join(path.read_text() for path in (out / "logs").iterdir())
    assert "Resumed at step" in logs
    for process in running:
        assert not Path(f"/proc/{process}").exists()


class Events:
    """Records what a launcher reports, and asks to stop once a run has taken a few steps."""

    def __init__(self, run):
        self.run, self.lines = run, []

    @property
    def asked(self):
        return last_step(self.run) > 3

    def started(self, request, attempt):
        self.lines.append(("started", request.name, attempt))

    def ended(self, request, failure):
        self.lines.append(("ended", request.name, failure))

    def waiting(self):
        pass


def test_an_interrupted_sweep_says_how_to_continue(tmp_path, capsys):
    for interrupted in (True, False):
        _print_result(SweepResult(tmp_path, (), tmp_path / "runs.csv", (), interrupted))
        said = f"To continue: parcae sweep {tmp_path}" in capsys.readouterr().out.replace("\n", "")
        assert said == interrupted


def test_asked_to_stop_its_runs_save(whole, tmp_path):
    request = SweepFolder(whole).request(NAMES[0])
    request = replace(request, run=tmp_path / "run", log=tmp_path / "log")
    events = Events(request.run)
    never = replace(request, name="never started")
    LocalWorkers(1, environments(1)).run([request, never], events, events)
    assert events.lines == [("started", request.name, 1), ("ended", request.name, None)]
    assert read_status(request.run) == "interrupted"
    assert list((request.run / "checkpoints").iterdir())


def test_the_next_run_starts_before_the_last_one_is_evaluated(whole, tmp_path, monkeypatch):
    """Observers evaluate a run that has ended; the others need not wait. It is told first."""
    first = replace(SweepFolder(whole).request(NAMES[0]), run=tmp_path / "run")
    second = replace(first, name="second")
    events = Events(tmp_path / "run")

    def start(request, *_):
        events.lines.append(("process", request.name))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launch, "start_process", start)
    LocalWorkers(1, environments(1)).run([first, second], events, events)
    assert [line[:2] for line in events.lines] == [
        ("process", first.name),
        ("started", first.name),
        ("process", "second"),
        ("ended", first.name),
        ("started", "second"),
        ("ended", "second"),
    ]


def test_failing_runs_are_isolated_and_can_be_retried(recipe, tmp_path, capsys):
    """One cannot write into its folder, one diverges, one is well."""
    out = tmp_path / "sweep"
    grid = ["--learning-rates", "8e-3,4e-3,1e6", "--budget.steps", "12", "--workers", "2"]
    rest = ["--run.max_nonfinite_steps", "2", "--out", str(out), *SPEED]
    command = ["sweep", str(recipe), *grid, *rest]
    good, bad = "looped-68.16k-mu3", "looped-68.16k-mu3-lr0.004"
    (out / "runs").mkdir(parents=True)
    (out / "runs" / bad).write_text("in the way")
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert f"failed    {bad}: {out / 'runs' / bad}: a file, not a folder." in printed
    assert f"See {out / 'logs' / bad}.log" in printed
    assert "1 finished, 1 failed, 1 diverged." in printed
    assert set(read_table(out / "runs.csv")["run"].tolist()) == {good}

    assert main(command) == 1  # nothing is started: it would fail again
    assert "started" not in capsys.readouterr().out
    (out / "runs" / bad).unlink()
    assert main(["sweep", str(out), "--retry", *SPEED]) == 1
    assert "2 finished, 1 diverged." in capsys.readouterr().out
    assert set(read_table(out / "runs.csv")["learning_rate"].tolist()) == {8e-3, 4e-3}
