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


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for number, (kind, body) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language:
                found.append(pytest.param(body, id=f"{page.name}-{number}"))
    return found


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.values[0].splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith("parcae ")})


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks(code, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands())
def test_commands(command):
    arguments = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": "100"}
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


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
