"""Read documents from text, JSON lines and Parquet files, uncompressed, gzip or zstandard.

    for document in read_documents(files, ReadOptions(text_field="content")):
        document.text

The suffixes of each format are in `sources.FORMATS`.

A text file holds one document, or one from each line that matches `document_start`, or those that
lines equal to `separator` separate; JSON lines and Parquet hold one per record. Files are streamed,
so memory does not grow with their size. The order is fixed, and a `ReadPosition` says where to
continue. Text that is not valid UTF-8 is an error that names the file and the line or row, or is
replaced if the options say so.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import zstandard

from parcae.data.sources import Format, ReadOptions, SourceFile, open_compressed
from parcae.files import FileError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are not UTF-8."""
LONGEST_TEXT = 1 << 23
"""Characters. The rest of a longer text file is read as further documents."""
LONGEST_RECORD_BYTES = 3 << 24
PARQUET_BATCH_BYTES = 1 << 22


class ReadPosition(NamedTuple):
    """The next document to read: index of its file, and index of the document in the file."""

    file: int = 0
    document: int = 0


BEGINNING = ReadPosition()


class Document(NamedTuple):
    text: str
    next_position: ReadPosition
    """Where to continue after this document."""
    fraction_read: float
    """Fraction of its file that has been read, from 0 to 1."""


class Record(NamedTuple):
    """A document's text, and the fraction of its file that has been read."""

    text: str
    fraction_read: float


def read_documents(
    files: Sequence[SourceFile],
    options: ReadOptions | None = None,
    start: ReadPosition = BEGINNING,
) -> Iterator[Document]:
    """Yield every document of the files, from `start`.

    Documents without text are included, so that positions count them; skip them if not `text`.
    """
    options = options or ReadOptions()
    for index in range(start.file, len(files)):
        file = files[index]
        document = start.document if index == start.file else 0
        for text, fraction_read in read_file(file.path, file.format, options, document):
            document += 1
            yield Document(text, ReadPosition(index, document), fraction_read)
        if document == 0 and file.format != "python":
            raise FileError(f"{file.path}: contains no document. Remove it from the sources.")


def bytes_read(files: Sequence[SourceFile]) -> Callable[[Document], float]:
    """A function that returns the bytes of the files that were read up to a document's end."""
    sizes = [file.bytes for file in files]
    starts = list(accumulate(sizes, initial=0))

    def read_until(document: Document) -> float:
        file = document.next_position.file
        return starts[file] + document.fraction_read * sizes[file]

    return read_until


def read_file(path: Path, format: Format, options: ReadOptions, skip: int = 0) -> Iterator[Record]:
    """Yield the documents of one file, without the first `skip`."""
    reader = READERS[format]
    try:
        yield from reader(path, options, skip)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        if "too much memory" in str(error):
            raise FileError(
                f"{path}: its zstandard window is larger than 128 MiB. Compress it again without "
                "--long, or with --long=27."
            ) from None
        raise FileError(f"{path}: damaged or truncated ({error}). Download it again.") from None
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(f"{path}, line {_invalid_line(path)}", error)) from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        problem = error.strerror or error
        raise FileError(f"{path}: cannot be read ({problem}). Check its permissions.") from None


def _refuse_utf16(path: Path) -> None:
    """An error for a file in UTF-16 or UTF-32: its zero bytes would pass as UTF-8."""
    with open_compressed(path) as (stream, _):
        start = stream.read(1024)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or start.count(0) > len(start) / 4:
        raise FileError(
            f"{path}: not UTF-8, but probably UTF-16. Convert it, as "
            "`iconv -f utf-16 -t utf-8 FILE > NEW` does."
        )


def _invalid_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    number = 0
    with open_compressed(path) as (stream, _):
        while line := stream.readline(LONGEST_RECORD_BYTES):
            number += 1
            try:
                line.decode()
            except UnicodeDecodeError:
                break
    return number


def _not_utf8(location: object, error: UnicodeDecodeError) -> str:
    return (
        f"{location}: not UTF-8 (byte 0x{error.object[error.start]:02x}, {error.reason}). Convert "
        "it, as `iconv -f latin1 -t utf-8 FILE > NEW` does from Latin-1, or lose its invalid bytes "
        "with `parcae data prepare --encoding-errors replace`."
    )


def _read_text(path: Path, options: ReadOptions, skip: int) -> Iterator[Record]:
    _refuse_utf16(path)
    starts = re.compile(options.document_start).search if options.document_start else None
    with open_compressed(path) as (stream, fraction_read):
        text = io.TextIOWrapper(stream, "utf-8-sig", errors=options.encoding_errors, newline="")
        for number, document in enumerate(_join_lines(path, text, starts, options.separator)):
            if number >= skip:
                yield Record(document, fraction_read())


def _join_lines(
    path: Path, text: IO[str], starts: Callable[[str], Any] | None, separator: str | None
) -> Iterator[str]:
    """The documents of a text file; what is blank between two separators is none."""
    mark = None if separator is None else separator.strip()
    lines: list[str] = []
    characters = number = inside = 0
    separated = False
    while line := text.readline(LONGEST_TEXT):
        number += 1
        is_separator = mark is not None and line.strip() == mark
        is_start = starts is not None and starts(line.rstrip("\r\n"))
        if lines and (is_separator or is_start or characters + len(line) > LONGEST_TEXT):
            if mark is None or any(not kept.isspace() for kept in lines):
                yield "".join(lines)
            lines, characters = [], 0
        if is_separator:
            separated = True
            continue
        if mark is not None and not inside and mark in line:
            inside = number
        lines.append(line)
        characters += len(line)
    if inside and not separated:
        raise FileError(
            f"{path}, line {inside}: {mark!r} is inside a line, and no line consists of it alone. "
            "Put the separator on lines of its own, or omit it."
        )
    if lines and (mark is None or any(not kept.isspace() for kept in lines)):
        yield "".join(lines)


