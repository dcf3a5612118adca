"""The commands `make` would run."""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from parcae.cli import parser, split_settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def dry_run(*arguments: str) -> str:
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_again_retrains_the_demo():
    assert "parcae demo --out out/demo --overwrite" in dry_run("demo", "AGAIN=1")
    assert "--overwrite" not in dry_run("demo")


def test_a_message_precedes_the_installation(tmp_path):
    lines = dry_run("demo", f"VENV={tmp_path / 'venv'}").splitlines()
    pip = next(number for number, line in enumerate(lines) if "pip install" in line)
    assert any(line.startswith('echo "Installing') for line in lines[:pip])


def test_the_demo_installs_no_development_dependencies(tmp_path):
    assert "[dev]" not in dry_run("demo", f"VENV={tmp_path / 'venv'}")
    assert "[dev]" in dry_run("test", f"VENV={tmp_path / 'venv'}")


def test_pytorch_is_the_oldest_supported_or_the_one_that_is_asked_for(tmp_path):
    """The newest would be a large download where a build without CUDA of the oldest is at hand."""
    environment = f"VENV={tmp_path / 'venv'}"
    assert "'torch==2.13.0' --editable '.[serve]'" in dry_run("test", environment)
    assert "'torch==2.15.0' --editable" in dry_run("demo", environment, "TORCH=torch==2.15.0")


def test_clean_removes_every_cache_that_git_ignores():
    ignored = (ROOT / ".gitignore").read_text().split()
    caches = [line.rstrip("/") for line in ignored if line.startswith(".") and line.endswith("/")]
    assert ".import_linter_cache" in caches
    removed = dry_run("clean").split()
    assert [cache for cache in caches if cache not in removed] == []


def test_docs_are_built_in_strict_mode(tmp_path):
    output = dry_run("docs", f"VENV={tmp_path / 'venv'}")
    assert "mkdocs build --strict" in output
    assert "[dev]" in output


@pytest.mark.slow
def test_options_of_the_vllm_check():
    """Those of this package's commands, parsed without vLLM."""
    compare = runpy.run_path(str(ROOT / "scripts/vllm/compare.py"))
    lines = (ROOT / "scripts/vllm/check").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.strip().startswith('"$bin/parcae"')]
    commands.append(compare["PARCAE"].format(folder="model", name="model", port=8000).split())
    assert [command[0] for command in commands] == ["train", "export", "serve"]
    for command in commands:
        rest, _ = split_settings(command)
        parser().parse_args(rest)  # ends the process where an option does not exist
