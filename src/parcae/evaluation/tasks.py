"""The paper's table of evaluation tasks: type, shots, baselines, and where the data is found.

    core_extended()          all 46 rows, from tasks.csv; those with `core` set are the 22 of CORE
    locate(task, folder)     the task's file below a folder of evaluation data, or None

A score is centred: (accuracy - baseline) / (1 - baseline). Two tables of baselines have been
published; they differ where choices were counted differently. The reference release scores with
nanochat's.
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
"""Below the folder of evaluation data: as it stands, or as one of the known collections."""
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
    """What guessing scores, in percent, by the table it stands in."""
    delimiter: str
    """Between a question and its answer."""
    file: str
    """Where the collections keep it, below their own folder."""
    stand_in: str | None
    """A part or a reconstruction of the data, used where `file` is not there."""
    sha256: str | None
    """Of `file`, uncompressed, where it is known."""
    bytes: int | None
    """Like `sha256`."""

    def centred(self, accuracy: float, baselines: Baselines = "nanochat") -> float:
        chance = self.baselines[baselines] / 100
        return (accuracy - chance) / (1 - chance)


@cache
def core_extended() -> tuple[Task, ...]:
    text = (files("parcae.evaluation") / "tasks.csv").read_text(encoding="utf-8")
    return tuple(_task(row) for row in csv.DictReader(text.splitlines()))


def core() -> tuple[Task, ...]:
    return tuple(task for task in core_extended() if task.core)


def tasks_named(names: list[str]) -> tuple[Task, ...]:
    known = {task.name: task for task in core_extended()}
    for name in names:
        if name not in known:
            raise ConfigError(f"tasks: no task is called {name!r}. {suggest(name, list(known))}")
    return tuple(known[name] for name in dict.fromkeys(names))


def locate(task: Task, folder: Path) -> Path | None:
    """The task's own file if any collection's layout has it, else its stand-in."""
    if not folder.is_dir():
        raise FileError(
            f"{folder}: no such folder. Name the folder of evaluation tasks by --eval-data."
        )
    for name in (task.file, task.stand_in):
        if name is not None and (found := find(folder, name)):
            return found
    return None


def find(folder: Path, name: str) -> Path | None:
    places = (folder / below / f"{name}{ending}" for below in FOLDERS for ending in ENDINGS)
    return next((path for path in places if path.is_file()), None)


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