def _read_json_lines(path: Path, options: ReadOptions, skip: int) -> Iterator[Record]:
    _refuse_utf16(path)
    seen = 0
    number = 0
    with open_compressed(path) as (stream, fraction_read):
        while line := stream.readline(LONGEST_RECORD_BYTES):
            number += 1
            location = f"{path}, line {number}"
            if len(line) == LONGEST_RECORD_BYTES:
                raise FileError(
                    f"{location}: longer than {LONGEST_RECORD_BYTES >> 20} MiB. Split it."
                )
            if line.isspace():
                continue
            seen += 1
            if seen > skip:
                yield Record(_text_of(line, options, location), fraction_read())


def _text_of(line: bytes, options: ReadOptions, location: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig", options.encoding_errors))
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(location, error)) from None
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{location}: not valid JSON ({error}). Expected one object on each line; a list of "
            "objects over several lines is not supported."
        ) from None
    if not isinstance(record, dict):
        raise FileError(
            f"{location}: {type(record).__name__} instead of an object. Write one document per "
            f'line, as {{"{options.text_field}": "..."}}.'
        )
    if options.text_field not in record:
        raise FileError(_no_field(location, options.text_field, record))
    text = record[options.text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        others = [name for name, value in record.items() if isinstance(value, str)]
        kind = type(text).__name__
        raise FileError(_not_text(f"{location}: {options.text_field!r}", kind, others))
    return _well_formed(text)


def _no_field(location: object, field: str, fields: Any) -> str:
    names = ", ".join(map(str, fields)) or "nothing"
    return f"{location}: no field {field!r}; it has {names}. Choose one with `text_field`."


def _not_text(what: str, kind: object, others: list[str]) -> str:
    remedy = f"Choose a text field with `text_field`: {', '.join(others)}."
    return f"{what} is {kind}, not text. {remedy if others else 'There is no text field.'}"


def _well_formed(text: str) -> str:
    """Replace unpaired surrogates, which JSON can escape but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_parquet(path: Path, options: ReadOptions, skip: int) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            _check_text_field(path, file.schema_arrow, options.text_field)
            metadata = file.metadata
        with pq.ParquetFile(
            path,
            metadata=metadata,
            buffer_size=1 << 20,
            pre_buffer=False,
            read_dictionary=[options.text_field],  # what a small file repeats is in memory once
        ) as file:
            yield from _read_row_groups(path, file, options, skip)
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:300]
        raise FileError(f"{path}: damaged, or not Parquet ({reason}). Download it again.") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise FileError(
            f"{path}: damaged, or not readable ({reason}). Download it again."
        ) from None


def _check_text_field(path: Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        raise FileError(_no_field(path, field, schema.names))
    kind = schema.field(field).type
    if not _is_text(kind):
        others = [field.name for field in schema if _is_text(field.type)]
        raise FileError(_not_text(f"{path}: column {field!r}", kind, others))


def _read_row_groups(path: Path, file: Any, options: ReadOptions, skip: int) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.compute as pc

    row = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        batches = file.iter_batches(
            _rows_per_batch(file, group), [group], columns=[options.text_field], use_threads=False
        )
        for batch in batches:
            column = batch.column(0)
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            texts = column.dictionary.cast(pa.large_binary())
            longest = pc.max(pc.binary_length(texts)).as_py() or 0  # pyright: ignore
            if longest > LONGEST_RECORD_BYTES:
                limit = LONGEST_RECORD_BYTES >> 20
                raise FileError(f"{path}, near row {row}: longer than {limit} MiB. Split it.")
            for index in column.indices.to_pylist():
                row += 1
                if row > skip:
                    value = None if index is None else texts[index].as_py()
                    text = _decode(value, options, f"{path}, row {row}")
                    yield Record(text, row / file.metadata.num_rows)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    tests += (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _rows_per_batch(file: Any, group: int) -> int:
    """Rows that take about `PARQUET_BATCH_BYTES`, by the group's mean row size."""
    metadata = file.metadata.row_group(group)
    mean_bytes = metadata.total_byte_size / max(1, metadata.num_rows)
    return int(min(max(PARQUET_BATCH_BYTES / max(mean_bytes, 1), 1), 1024))


def _decode(value: bytes | None, options: ReadOptions, location: str) -> str:
    try:
        return (value or b"").decode("utf-8", options.encoding_errors)
    except UnicodeDecodeError as error:
        raise FileError(_not_utf8(location, error)) from None


def _read_python(path: Path, options: ReadOptions, skip: int) -> Iterator[Record]:
    """A module is one document; an empty file is none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not skip:
        yield Record(text, 1.0)


def _read_topics(path: Path, options: ReadOptions, skip: int) -> Iterator[Record]:
    """The topics of Python's interactive help, by name."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    for number in range(skip, len(names)):
        yield Record(topics[names[number]], (number + 1) / len(names))


READERS: dict[Format, Callable[[Path, ReadOptions, int], Iterator[Record]]] = {
    "text": _read_text,
    "json-lines": _read_json_lines,
    "parquet": _read_parquet,
    "python": _read_python,
    "topics": _read_topics,
}
