"""Blocks of docs/huggingface.md that need the hub or vLLM; the others run in test_docs.py."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from parcae.cli import main

ROOT = Path(__file__).parents[2]
DATA = os.environ.get("PARCAE_TEST_DATA")


def console(program: str) -> list[list[str]]:
    """The arguments of the commands of a program in blocks that test_docs.py does not run."""
    page = (ROOT / "docs" / "huggingface.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command[1:] for command in commands if command[0] == program]


@pytest.mark.skipif(DATA is None, reason="PARCAE_TEST_DATA is not set")
@pytest.mark.slow
def test_the_published_model(monkeypatch, tmp_path, capsys):
    """With a small model in the release's format in the place of the one on the hub."""
    import huggingface_hub

    def download(repository, local_dir, **options):
        assert repository == "SandyResearch/parcae-140m"
        shutil.copytree(Path(DATA or "") / "fixtures" / "eval-tiny", local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    commands = console("parcae")
    assert [command[0] for command in commands] == ["import", "generate"]
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err


def test_the_command_for_vllm_is_the_one_that_is_checked():
    """`make test-vllm` runs it; its options are read here."""
    path = ROOT / "scripts" / "vllm" / "compare.py"
    checked = re.search(r"^VLLM = \((.*?)^\)", path.read_text(), re.MULTILINE | re.DOTALL)
    assert checked is not None
    options = [word for (command,) in [console("vllm")] for word in command if word[:2] == "--"]
    assert options == ["--model-impl", "--trust-remote-code", "--hf-overrides"]
    assert all(option in checked[1] for option in options)


def test_the_command_for_the_hub_exists():
    (command,) = console("hf")
    assert command[0] == "upload"
    assert importlib.util.find_spec("huggingface_hub.cli.upload") is not None
