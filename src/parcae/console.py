"""What a person sees in a terminal: tables, progress with rate and ETA, short numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Self, TypeVar

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
"""For tables without a header: what SIMPLE_HEAD draws below one."""


class WideConsole(Console):
    """A pipe or a file has no width, so nothing is wrapped or cut there."""

    @property
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else ConsoleDimensions(10_000, 25)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        Console.size.fset(self, new_size)  # type: ignore[attr-defined]


out = WideConsole()
err = WideConsole(stderr=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress display on standard error; silent where that is not a terminal."""
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
    """Iterate with a progress bar."""
    with progress() as display:
        yield from display.track(items, description=description, total=total)


class LiveBar:
    """A bar on a terminal for as long as a block runs; what is said meanwhile stands above it."""

    REFRESHES_PER_SECOND = 2
    """Each takes some 1.5 ms from the thread at work; the ten of `rich` would be 1.5 % of it."""

    def __init__(self, *columns: ProgressColumn, shown: bool = True) -> None:
        """`columns` follow the bar, the percentage and the time gone by."""
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

    def say(self, words: str) -> None:
        if self.shown:
            self._progress.console.print(
                words, highlight=False, soft_wrap=True, markup=False, emoji=False
            )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """First column to the left, the others to the right: names, then numbers.

    Where a terminal is too narrow, cells go on in the next line: a number is never cut off.
    """
    headed = any(columns)
    view = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        show_header=headed,
        header_style="bold",
        box=SIMPLE_HEAD if headed else RULE_ABOVE,
    )
    for index, name in enumerate(columns):
        view.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        view.add_row(*(Text(str(cell)) for cell in row))  # a [bracket] is no markup
    return view


def number(value: float) -> str:
    """Three digits that count, written out: 84.7, 1,080, 0.0241."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def short(value: float) -> str:
    """1234567 -> '1.23M'."""
    value = float(f"{value:.3g}")  # 999,900 is 1M, not 1,000k
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)}{letter}"
    return number(value)


def size(count: float) -> str:
    """1234567 -> '1.18 MiB'."""
    for unit, letters in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{number(count / unit)} {letters}"
    return f"{count:.0f} B"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], top: float, most: int = 240) -> tuple[str, int]:
    """One bar for each value, from nothing to `top`; beyond `most` bars, each is the mean of
    several values. Returns the bars and how many values each stands for."""
    group = -(-len(values) // most) or 1
    means = (
        sum(part) / len(part)
        for start in range(0, len(values), group)
        if (part := values[start : start + group])
    )
    places = (min(max(ceil(mean / top * len(BARS) - 1e-9), 1), len(BARS)) for mean in means)
    return "".join(BARS[place - 1] for place in places), group
