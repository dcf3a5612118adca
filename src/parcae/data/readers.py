"""One file to its documents: text, JSON lines, Parquet; plain, gzip or zstandard; as streams.

Text that is not well formed is an error that names the place, or is replaced where asked.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import zstandard

from parcae.config import ConfigError
from parcae.files import FileError

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

LONGEST_TEXT = 1 << 23
"""Characters. What is longer in a text file goes on as a further document."""
LONGEST_RECORD_BYTES = 3 << 24
PARQUET_BATCH_BYTES = 1 << 22
ZSTANDARD_PIECE_BYTES = 512
"""Of compressed input; a block of 4 bytes can stand for 128 KiB, so this may become 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are turned into documents."""

    text_field: str = "text"
    """The key of a JSON record, or the column of a Parquet file, that holds the text."""
    document_start: str | None = None
    """In text files, a line that this regular expression matches starts a new document."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: an error, or U+FFFD in their place."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.document_start or "")
        except re.error as error:
            raise ConfigError(
                f"document_start: {self.document_start!r} is not a regular expression ({error})."
            ) from None


class Record(NamedTuple):
    """A document's text, and how much of its file has been read: from 0 to 1."""

    text: str
    share: float


def format_of(path: Path) -> Format | None:
    plain = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return FORMATS.get(plain.suffix)


def read(path: Path, format: Format, reading: Reading, skip: int = 0) -> Iterator[Record]:
    """The documents of one file behind the first `skip`."""
    reader = READERS[format]
    try:
        yield from reader(path, reading, skip)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        if "too much memory" in str(error):
            raise FileError(
                f"{path}: its zstandard window is above 128 MiB. Compress it anew, without --long "
                "or with --long=27."
            ) from None
        raise FileError(f"{path}: damaged or truncated ({error}). Fetch it again.") from None
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(path, error)) from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        problem = error.strerror or error
        raise FileError(f"{path}: cannot be read ({problem}). Check its permissions.") from None


def _not_utf8(place: object, error: UnicodeDecodeError) -> str:
    return (
        f"{place}: not UTF-8 (byte 0x{error.object[error.start]:02x}, {error.reason}). "
        "Convert it, or use --encoding-errors replace."
    )


def _read_text(path: Path, reading: Reading, skip: int) -> Iterator[Record]:
    starts = re.compile(reading.document_start).search if reading.document_start else None
    with _open(path) as (stream, share_read):
        text = io.TextIOWrapper(stream, "utf-8-sig", errors=reading.encoding_errors, newline="")
        for number, document in enumerate(_join_lines(text, starts)):
            if number >= skip:
                yield Record(document, share_read())


def _join_lines(text: IO[str], starts: Callable[[str], Any] | None) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    while line := text.readline(LONGEST_TEXT):
        is_start = starts is not None and starts(line.rstrip("\r\n"))
        if lines and (is_start or characters + len(line) > LONGEST_TEXT):
            yield "".join(lines)
            lines, characters = [], 0
        lines.append(line)
        characters += len(line)
    if lines:
        yield "".join(lines)


def _read_json_lines(path: Path, reading: Reading, skip: int) -> Iterator[Record]:
    seen = 0
    number = 0
    with _open(path) as (stream, share_read):
        while line := stream.readline(LONGEST_RECORD_BYTES):
            number += 1
            place = f"{path}, line {number}"
            if len(line) == LONGEST_RECORD_BYTES:
                raise FileError(f"{place}: longer than {LONGEST_RECORD_BYTES >> 20} MiB. Split it.")
            if line.isspace():
                continue
            seen += 1
            if seen > skip:
                yield Record(_text_of(line, reading, place), share_read())


