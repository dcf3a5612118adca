"""Every script in examples/ runs; each test checks what its script prints or writes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import parcae

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: object) -> None:
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of train_from_python.py, which the other scripts continue from."""
    out = tmp_path_factory.mktemp("examples") / "run"
    from parcae.cli import main

    main(["train", str(ROOT / "recipes/smoke.toml"), "--budget.steps", "2", "--out", str(out)])
    return out


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
    text.write_text("def add(a, b):\n    return a + b\n" * 400)
    run("fine_tune.py", trained, text, "--out", out, "--steps", 3, "--learning-rate", 1e-3)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "4", "8"]
    for line in lines:
        before, after = map(float, re.findall(r"\d+\.\d+", line))
        assert after < before
    checkpoint = parcae.open_checkpoint(out)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("def add")) == "def add"
