"""The folder of an evaluation, written item by item; `item_scores` reads it for comparisons.

    result.json      the metrics of the last evaluation in the folder
    samples.jsonl    a line for every item and seed; an interrupted evaluation resumes from it
    settings.json    model and context length, which all samples in a folder share, and all `loops`
    scores.png       the scores against the number of loops

    {"task": "arc_easy", "seed": 1234, "index": 17, "data": "d2d12e59543a", "loops": [4, 8], ...}

Lists of a sample have one entry for each of its `loops`. An evaluation at further numbers of loops
scores these alone and adds them to the samples; of two lines of one item the later counts. A batch
is appended by one write, so at worst the last line is incomplete; it is dropped. Samples of another
file (`data` is the beginning of its SHA-256) do not count.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcae.evaluation.jobs import Job, Record, summary
from parcae.files import (
    FileError,
    atomic_path,
    no_link,
    read_lines,
    read_sealed,
    write_all,
    write_sealed,
    writing,
)
from parcae.tables import html_table

RESULT = "result.json"
SAMPLES = "samples.jsonl"
SETTINGS = "settings.json"
PICTURE = "scores.png"

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
    task_data: str | None
    suites: dict[str, dict[str, Any]]
    """By suite: `by_loops` has the metrics at each number of loops (as text; None where the model
    diverged), `tasks` the same of each task (None where its data is missing), `limit` the largest
    number of items of a task (None: all)."""
    seconds: float
    mean_loops: int | None = None
    """The mean in training; None for a model without a loop."""
    folder: Path | None = field(default=None, compare=False)
    """Where the files are; None where nothing was written."""
    records: tuple[Record, ...] = field(default=(), compare=False, repr=False)
    """The samples, where nothing was written."""

    def table(self) -> list[dict[str, Any]]:
        """One row for each suite, task, number of loops and metric; `task` is None for a metric of
        the whole suite, `value` is None where the model diverged."""
        return [row for name, suite in self.suites.items() for row in _rows(name, suite)]

    def _repr_html_(self) -> str:
        """A row for each metric, a column for each number of loops."""
        wide: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.table():
            names = {name: row[name] for name in ("suite", "task", "metric")}
            wide.setdefault(tuple(names.values()), names)[f"T={row['loops']}"] = row["value"]
        return html_table(wide.values())

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "checkpoint": self.checkpoint,
            "looped": self.looped,
            "loops": list(self.loops),
            "mean_loops": self.mean_loops,
            "state": self.state,
            "context_length": self.context_length,
            "task_data": self.task_data,
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
        """`settings` must be the same for all records of a folder, but for `loops`, which are
        added to those of earlier records. `overwrite` drops earlier records."""
        self.path = None if folder is None else folder / SAMPLES
        self._lines: dict[Group, dict[int, str]] = defaultdict(dict)
        self._loops: dict[Group, dict[int, tuple[int, ...]]] = defaultdict(dict)
        settings = dict(settings)
        if folder is None or self.path is None:
            return
        remedy = "Choose another folder with `out`, or drop its results with `overwrite`."
        if overwrite:
            with writing(self.path):
                self.path.unlink(missing_ok=True)
        elif (folder / SETTINGS).exists() and self.path.exists():
            before = read_sealed(folder / SETTINGS, remedy)
            fixed = settings.keys() - {"loops"}
            if changed := sorted(key for key in fixed if settings[key] != before.get(key)):
                raise FileError(
                    f"{folder}: holds an evaluation with another {', '.join(changed)}. {remedy}"
                )
            self._read(self.path, remedy)
            settings["loops"] = sorted({*before.get("loops", ()), *settings.get("loops", ())})
        elif self.path.exists():
            raise FileError(f"{self.path}: {SETTINGS} is missing beside it. {remedy}")
        write_sealed(folder / SETTINGS, settings)

    def _read(self, path: Path, remedy: str) -> None:
        complete = 0
        for number, raw in enumerate(read_lines(path), start=1):
            if not raw.endswith(b"\n"):  # the process was killed while it wrote
                with writing(path), open(path, "r+b", opener=no_link) as stream:
                    stream.truncate(complete)
                break
            complete += len(raw)
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if not line:
                continue
            try:
                record = parse_record(line)
                group = (record["task"], record["seed"], record["data"])
                index, loops = int(record["index"]), tuple(map(int, record["loops"]))
                if [*map(type, group)] not in ([str, int, str], [str, type(None), str]):
                    raise TypeError(group)
            except (ValueError, KeyError, TypeError, ArithmeticError):
                raise FileError(f"{path}: line {number} is damaged. {remedy}") from None
            self._lines[group][index], self._loops[group][index] = line, loops

    def missing(self, job: Job, loops: Sequence[int]) -> dict[tuple[int, ...], set[int]]:
        """The items of a job without a record at some of `loops`, by these."""
        scored, missing = self._loops[_group(job)], defaultdict(set)
        for index in range(len(job)):
            lacking = tuple(d for d in loops if d not in scored.get(index, ()))
            if lacking:
                missing[lacking].add(index)
        return dict(missing)

    def common_loops(self, jobs: Sequence[Job]) -> set[int]:
        """The numbers of loops at which every item of all these jobs has a record."""
        scored = (self._loops[_group(job)].get(i, ()) for job in jobs for i in range(len(job)))
        different = [set(loops) for loops in set(scored)]
        return set.intersection(*different) if different else set()

    def add(self, job: Job, records: Mapping[int, Record], loops: Sequence[int]) -> None:
        """Add records at `loops` to what is known of these items."""
        task, seed, data = group = _group(job)
        lines: dict[int, str] = {}
        for index, record in records.items():
            new = {"task": task, "seed": seed, "index": index, "data": data}
            new |= {"loops": list(loops), **record}
            if index in self._lines[group]:
                new = merged(parse_record(self._lines[group][index]), new)
            lines[index] = format_record(new)
            self._loops[group][index] = tuple(new["loops"])
        if self.path is not None:
            remedy = "Earlier samples are kept; free some space and start again."
            with writing(self.path, remedy), open(self.path, "ab", 0, opener=no_link) as stream:
                write_all(stream, "".join(f"{line}\n" for line in lines.values()).encode())
        self._lines[group].update(lines)

    def of(self, job: Job, loops: Sequence[int]) -> list[Record]:
        """All records of a job at `loops`, in order."""
        lines = self._lines[_group(job)]
        return [selected(parse_record(lines[index]), loops) for index in range(len(job))]

    def all(self) -> tuple[Record, ...]:
        return tuple(map(parse_record, self._sorted()))

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


def format_record(record: Record) -> str:
    """A line of samples.jsonl, with a checksum of the rest of it."""
    return json.dumps({**record, "crc32": _checksum(record)}, allow_nan=False)


def parse_record(line: str) -> Record:
    """What `format_record` wrote, or an earlier version, without a checksum; ValueError if it was
    changed."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict) or record.pop("crc32", None) not in (None, _checksum(record)):
        raise ValueError("its checksum differs")
    return record


