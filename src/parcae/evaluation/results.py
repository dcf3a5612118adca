"""The folder of an evaluation: what is written item by item, and what is read back from it.

    result.json      the metrics of the last evaluation in the folder
    samples.jsonl    a line for every item and seed; an interrupted evaluation resumes from it
    settings.json    model, loops and context length, which all samples in a folder share
    scores.png       the scores against the number of loops

    {"task": "arc_easy", "seed": 1234, "index": 17, "data": "d2d12e59543a", ...}   one sample

A batch is appended by one write, so at worst the last line is incomplete; it is dropped. Samples of
another file (`data` is the beginning of its SHA-256) do not count.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from parcae.evaluation.jobs import Job, Record, summary
from parcae.files import (
    FileError,
    atomic_path,
    read_json,
    read_sealed,
    reading,
    write_sealed,
    writing,
)
from parcae.runs.layout import EVALUATION_FOLDER

RESULT = "result.json"
SAMPLES = "samples.jsonl"
SETTINGS = "settings.json"
PICTURE = "scores.png"
REMEDY = "Give a folder that `parcae eval` has written, and let the evaluation finish."

Group = tuple[str, int | None, str]
"""Task, seed and the beginning of the data's SHA-256."""


@dataclass(frozen=True)
class EvaluationResult:
    """What `parcae.evaluate` measured; `result.json` holds the same fields."""

    checkpoint: str
    """The folder or the name of the model."""
    looped: bool
    loops: tuple[int, ...]
    """Numbers of loops scored at; (1,) for a model without a loop."""
    state: str
    context_length: int
    limit: int | None
    eval_data: str | None
    suites: dict[str, dict[str, Any]]
    """By suite: `by_loops` has the metrics at each number of loops (as text; None where the model
    diverged), `tasks` the same of each task (None where its data is missing)."""
    seconds: float
    folder: Path | None = field(default=None, compare=False)
    """Of the files; None where nothing was written."""
    records: tuple[Record, ...] = field(default=(), compare=False, repr=False)
    """The samples, where nothing was written."""

    def table(self) -> list[dict[str, Any]]:
        """One row for each suite, task, number of loops and metric; `task` is None for a metric of
        the whole suite, `value` is None where the model diverged."""
        return [row for name, suite in self.suites.items() for row in _rows(name, suite)]

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "checkpoint": self.checkpoint,
            "looped": self.looped,
            "loops": list(self.loops),
            "state": self.state,
            "context_length": self.context_length,
            "limit": self.limit,
            "eval_data": self.eval_data,
            "suites": self.suites,
            "seconds": self.seconds,
        }

    def files(self) -> list[Path]:
        """The files of the result."""
        if self.folder is None:
            return []
        paths = (self.folder / name for name in (RESULT, SAMPLES, PICTURE))
        return [path for path in paths if path.exists()]


