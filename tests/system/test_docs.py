"""What the documentation shows, runs: every Python block and every `parcae` command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


SHORT_DEMO = "--budget.steps 6 --run.sample_tokens 4 --run.validation_rows 4"
"""Flags that let `make demo` take seconds, whose run later commands of a page may use."""


def steps(page: Path) -> list[list[str]]:
    """The page's Python blocks and `parcae` commands, in order. Blocks of other kinds are not run:
    `console` is for what takes long, and other `make` and `git` lines are other tests' business."""
    found: list[list[str]] = []
    for kind, body in BLOCK.findall(page.read_text()):
        if kind == "python":
            found.append([sys.executable, "-c", body])
        elif kind == "bash":
            lines = body.replace("\\\n", " ").splitlines()
            for words in (shlex.split(line, comments=True) for line in lines):
                if words[:2] == ["make", "demo"]:
                    found.append([sys.executable, "-m", "parcae", "demo", *shlex.split(SHORT_DEMO)])
                elif words[:1] == ["parcae"]:
                    found.append([sys.executable, "-m", *words])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if steps(p)], ids=lambda page: page.name)
def test_everything_shown_runs(page, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    environment = {**os.environ, "COLUMNS": "100"}
    for step in steps(page):
        result = subprocess.run(step, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, f"{step[1:]}\n{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_symbol_and_test_of_the_paper_map_exists():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    code = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(?:[\w/.]+::)?(test_\w+?)(?:\[\w+\])?`", text):
        assert f"def {name}(" in tests or Path(ROOT / "tests" / name).exists(), name
    for name in re.findall(r"`(?:[\w/.]+\.py: )?(?:\w+\.)?([a-z_]+|[A-Z]\w+)`", text):
        if not name.startswith("test_"):
            assert re.search(rf"\b{name}\b", code), name
