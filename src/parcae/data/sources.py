"""The source files of a corpus: find, open and hash them; which documents are held out.

    corpus = Corpus(find_files(["builtin", "books/", "web/*.parquet"]), validation_fraction=0.005)

Names, folders and globs stand for files in a fixed order. A file may be compressed by gzip or
zstandard.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import hashlib
import io
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import zstandard

from parcae.config import ConfigError
from parcae.files import FileError, reading, sha256
from parcae.schema import require_range

Format = Literal["text", "json-lines", "parquet", "python", "topics"]

FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".raw": "text",
    ".jsonl": "json-lines",
    ".json": "json-lines",
    ".ndjson": "json-lines",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
BUILTIN = "builtin"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_FRACTION = 0.005
MOST_ENTRIES = 1_000_000
"""Files and folders among which the files of a source are looked for."""
ZSTANDARD_PIECE_BYTES = 512
"""Compressed bytes decoded at once; a block of 4 bytes can hold 128 KiB, so at most 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How files are split into documents and decoded."""

    text_field: str = "text"
    """JSON key or Parquet column that holds the text."""
    document_start: str | None = None
    """In text files, a line that matches this regular expression starts a new document."""
    separator: str | None = None
    """In text files, a line equal to this, such as `<|endoftext|>`, ends a document and is dropped;
    spaces around it do not matter."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8 are an error, or become U+FFFD."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.document_start or "")
        except re.error as error:
            raise ConfigError(
                f"document_start: {self.document_start!r} is not a valid regular expression "
                f"({error})."
            ) from None
        if self.separator is not None and len(self.separator.strip().splitlines()) != 1:
            raise ConfigError(
                f"separator: {self.separator!r} is not one line of text. Give the line that "
                "separates documents, such as <|endoftext|>."
            )

    @property
    def splits(self) -> bool:
        """Whether a text file may be several documents."""
        return self.separator is not None or self.document_start is not None

    @property
    def identity(self) -> dict[str, Any]:
        """The options by name, without an unset separator: shards from before it stay valid."""
        return {name: v for name, v in vars(self).items() if name != "separator" or v is not None}


@dataclass(frozen=True)
class SourceFile:
    """A file, and a name that does not change when its folder moves."""

    name: str
    path: Path
    format: Format
    folder: Path | None = None
    """The folder given as a source, if the file was found in one."""

    @property
    def bytes(self) -> int:
        with reading(self.path):
            return self.path.stat().st_size


def find_files(sources: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """Files matched by names, folders and globs, in a fixed order, each once."""
    files: dict[Path, SourceFile] = {}
    for source in sources:
        for file in _expand(source):
            files.setdefault(file.path.resolve(), file)
    if not files:
        raise FileError("sources: none given. Name files, folders or globs, or `builtin`.")
    return tuple(files.values())


def format_of(path: Path) -> Format | None:
    """The format by the file's suffix, without .gz or .zst; None if it is not supported."""
    plain = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return FORMATS.get(plain.suffix)


class Stage(NamedTuple):
    """Files that are read in one pass."""

    files: tuple[SourceFile, ...]
    held_out: bool = False


@dataclass(frozen=True)
class Corpus:
    """Files, how they are read, and which of their documents are held out."""

    files: tuple[SourceFile, ...]
    validation_files: tuple[SourceFile, ...] = ()
    """All their documents are held out, and documents equal to one of them are not trained on."""
    validation_fraction: float = VALIDATION_FRACTION
    """Fraction of the documents to hold out if there are no validation files."""
    options: ReadOptions = field(default_factory=ReadOptions)

    def __post_init__(self) -> None:
        require_range("validation_fraction", self.validation_fraction, at_least=0, below=1)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.all_files)

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return (*self.validation_files, *self.files)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Validation files first: they decide what may be trained on."""
        held_out = Stage(self.validation_files, True)
        return (held_out, Stage(self.files)) if self.validation_files else (Stage(self.files),)

    def check_output(self, folder: Path) -> None:
        """Refuse a folder inside a source, or with a source file in it."""
        out = Path(os.path.realpath(folder))  # `resolve` raises RuntimeError at a link to itself
        for source in {file.folder for file in self.all_files if file.folder}:
            if out.is_relative_to(source.resolve()):
                raise FileError(
                    f"{folder}: inside the source folder {source}, so its files would be read as "
                    "documents. Choose another folder."
                )
        if any(file.path.resolve().is_relative_to(out) for file in self.all_files):
            raise FileError(f"{folder}: contains a source file. Choose another folder.")


def content_key(text: str) -> bytes:
    """A 16-byte hash of the text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def split_of(text: str, validation_fraction: float) -> Split:
    """The split of a text, by its hash only: adding files moves no document, and duplicates are
    in the same split."""
    share = int.from_bytes(content_key(text)[:8], "big") / 2.0**64
    return "validation" if share < validation_fraction else "train"


FileDigests = dict[str, list[Any]]
"""For each path, [[size, modification time in ns], sha256]: plain JSON."""


def digest_files(
    files: Sequence[SourceFile],
    known: FileDigests,
    report: Callable[[int], None] = lambda _bytes_done: None,
) -> FileDigests:
    """Digests of all files. A file whose size and time are those in `known` is not read again."""
    digests: FileDigests = {}
    done = 0
    for file in files:
        report(done)
        stamp, (known_stamp, digest) = file_stamp(file), known.get(str(file.path), [None, None])
        digests[str(file.path)] = [stamp, digest if known_stamp == stamp else sha256(file.path)]
        done += stamp[0]
    return digests