def _checksum(record: Record) -> int:
    rest = {key: value for key, value in record.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest).encode())


def _group(job: Job) -> Group:
    return job.name, job.seed, job.fingerprint[:12]


def merged(old: Record, new: Record) -> Record:
    """A record at the loops of both; `new` counts where both have a number of loops."""
    loops = sorted({*old["loops"], *new["loops"]})
    sources = [new if depth in new["loops"] else old for depth in loops]
    indices = [of["loops"].index(depth) for of, depth in zip(sources, loops, strict=True)]
    return _columns(new, loops, sources, indices)


def selected(record: Record, loops: Sequence[int]) -> Record:
    """A record at some of its loops."""
    indices = [record["loops"].index(depth) for depth in loops]
    return _columns(record, loops, [record] * len(indices), indices)


def _columns(
    record: Record, loops: Sequence[int], sources: Sequence[Record], indices: Sequence[int]
) -> Record:
    """`record` with lists whose entry for each of `loops` is that of a source at an index."""
    pairs = list(zip(sources, indices, strict=True))
    result = {
        key: [of[key][i] for of, i in pairs] if isinstance(value, list) else value
        for key, value in record.items()
        if key != "lost"
    }
    result["loops"] = list(loops)
    lost = [n for n, (of, i) in enumerate(pairs) if i in of.get("lost", ())]
    return result | ({"lost": lost} if lost else {})


def job_result(job: Job, samples: Samples, loops: Sequence[int]) -> dict[str, Any]:
    """The entry of a job in the result: its data, and its metrics at each depth."""
    records = samples.of(job, loops)
    return {
        **job.describe(records),
        "by_loops": {str(depth): summary(job, records, i) for i, depth in enumerate(loops)},
    }


def coverage(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """How many tasks of a suite were scored; a missing task is None."""
    missing = [name for name, task in tasks.items() if task is None]
    return {
        "tasks_scored": len(tasks) - len(missing),
        "tasks_wanted": len(tasks),
        "missing": missing,
    }
