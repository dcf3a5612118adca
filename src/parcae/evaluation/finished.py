"""A finished evaluation read back, item by item.

    read_evaluation("runs/a/evaluation").items["arc_easy"][data, seed, index].credit

Windows of a text depend on the tokenizer and the context length, and one text's are not independent
of each other, so that documents are made whole again and count as the items.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from parcae.evaluation.job import Record
from parcae.evaluation.samples import SETTINGS, read_samples
from parcae.files import FileError, read_json, read_sealed
from parcae.runs.layout import EVALUATION_FOLDER

RESULT = "result.json"
REMEDY = "Name a folder that `parcae eval` wrote, and let it finish there."


class Key(NamedTuple):
    data: str
    seed: int | None
    number: int
    """Of the question, or of the document."""


@dataclass(frozen=True)
class Item:
    credit: list[float | None] | None = None
    """How right the answer is, at each depth, and None at one that is lost; like `nats` None where
    it is not measured."""
    nats: list[float | None] | None = None
    bytes: int | None = None
    """Of a document."""


@dataclass(frozen=True)
class Evaluation:
    folder: Path
    checkpoint: str
    is_looped: bool
    loops: tuple[int, ...]
    context_length: int
    items: Mapping[str, Mapping[Key, Item]]
    """By task."""


def read_evaluation(folder: str | Path) -> Evaluation:
    """Of its folder, or of the run or model it stands in."""
    folder = Path(folder)
    inside = folder / EVALUATION_FOLDER
    if (inside / RESULT).exists():  # a run has a result of its own
        folder = inside
    if not (folder / RESULT).exists():
        raise FileError(f"{folder / RESULT}: no such file. {REMEDY}")
    result, settings = read_json(folder / RESULT), read_sealed(folder / SETTINGS, REMEDY)
    try:
        loops = tuple(result["loops"])
        if list(loops) != settings["loops"]:
            raise FileError(f"{folder}: {RESULT} is not that of the items beside it. {REMEDY}")
        items = {
            task: dict(_items(records, _count(result, task), len(loops)))
            for task, records in _by_task(folder).items()
        }
        return Evaluation(
            folder, result["checkpoint"], result["looped"], loops, result["context_length"], items
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise FileError(f"{folder}: not the result and items of an evaluation. {REMEDY}") from None


def _by_task(folder: Path) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = defaultdict(list)
    for record in read_samples(folder):
        records[record["task"]].append(record)
    return records


def _count(result: Mapping[str, Any], task: str) -> tuple[str, int] | None:
    """Data and number of windows of a text that the result is of."""
    suite = result["suites"].get(task)
    return (suite["sha256"][:12], suite["scored"]) if suite and "scored" in suite else None


def _items(
    records: list[Record], finished: tuple[str, int] | None, depths: int
) -> Iterator[tuple[Key, Item]]:
    if "document" in records[0]:
        yield from _documents(records, finished, depths)
        return
    for record in records:
        key = Key(record["data"], record["seed"], record["index"])
        if "greedy" in record:
            credit = [None if right is None else float(right) for right in record["greedy"]]
            yield key, Item(_whole(credit, depths), _whole(record["nats"], depths))
        else:
            yield key, Item(_whole(record["credit"], depths))


def _documents(
    records: list[Record], finished: tuple[str, int] | None, depths: int
) -> Iterator[tuple[Key, Item]]:
    """Those of which no window is missing, as the last ones of a killed evaluation are."""
    at = {(record["data"], record["index"]): record for record in records}
    for (data, document), windows in groupby(
        sorted(at), key=lambda place: (place[0], at[place]["document"])
    ):
        places = list(windows)
        first, after = places[0][1], places[-1][1] + 1
        parts = [at[place] for place in places]
        begins = parts[0]["bytes"] > 0
        ends = (data, after) in at or (data, after) == finished
        if begins and ends and after - first == len(parts):
            columns = zip(*(part["nats"] for part in parts), strict=True)
            nats = [None if None in column else fsum(column) for column in columns]
            yield Key(data, None, document), Item(None, _whole(nats, depths), parts[0]["bytes"])


def _whole(values: list[float | None], depths: int) -> list[float | None]:
    if len(values) != depths:
        raise ValueError
    return values
