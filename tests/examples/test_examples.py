"""Every script in examples/ runs; each test checks what its script prints or writes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import parcae
import shortcuts

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: object) -> None:
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder of small text files."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(100):
        lines = (f"def add_{number}_{n}(a):\n    return a + {n}\n\n" for n in range(30))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def training(source, tmp_path_factory) -> tuple[Path, str]:
    """The run of train_from_python.py, which other scripts open, and what the script printed."""
    folder = tmp_path_factory.mktemp("examples")
    text, out, line = folder / "text.txt", folder / "run", "<|endoftext|>"
    text.write_text(f"{line}\n".join(path.read_text() for path in sorted(source.iterdir())))
    options = ("--source", text, "--separator", line, "--out", out, "--steps", 2)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run("train_from_python.py", *options)
    return out, output.getvalue()


@pytest.fixture(scope="module")
def trained(training) -> Path:
    return training[0]


def test_every_script_is_tested():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert len(scripts) == 5
    assert [name for name in scripts if f'"{name}"' not in tests] == []


@pytest.mark.slow
def test_train_from_python(training):
    lines = training[1].splitlines()
    losses = [
        float(line.split()[5]) for line in lines if "held-out loss" in line and "nats" in line
    ]
    assert len(losses) == 4
    assert all(0 < loss < 8 for loss in losses)
    texts = [line for line in lines if re.match(r"\d loops: ['\"]", line)]
    assert [line[0] for line in texts] == ["1", "2", "4", "8"]


@pytest.mark.slow
def test_small_sweep(source, tmp_path, capfd, monkeypatch):
    shortcuts.train_runs_of_sweeps_here(monkeypatch)
    out = tmp_path / "sweep"
    run("small_sweep.py", "--source", source, "--out", out, "--flops", 1e9, "--workers", 2)
    output = capfd.readouterr().out
    assert re.findall(r"^(\w) = \S+ \(90 % interval", output, re.MULTILINE) == list("EXxYy")
    assert "with twice the largest budget: tokens" in output
    laws = json.loads((out / "fit" / "fit.json").read_text())
    assert laws["models"]


@pytest.mark.slow
def test_look_at_every_loop(trained, capfd):
    run("look_at_every_loop.py", trained, "import os", "--loops", 3)
    by_loop, by_token = capfd.readouterr().out.split("\n\n")
    loops, losses, changes, *_ = zip(*map(str.split, by_loop.splitlines()[1:]), strict=True)
    assert loops == ("1", "2", "3")
    assert float(changes[0]) == 1  # h_0 is zero
    first, last = zip(
        *(re.findall(r"\d+\.\d+", row) for row in by_token.splitlines()[1:]), strict=True
    )
    assert sum(map(float, first)) / len(first) == pytest.approx(float(losses[0]), abs=1e-3)
    assert sum(map(float, last)) / len(last) == pytest.approx(float(losses[-1]), abs=1e-3)


@pytest.mark.slow
def test_fine_tune(trained, tmp_path, capfd):
    text, out = tmp_path / "text.txt", tmp_path / "tuned"
    text.write_text("class Reader:\n    def read(self):\n        return self.path\n" * 400)
    run("fine_tune.py", trained, text, "--out", out, "--steps", 3, "--learning-rate", 1e-3)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["1:", "2:", "4:", "8:"]
    for line in lines:
        before, after = map(float, re.findall(r"\d+\.\d+", line))
        assert after < before
    checkpoint = parcae.open_checkpoint(out)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("def add")) == "def add"