def _text_of(line: bytes, reading: Reading, place: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig", reading.encoding_errors))
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(place, error)) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{place}: not a JSON record ({error}). Each line is one.") from None
    if not isinstance(record, dict):
        raise FileError(
            f"{place}: a record is an object, not {type(record).__name__}. Write each document as "
            f'{{"{reading.text_field}": "..."}} on a line of its own.'
        )
    if reading.text_field not in record:
        raise FileError(_no_field(place, reading.text_field, record))
    text = record[reading.text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        others = [name for name, value in record.items() if isinstance(value, str)]
        kind = type(text).__name__
        raise FileError(_not_text(f"{place}: {reading.text_field!r}", kind, others))
    return _well_formed(text)


def _no_field(place: object, field: str, fields: Any) -> str:
    names = ", ".join(map(str, fields)) or "nothing"
    return f"{place}: no field {field!r}; it has {names}. Choose one with --text-field."


def _not_text(what: str, kind: object, others: list[str]) -> str:
    remedy = f"Choose one that is with --text-field: {', '.join(others)}."
    return f"{what} is not text but {kind}. {remedy if others else 'Nothing else in it is either.'}"


def _well_formed(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no UTF-8 text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_parquet(path: Path, reading: Reading, skip: int) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from _read_row_groups(path, file, reading, skip)
    except pa.ArrowException as error:
        raise FileError(f"{path}: damaged, or not Parquet ({error}). Fetch it again.") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: damaged, or not readable ({error}). Fetch it again.") from None


def _read_row_groups(path: Path, file: Any, reading: Reading, skip: int) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = file.schema_arrow
    if reading.text_field not in schema.names:
        raise FileError(_no_field(path, reading.text_field, schema.names))
    kind = schema.field(reading.text_field).type
    if not _is_text(kind):
        others = [field.name for field in schema if _is_text(field.type)]
        raise FileError(_not_text(f"{path}: column {reading.text_field!r}", kind, others))
    row = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        batches = file.iter_batches(
            _rows_per_batch(file, group), [group], columns=[reading.text_field], use_threads=False
        )
        for batch in batches:
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            column = column.cast(pa.large_binary())
            longest = pc.max(pc.binary_length(column)).as_py() or 0  # pyright: ignore
            if longest > LONGEST_RECORD_BYTES:
                limit = LONGEST_RECORD_BYTES >> 20
                raise FileError(f"{path}, near row {row}: longer than {limit} MiB. Split it.")
            for value in column:
                row += 1
                if row > skip:
                    text = _decode(value.as_py(), reading, f"{path}, row {row}")
                    yield Record(text, row / file.metadata.num_rows)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    tests += (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _rows_per_batch(file: Any, group: int) -> int:
    """As many as fit the memory we give a batch, judged by the group's mean."""
    metadata = file.metadata.row_group(group)
    mean_bytes = metadata.total_byte_size / max(1, metadata.num_rows)
    return int(min(max(PARQUET_BATCH_BYTES / max(mean_bytes, 1), 1), 1024))


def _decode(value: bytes | None, reading: Reading, place: str) -> str:
    try:
        return (value or b"").decode("utf-8", reading.encoding_errors)
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(place, error)) from None


def _read_python(path: Path, reading: Reading, skip: int) -> Iterator[Record]:
    """A module is one document; an empty `__init__.py` is none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not skip:
        yield Record(text, 1.0)


def _read_topics(path: Path, reading: Reading, skip: int) -> Iterator[Record]:
    """The topics of the interactive help, by name."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    for number in range(skip, len(names)):
        yield Record(topics[names[number]], (number + 1) / len(names))


READERS: dict[Format, Callable[[Path, Reading, int], Iterator[Record]]] = {
    "text": _read_text,
    "json-lines": _read_json_lines,
    "parquet": _read_parquet,
    "python": _read_python,
    "topics": _read_topics,
}


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The file's content, and a function that says how much of the file has been read."""
    size = path.stat().st_size
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb", buffering=0))
        raw: Any = file
        if path.suffix == ".gz":
            raw = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.suffix == ".zst":
            raw = _ZstandardStream(file)
        yield io.BufferedReader(raw, 1 << 20), lambda: file.tell() / size


class _ZstandardStream(io.RawIOBase):
    """zstandard's own stream takes a truncated file for a whole one; this one does not.

    Input is fed in small pieces, since a few bytes of repetitive text stand for a great many.
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
