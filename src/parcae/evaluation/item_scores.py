"""The scores of an evaluation, of its items and suites, read back from its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from parcae.evaluation.jobs import Record
from parcae.evaluation.results import (
    RESULT,
    SAMPLES,
    SETTINGS,
    EvaluationResult,
    merged,
    parse_record,
    selected,
)
from parcae.evaluation.suites import SUITES, job_name
from parcae.files import FileError, read_json, read_lines, read_sealed
from parcae.runs.layout import EVALUATION_FOLDER, checkpoint_path, list_steps

REMEDY = "Give a folder that `parcae eval` has written, and let the evaluation finish."


class Key(NamedTuple):
    """Identifies an item in two evaluations."""

    data: str
    seed: int | None
    number: int
    """Number of the question, the document, or the batch of rows."""


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
    missing: frozenset[int] = frozenset()
    """Indices of the numbers of loops at which the item was not scored."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation, item by item."""

    name: str
    """Its folder, or the checkpoint where nothing was written."""
    checkpoint: str
    is_looped: bool
    loops: tuple[int, ...]
    """All numbers of loops in the folder; a task may have been scored at fewer."""
    context_length: int
    items: Mapping[str, Mapping[Key, ItemScore]]
    """By task."""
    suites: Mapping[str, Any]
    """Results of the last evaluation, as in result.json."""
    mean_loops: int | None = None
    """In training; None where it is not recorded."""

    @property
    def default_loops(self) -> int:
        """The mean of training where it was scored, else the largest scored."""
        mean = self.mean_loops
        return mean if mean is not None and mean in self.loops else max(self.loops)


def read_evaluation(folder: str | Path) -> Evaluation:
    """Read an evaluation from its folder, or from the run or model it belongs to."""
    folder = Path(folder)
    if (folder / EVALUATION_FOLDER / RESULT).exists():  # a run has a result.json of its own
        folder = folder / EVALUATION_FOLDER
    if not (folder / RESULT).exists():
        raise FileError(f"{folder / RESULT}: no such file. {REMEDY}")
    result, settings = read_json(folder / RESULT), read_sealed(folder / SETTINGS, REMEDY)
    try:
        if not set(result["loops"]) <= set(settings["loops"]):
            raise FileError(f"{folder}: {RESULT} and {SAMPLES} are of two evaluations. {REMEDY}")
        return _evaluation(str(folder), result, _read_samples(folder), tuple(settings["loops"]))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise FileError(f"{folder}: {RESULT} or {SAMPLES} is damaged. {REMEDY}") from None


def scores_of_run(run: Path) -> tuple[dict[int, dict[str, float]], int | None]:
    """By number of loops the score of each suite that `parcae eval RUN` measured, and the smallest
    limit of their items, None if all were scored.

    Empty if the run was not evaluated, or not at its newest checkpoint. The score is the metric
    that scores.png shows; suites and numbers of loops where the model diverged are left out.
    """
    path, steps = run / EVALUATION_FOLDER / RESULT, list_steps(run)
    if not path.exists():
        return {}, None
    result = read_json(path)
    try:
        if steps and Path(result["checkpoint"]).name != checkpoint_path(run, steps[-1]).name:
            return {}, None
        scores: dict[int, dict[str, float]] = defaultdict(dict)
        for suite, entry in result["suites"].items():
            for loops, metrics in entry["by_loops"].items():
                if metrics is not None and metrics.get(SUITES[suite].metric) is not None:
                    scores[int(loops)][suite] = float(metrics[SUITES[suite].metric])
        limits = [entry.get("limit", result.get("limit")) for entry in result["suites"].values()]
        return dict(scores), min((int(limit) for limit in limits if limit), default=None)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise FileError(f"{path}: damaged. {REMEDY}") from None


def evaluation_of(source: str | Path | EvaluationResult) -> Evaluation:
    """The items of a result, or of a folder of results."""
    if not isinstance(source, EvaluationResult):
        return read_evaluation(source)
    if source.folder is not None:
        return read_evaluation(source.folder)
    return _evaluation(source.checkpoint, source.to_json(), source.records, source.loops)


