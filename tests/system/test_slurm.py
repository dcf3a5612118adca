"""The script for Slurm on a real cluster of one node: it trains, is cancelled, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from system.one_node_slurm import cluster, missing
from training import runs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
LONG = ("--budget.steps", "100000", "--run.validate_every", "0", "--run.checkpoint_every", "0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"Slurm: {missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {
            **environment,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "src"),
            "PROCESSES_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture
def run(tmp_path):
    runs.write_text(tmp_path, documents=600)
    return tmp_path / "run"


def submit(slurm, run, *settings):
    settings = ("--data.sources", json.dumps([str(run.parent / "text.jsonl")]), *settings)
    command = ["sbatch", "--parsable", f"--output={run}.out", SCRIPT, "recipes/smoke.toml", run]
    result = subprocess.run(
        [*command, *settings], cwd=ROOT, env=slurm, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def wait_for(what, run, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        log = Path(f"{run}.out")
        words = log.read_text()[-2000:] if log.exists() else "nothing was printed"
        assert time.monotonic() < end, words
        time.sleep(0.3)


def status(run):
    file = run / "result.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def steps(run):
    file = run / "metrics.jsonl"
    kinds = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["step"] for line in kinds if line["kind"] == "train"]


def test_trains_on_two_processes(slurm, run):
    submit(slurm, run)
    wait_for(lambda: status(run) == "finished", run)
    assert json.loads((run / "result.json").read_text())["processes"] == 2


def test_cancelled_it_saves_and_submitted_again_it_goes_on(slurm, run):
    job = submit(slurm, run, *LONG)
    wait_for(lambda: len(steps(run)) > 5, run)
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_for(lambda: status(run) == "interrupted", run)
    stopped = steps(run)[-1]
    assert (run / "checkpoints" / f"step-{stopped:08d}" / "state.json").exists()

    job = submit(slurm, run)
    wait_for(lambda: steps(run)[-1] > stopped + 2, run)
    subprocess.run(["scancel", job], env=slurm, check=True)
    queue = ["squeue", "--noheader", f"--jobs={job}"]
    wait_for(lambda: not subprocess.run(queue, env=slurm, capture_output=True).stdout, run)
    assert f"Resumed at step {stopped}." in Path(f"{run}.out").read_text()
    assert steps(run) == list(range(1, len(steps(run)) + 1))
