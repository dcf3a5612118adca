"""The table of CORE and CORE-Extended tasks: type, shots, baselines and files.

    core_extended()          all 46 tasks, from tasks.csv; 22 of them are CORE
    locate(task, folder)     the task's file below a folder of task files, or None

Scores are centred: (accuracy - baseline) / (1 - baseline), where the baseline is the accuracy of
guessing. Two tables of baselines have been published, which differ where choices were counted
differently. The reference release uses nanochat's.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, cast, get_args

from parcae.config import ConfigError
from parcae.files import FileError
from parcae.recipe import suggest

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Baselines = Literal["nanochat", "dclm"]
BASELINES: tuple[Baselines, ...] = get_args(Baselines)
SHORT_KINDS: dict[Kind, str] = {"multiple_choice": "MC", "schema": "S", "language_modeling": "LM"}

FOLDERS = ("", "core_eval", "eval_data", "eval_bundle/eval_data", "local_data")
"""Where the known collections have their files, below the folder of task files."""
ENDINGS = ("", ".gz")


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    """As the paper writes it."""
    category: str
    kind: Kind
    shots: int
    core: bool
    baselines: dict[Baselines, float]
    """Accuracy of guessing in percent, by table."""
    delimiter: str
    """Text between a question and its answer."""
    file: str
    """Path of the data below the folder of a collection."""
    stand_in: str | None
    """A part or a reconstruction of the data, used where `file` is missing."""
    sha256: str | None
    """Of `file`, uncompressed; None if unknown."""
    bytes: int | None
    """Size of `file`, uncompressed; None if unknown."""

    def centred(self, accuracy: float, baselines: Baselines = "nanochat") -> float:
        """0 for guessing, 1 for no error."""
        return centre(accuracy, self.baselines[baselines])


def centre(accuracy: float, baseline: float) -> float:
    """Centred accuracy: 0 for guessing, whose accuracy is `baseline` in percent, 1 for no error."""
    chance = baseline / 100
    return (accuracy - chance) / (1 - chance)


@cache
def core_extended() -> tuple[Task, ...]:
    """All tasks of the table."""
    text = (files("parcae.evaluation") / "tasks.csv").read_text(encoding="utf-8")
    return tuple(_task(row) for row in csv.DictReader(text.splitlines()))


def core() -> tuple[Task, ...]:
    """The 22 tasks of CORE."""
    return tuple(task for task in core_extended() if task.core)


def tasks_named(names: list[str]) -> tuple[Task, ...]:
    """The tasks with these names; an unknown name is an error."""
    known = {task.name: task for task in core_extended()}
    for name in names:
        if name not in known:
            raise ConfigError(f"tasks: {name!r} is not known. {suggest(name, list(known))}")
    return tuple(known[name] for name in dict.fromkeys(names))


def locate(task: Task, folder: Path) -> Path | None:
    """The path of the task's file, or else of its stand-in; None if both are missing."""
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder. Give the folder of task files by --eval-data.")
    for name in (task.file, task.stand_in):
        if name is not None and (path := find(folder, name)):
            return path
    return None


def find(folder: Path, name: str) -> Path | None:
    """The path of a file in any of the known layouts, plain or gzipped; None if it is missing."""
    paths = (folder / below / f"{name}{ending}" for below in FOLDERS for ending in ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _task(row: dict[str, str]) -> Task:
    return Task(
        name=row["name"],
        title=row["title"],
        category=row["category"],
        kind=cast(Kind, row["kind"]),
        shots=int(row["shots"]),
        core=row["core"] == "yes",
        baselines={name: float(row[f"baseline_{name}"]) for name in BASELINES},
        delimiter=json.loads(row["delimiter"]),
        file=row["file"],
        stand_in=row["stand_in"] or None,
        sha256=row["sha256"] or None,
        bytes=int(row["bytes"]) if row["bytes"] else None,
    )