def _rows(suite: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    measured = {None: result, **(result.get("tasks") or {})}
    metrics = {
        task: {
            metric: None
            for metrics in of_task["by_loops"].values()
            for metric, value in (metrics or {}).items()
            if not isinstance(value, dict)
        }
        for task, of_task in measured.items()
        if of_task is not None
    }
    for task, names in metrics.items():
        for loops, values in measured[task]["by_loops"].items():
            for metric in names:
                yield {
                    "suite": suite,
                    "task": task,
                    "loops": int(loops),
                    "metric": metric,
                    "value": None if values is None else values[metric],
                }


class Samples:
    """The records of all items scored so far, on disk unless `folder` is None."""

    def __init__(
        self, folder: Path | None, settings: Mapping[str, Any], overwrite: bool = False
    ) -> None:
        """`settings` must be the same for all records of a folder. `overwrite` drops earlier
        records."""
        self.path = None if folder is None else folder / SAMPLES
        self._lines: dict[Group, dict[int, str]] = defaultdict(dict)
        if folder is None or self.path is None:
            return
        remedy = "Choose another folder by --out, or drop its results by --again."
        if overwrite:
            with writing(self.path):
                self.path.unlink(missing_ok=True)
        elif (folder / SETTINGS).exists() and self.path.exists():
            before = read_sealed(folder / SETTINGS, remedy)
            if changed := sorted(k for k in settings if settings[k] != before.get(k)):
                raise FileError(
                    f"{folder}: holds an evaluation with other {', '.join(changed)}. {remedy}"
                )
            self._read(self.path, remedy)
        elif self.path.exists():
            raise FileError(f"{self.path}: {SETTINGS} is missing beside it. {remedy}")
        write_sealed(folder / SETTINGS, dict(settings))

    def _read(self, path: Path, remedy: str) -> None:
        with reading(path):
            data = path.read_bytes()
        complete, newline, rest = data.rpartition(b"\n")
        if rest:  # the process was killed while it wrote
            with writing(path):
                os.truncate(path, len(complete) + len(newline))
        for number, line in enumerate(complete.decode("utf-8", "replace").split("\n"), start=1):
            if not line:
                continue
            try:
                record = json.loads(line)
                group = (record["task"], record["seed"], record["data"])
                self._lines[group][int(record["index"])] = line
            except (ValueError, KeyError, TypeError):
                raise FileError(f"{path}: line {number} is damaged. {remedy}") from None

    def has(self, job: Job, index: int) -> bool:
        return index in self._lines[_group(job)]

    def has_all(self, job: Job) -> bool:
        return all(self.has(job, index) for index in range(len(job)))

    def add(self, job: Job, records: Mapping[int, Record]) -> None:
        task, seed, data = group = _group(job)
        lines = {
            index: json.dumps(
                {"task": task, "seed": seed, "index": index, "data": data, **record},
                allow_nan=False,
            )
            for index, record in records.items()
        }
        if self.path is not None:
            remedy = "Earlier samples are kept; free some space and start again."
            with writing(self.path, remedy), self.path.open("a", encoding="utf-8") as stream:
                stream.write("".join(f"{line}\n" for line in lines.values()))
        self._lines[group].update(lines)

    def of(self, job: Job) -> list[Record]:
        """All records of a job, in order."""
        lines = self._lines[_group(job)]
        return [json.loads(lines[index]) for index in range(len(job))]

    def all(self) -> tuple[Record, ...]:
        return tuple(map(json.loads, self._sorted()))

    def sort(self) -> None:
        """Rewrite the file in order, so that it does not depend on interruptions."""
        if self.path is None:
            return
        with atomic_path(self.path) as temporary, temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in self._sorted())

    def _sorted(self) -> Iterator[str]:
        for group in sorted(self._lines, key=lambda group: (group[0], group[1] or 0, group[2])):
            lines = self._lines[group]
            yield from (lines[index] for index in sorted(lines))


def _group(job: Job) -> Group:
    return job.name, job.seed, job.fingerprint[:12]


def job_result(job: Job, samples: Samples, depths: Sequence[int]) -> dict[str, Any]:
    """The entry of a job in the result: its data, and its metrics at each depth."""
    records = samples.of(job)
    return {
        **job.describe(records),
        "by_loops": {str(depth): summary(job, records, i) for i, depth in enumerate(depths)},
    }


