"""What `make` would run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def would_run(*words: str) -> str:
    command = ["make", "--dry-run", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_demo_can_be_had_anew():
    assert "parcae demo --out out/demo --again" in would_run("demo", "AGAIN=1")
    assert "--again" not in would_run("demo")


def test_an_installation_says_what_it_does_before_it_is_silent(tmp_path):
    lines = would_run("demo", f"VENV={tmp_path / 'venv'}").splitlines()
    pip = next(number for number, line in enumerate(lines) if "pip install" in line)
    assert any(line.startswith('echo "Installing') for line in lines[:pip])


def test_the_demo_waits_for_nothing_that_only_tests_need(tmp_path):
    assert "[dev]" not in would_run("demo", f"VENV={tmp_path / 'venv'}")
    assert "[dev]" in would_run("test", f"VENV={tmp_path / 'venv'}")


def test_clean_removes_every_cache_that_git_ignores():
    ignored = (ROOT / ".gitignore").read_text().split()
    caches = [line.rstrip("/") for line in ignored if line.startswith(".") and line.endswith("/")]
    assert ".import_linter_cache" in caches
    removed = would_run("clean").split()
    assert [cache for cache in caches if cache not in removed] == []
