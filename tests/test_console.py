"""Tables show every digit, in a pipe and on a narrow terminal."""

from __future__ import annotations

import io
import re
from argparse import ArgumentTypeError

import pytest

from parcae import console
from parcae.console import WideConsole, table

COLUMNS = ["name", *(f"bytes of column {i}" for i in range(8))]
CELLS = ["a/quite/long/name", *(f"{10**9 + i:,}" for i in range(8))]


def shown(terminal: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    WideConsole(file=stream, force_terminal=terminal, color_system=None).print(
        table("A table", COLUMNS, [CELLS])
    )
    return stream.getvalue()


def test_a_pipe_gets_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(False, 80, monkeypatch)
    assert re.search(r"\s+".join(map(re.escape, CELLS)), text)
    assert len(text.splitlines()[0].rstrip()) < 20  # as wide as it needs, not as it may


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_gets_every_digit(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = shown(True, width, monkeypatch)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    digits = [c for cell in (*COLUMNS, *CELLS) for c in cell if c.isdigit()]
    assert sorted(c for c in text if c.isdigit()) == sorted(digits)


def test_texts_stand_on_the_left_and_numbers_on_the_right() -> None:
    stream = io.StringIO()
    rows = [("a", "short", "-1.5"), ("b", "much longer", "–"), ("total", "", "12.25")]
    WideConsole(file=stream).print(table("T", ("run", "what", "loss"), rows))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert "a       short          -1.5" in lines
    assert "b       much longer       –" in lines


def test_a_table_without_a_header_has_no_empty_lines() -> None:
    stream = io.StringIO()
    WideConsole(file=stream).print(table("Cost", ("", ""), [("steps", "12"), ("tokens", "6,144")]))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert lines == ["Cost", "─" * 16, "steps       12", "tokens   6,144", ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [(84.72, "84.7"), (1083.0, "1,080"), (0.02414, "0.0241"), (999.6, "1,000"), (0, "0")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert console.format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.4, "999"),
        (999.6, "1k"),
        (999_400, "999k"),
        (999_600, "1M"),
        (1.5e9, "1.5B"),
        (3.2e13, "32T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert console.format_count(value) == text


def test_flops_and_speeds() -> None:
    texts = [console.format_flops(x) for x in (0, 512, 1e9, 6.4e19)]
    assert texts == ["0", "512", "1e9", "6.4e19"]
    assert [console.format_si(x, "FLOP/s") for x in (12, 999.9e9, 3.12e14)] == [
        "12 FLOP/s",
        "1 TFLOP/s",
        "312 TFLOP/s",
    ]


def test_bytes_are_binary() -> None:
    assert [console.format_bytes(x) for x in (1023, 1024, 1023 * 1024, 36 * 1024, 3 << 30)] == [
        "1023 B",
        "1 KiB",
        "1,020 KiB",
        "36 KiB",
        "3 GiB",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0124, "12 ms"),
        (0.9996, "1 s"),
        (2.34, "2.3 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (330, "5 min 30 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (359_990, "100 h"),
        (1234.4 * 3600, "1,234 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert console.format_duration(seconds) == text


def test_lists_separated_by_commas() -> None:
    assert console.parse_list("a, b,,a") == ["a", "b"]
    assert console.parse_number_list("1e13,2.5,4,4.0") == [1e13, 2.5, 4]
    assert console.parse_int_list("1,2,4,2") == [1, 2, 4]
    for parse, text, problem in (
        (console.parse_list, " ,", "an empty list"),
        (console.parse_number_list, "1,lots", "'lots' is not a number"),
        (console.parse_int_list, "1.5", "1.5 is not a whole number"),
        (console.parse_int_list, "nan", "nan is not a whole number"),
    ):
        with pytest.raises(ArgumentTypeError, match=problem):
            parse(text)


def test_one_item_is_singular():
    assert console.format_items(1, "run") == "1 run"
    assert console.format_items(0, "run") == "0 runs"
    assert console.format_items(1234, "item") == "1,234 items"
