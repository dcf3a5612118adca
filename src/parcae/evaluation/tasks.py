"""The tasks of CORE and CORE-Extended: their table, their files, the questions in them, downloads.

    core_extended()                  all 46 tasks, from tasks.csv; 22 of them are CORE
    locate(task, folder)             the task's file below a folder of task files, or None
    read_items(path, task.kind)      its questions; an error names file, line and field
    download_tasks(files, folder)    resumable, verified by the sha256 in tasks.csv

Files are JSON lines, plain or gzipped:

    {"query": ..., "choices": [...], "gold": 1}               multiple choice
    {"context_options": [...], "continuation": ..., "gold": 0}    schema
    {"context": ..., "continuation": ...}                     language modelling

Scores are centred: (accuracy - baseline) / (1 - baseline), where the baseline is the accuracy of
guessing. Two tables of baselines have been published, which differ where choices were counted
differently. The reference release uses nanochat's.
"""

from __future__ import annotations

import csv
import gzip
import importlib.resources
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args
from urllib.parse import urlsplit

from parcae.config import ConfigError
from parcae.data.downloads import RemoteFile, Report, fetch, is_intact
from parcae.files import FileError, lock_folder, path_inside, reading
from parcae.recipe import suggest

T = TypeVar("T")

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Baselines = Literal["nanochat", "dclm"]
BASELINES: tuple[Baselines, ...] = get_args(Baselines)
SHORT_KINDS: dict[Kind, str] = {"multiple_choice": "MC", "schema": "S", "language_modeling": "LM"}

FOLDERS = ("", "core_eval", "eval_data", "eval_bundle/eval_data", "local_data")
"""Where the known collections have their files, below the folder of task files."""
ENDINGS = ("", ".gz")
LARGEST_FILE = 1 << 28
"""Bytes of a file of questions or of WikiText, uncompressed; those in use have less than 2^25."""
COLLECTION = "https://github.com/mosaicml/llm-foundry/raw/8c8dd48/scripts/eval/local_data"
"""Where files are downloaded from: the llm-foundry repository at a fixed commit."""
NO_CHECKSUM = "no known checksum to verify it by"
ELSEWHERE = "not part of this collection"


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
    """Checksum of `file`, uncompressed; None if unknown."""
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
    text = (importlib.resources.files("parcae.evaluation") / "tasks.csv").read_text(
        encoding="utf-8"
    )
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
        raise FileError(
            f"{folder}: no such folder. Give the folder of task files with `task_data`."
        )
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


def read_content(path: Path) -> bytes:
    """The content of a file, plain or gzipped; a small gzip file can hold any number of bytes."""
    with reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
        try:
            content = stream.read(LARGEST_FILE + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FileError(
                f"{path}: not a complete gzip file ({error}). Download it again."
            ) from None
    if len(content) > LARGEST_FILE:
        raise FileError(f"{path}: more than {LARGEST_FILE >> 20} MiB of data. Give a part of it.")
    return content


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1; decoded one by one, so that an error names its line."""
    for number, line in enumerate(read_content(path).split(b"\n"), start=1):
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


@dataclass(frozen=True)
class TaskFiles:
    files: tuple[RemoteFile, ...]
    omitted: dict[str, tuple[str, ...]]
    """Names of tasks that cannot be downloaded, by reason."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def files_of_tasks(tasks: Iterable[Task], elsewhere: Iterable[str] = ()) -> TaskFiles:
    """The files of some tasks; `elsewhere` are names of tasks that the collection does not have."""
    files: dict[str, RemoteFile] = {}
    unknown = []
    for task in tasks:
        if task.sha256 is None or task.bytes is None:
            unknown.append(task.name)
        else:  # several tasks may share a file
            files[task.file] = RemoteFile(task.file, task.bytes, task.sha256)
    omitted = {NO_CHECKSUM: tuple(unknown), ELSEWHERE: tuple(elsewhere)}
    return TaskFiles(tuple(files.values()), {why: names for why, names in omitted.items() if names})


def download_tasks(
    files: Sequence[RemoteFile],
    folder: str | Path,
    *,
    collection: str = COLLECTION,
    report: Report = lambda _file, _bytes: None,
) -> None:
    """Download what is missing in `folder`; an interrupted download resumes when called again.
    `collection` is the address of the folder of files, such as a mirror."""
    folder = Path(folder)
    address = urlsplit(collection)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"mirror: {collection!r} is not an http(s) address such as {COLLECTION}.")
    with lock_folder(folder):
        _refuse_other_files(files, folder)
        for file in files:
            url = f"{collection.rstrip('/')}/{file.path}"
            fetch(url, file, path_inside(folder, file.path), report=report)


def _refuse_other_files(files: Sequence[RemoteFile], folder: Path) -> None:
    """Refuse to overwrite a file of the same name with another content: a download gets its name
    only when it is complete and verified, so the file has another origin."""
    paths = ((folder / file.path, file) for file in files)
    others = [str(path) for path, file in paths if path.exists() and not is_intact(path, file)]
    if others:
        raise FileError(
            f"{', '.join(others)}: exists with another content than tasks.csv expects. Move it "
            "away, or choose another folder."
        )
