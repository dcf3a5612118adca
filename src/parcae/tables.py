"""Tables as text: Markdown, CSV and LaTeX from rows, with the best value in bold.

rows = parcae.compare("runs/a", "runs/b").table()
parcae.format_table(rows, "latex", best={"loss": "lowest"})
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from parcae.console import format_number

Format = Literal["markdown", "csv", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)
Best = Literal["lowest", "highest"]
Row = Mapping[str, Any]

MISSING = "–"
ERROR = "_error"
"""What the name of the column with the uncertainty of another column ends in."""


def format_table(
    rows: Iterable[Row],
    format: Format = "markdown",
    *,
    titles: Mapping[str, str] | None = None,
    best: Mapping[str, Best] | None = None,
    digits: Mapping[str, int] | None = None,
) -> str:
    r"""Rows as a table in Markdown, CSV or LaTeX (a `tabular` with the rules of booktabs).

    The columns are the keys of all rows, in the order of their first appearance. Where there is a
    column `loss_error` beside `loss`, both are shown as `3.532 ± 0.004` in Markdown and LaTeX.
    CSV has every value in full, under its key. None and NaN are missing values.

    Args:
        rows: One mapping per row. Numbers, texts, None.
        format: "markdown", "csv" or "latex".
        titles: Headings of columns; by default their keys, with spaces.
        best: By column, whether its "lowest" or its "highest" value is bold. Values that look the
            same as the best one are bold too; a single value is not.
        digits: Decimals of columns. Default: as many as the error has, else four significant.
    """
    if format not in FORMATS:
        raise ValueError(f"format: {format!r} is not known. Use {', '.join(FORMATS)}.")
    rows = list(rows)
    if format == "csv":
        return _csv(rows)
    shown, heads = _shown(rows, titles)
    escape, bold, minus = STYLES[format]
    columns = [
        [
            (bold.format(escape(text)) if is_best else escape(text)) + escape(error)
            for text, error, is_best in _column(
                key, rows, (digits or {}).get(key), (best or {}).get(key), minus
            )
        ]
        for key in shown
    ]
    numeric = [any(_is_number(row.get(key)) for row in rows) for key in shown]
    cells = [list(row) for row in zip(*columns, strict=True)]
    lay_out = _markdown if format == "markdown" else _latex
    return lay_out([escape(head) for head in heads], cells, numeric)


def text_cells(
    rows: Iterable[Row],
    *,
    titles: Mapping[str, str] | None = None,
    digits: Mapping[str, int] | None = None,
) -> tuple[list[str], list[list[str]]]:
    """The headings and cells that `format_table` shows, neither escaped nor bold."""
    rows = list(rows)
    shown, heads = _shown(rows, titles)
    columns = [
        [text + error for text, error, _ in _column(key, rows, (digits or {}).get(key), None, "-")]
        for key in shown
    ]
    return heads, [list(row) for row in zip(*columns, strict=True)]


def html_table(rows: Iterable[Row]) -> str:
    """Rows as a table for a notebook."""

    def line(tag: str, texts: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"

    heads, cells = text_cells(rows)
    body = "".join(line("td", row) for row in cells)
    return f"<table><thead>{line('th', heads)}</thead><tbody>{body}</tbody></table>"


class ShownAsTable(ABC):
    """Its `table()` is what a notebook shows."""

    @abstractmethod
    def table(self) -> list[dict[str, Any]]: ...

    def _repr_html_(self) -> str:
        return html_table(self.table())


def html_curve(values: Sequence[float], width: int = 360, height: int = 80) -> str:
    """Numbers as a curve for a notebook, in the colour of its text; not finite ones are omitted."""
    points = [(index, value) for index, value in enumerate(values) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    last, span = max(len(values) - 1, 1), (high - low) or 1.0
    path = " ".join(f"{width * i / last:.1f},{height * (high - v) / span:.1f}" for i, v in points)
    return (
        f'<svg viewBox="-2 -2 {width + 4} {height + 4}" width="{width}" height="{height}">'
        f'<polyline points="{path}" fill="none" stroke="currentColor"/></svg>'
    )


def _shown(rows: Sequence[Row], titles: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """The columns that are shown (errors behind their values), and their headings."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shown = [key for key in keys if not (key.endswith(ERROR) and key.removesuffix(ERROR) in keys)]
    return shown, [(titles or {}).get(key, key.replace("_", " ")) for key in shown]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts as a Markdown table; the first column is aligned to the left, the others right."""
    cells = [[escape_markdown(cell) for cell in row] for row in rows]
    numeric = [index > 0 for index in range(len(columns))]
    return _markdown([escape_markdown(head) for head in columns], cells, numeric)


def escape_markdown(text: str) -> str:
    """`text` as Markdown shows it unchanged, in a table and elsewhere: no markup, no HTML."""
    text = " ".join(text.split("\n")).replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside of a word _ is no emphasis


LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "\n": " ",
    "–": "--",
    "…": r"\ldots{}",
    "μ": r"$\mu$",
    "∞": r"$\infty$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "→": r"$\to$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "²": r"$^2$",
}


def escape_latex(text: str) -> str:
    """`text` as LaTeX shows it unchanged."""
    return "".join(LATEX.get(letter, letter) for letter in text)


STYLES = {
    "markdown": (escape_markdown, "**{}**", "-"),
    "latex": (escape_latex, r"\textbf{{{}}}", "−"),
}
"""By format: how text is escaped, what is bold, the sign of negative numbers."""


def _csv(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(csv_text, keys))
    for row in rows:
        cells = ("" if _is_missing(row.get(key)) else row[key] for key in keys)
        writer.writerow(csv_text(cell) if isinstance(cell, str) else cell for cell in cells)
    return stream.getvalue()


def csv_text(text: str) -> str:
    """A text as a cell that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _column(
    key: str, rows: Sequence[Row], digits: int | None, best: Best | None, minus: str
) -> list[tuple[str, str, bool]]:
    """For each row the value and its error as text, and whether the value is the best."""
    values: list[Any] = [row.get(key) for row in rows]
    errors = [row.get(f"{key}{ERROR}") for row in rows]
    texts = [_texts(value, error, digits) for value, error in zip(values, errors, strict=True)]
    numbers = {
        index: float(value)
        for index, value in enumerate(values)
        if _is_number(value) and not _is_missing(value)
    }
    texts = [
        (text.replace("-", minus) if index in numbers else text, error)
        for index, (text, error) in enumerate(texts)
    ]
    winner = None
    if best is not None and len(numbers) > 1:
        choose = {"lowest": min, "highest": max}[best]
        winner = texts[choose(numbers, key=lambda index: numbers[index])][0]
    return [
        (text, error, index in numbers and text == winner)
        for index, (text, error) in enumerate(texts)
    ]


