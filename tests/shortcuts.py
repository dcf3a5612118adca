"""What makes commands of the documentation cheap: less text, rough fits, and no new processes.

That the library is found, that a sweep starts and supervises processes, and that fits are accurate
is tested elsewhere (data/test_sources.py, sweeps/test_sweep_runs.py, laws/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pytest

from parcae.cli import main
from parcae.data import sources
from parcae.data.readers import SourceFile
from parcae.evaluation import task_accuracy
from parcae.laws import optimise
from parcae.laws.lbfgs import Schedule
from parcae.report import panel
from parcae.runs import read_status
from parcae.sweeps import launch
from parcae.sweeps.worker import RunRequest

BUILTIN_FILES = 60


def read_part_of_builtin(patch: pytest.MonkeyPatch) -> None:
    """Let the source `builtin` be the first files of Python's library instead of all of them."""
    library = sources._standard_library

    def part() -> list[SourceFile]:
        return library()[:BUILTIN_FILES]

    patch.setattr(sources, "_standard_library", part)


def fit_roughly() -> None:
    """Let fits stop after three rounds of their optimiser, until this process ends."""
    for schedule in vars(optimise).values():
        if isinstance(schedule, Schedule):
            object.__setattr__(schedule, "rounds", 3)


class _NoOthers(dict):
    def __iter__(self) -> Iterator[str]:
        return iter(())


def draw_one_axis(patch: pytest.MonkeyPatch) -> None:
    """Let figures of a report be drawn over the axis that was asked for only."""
    patch.setattr(panel, "AXES", _NoOthers(panel.AXES))


def ask_few_questions(patch: pytest.MonkeyPatch) -> None:
    """Let the accuracy on a task be that of a few rows."""
    patch.setattr(task_accuracy, "accuracies", partial(task_accuracy.accuracies, rows=16))


@dataclass
class EndedProcess:
    """What a launcher needs of the `Popen` of a run that was trained at its start."""

    returncode: int
    pid: int = -1

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode


def train_runs_of_sweeps_here(patch: pytest.MonkeyPatch) -> None:
    """Let local sweeps train their runs in this process, one after the other."""

    def train(
        request: RunRequest, _environment: Mapping[str, str] | None = None, processes: int = 1
    ) -> EndedProcess:
        assert processes == 1
        new = read_status(request.run) == "new"
        given = [str(request.recipe), "--out"] if new else ["--resume"]
        request.log.parent.mkdir(parents=True, exist_ok=True)
        with (
            request.log.open("a") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            return EndedProcess(main(["train", *given, str(request.run)]))

    patch.setattr(launch, "start_process", train)
    patch.setattr(launch, "POLL_SECONDS", 0)
