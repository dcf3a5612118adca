"""A sweep on a real Slurm of one node: queued, one run killed and requeued, results collected."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parcae.laws.table import read_table
from parcae.recipe import merge, write_toml
from parcae.runs import last_step, read_status
from system.one_node_slurm import cluster, missing
from training import runs

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"Slurm: {missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    pytest.importorskip("submitit")
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def write_recipe(folder):
    source = {"data": {"sources": [str(runs.write_text(folder))]}}
    quiet = {"run": {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 10}}
    path = folder / "mine.toml"
    path.write_text(write_toml(merge(merge(runs.TREE, source), quiet)))
    return path


def parcae(slurm, *words):
    command = [sys.executable, "-m", "parcae", *map(str, words)]
    return subprocess.run(command, env=slurm, capture_output=True, text=True)


def control(slurm, *words):
    return subprocess.run(["scontrol", *words], env=slurm, capture_output=True, text=True)


def wait_for(what, folder, seconds=240):
    end = time.monotonic() + seconds
    while not what():
        logs = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("*/*.[lo][ou][gt]")))
        assert time.monotonic() < end, logs
        time.sleep(0.3)


def test_queued_killed_requeued_and_collected(slurm, tmp_path):
    out, recipe = tmp_path / "sweep", write_recipe(tmp_path)
    grid = ("--tokens", "12.8e3", "--loops", "1,2,4", "--out", out)
    wanted = (
        "--slurm.partition",
        "main",
        "--slurm.cpus",
        "1",
        "--slurm.minutes",
        "60",
        "--slurm.memory",
        "400M",
    )
    sent = parcae(slurm, "sweep", recipe, *grid, "--slurm", *wanted)
    assert sent.returncode == 0, sent.stderr
    jobs = json.loads((out / "jobs.json").read_text())
    assert len(jobs) == 3

    name = next(iter(jobs))
    run = out / "runs" / name
    wait_for(lambda: last_step(run) > 20, out)
    first = int((run / ".lock").read_text())
    assert control(slurm, "requeue", jobs[name]).returncode == 0  # kills its processes
    wait_for(lambda: not Path(f"/proc/{first}").exists(), out)
    shown = parcae(slurm, "sweep", out)
    assert shown.returncode == 0, shown.stderr
    assert "queued" in shown.stdout
    assert json.loads((out / "jobs.json").read_text()) == jobs  # nothing was sent twice
    # Slurm lets a requeued job wait two minutes.
    wait_for(
        lambda: control(slurm, "update", f"JobId={jobs[name]}", "StartTime=now").returncode == 0,
        out,
    )
    wait_for(lambda: all(read_status(out / "runs" / name) == "finished" for name in jobs), out)

    collected = parcae(slurm, "sweep", out)
    assert collected.returncode == 0, collected.stderr
    assert "3 finished." in collected.stdout
    assert "Resumed at step" in (out / "logs" / f"{name}.log").read_text()
    table = read_table(out / "runs.csv")
    assert set(table["run"].tolist()) == set(jobs)
    assert set(table["tokens"].tolist()) == {12.8e3}