def coverage(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """How many tasks of a suite were scored; a missing task is None."""
    missing = [name for name, task in tasks.items() if task is None]
    return {
        "tasks_scored": len(tasks) - len(missing),
        "tasks_wanted": len(tasks),
        "missing": missing,
    }


class Key(NamedTuple):
    """Identifies an item in two evaluations."""

    data: str
    seed: int | None
    number: int
    """Of the question, the document, or the batch of rows."""


@dataclass(frozen=True)
class ItemScore:
    """What is compared of an item; lists have one entry per depth, None where it diverged."""

    credit: list[float | None] | None = None
    """1 for a right answer; None where this is not measured."""
    nats: list[float | None] | None = None
    """Total loss; None where this is not measured."""
    size: int = 1
    """What `nats` is divided by, in `unit`s."""
    unit: str = "word"


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, item by item."""

    name: str
    """Its folder, or the checkpoint where nothing was written."""
    checkpoint: str
    is_looped: bool
    loops: tuple[int, ...]
    context_length: int
    items: Mapping[str, Mapping[Key, ItemScore]]
    """By task."""


def read_evaluation(folder: str | Path) -> Evaluation:
    """Read an evaluation from its folder, or from the run or model it belongs to."""
    folder = Path(folder)
    if (folder / EVALUATION_FOLDER / RESULT).exists():  # a run has a result.json of its own
        folder = folder / EVALUATION_FOLDER
    if not (folder / RESULT).exists():
        raise FileError(f"{folder / RESULT}: no such file. {REMEDY}")
    result, settings = read_json(folder / RESULT), read_sealed(folder / SETTINGS, REMEDY)
    try:
        if list(result["loops"]) != settings["loops"]:
            raise FileError(f"{folder}: {RESULT} and {SAMPLES} are of two evaluations. {REMEDY}")
        return _evaluation(str(folder), result, _read_samples(folder))
    except (KeyError, TypeError, ValueError, IndexError):
        raise FileError(f"{folder}: {RESULT} or {SAMPLES} is damaged. {REMEDY}") from None


def evaluation_of(source: str | Path | EvaluationResult) -> Evaluation:
    """The items of a result, or of a folder of results."""
    if not isinstance(source, EvaluationResult):
        return read_evaluation(source)
    if source.folder is not None:
        return read_evaluation(source.folder)
    return _evaluation(source.checkpoint, source.to_json(), source.records)


def _evaluation(name: str, result: Mapping[str, Any], records: Iterable[Record]) -> Evaluation:
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_task[record["task"]].append(record)
    loops = tuple(result["loops"])
    items = {
        task: dict(_items(of_task, _window_count(result, task), len(loops)))
        for task, of_task in by_task.items()
    }
    return Evaluation(
        name, result["checkpoint"], result["looped"], loops, result["context_length"], items
    )


def _read_samples(folder: Path) -> Iterator[Record]:
    path = folder / SAMPLES
    with reading(path), path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield json.loads(line)
            except ValueError:
                raise FileError(f"{path}: line {number} is not JSON. Is it truncated?") from None


def _window_count(result: Mapping[str, Any], task: str) -> tuple[str, int] | None:
    """The data of a text and the number of its windows."""
    suite = result["suites"].get(task)
    if not suite or "sha256" not in suite:
        return None
    return suite.get("fingerprint", suite["sha256"])[:12], suite["scored"]


def _items(
    records: list[Record], window_count: tuple[str, int] | None, depths: int
) -> Iterator[tuple[Key, ItemScore]]:
    if "document" in records[0]:
        yield from _documents(records, window_count, depths)
        return
    for record in records:
        key = Key(record["data"], record["seed"], record["index"])
        if "rows" in record:
            size = record["bytes"]
            nats = _complete(record["nats" if size is None else "text_nats"], depths)
            unit = "token" if size is None else "byte"
            yield key, ItemScore(None, nats, record["tokens"] if size is None else size, unit)
        elif "greedy" in record:
            credit = [None if right is None else float(right) for right in record["greedy"]]
            yield key, ItemScore(_complete(credit, depths), _complete(record["nats"], depths))
        else:
            yield key, ItemScore(_complete(record["credit"], depths))


def _documents(
    records: list[Record], window_count: tuple[str, int] | None, depths: int
) -> Iterator[tuple[Key, ItemScore]]:
    """The documents of which no window is missing, as the last ones of a killed evaluation are.

    Windows depend on the tokenizer and the context length, and those of one document are not
    independent of each other, so the items are whole documents."""
    windows = {(record["data"], record["index"]): record for record in records}
    for (data, document), keys in groupby(
        sorted(windows), key=lambda key: (key[0], windows[key]["document"])
    ):
        indices = [index for _, index in keys]
        after = indices[-1] + 1
        parts = [windows[data, index] for index in indices]
        has_first = parts[0]["bytes"] > 0
        has_last = (data, after) in windows or (data, after) == window_count
        if has_first and has_last and after - indices[0] == len(parts):
            columns = zip(*(part["nats"] for part in parts), strict=True)
            nats = [None if None in column else fsum(column) for column in columns]
            score = ItemScore(None, _complete(nats, depths), parts[0]["bytes"], "byte")
            yield Key(data, None, document), score


def _complete(values: list[float | None], depths: int) -> list[float | None]:
    if len(values) != depths:
        raise ValueError
    return values
