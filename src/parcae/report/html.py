"""Numbers, values and tables as text and HTML. Tables escape their cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from parcae import console

NONE = "–"


def count(value: float) -> str:
    return NONE if math.isnan(value) else console.format_count(value)


def flops(value: float) -> str:
    return NONE if math.isnan(value) else console.format_flops(value)


def whole(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:,.0f}"


def decimal(value: float, digits: int = 4) -> str:
    return NONE if math.isnan(value) else f"{value:,.{digits}f}"


def percent(value: float) -> str:
    return NONE if math.isnan(value) else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NONE
    return console.format_duration(seconds)


def plain_value(value: Any) -> str:
    """A setting or a result as in its file."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one table with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    *,
    kind: Literal["numbers", "text", "compared"] = "numbers",
) -> str:
    """An HTML table that scrolls if it is wide; the first cell of each row is its header."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{top}</tr></thead>\n" if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{title}{top}'
        f"<tbody>{body}</tbody></table></div>\n"
    )
