"""The command that README.md promises for several devices, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training import runs

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    runs.write_text(tmp_path, documents=600)
    return tmp_path / "run"


def start(run, options, *settings):
    data = ["--data.sources", json.dumps([str(run.parent / "text.jsonl")])]
    command = [*TORCHRUN, *options, "-m", "parcae", "train", "recipes/smoke.toml", "--out", run]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    log = open(f"{run}.out", "a")  # noqa: SIM115
    return subprocess.Popen(
        [*command, *data, *settings], cwd=ROOT, env=environment, stdout=log, stderr=log
    )


def finish(run, *launchers):
    codes = [launcher.wait(timeout=240) for launcher in launchers]
    assert codes == [0] * len(launchers), Path(f"{run}.out").read_text()[-3000:]
    return json.loads((run / "result.json").read_text())


def test_two_processes(run):
    one_node = ["--standalone", "--nproc-per-node", "2"]
    result = finish(run, start(run, one_node, "--run.parallel", "fsdp"))
    assert (result["status"], result["processes"]) == ("finished", 2)
    assert result["samples"]


def test_two_nodes(run):
    """Two launchers that find each other, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7"]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", *place]
    result = finish(run, *(start(run, nodes) for _ in range(2)))
    assert (result["status"], result["processes"]) == ("finished", 2)


def test_sigterm_to_torchrun_saves(run):
    long = ("--budget.steps", "100000", "--run.validate_every", "0")
    launcher = start(run, ["--standalone", "--nproc-per-node", "2"], *long)
    log, end = run / "metrics.jsonl", time.monotonic() + 120
    while not log.exists() or log.read_text().count('"train"') < 5:
        assert launcher.poll() is None, Path(f"{run}.out").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=60)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert (run / "checkpoints" / f"step-{result['steps']:08d}" / "state.json").exists()
