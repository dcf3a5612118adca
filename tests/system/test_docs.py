"""What the documentation shows, runs: every Python block and every `parcae` command."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from parcae.cli import main
from training import runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


SHORT_DEMO = "--budget.steps 6 --run.sample_tokens 4 --run.validation_rows 4"
"""Flags that let `make demo` take seconds, whose run later commands of a page may use."""


def steps(page: Path) -> list[str | list[str]]:
    """The page's Python blocks and the words of its `parcae` commands, in order. Blocks of other
    kinds are not run: `console` is for what takes long, and other `make` and `git` lines are other
    tests' business."""
    found: list[str | list[str]] = []
    for kind, body in BLOCK.findall(page.read_text()):
        if kind == "python":
            found.append(body)
        elif kind == "bash":
            lines = body.replace("\\\n", " ").splitlines()
            for words in (shlex.split(line, comments=True) for line in lines):
                if words[:2] == ["make", "demo"]:
                    found.append(["demo", *shlex.split(SHORT_DEMO)])
                elif words[:1] == ["parcae"]:
                    found.append(words[1:])
    return found


def take(step: str | list[str], folder: Path, log: Path) -> None:
    """What a shell in `folder` would do, in a process that has its imports behind it."""
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    with log.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    if isinstance(step, str):
        exec(compile(step, "a block of the page", "exec"), {"__name__": "__main__"})
    else:
        sys.exit(main(step))


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if steps(p)], ids=lambda page: page.name)
def test_everything_shown_runs(page, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    context, log = runs.clean_processes(), tmp_path / "log"
    for step in steps(page):
        process = context.Process(target=take, args=(step, tmp_path, log))
        process.start()
        process.join()
        assert process.exitcode == 0, f"{step}\n{log.read_text()}"


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
