"""Files to documents: every format gives the same texts, from any position, or a clear error."""

from __future__ import annotations

import gzip
import json
import re
import resource
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.data import readers
from parcae.data.readers import ReadPosition, bytes_read, read_documents
from parcae.data.sources import ReadOptions, find_files, open_compressed
from parcae.files import FileError

TEXTS = ["first", "zwei\nZeilen", "", "três 🙂 \u200d\0 end", "x" * 3000, "last"]


def compress(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        half = len(data) // 2  # two frames, as tools that append write them
        data = b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))
    path.write_bytes(data)
    return path


def write_records(path: Path, texts: list[str], field: str = "text") -> Path:
    if ".parquet" in path.name:
        table = pa.table({"id": list(range(len(texts))), field: texts})
        pq.write_table(table, path, row_group_size=2)
        return path
    lines = [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
    return compress(path, ("\n".join(lines) + "\n\n").encode())


def texts_of(path: Path, **reading: str) -> list[str]:
    return [d.text for d in read_documents(find_files([path]), ReadOptions(**reading))]  # type: ignore[arg-type]


RECORD_NAMES = ["a.jsonl", "a.json.gz", "a.jsonl.zst", "a.ndjson", "a.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORD_NAMES)
def test_records_come_back_from_any_position(tmp_path: Path, name: str) -> None:
    files = find_files([write_records(tmp_path / name, TEXTS)])
    whole = list(read_documents(files, ReadOptions()))
    assert [document.text for document in whole] == TEXTS
    for place, document in enumerate(whole):
        rest = read_documents(files, ReadOptions(), document.next_position)
        assert [later.text for later in rest] == TEXTS[place + 1 :]
    shares = [document.fraction_read for document in whole]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1
    assert bytes_read(files)(whole[-1]) <= files[0].bytes


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.raw", "a.raw.zst"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    text = "\ufeffone\r\ntwo\rthree\n\n\0end"
    path = compress(tmp_path / name, text.encode())
    assert texts_of(path) == [text.lstrip("\ufeff")]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="#a \n", max_size=60))