def _evaluation(
    name: str, result: Mapping[str, Any], records: Iterable[Record], loops: tuple[int, ...]
) -> Evaluation:
    latest: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (record["task"], record["seed"], record["data"], record["index"])
        latest[key] = record
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in latest.values():
        if _data_of(result, record["task"]) in (None, record["data"]):
            by_task[record["task"]].append(_at_all_loops(record, loops))
    items = {
        task: dict(_items(of_task, _window_count(result, task), len(loops)))
        for task, of_task in by_task.items()
    }
    return Evaluation(
        name,
        result["checkpoint"],
        result["looped"],
        loops,
        result["context_length"],
        items,
        result["suites"],
        result.get("mean_loops"),
    )


def _at_all_loops(record: Record, loops: tuple[int, ...]) -> Record:
    """A record with null at the numbers of loops where it was not scored, in `missing`."""
    scored = record["loops"]
    for value in record.values():
        if (
            isinstance(value, list)
            and value is not record.get("lost")
            and len(value) != len(scored)
        ):
            raise ValueError
    missing = [depth for depth in loops if depth not in scored]
    if not missing:
        return selected(record, loops)
    empty = {key: [None] * len(missing) for key, value in record.items() if isinstance(value, list)}
    full = merged(record, {**record, **empty, "loops": missing, "lost": []})
    return full | {"missing": [loops.index(depth) for depth in missing]}


def _read_samples(folder: Path) -> Iterator[Record]:
    path = folder / SAMPLES
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield parse_record(line.decode())
        except ValueError:
            raise FileError(f"{path}: line {number} is damaged. {REMEDY}") from None


def _data_of(result: Mapping[str, Any], task: str) -> str | None:
    """The data of a text or an own task in the last evaluation, as its samples name it; None for
    other tasks.

    Samples of another text, such as an earlier `val_data`, are not of this evaluation."""
    suite = result["suites"].get(task) or {}
    if task.startswith(job_name("own", "")):
        own = result["suites"].get("own") or {"tasks": {}}
        suite = own["tasks"].get(task.removeprefix(job_name("own", ""))) or {}
    digest = suite.get("fingerprint", suite.get("sha256"))
    return None if digest is None else digest[:12]


def _window_count(result: Mapping[str, Any], task: str) -> tuple[str, int] | None:
    """The data of a text and the number of its windows."""
    data, suite = _data_of(result, task), result["suites"].get(task)
    return None if data is None or suite is None else (data, suite.get("scored", 0))


def _items(
    records: list[Record], window_count: tuple[str, int] | None, count: int
) -> Iterator[tuple[Key, ItemScore]]:
    if "document" in records[0]:
        yield from _documents(records, window_count, count)
        return
    for record in records:
        key = Key(record["data"], record["seed"], record["index"])
        missing = frozenset(record.get("missing", ()))
        if "rows" in record:
            size = record["bytes"]
            nats = _complete(record["nats" if size is None else "text_nats"], count)
            unit = "token" if size is None else "byte"
            size = record["tokens"] if size is None else size
            yield key, ItemScore(None, nats, size, unit, missing)
        elif "greedy" in record:
            credit = [None if right is None else float(right) for right in record["greedy"]]
            nats = _complete(record["nats"], count)
            yield key, ItemScore(_complete(credit, count), nats, missing=missing)
        else:
            yield key, ItemScore(_complete(record["credit"], count), missing=missing)


def _documents(
    records: list[Record], window_count: tuple[str, int] | None, count: int
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
            missing = frozenset(index for part in parts for index in part.get("missing", ()))
            size = parts[0]["bytes"]
            score = ItemScore(None, _complete(nats, count), size, "byte", missing)
            yield Key(data, None, document), score


def _complete(values: list[float | None], count: int) -> list[float | None]:
    if len(values) != count:
        raise ValueError
    return values