def file_stamp(file: SourceFile) -> list[int]:
    """Size in bytes and modification time in nanoseconds."""
    with reading(file.path):
        status = file.path.stat()
    return [status.st_size, status.st_mtime_ns]


def _expand(source: str | Path) -> list[SourceFile]:
    if source == BUILTIN:
        return _standard_library()
    if str(source).startswith("task:") and not Path(source).exists():
        raise FileError(
            f"{source}: a task is not a file. Name it in a recipe, as the only one of data.sources."
        )
    if not str(source).strip():
        raise FileError("sources: empty name. Name a file, a folder or a glob, or `builtin`.")
    path, search = Path(source), _Search(source)
    with reading(path):
        if path.is_dir():
            return _files_of(path, search)
        if path.is_file():
            return [_source_file(path, path.name)]
    files = [file for match in search.matches() for file in _expand_match(match, search)]
    if files:
        return files
    raise FileError(
        f"{source}: no such file, folder or glob. Relative paths start at the current folder. For "
        "a dataset of the Hugging Face hub, run `parcae data download` and name its folder here."
    )


def _expand_match(path: Path, search: _Search) -> list[SourceFile]:
    """The files of a glob's match; a matched folder without readable files is ignored."""
    with reading(path):
        if not path.is_dir():
            return [_source_file(path, path.name)]
        return _files_of(path, search) if _readable_below(path, search) else []


def _files_of(folder: Path, search: _Search) -> list[SourceFile]:
    paths = _readable_below(folder, search)
    if not paths:
        raise FileError(f"{folder}: no readable file in this folder. {_supported_formats()}")
    return [
        _source_file(p, f"{folder.name}/{p.relative_to(folder).as_posix()}", folder) for p in paths
    ]


def _readable_below(folder: Path, search: _Search) -> list[Path]:
    """Readable files below `folder`, by name."""
    found = (path for parent in search.folders(folder) for path in search.entries(parent))
    return sorted(path for path in found if format_of(path) and not path.is_dir())


class _Search:
    """Looks for the files of a source: in at most `MOST_ENTRIES` files and folders, so that a glob
    such as `/**` ends. Links to folders are followed, each folder once; hidden names are ignored.
    """

    def __init__(self, source: str | Path) -> None:
        self.source, self._left = source, MOST_ENTRIES

    def matches(self) -> list[Path]:
        """The paths that the source, a glob, matches; `**` stands for any number of folders."""
        path = Path(self.source)
        paths = [Path(path.anchor)]
        for part in path.parts[bool(path.anchor) :]:
            if part == "**":
                folders = (folder for path in paths for folder in self.folders(path))
                paths = list(dict.fromkeys(folders))
            elif glob.has_magic(part):
                entries = (entry for path in paths for entry in self.entries(path, part))
                paths = [entry for entry in entries if fnmatch.fnmatch(entry.name, part)]
            else:
                paths = [path / part for path in paths]
        is_match = Path.is_dir if str(self.source).endswith(os.sep) else Path.exists
        return sorted(filter(is_match, dict.fromkeys(paths)))

    def folders(self, folder: Path) -> Iterator[Path]:
        """The folder, and all below it."""
        seen, left = set(), [folder]
        while left:
            folder = left.pop()
            if (real := folder.resolve()) not in seen and folder.is_dir():
                seen.add(real)
                yield folder
                with reading(folder):
                    left += [path for path in self.entries(folder) if path.is_dir()]

    def entries(self, folder: Path, pattern: str = "") -> list[Path]:
        """The paths in a folder; hidden ones only for a pattern that starts with a dot."""
        if not folder.is_dir():
            return []
        with reading(folder):
            names = sorted(os.listdir(folder))
        self._left -= len(names)
        if self._left < 0:
            raise FileError(
                f"{self.source}: more than {MOST_ENTRIES:,} files and folders to search. Name the "
                "folder of the texts."
            )
        return [folder / name for name in names if pattern[:1] == "." or name[:1] != "."]


def _source_file(path: Path, name: str, folder: Path | None = None) -> SourceFile:
    format = format_of(path)
    if format is None:
        raise FileError(f"{path}: unknown file format {path.suffix!r}. {_supported_formats()}")
    file = SourceFile(name, path, format, folder)
    if file.bytes == 0:
        raise FileError(f"{path}: empty file. Remove it from the sources.")
    return file


def _supported_formats() -> str:
    return f"Supported: {', '.join(FORMATS)}, uncompressed or followed by .gz or .zst."


def _standard_library() -> list[SourceFile]:
    """The source files and documentation topics of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = [path for path in paths if path != topics]
    if not paths:
        raise FileError(f"{root}: this Python has no library source files. Name other sources.")
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    files = [SourceFile(f"python/{name}", path, "python") for name, path in named]
    if topics.exists():
        files.append(SourceFile("python/pydoc_data/topics.py", topics, "topics"))
    return files


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The decompressed content, and a function for the fraction of the file that was read."""
    size = path.stat().st_size
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb", buffering=0))
        raw: Any = file
        if path.suffix == ".gz":
            raw = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.suffix == ".zst":
            raw = ZstandardStream(file)
        yield io.BufferedReader(raw, 1 << 20), lambda: file.tell() / size


class ZstandardStream(io.RawIOBase):
    """Decompress zstandard; unlike the library's stream, fail if the file is truncated.

    Input is decoded in small pieces, because a few bytes can decompress to many.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: Any = None
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._output:
            self._input = self._input or memoryview(self._file.read(1 << 16))
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            piece = self._input[:ZSTANDARD_PIECE_BYTES]
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(frame.decompress(piece))
            self._input = self._input[len(piece) - len(frame.unused_data) :]
            self._frame = None if frame.eof else frame
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
