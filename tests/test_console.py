"""Tables show every digit, in a pipe and on a narrow terminal."""

from __future__ import annotations

import io
import re

import pytest

from parcae.console import WideConsole, number, short, size, table

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


def test_a_table_without_a_header_has_no_empty_lines() -> None:
    stream = io.StringIO()
    WideConsole(file=stream).print(table("Cost", ("", ""), [("steps", "12"), ("tokens", "6,144")]))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert lines == ["Cost", "─" * 16, "steps       12", "tokens   6,144", ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [(84.72, "84.7"), (1083.0, "1,080"), (0.02414, "0.0241"), (999.6, "1,000"), (0, "0")],
)
def test_numbers_are_written_out(value: float, text: str) -> None:
    assert number(value) == text


def test_short_numbers_and_sizes_have_no_exponents() -> None:
    assert [short(x) for x in (999.4, 999.6, 999_400, 999_600, 1.5e9)] == [
        "999",
        "1k",
        "999k",
        "1M",
        "1.5G",
    ]
    assert [size(x) for x in (1023, 1024, 1023 * 1024, 36 * 1024)] == [
        "1023 B",
        "1 KiB",
        "1,020 KiB",
        "36 KiB",
    ]
