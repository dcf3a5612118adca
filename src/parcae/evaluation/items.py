"""Questions from task files: JSON lines, plain or gzipped, checked field by field.

    {"query": ..., "choices": [...], "gold": 1}               multiple choice
    {"context_options": [...], "continuation": ..., "gold": 0}    schema
    {"context": ..., "continuation": ...}                     language modelling

An error names file, line and field.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from parcae.evaluation.tasks import Kind
from parcae.files import FileError, reading

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One question: a list of alternatives, each a question with an answer, for every kind."""

    questions: tuple[str, ...]
    """The text before the delimiter, of each alternative."""
    answers: tuple[str, ...]
    """The text after the delimiter, of each alternative."""
    gold: int
    """Index of the right alternative."""


class Fields:
    """The JSON object of one line; its errors name file, line and field."""

    def __init__(self, path: Path, line: int, tree: Any) -> None:
        self.path, self.line, self.tree = path, line, tree
        if not isinstance(tree, dict):
            raise self.error("not a JSON object")

    def error(self, problem: str, field: str = "") -> FileError:
        location = f", field {field}" if field else ""
        return FileError(f"{self.path}: line {self.line}{location}: {problem}. Fix the file.")

    def get(self, field: str) -> Any:
        if field not in self.tree:
            raise self.error("missing", field)
        return self.tree[field]

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str):
            raise self.error(f"{_short(value)} is not a string", field)
        self._check_characters(value, field)
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.get(field)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(f"{_short(value)} is not a list of strings", field)
        if len(value) < 2:
            raise self.error(f"{len(value)} entries; at least 2 are needed", field)
        for text in value:
            self._check_characters(text, field)
        return tuple(value)

    def index(self, field: str, count: int) -> int:
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.error(f"{_short(value)} is not an index from 0 to {count - 1}", field)
        return value

    def _check_characters(self, text: str, field: str) -> None:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise self.error("contains half of a surrogate pair", field)


def read_items(path: Path, kind: Kind) -> list[Item]:
    return read_lines(path, READERS[kind])


def read_lines(path: Path, read: Callable[[Fields], T]) -> list[T]:
    """`read` applied to every line that is not blank."""
    items = [read(Fields(path, line, _parse(path, line, text))) for line, text in _lines(path)]
    if not items:
        raise FileError(f"{path}: contains no question. Is it truncated?")
    return items


def _multiple_choice(fields: Fields) -> Item:
    query, choices = fields.text("query"), fields.texts("choices")
    return Item((query,) * len(choices), choices, fields.index("gold", len(choices)))


def _schema(fields: Fields) -> Item:
    contexts, continuation = fields.texts("context_options"), fields.text("continuation")
    return Item(contexts, (continuation,) * len(contexts), fields.index("gold", len(contexts)))


def _language_modeling(fields: Fields) -> Item:
    context, continuation = fields.text("context"), fields.text("continuation")
    if not continuation.strip():
        raise fields.error("nothing to predict", "continuation")
    return Item((context,), (continuation,), 0)


READERS: dict[Kind, Callable[[Fields], Item]] = {
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "language_modeling": _language_modeling,
}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1; decoded one by one, so that an error names its line."""
    try:
        with reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
            lines: Sequence[bytes] = stream.read().split(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileError(f"{path}: not a complete gzip file ({error}). Download it again.") from None
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(
                f"{path}: line {number}: not UTF-8 ({error.reason} at byte {error.start}). "
                "Convert the file to UTF-8."
            ) from None
        if text.strip():
            yield number, text


def _parse(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: line {line}: not valid JSON ({error}). Fix the file.") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
