"""Where calls and modules of Linux are missing, parcae still imports, trains, scores and writes."""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parcae import machine
from parcae.cli import main
from parcae.training import trainer
from parcae.training.run import train
from training import runs

PACKAGE = Path(__file__).parents[1] / "src" / "parcae"
NOT_EVERYWHERE = re.compile(
    r"^\s*(?:import|from) (?:fcntl|resource|pwd|grp|termios|tty|pty|msvcrt|winreg)\b"
    r"|os\.(?:fork|sched_\w+|getuid|geteuid|nice|uname|sysconf|statvfs|killpg|setsid)\b"
    r"|signal\.(?:SIGHUP|SIGKILL|SIGUSR1|SIGUSR2|SIGALRM|SIGQUIT|pthread_\w+)\b"
    r"|[\"']/(?:proc|sys|dev)/|ctypes\.CDLL\(None\)|sys\.platform|os\.name\b",
    re.MULTILINE,
)
ONLY_ON_LINUX = {"sweeps/slurm.py"}
WITH_FALLBACK = {"machine.py", "infer/native/kernels.py"}
MISSING_SIGNALS = ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2")


def test_one_module_knows_the_platform():
    found = {
        path.relative_to(PACKAGE).as_posix(): match[0].strip()
        for path in PACKAGE.rglob("*.py")
        if (match := NOT_EVERYWHERE.search(path.read_text(encoding="utf-8")))
    }
    assert found.keys() <= ONLY_ON_LINUX | WITH_FALLBACK, found
    assert "machine.py" in found


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A system with none of them: as much of Windows as can be had on Linux."""
    for name in ("sched_getaffinity", "getuid", "geteuid", "nice", "uname", "statvfs"):
        monkeypatch.delattr(os, name, raising=False)
    for name in MISSING_SIGNALS:
        monkeypatch.delattr(signal, name, raising=False)
    monkeypatch.setenv("USERNAME", "somebody")
    load, read = ctypes.CDLL, io.open

    def library(name, *arguments, **options):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return load(name, *arguments, **options)

    def existing(file, *arguments, **options):
        if str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return read(file, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(io, "open", existing)


@pytest.mark.usefixtures("elsewhere")
def test_what_is_missing_has_a_fallback(monkeypatch, tmp_path):
    assert machine.cores() == os.cpu_count()
    assert machine.available_memory() is None
    assert not machine.keep_freed_memory()
    assert not machine.end_with_parent()
    machine.ignore_signal("SIGUSR2")
    with machine.StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.asked
    file = tmp_path / "file"
    file.write_text("text")
    opened, open_file = [], os.open
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given) or open_file(*given))
    monkeypatch.setattr(os, "name", "nt")
    machine.flush(tmp_path)
    machine.flush(file)
    assert opened == [(file, os.O_RDWR)]


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_it_trains_evaluates_and_generates(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trainer, "peak_flops", lambda *_: 1e12)
    run = tmp_path / "run"
    assert train(runs.recipe(runs.write_text(tmp_path), budget={"steps": 2}), run).steps == 2
    assert train(runs.recipe(tmp_path / "text.jsonl", budget={"steps": 2}), run, resume=True)
    assert main(["eval", str(run), "--loops", "1"]) == 0
    assert main(["generate", str(run), "alpha", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
def test_every_module_of_the_library_imports_without_modules_of_unix():
    """Other packages import what they like: they are imported first."""
    code = f"""
import sys, importlib, pkgutil, os, signal, ctypes
import torch, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.checkpoint
import numpy, pyarrow.parquet, filelock, tokenizers, huggingface_hub, scipy.optimize, httpx2
import matplotlib.pyplot, rich.progress, rich.live, concurrent.futures.thread, multiprocessing.pool
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in {MISSING_SIGNALS}: delattr(signal, name)
del os.sched_getaffinity, os.getuid, os.fork
import parcae
for module in pkgutil.walk_packages(parcae.__path__, "parcae."):
    if not module.name.startswith(("parcae.hub", "parcae.serve")) and "__main__" not in module.name:
        importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
