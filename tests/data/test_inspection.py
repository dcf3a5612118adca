"""Inspecting: figures that agree with counting by hand, rows whose borders can be seen."""

import json
import re

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from parcae.commands.data import print_inspection
from parcae.config import ConfigError
from parcae.data.inspection import draw_lengths, inspect, render_row, summarise
from parcae.data.packing import SplitDocuments, pack
from parcae.data.shards import InMemoryDocuments

BOS = 0


def letters(ids) -> str:
    return "".join("^" if token == BOS else chr(token) for token in ids)


def words(*texts: str) -> InMemoryDocuments:
    return InMemoryDocuments([[BOS, *map(ord, text)] for text in texts])


def random_documents(count=500, longest=60) -> InMemoryDocuments:
    rng = np.random.default_rng(0)
    return InMemoryDocuments(
        [[BOS, *rng.integers(97, 123, rng.integers(0, longest))] for _ in range(count)]
    )


def test_the_summary_agrees_with_counting():
    documents = words("aaa", "bbbbbbb", "c", "dddddddddddd")
    sizes = np.zeros(256, dtype=np.int64)
    sizes[97:101] = [1, 2, 3, 4]
    summary = summarise(documents, context=7, bytes_of_token=sizes)
    assert (summary.documents, summary.tokens, summary.longest) == (4, 27, 13)
    assert summary.median_length == 6
    assert summary.bytes_per_token == (3 + 14 + 3 + 48) / 23
    assert summary.documents_longer_than_row == 0.25
    assert summary.tokens_in_documents_longer_than_row == pytest.approx(13 / 27)
    assert summary.concatenate.rows == 3
    assert summary.concatenate.leftover_share == pytest.approx(3 / 27)
    best = summary.best_fit
    assert (best.utilisation, best.aligned_share) == (1.0, 1.0)
    packed = best.rows * 8 / 27
    assert packed + best.cropped_share + best.leftover_share == pytest.approx(1)


def test_concatenation_starts_rows_in_the_middle_of_documents():
    summary = summarise(random_documents(), context=31)
    assert summary.best_fit.aligned_share == 1.0
    assert summary.concatenate.aligned_share < 0.5
    assert summary.concatenate.cropped_share == 0
    assert summary.best_fit.cropped_share > summary.best_fit_split.cropped_share > 0
    assert summary.best_fit_split.aligned_share == 1.0


def test_a_row_shows_its_documents_and_the_crop_without_colours():
    documents = words("abc", "defg", "hijklmn")
    packing = pack(documents.lengths, capacity=12)
    lines = render_row(documents, packing, 0, letters, "row 0").plain.splitlines()
    assert lines == [
        "",
        "row 0  2 documents",
        "█" * 53 + "▒" * 27,
        "  document 2, 8 tokens",
        "    ^hijklmn",
        "  document 0, 4 tokens",
        "    ^abc",
    ]
    packing = pack(documents.lengths, capacity=10)
    lines = render_row(documents, packing, 0, letters, "row 0").plain.splitlines()
    assert lines[-2:] == ["  document 0, 2 tokens  ✂ 2 cropped", "    ^a"]


def test_of_long_documents_the_beginning_and_the_end_are_shown_and_of_many_some():
    long = "".join(chr(97 + i % 26) for i in range(500))
    documents = words(long)
    lines = render_row(documents, pack(documents.lengths, 501), 0, letters, "row").plain.split("\n")
    assert lines[-2:] == [f"    ^{long[:73]} …", f"    … {long[-74:]}"]
    documents = words(*["ab"] * 9)
    lines = render_row(documents, pack(documents.lengths, 27), 0, letters, "row").plain.split("\n")
    assert lines.count("    ^ab") == 6
    assert lines[-1] == "  and 3 more"


def test_documents_of_a_row_differ_in_colour():
    documents = words("abc", "defg", "hijklmn")
    row = render_row(documents, pack(documents.lengths, 12), 0, letters, "row 0")
    styles = [str(span.style) for span in row.spans if str(span.style).startswith("#")]
    assert len(set(styles)) == 2


def test_terminal_controls_in_a_document_stay_harmless():
    documents = words("a\x1b[2Jb\nc[red]d")
    row = render_row(documents, pack(documents.lengths, 5), 0, letters, "[bold]row")
    assert "\x1b" not in row.plain
    assert row.plain.splitlines()[-1].startswith("    ^a·[2")
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as captured:
        console.print(row)
    assert "\x1b[2J" not in captured.get()


@pytest.mark.slow
def test_all_of_it(tmp_path, capsys):
    sizes = np.ones(256, dtype=np.int64)
    inspection = inspect(random_documents(), 31, decode=letters, bytes_of_token=sizes)
    print_inspection(inspection, 3)
    assert inspection.save(tmp_path) == tmp_path / "lengths.png"
    summary = inspection.summary
    printed = capsys.readouterr().out
    assert f"{summary.tokens:,}" in printed
    assert re.findall(r"^row (\d)  ", printed, re.MULTILINE) == ["0", "1", "2"]
    written = json.loads((tmp_path / "inspect.json").read_text())
    assert written["tokens"] == summary.tokens
    assert written["best_fit"]["rows"] == summary.best_fit.rows
    assert matplotlib.image.imread(tmp_path / "lengths.png").shape[0] > 300


def test_no_decoder_and_no_bytes_are_said_so(capsys):
    print_inspection(inspect(random_documents(), 31), 1)
    printed = capsys.readouterr().out
    assert "unknown" in printed
    assert "0 " in printed.splitlines()[-1]


def test_long_documents_are_pointed_out(capsys):
    print_inspection(inspect(InMemoryDocuments([[BOS] * 500] * 20), 31), 0)
    assert "Best fit drops 94%" in capsys.readouterr().out
    print_inspection(inspect(InMemoryDocuments([[BOS] * 32] * 20), 31), 0)
    assert "Best fit drops" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 100_000], [7, 8]])
def test_any_lengths_can_be_drawn(lengths, tmp_path):
    path = draw_lengths(np.array(lengths), 513, tmp_path / "lengths.png")
    assert path.stat().st_size > 5_000


@pytest.mark.slow
def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="context"):
        inspect(random_documents(), 0)
    with pytest.raises(ConfigError, match="rows"):
        print_inspection(inspect(random_documents(), 31), -1)
    with pytest.raises(ConfigError, match="less than one row"):
        inspect(words("a"), 31)
    with pytest.raises(ConfigError, match=r"context: no block of 16,384 documents fills a row"):
        inspect(InMemoryDocuments([[BOS, 1]] * 70_000), 60_000)


@pytest.mark.parametrize("longest", [2, 3, 7, 60, 1000])
def test_split_documents_hold_the_same_text(longest):
    documents = random_documents()
    split = SplitDocuments(documents, longest)
    pieces = [split.tokens(i) for i in range(len(split.lengths))]
    assert [len(piece) for piece in pieces] == split.lengths.tolist()
    assert split.lengths.max() <= longest
    assert all(piece[0] == BOS for piece in pieces)
    text = [token for piece in pieces for token in piece[1:].tolist()]
    whole = [t for d in range(500) for t in documents.tokens(d)[1:].tolist()]
    assert text == whole
    assert len(pieces) == sum(max(1, -(-(n - 1) // (longest - 1))) for n in documents.lengths)


def test_a_split_has_its_own_fingerprint():
    documents = random_documents()
    prints = {documents.fingerprint, *(SplitDocuments(documents, n).fingerprint for n in (5, 6))}
    assert len(prints) == 3
    with pytest.raises(ConfigError, match="longest"):
        SplitDocuments(documents, 1)