def test_document_start_splits_like_a_regular_expression(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    if not text:
        return
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    oracle = [part for part in re.split(r"(?m)^(?=#)", text) if part]
    assert texts_of(path, document_start="^#") == oracle


def test_a_giant_text_is_read_as_further_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_TEXT", 10)
    path = tmp_path / "a.txt"
    path.write_text("short\nlines\nand one without any break at all")
    parts = texts_of(path)
    assert "".join(parts) == path.read_text()
    assert max(map(len, parts)) <= 10


def test_many_files_keep_their_order_and_positions(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_records(tmp_path / f"{number}.jsonl", [f"{number}-{i}" for i in range(3)])
    files = find_files([tmp_path, tmp_path / "1.jsonl", str(tmp_path / "*.jsonl")])
    assert [file.path.name for file in files] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    expected = [f"{n}-{i}" for n in range(3) for i in range(3)]
    assert [d.text for d in read_documents(files, ReadOptions())] == expected
    later = read_documents(files, ReadOptions(), ReadPosition(1, 2))
    assert [d.text for d in later] == expected[5:]


def test_another_field(tmp_path: Path) -> None:
    for name in RECORD_NAMES:
        path = write_records(tmp_path / name, ["body"], field="content")
        assert texts_of(path, text_field="content") == ["body"]
        remedy = "Choose one with `text_field`"
        with pytest.raises(FileError, match=rf"no field 'text'; it has id, content.*{remedy}"):
            texts_of(path)


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b \\ud83d\\ude42"}\n')
    assert texts_of(path) == ["a\ufffd b 🙂"]


def test_the_error_names_the_line_and_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("eins\nzwei\nfünf\n".encode("latin1"))
    with pytest.raises(FileError, match=r"a\.txt, line 3: not UTF-8.*latin1"):
        texts_of(path)
    for name, encoding in (("a.txt", "utf-16"), ("a.txt", "utf-16-le"), ("a.jsonl", "utf-16")):
        path = tmp_path / name
        path.write_bytes('{"text": "eins"}\n'.encode(encoding))
        for errors in ("strict", "replace"):
            with pytest.raises(FileError, match=rf"{name}: .*UTF-16.*iconv -f utf-16"):
                texts_of(path, encoding_errors=errors)


BAD_UTF8 = b"good \xff bad"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_not_utf8_is_an_error_or_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([BAD_UTF8], pa.binary())}), path)
    else:
        path.write_bytes(BAD_UTF8 if name == "a.txt" else b'{"text": "' + BAD_UTF8 + b'"}')
    with pytest.raises(
        FileError, match=rf"{name}.*not UTF-8 \(byte 0xff.*--encoding-errors replace`"
    ):
        texts_of(path)
    assert texts_of(path, encoding_errors="replace") == ["good \ufffd bad"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", r"a\.txt: empty file\. Remove it"),
        ("a.jsonl", b"\n \n", r"contains no document"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"line 2: not valid JSON"),
        (
            "a.jsonl",
            b'["a"]',
            r'line 1: list instead of an object.*as \{"text": "..."\}',
        ),
        (
            "a.jsonl",
            b'{"text": 5, "body": "x"}',
            r"line 1: 'text' is int, not text.*`text_field`: body",
        ),
        ("a.jsonl", b'{"text": ["x"]}', r"line 1: 'text' is list, not text. There is no text"),
        ("a.jsonl", b'{"id": ' + b"9" * 5000 + b"}", r"line 1: not valid JSON"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: damaged, or not Parquet"),
        ("a.pdf", b"%PDF", r"a\.pdf: unknown file format.*\.jsonl"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(FileError, match=message):
        texts_of(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_is_never_taken_for_a_whole_one(tmp_path: Path, name: str) -> None:
    path = write_records(tmp_path / name, [f"text {i}" for i in range(500)])
    data = path.read_bytes()
    half = len(zstandard.compress(b"")) + len(data) // 2
    for size in (half, len(data) - 1, len(data) - 5):
        path.write_bytes(data[:size])
        with pytest.raises(FileError, match="damaged or truncated"):
            texts_of(path)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FileError, match="damaged, or not Parquet"):
        texts_of(path)


def test_a_column_that_is_not_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(FileError, match=r"column 'text' is int64, not text.*`text_field`: body"):
        texts_of(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_kind_of_text_column(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["first", "zwei 🙂", None, "first"]).cast(
        kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    )
    if isinstance(kind, pa.DictionaryType):
        column = column.dictionary_encode().cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == ["first", "zwei 🙂", "", "first"]


@pytest.mark.slow
def test_repetitive_zstandard_is_unpacked_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b" " * (1 << 28)))
    assert path.stat().st_size < 1 << 14
    with open_compressed(path) as (stream, _):
        assert len(stream.read(1)) == 1
        assert len(stream.raw._output) <= 1 << 24  # type: ignore[attr-defined]


def test_a_zstandard_window_that_is_too_large(tmp_path: Path) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    path = tmp_path / "a.jsonl.zst"
    with (
        path.open("wb") as file,
        zstandard.ZstdCompressor(compression_params=settings).stream_writer(file) as stream,
    ):
        stream.write(b'{"text": "abc"}\n')
    with pytest.raises(FileError, match=r"window is larger than 128 MiB.*--long=27"):
        texts_of(path)


def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "a.jsonl", ["text"])
    files = find_files([path])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(FileError, match=r"a\.jsonl: cannot be read \(Permission denied"):
            list(read_documents(files, ReadOptions()))
    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(FileError, match=r"cannot be read \(Permission denied"):
        find_files([tmp_path])


def test_records_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_RECORD_BYTES", 1 << 20)
    for name in ("a.jsonl", "a.parquet"):
        path = write_records(tmp_path / name, ["x" * (1 << 21)])
        with pytest.raises(FileError, match=r"longer than 1 MiB\. Split it"):
            texts_of(path)


def test_a_separator_line_splits_documents_and_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\nmore\n<|endoftext|>\r\ntwo <|endoftext|> here\n <|endoftext|> \n\n")
    expected = ["one\nmore\n", "two <|endoftext|> here\n"]
    assert texts_of(path, separator="<|endoftext|>") == expected
    files = find_files([path])
    later = read_documents(files, ReadOptions(separator="<|endoftext|>"), ReadPosition(0, 1))
    assert [document.text for document in later] == expected[1:]
    assert texts_of(path, separator="<|endoftext|>", document_start="^more") == [
        "one\n",
        "more\n",
        expected[1],
    ]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="#a \n", max_size=60))
def test_a_separator_splits_like_a_regular_expression(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    if not text:
        return
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    parts = re.split(r"(?m)^ *# *(?:\n|\Z)", text)
    oracle = [part for part in parts if part.strip()]
    if "#" in text and len(parts) == 1:
        with pytest.raises(FileError, match="inside a line"):
            texts_of(path, separator="#")
    elif oracle:
        assert texts_of(path, separator="#") == oracle


def test_a_separator_inside_lines_only_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("zero\none<|endoftext|>two\n")
    with pytest.raises(FileError, match=r"a\.txt, line 2: '<\|endoftext\|>' is inside a line"):
        texts_of(path, separator="<|endoftext|>")


@pytest.mark.parametrize("separator", ["", "  ", "a\nb"])
def test_a_separator_is_one_line(separator: str) -> None:
    with pytest.raises(ConfigError, match=r"separator: .* not one line"):
        ReadOptions(separator=separator)


def test_a_text_that_a_small_file_repeats_is_in_memory_once(tmp_path: Path) -> None:
    text = "a" * (4 << 20)
    indices = pa.array([0] * 600, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array([text]))
    path = tmp_path / "repeated.parquet"
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(d.text) for d in islice(read_documents(find_files([path])), 20)) == 20 * len(
        text
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
