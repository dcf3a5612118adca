"""Blocks and commands of the documentation run, its links resolve and its site builds."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import parcae
import shortcuts
from parcae.cli import main
from parcae.training.trainer import Trainer
from training import runs

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
SHORTER = {"steps = 500": "steps = 8", "steps = 200": "steps = 4"}
"""Budgets of recipes on the pages, and those that a test uses instead."""

SHORT_RATE = "--budget.steps 4"
"""An option that shortens the pair of recipes at a high learning rate."""
SHORT_DEMO = "--budget.steps 6 --run.sample_tokens 4 --run.validation_rows 4"
"""Options that shorten `make demo` to seconds; later commands of a page may use its run."""


@dataclass
class File:
    """A block with a title is a file."""

    name: str
    text: str


@dataclass
class Stopped:
    """`timeout --signal NAME SECONDS parcae ...`; a test does not wait for the seconds."""

    signal: signal.Signals
    command: list[str]

    def run(self) -> int:
        """Run the command; its process gets the signal after the second step of training."""
        take_step, steps_taken = Trainer._train_step, itertools.count(1)

        def stop_after_two(trainer):
            take_step(trainer)
            if next(steps_taken) == 2:
                os.kill(os.getpid(), self.signal)

        Trainer._train_step = stop_after_two
        if self.signal == signal.SIGINT:  # ignored in what a script starts in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(self.command)


Step = str | list[str] | File | Stopped


def steps(page: Path) -> list[Step]:
    """The page's files, Python blocks (as text) and `parcae` commands (as arguments), in order.

    Blocks marked `console` take too long for a test and are not run. Of the other shell commands
    `mv` is run, and `make demo`, as a short `parcae demo`.
    """
    result: list[Step] = []
    for kind, title, body in BLOCK.findall(page.read_text()):
        if title:
            for long, short in SHORTER.items():
                body = body.replace(long, short)
            result.append(File(title, body))
        elif kind == "python":
            result.append(body)
        elif kind == "bash":
            lines = body.replace("\\\n", " ").splitlines()
            for command in (shlex.split(line, comments=True) for line in lines):
                if command[:2] == ["make", "demo"]:
                    result.append(["demo", *shlex.split(SHORT_DEMO)])
                elif command[:3] == ["parcae", "train", "recipes/walks.toml"]:
                    result.append([*command[1:], "--budget.steps", "4"])
                elif command[:1] == ["parcae"]:
                    short = SHORT_RATE if command[2:3] and "high-rate-" in command[2] else ""
                    result.append([*command[1:], *short.split()])
                elif command[:1] == ["mv"]:
                    result.append(f"import shutil; shutil.move({command[1]!r}, {command[2]!r})")
                elif command[:1] == ["timeout"]:
                    result.append(Stopped(signal.Signals[f"SIG{command[2]}"], command[5:]))
    return result


def run_step(step: str | list[str] | Stopped, folder: Path, log: Path) -> None:
    """Run one step as a shell in `folder` would, in a process that has already imported PyTorch."""
    patch = pytest.MonkeyPatch()  # ends with this process
    shortcuts.read_part_of_builtin(patch)
    shortcuts.train_runs_of_sweeps_here(patch)
    shortcuts.draw_one_axis(patch)
    shortcuts.ask_few_questions(patch)
    shortcuts.fit_roughly()
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    with log.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    if isinstance(step, str):
        exec(compile(step, "documentation block", "exec"), {"__name__": "__main__"})
    else:
        sys.exit(step.run() if isinstance(step, Stopped) else main(step))


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in GUIDES if steps(p)], ids=lambda page: page.name)
def test_blocks_and_commands_run(page, tmp_path):
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    context, log, demos = runs.clean_processes(), tmp_path / "log", []
    again = [["demo"]] if page.name == "README.md" else []
    for step in [*steps(page), *again]:
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.text)
            continue
        process = context.Process(target=run_step, args=(step, tmp_path, log))
        process.start()
        process.join()
        killed = isinstance(step, Stopped) and step.signal == signal.SIGKILL
        assert process.exitcode == (-signal.SIGKILL if killed else 0), f"{step}\n{log.read_text()}"
        if isinstance(step, Stopped):
            assert "Finished" not in log.read_text()
        if isinstance(step, list) and step[0] == "demo":
            demos.append(log.read_text())
    if again:
        check_demo(tmp_path / "out" / "demo", *demos)


def check_demo(folder: Path, printed: str, printed_again: str) -> None:
    """What `make demo` printed at first and when it was run again, and left in its folder."""
    assert (folder / "looping.png").stat().st_size > 20_000
    assert (folder / "report" / "report.html").stat().st_size > 100_000
    result = json.loads((folder / "run" / "result.json").read_text())
    assert {sample["depth"] for sample in result["samples"]} == {1, 2, 4, 8}
    assert json.loads((folder / "walks" / "result.json").read_text())["steps"] == 6
    parts = ("Walking", "8 steps", "1 loop ", "8 loops", "Look at", "validation loss")
    assert all(part in printed for part in parts), printed
    assert "is a finished run" in printed_again


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    """Links within docs/ also stay within it, because the site is built from that folder."""
    docs = ROOT / "docs"
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            path = (page.parent / target).resolve()
            assert path.exists(), target
            assert not page.is_relative_to(docs) or path.is_relative_to(docs), target


@pytest.mark.slow
def test_every_symbol_and_test_of_the_paper_map_exists():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    code = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(?:[\w/.]+::)?(test_\w+?)(?:\[\w+\])?`", text):
        assert f"def {name}(" in tests or Path(ROOT / "tests" / name).exists(), name
    for name in re.findall(r"`(?:[\w/.]+\.py: )?(?:\w+\.)?([a-z_]+|[A-Z]\w+)`", text):
        if not name.startswith("test_"):
            assert re.search(rf"\b{name}\b", code), name


def test_every_symbol_of_the_paper_map_is_in_the_file_it_names():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    for path, names in re.findall(r"`([\w/]+\.py): ([\w., ]+)`", text):
        code = (ROOT / "src" / "parcae" / path).read_text()
        for name in re.split(r"[., ]+", names):
            assert re.search(rf"\b{name}\b", code), f"{path}: {name}"


def test_every_file_of_the_paper_map_exists():
    text = (ROOT / "docs" / "paper-map.md").read_text()
    for path in re.findall(r"`((?:\w+/)*\w+\.py)\b", text):
        assert (ROOT / "src" / "parcae" / path).exists() or (ROOT / "tests" / path).exists(), path


def test_the_reference_documents_every_public_name():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: parcae\.(\w+)$", text, re.MULTILINE))
    assert set(parcae.__all__) - documented == set()


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    for module in ("material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr

    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    locations = {entry["location"] for entry in index["docs"]}
    assert "api/models.html#parcae.create" in locations
    for page in tmp_path.rglob("*.html"):
        external = re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//', page.read_text())
        external += re.findall(r'<link[^>]*href="(?:https?:)?//', page.read_text())
        assert external == [], page.name
