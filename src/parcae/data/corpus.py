"""Where documents come from, and which of them are held out.

    files = find_files(["builtin", "books/", "web/*.parquet"])
    for document in read_documents(files, Reading()):
        split = split_of(document.text, validation_fraction=0.005)

Text files hold one document each, or one from every line that matches `document_start`; JSON
lines and Parquet hold one per record. Everything is read as a stream, so memory does not grow
with the files. The order is fixed, and a `Position` names where to go on.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from parcae.data import readers
from parcae.data.readers import Reading
from parcae.files import FileError, reading

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
BUILTIN = "builtin"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A file under a name that does not change when its folder moves."""

    name: str
    path: Path
    format: readers.Format
    folder: Path | None = None
    """The folder that was named as a source, where the file was found in one."""

    @property
    def bytes(self) -> int:
        with reading(self.path):
            return self.path.stat().st_size


class Position(NamedTuple):
    """The first document not yet read: the number of its file and its number there."""

    file: int = 0
    document: int = 0


BEGINNING = Position()


class Document(NamedTuple):
    text: str
    behind: Position
    """Where to go on after this document."""
    share_of_file: float
    """How much of its file has been read, from 0 to 1: for those who wait."""


def find_files(sources: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """The files behind names, folders and globs, in a fixed order, each once."""
    found: dict[Path, SourceFile] = {}
    for source in sources:
        for file in _expand(source):
            found.setdefault(file.path.resolve(), file)
    if not found:
        raise FileError("no source was named. Name files, folders or globs, or `builtin`.")
    return tuple(found.values())


def read_documents(
    files: Sequence[SourceFile], reading: Reading, start: Position = BEGINNING
) -> Iterator[Document]:
    """Every document from `start` on.

    Those without text come too, so that positions can be counted; skip them if not `text`.
    """
    for number in range(start.file, len(files)):
        file = files[number]
        document = start.document if number == start.file else 0
        for text, share in readers.read(file.path, file.format, reading, document):
            document += 1
            yield Document(text, Position(number, document), share)
        if document == 0 and file.format != "python":
            raise FileError(f"{file.path}: no document in it. Remove it from the sources.")


def bytes_read(files: Sequence[SourceFile]) -> Callable[[Document], float]:
    """A function that says, of a document, how many bytes of the files lie before its end."""
    sizes = [file.bytes for file in files]
    starts = list(accumulate(sizes, initial=0))

    def behind(document: Document) -> float:
        file = document.behind.file
        return starts[file] + document.share_of_file * sizes[file]

    return behind


def content_key(text: str) -> bytes:
    """Documents with the same text have the same key."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def split_of(text: str, validation_fraction: float) -> Split:
    """Decided by the text alone: adding files moves nothing, and duplicates stay together."""
    share = int.from_bytes(content_key(text)[:8], "big") / 2.0**64
    return "validation" if share < validation_fraction else "train"


def _expand(source: str | Path) -> list[SourceFile]:
    if source == BUILTIN:
        return _standard_library()
    if not str(source).strip():
        raise FileError("a source without a name. Name a file, a folder or a glob, or `builtin`.")
    path = Path(source)
    with reading(path):
        if path.is_dir():
            return _files_of(path)
        if path.is_file():
            return [_source_file(path, path.name)]
        matches = sorted(Path(name) for name in glob.glob(str(source), recursive=True))
    files = [file for match in matches for file in _expand_match(match)]
    if files:
        return files
    raise FileError(
        f"{source}: no such file, folder or glob. For a dataset of the Hugging Face hub, "
        "run `parcae data download` first and name its folder here."
    )


def _expand_match(path: Path) -> list[SourceFile]:
    """A folder among the matches is read like one that was named; one with nothing to read is not
    what was meant."""
    with reading(path):
        if not path.is_dir():
            return [_source_file(path, path.name)]
        return _files_of(path) if _readable_below(path) else []


def _files_of(folder: Path) -> list[SourceFile]:
    paths = _readable_below(folder)
    if not paths:
        raise FileError(f"{folder}: no file to read in this folder. {_readable()}")
    return [
        _source_file(p, f"{folder.name}/{p.relative_to(folder).as_posix()}", folder) for p in paths
    ]


def _readable_below(folder: Path) -> list[Path]:
    """By name. Links to folders are followed, each folder once; what is hidden, such as the record
    of a download, is not a document."""
    found: list[Path] = []
    seen: set[Path] = set()

    def visit(here: Path) -> None:
        if (real := here.resolve()) in seen:
            return
        seen.add(real)
        with reading(here):
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = here / entry.name
            with reading(path):
                if entry.is_dir():
                    visit(path)
                elif readers.format_of(path):
                    found.append(path)

    visit(folder)
    return sorted(found)


def _source_file(path: Path, name: str, folder: Path | None = None) -> SourceFile:
    format = readers.format_of(path)
    if format is None:
        raise FileError(f"{path}: its suffix says nothing we can read. {_readable()}")
    file = SourceFile(name, path, format, folder)
    if file.bytes == 0:
        raise FileError(f"{path}: empty. Remove it from the sources.")
    return file


def _readable() -> str:
    return f"Use {', '.join(readers.FORMATS)}, plain or with .gz or .zst behind."


def _standard_library() -> list[SourceFile]:
    """The running interpreter's own library and documentation topics."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"
    sources: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    sources = [path for path in sources if path != topics]
    if not sources:
        raise FileError(f"{root}: this Python came without its library's source. Name other files.")
    named = sorted((path.relative_to(root).as_posix(), path) for path in sources)
    files = [SourceFile(f"python/{name}", path, "python") for name, path in named]
    if topics.exists():
        files.append(SourceFile("python/pydoc_data/topics.py", topics, "topics"))
    return files
