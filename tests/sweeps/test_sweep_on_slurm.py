"""A sweep on a real Slurm of one node: queued, one run killed and requeued, results collected."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from parcae.cli import main
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
    with (
        cluster(tmp_path_factory.mktemp("slurm")) as environment,
        pytest.MonkeyPatch.context() as patch,
    ):
        environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def write_recipe(folder):
    source = {"data": {"sources": [str(runs.write_text(folder))]}}
    quiet = {"run": {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 10}}
    path = folder / "mine.toml"
    path.write_text(write_toml(merge(merge(runs.TREE, source), quiet)))
    return path


def control(*words):
    return subprocess.run(["scontrol", *words], capture_output=True, text=True)


def is_running_again(job):
    """Slurm lets a requeued job wait two minutes, from when its processes have ended."""
    control("update", f"JobId={job}", "StartTime=now")
    return "JobState=RUNNING" in control("show", "job", job).stdout


def wait_for(what, folder, seconds=600):
    end = time.monotonic() + seconds
    while not what():
        logs = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("*/*.[lo][ou][gt]")))
        assert time.monotonic() < end, logs
        time.sleep(0.3)


@pytest.mark.usefixtures("slurm")
def test_queued_killed_requeued_and_collected(tmp_path, capsys):
    out, recipe = tmp_path / "sweep", write_recipe(tmp_path)
    grid = ("--tokens", "12.8e3", "--mean-loops", "1,2", "--out", str(out))
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
    assert main(["sweep", str(recipe), *grid, "--slurm", *wanted]) == 0
    jobs = json.loads((out / "jobs.json").read_text())
    assert len(jobs) == 2

    name = next(iter(jobs))
    run = out / "runs" / name
    wait_for(lambda: last_step(run) > 20, out)
    first = int((run / ".lock").read_text())
    assert control("requeue", jobs[name]).returncode == 0  # kills its processes
    wait_for(lambda: not Path(f"/proc/{first}").exists(), out)
    assert main(["sweep", str(out)]) == 0
    assert "queued" in capsys.readouterr().out
    assert json.loads((out / "jobs.json").read_text()) == jobs  # nothing was sent twice
    wait_for(lambda: is_running_again(jobs[name]), out)
    wait_for(lambda: all(read_status(out / "runs" / name) == "finished" for name in jobs), out)

    assert main(["sweep", str(out)]) == 0
    assert "2 finished." in capsys.readouterr().out
    assert "Resumed at step" in (out / "logs" / f"{name}.log").read_text()
    table = read_table(out / "runs.csv")
    assert set(table["run"].tolist()) == set(jobs)
    assert set(table["tokens"].tolist()) == {12.8e3}
