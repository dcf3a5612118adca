"""Terminal output: tables, progress bars, and the only formatting of numbers, durations and bytes.

Also the types of command-line arguments that are lists separated by commas.
"""

from __future__ import annotations

import math
import re
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, ConsoleDimensions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
RULE_ABOVE = Box(" ── \n" + 7 * "    \n")
"""For tables without a header: the rule that SIMPLE_HEAD draws below one."""
SECONDS_BETWEEN_LINES = 10.0
"""Between two lines of progress where standard output or error is not a terminal."""


ORDER = (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Separators of lines, and the characters that make others be shown in another order."""
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (*ORDER, *range(0xD800, 0xE000))}


def printable(text: str) -> str:
    """`text` with control characters as \\x1b: names of files may contain what a terminal obeys, or
    what makes it show another text, as U+202E does."""
    return text.translate(_CONTROL)


class WideConsole(Console):
    """A console that wraps and cuts nothing where the output is a pipe or a file, and that shows
    control characters instead of sending them."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    @property
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else ConsoleDimensions(10_000, 25)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        Console.size.fset(self, new_size)  # type: ignore[attr-defined]


out = WideConsole()
err = WideConsole(stderr=True)


def print_text(text: str, *, console: Console | None = None, style: str | None = None) -> None:
    """Print `text` as it is, but for control characters: no markup, no hard line breaks."""
    (console or out).print(
        text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
    )


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on standard error; nothing is shown where that is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as display:
        yield display


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` with a progress bar."""
    with progress() as display:
        yield from display.track(items, description=description, total=total)


@contextmanager
def progress_bar(total: float | None = None) -> Iterator[Callable[..., None]]:
    """One bar on standard error, updated by `update(description, completed, total=None)`.

    Where standard error is not a terminal, a line is printed every 10 s instead.
    """
    with progress() as display:
        task = display.add_task("", total=total)
        printed = time.monotonic()

        def update(description: str, completed: float, total: float | None = total) -> None:
            nonlocal printed
            display.update(task, description=description, completed=completed, total=total)
            if not err.is_terminal and time.monotonic() > printed + SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                print_text(f"{description}: {completed / max(total or 0, 1e-9):.0%}", console=err)

        yield update


class LiveProgress:
    """A bar at the bottom of the terminal while a block runs; messages are printed above it.

    Elsewhere than on a terminal there is no bar, only the messages.
    """

    REFRESHES_PER_SECOND = 2
    """Each takes about 1.5 ms from the working thread; rich's default of ten would cost 1.5 %."""

    def __init__(self, *columns: ProgressColumn, shown: bool = True) -> None:
        """`columns` follow the bar, the percentage and the elapsed time."""
        self.shown = shown
        self._live = shown and out.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            *columns,
            console=out,
            refresh_per_second=self.REFRESHES_PER_SECOND,
            disable=not self._live,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print(self, message: str) -> None:
        if self.shown:
            print_text(message, console=self._progress.console)


NUMBER = re.compile(r"[-+−]?\d")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table with texts and the first column aligned to the left, numbers to the right.

    Where a terminal is too narrow, cells are folded: no digit is cut off.
    """
    has_header = any(columns)
    view = Table(
        title=printable(title),
        title_justify="left",
        title_style="bold",
        show_header=has_header,
        header_style="bold",
        box=SIMPLE_HEAD if has_header else RULE_ABOVE,
    )
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    for index, name in enumerate(columns):
        cells = [row[index] for row in texts if row[index] not in ("", "-", "–")]
        is_text = index == 0 or (bool(cells) and not any(map(NUMBER.match, cells)))
        view.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in texts:
        view.add_row(*map(Text, row))  # a [bracket] is no markup
    return view


def format_number(value: float) -> str:
    """Three significant digits without an exponent: 84.7, 1,080, 0.0241."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def format_count(value: float) -> str:
    """A number of tokens, parameters, ...: 950, 14.3k, 1.23M, 11.2B, 1.5T."""
    return _with_prefix(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")))


def format_items(count: int, noun: str, plural: str | None = None) -> str:
    """1 run, 2 runs, 1,000 runs; `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_si(value: float, unit: str) -> str:
    """A measured value with an SI prefix: 312 TFLOP/s."""
    prefixes = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return _with_prefix(value, tuple((size, f" {letter}{unit}") for size, letter in prefixes), unit)


def format_flops(value: float) -> str:
    """A number of FLOPs in scientific notation: 1e9, 6.4e19."""
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")


def format_bytes(count: float) -> str:
    """A size in binary units: 512 B, 36 KiB, 1.18 MiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{format_number(count / size)} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """120 ms, 2.3 s, 45 s, 5 min 30 s, 2 h 5 min; from 100 h on 1,234 h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds > 0 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 100 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{seconds / 3600:,.0f} h"


def _with_prefix(value: float, prefixes: Sequence[tuple[float, str]], unit: str = "") -> str:
    value = float(f"{value:.3g}")  # 999,900 is 1M, not 1,000k
    for size, suffix in prefixes:
        if abs(value) >= size:
            return f"{format_number(value / size)}{suffix}"
    return f"{format_number(value)} {unit}".rstrip()


def parse_list(text: str) -> list[str]:
    """`a, b,c` -> ["a", "b", "c"], each once: the type of a command-line argument."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ArgumentTypeError(f"{text!r} is an empty list. Write values such as a,b,c.")
    return parts


def parse_number_list(text: str) -> list[float]:
    """`1e13,2e13` -> [1e13, 2e13], each once; whole numbers below 1e9 as integers."""
    values = [_parsed(part, "a number", "1,2,4") for part in parse_list(text)]
    return list(dict.fromkeys(values))


def parse_int_list(text: str) -> list[int]:
    """`1,2,4` -> [1, 2, 4], each once."""
    values: list[Any] = [_parsed(part, "a whole number", "1,2,4") for part in parse_list(text)]
    for value in values:
        if not isinstance(value, int):
            raise ArgumentTypeError(f"{value} is not a whole number. Write a list such as 1,2,4.")
    return list(dict.fromkeys(values))


def _parsed(text: str, kind: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not {kind}. Write a list such as {example}."
        ) from None
    return int(value) if value.is_integer() and abs(value) < 1e9 else value


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], top: float, most: int = 240) -> tuple[str, int]:
    """Return one bar per value on a scale from 0 to `top`, and how many values each bar stands for.

    Above `most` values, each bar shows the mean of several.
    """
    group = -(-len(values) // most) or 1
    means = (
        sum(part) / len(part)
        for start in range(0, len(values), group)
        if (part := values[start : start + group])
    )
    heights = (min(max(math.ceil(mean / top * len(BARS) - 1e-9), 1), len(BARS)) for mean in means)
    return "".join(BARS[height - 1] for height in heights), group
