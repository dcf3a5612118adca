"""Tables show every digit, in a pipe and on a narrow terminal."""

from __future__ import annotations

import io
import re

import pytest

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
