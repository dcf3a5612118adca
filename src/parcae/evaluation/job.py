"""A job is one measurement over many items: a task at one seed, or a text cut into windows.

    prompt = job.prompt(index, scorer)                 what is scored for one item
    record = job.record(index, prompt, answers)        what is kept of it, as JSON
    job.summarise(records, place)                      the numbers at one depth

`place` is that of the depth among those the scorer reads; lists in a record go by depth. Where a
model had no predictions at a depth, the record has null and is marked (`lost`), and the summary is
None.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from parcae.evaluation.prompts import Prompt
from parcae.evaluation.scoring import Answer, Scorer
from parcae.files import reading, sha256

Record = dict[str, Any]


@dataclass(frozen=True)
class DataFile:
    """What a measurement was made on."""

    path: Path
    split: str
    stand_in: bool = False
    """Whether it is a part or a reconstruction of what the task is known by."""

    @cached_property
    def sha256(self) -> str:
        """Of the content: a file and its .gz are the same data."""
        if self.path.suffix != ".gz":
            return sha256(self.path)
        with reading(self.path), gzip.open(self.path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "split": self.split,
            "stand_in": self.stand_in,
            "sha256": self.sha256,
        }


class Job(Protocol):
    @property
    def name(self) -> str:
        """Tells measurements apart in the samples."""
        ...

    @property
    def seed(self) -> int | None:
        """Of the examples drawn; None where nothing is drawn."""
        ...

    @property
    def source(self) -> DataFile: ...

    def __len__(self) -> int: ...

    def prompt(self, index: int, scorer: Scorer) -> Prompt: ...

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record: ...

    def summarise(self, records: Sequence[Record], place: int) -> dict[str, Any]: ...


def keep(job: Job, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
    record = job.record(index, prompt, answers)
    lost = sorted({place for answer in answers for place in answer.lost()})
    if not lost:
        return record
    return {key: _without(value, lost) for key, value in record.items()} | {"lost": lost}


def _without(value: Any, lost: Sequence[int]) -> Any:
    if not isinstance(value, list):
        return value
    return [None if place in lost else one for place, one in enumerate(value)]


def summary(job: Job, records: Sequence[Record], place: int) -> dict[str, Any] | None:
    if any(place in record.get("lost", ()) for record in records):
        return None
    return job.summarise(records, place)


def sums(answer: Answer) -> list[float]:
    """Nats of the whole span, at each depth."""
    return answer.nats.sum(1).tolist()


def means(answer: Answer) -> list[float]:
    """Nats per token of the span, at each depth."""
    return answer.nats.mean(1).tolist()


TIE = 1e-6
"""Nats within which two scores count as equal: what rounding alone can make."""


def credit(scores: Sequence[float], gold: int) -> float:
    """1 if `gold` has the lowest score, 1/k if it shares it with k - 1 others, else 0."""
    best = min(scores)
    first = [place for place, score in enumerate(scores) if score <= best + TIE]
    return 1 / len(first) if gold in first else 0.0


def by_depth(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """[alternatives][depths] -> [depths][alternatives]."""
    return [list(row) for row in zip(*columns, strict=True)]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def standard_error(numbers: Sequence[float]) -> float | None:
    """Of their mean; None for a single one."""
    count = len(numbers)
    if count < 2:
        return None
    centre = mean(numbers)
    return (sum((x - centre) ** 2 for x in numbers) / (count - 1) / count) ** 0.5