def _texts(value: Any, error: Any, digits: int | None) -> tuple[str, str]:
    """A value and its uncertainty as text; the latter is empty where there is none."""
    if _is_missing(value):
        return MISSING, ""
    if not _is_number(value):
        return str(value), ""
    has_error = _is_number(error) and not _is_missing(error)
    if digits is None and has_error and error > 0:
        digits = _decimals(error)
    if digits is not None:
        return f"{value:,.{digits}f}", f" ± {error:.{digits}f}" if has_error else ""
    after = f" ± {format_number(error)}" if has_error else ""
    if isinstance(value, int):
        return f"{value:,}", after
    text = f"{value:.4g}".replace("e+", "e")
    return (text if abs(value) < 1e4 or abs(value) >= 1e9 else f"{value:,.0f}"), after


def _decimals(error: float) -> int:
    """Decimals that show an error by one digit, or by two if the first is a 1."""
    first = math.floor(math.log10(error))
    if error / 10**first < 1.95:
        first -= 1
    return max(0, -first)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """The cells are padded, so that the text itself can be read as a table."""
    widths = [max(3, *map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |\n"

    marks = (
        f" {'-' * width}{':' if is_right else ' '}"
        for width, is_right in zip(widths, right, strict=True)
    )
    return line(heads) + f"|{'|'.join(marks)}|\n" + "".join(map(line, rows))


def _latex(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    lines = [" & ".join(cells) + r" \\" for cells in (heads, *rows)]
    letters = "".join("r" if is_right else "l" for is_right in right)
    parts = (
        f"\\begin{{tabular}}{{{letters}}}",
        r"\toprule",
        lines[0],
        r"\midrule",
        *lines[1:],
        r"\bottomrule",
        r"\end{tabular}",
    )
    return "\n".join(parts) + "\n"
