"""One figure of the report: its lines, axes and legend, and the text beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from typing import Any

import numpy as np

from parcae import console, plotting
from parcae.report.runs import AXES, Axis, Run

FEW_POINTS = 12
"""Up to this many points get markers: a line through a single point would be invisible."""
WIDE_RANGE = 30.0
"""Positive values that differ by more than this factor get a logarithmic axis."""
SMALLEST_RANGE = 0.2
"""Smallest range of y, as a share of the values: what varies less is noise, not to fill a panel."""
START = 0.05
"""Share of x at the start of training, whose values may be cut off."""
MOST_POINTS = 800
MOST_NAMES = 8
"""With more runs, the page has one legend for all figures instead of one in each."""
DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Figure:
    """A drawn panel, with its texts."""

    name: str
    title: str
    caption: str
    """One sentence: what to look at."""
    alt: str
    """For readers who cannot see the figure."""
    svg: Mapping[Axis | None, str]
    """Elements for the page: by what is along x in a figure over training, else one under None."""
    png: bytes


@dataclass
class Panel:
    """The axes of a figure, with what was drawn on them."""

    axes: Any
    points: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """x and y of what was drawn, without missing values."""
    faint: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """The same of the noisy curves behind the smoothed ones."""
    descriptions: list[str] = field(default_factory=list)
    """One of each curve, for the alternative text."""
    legend: list[Any] | None = None
    """Handles of a legend other than one entry per curve."""
    by_step: list[tuple[Any, np.ndarray, Run]] = field(default_factory=list)
    """Lines whose x are steps, these steps, and their run: they can be moved to another axis."""

    @property
    def is_empty(self) -> bool:
        return not self.points

    def line(
        self,
        x: np.ndarray,
        y: np.ndarray,
        label: str | None = None,
        *,
        color: str | None = None,
        dash: str = "-",
        marked: bool = False,
        faint: bool = False,
        run: Run | None = None,
    ) -> bool:
        """Draw a curve, with gaps where values are NaN; False if all are.

        Give the `run` if x are its steps.
        """
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.any():
            return False
        if len(x) > 2 * FEW_POINTS:
            x, y = thin(x[finite], y[finite], MOST_POINTS)
        few = finite.sum() <= FEW_POINTS
        (line,) = self.axes.plot(
            x,
            y,
            dash,
            color=color,
            label=legend_text(label) if label else None,
            marker="o" if marked or few else None,
            linewidth=0.8 if faint else None,
            markersize=2.5 if faint else None,
            alpha=0.3 if faint else None,
            zorder=1.5 if faint else None,
        )
        if run is not None:
            self.by_step.append((line, x, run))
        finite = np.isfinite(x) & np.isfinite(y)
        (self.faint if faint else self.points).append((x[finite], y[finite]))
        if label and not faint:
            self.describe(label, y)
        return True

    def describe(self, label: str, values: np.ndarray) -> None:
        values = values[np.isfinite(values)]
        if len(values):
            text = f"from {values[0]:.3g} to {values[-1]:.3g}"
            self.descriptions.append(f"{label}: {text}" if label else text)

    def legend_of(self, colors: Mapping[str, str], dashes: Sequence[str]) -> None:
        """A legend of runs by colour and quantities by dash, instead of one entry per curve."""
        names = [({"color": color, "linestyle": "-"}, name) for name, color in colors.items()]
        kinds = [
            ({"color": plotting.GREY, "linestyle": plotting.DASHES[j % len(plotting.DASHES)]}, what)
            for j, what in enumerate(dashes)
        ]
        self.legend = [
            self.axes.plot([], [], label=legend_text(text), **look)[0]
            for look, text in (*names, *kinds)
        ]

    def mark(self, step: float, color: str, run: Run) -> None:
        """A thin vertical line at an event."""
        line = self.axes.axvline(step, color=color, linewidth=0.8, alpha=0.4)
        self.by_step.append((line, np.array([step, step], dtype=float), run))

    def move_to(self, axis: Axis) -> bool:
        """Show steps, tokens or FLOPs along x; False if the runs have not logged them."""
        from matplotlib.ticker import MaxNLocator

        moved = [(line, run.along(steps, axis)) for line, steps, run in self.by_step]
        known = np.concatenate([x[np.isfinite(x)] for _, x in moved])
        if not len(known):
            return False
        for line, x in moved:
            line.set_xdata(x)
        width = float(known.max() - known.min()) or 1.0
        self.axes.set_xlim(known.min() - 0.04 * width, known.max() + 0.04 * width)
        self.axes.set_xlabel(AXES[axis])
        formats = {"tokens": console.format_count, "flops": console.format_flops}
        if axis in formats:
            self.axes.xaxis.set_major_locator(MaxNLocator(5))
            self.axes.xaxis.set_major_formatter(lambda value, _: formats[axis](value))
        else:
            self.axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1))
            self.axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        return True

    def log_if_wide(self) -> None:
        """Make y logarithmic if all values are positive and span orders of magnitude."""
        values = np.concatenate([y for _, y in self.points] or [np.ones(1)])
        if values.min() > 0 and values.max() / values.min() > WIDE_RANGE:
            self.axes.set_yscale("log")

    def limit(self, smallest_range: float = SMALLEST_RANGE, *, cut_start: bool = False) -> None:
        """Set the limits of y, with a note if they cut something off.

        Noise does not fill the panel: the range is at least `smallest_range` of the values. Rare
        values of the noisy curves do not flatten the smoothed ones, and with `cut_start` neither
        do those of the start of training, nor those of a divergence.
        """
        if self.is_empty or self.axes.get_yscale() == "log":
            return
        start = -math.inf
        if cut_start:
            x = np.concatenate([x for x, _ in self.points])
            start = x.min() + START * (x.max() - x.min())
        curves = [later if len(later := y[x > start]) else y for x, y in self.points]
        drawn = np.concatenate(curves)
        low, high = float(drawn.min()), float(drawn.max())
        if cut_start and low > 0:  # a divergence
            high = max(low, min(high, 3 * float(np.median(drawn))))
        for x, y in self.faint:
            noise = np.percentile(y[x > start], (1, 99)) if (x > start).any() else (low, high)
            low, high = min(low, float(noise[0])), max(high, min(float(noise[1]), 2 * high - low))
        low, high = _widened(low, high, smallest_range)
        self.axes.set_ylim(low, high)
        if high >= 1e4:
            self.axes.yaxis.set_major_formatter(lambda value, _: console.format_count(value))
        if max(float(y.max()) for _, y in (*self.points, *self.faint)) > high:
            note = {"ha": "right", "va": "top", "fontsize": 8, "color": plotting.GREY}
            self.axes.text(
                0.99, 0.99, "higher values are cut off", transform=self.axes.transAxes, **note
            )


def _widened(low: float, high: float, smallest: float) -> tuple[float, float]:
    """Limits of an axis for values from `low` to `high`: a range of at least the share `smallest`
    of the values, and a margin; not below zero if no value is."""
    wanted = smallest * max(abs(low), abs(high)) or 1.0
    middle, half = (low + high) / 2, max(high - low, wanted) / 2
    bottom, top = middle - 1.05 * half, middle + 1.05 * half
    return (0.0, top - bottom) if bottom < 0 <= low else (bottom, top)


@contextmanager
def panel(title: str, y: str, x: str = "step") -> Iterator[tuple[Any, Panel]]:
    """Yield a figure with one panel, with these labels of its axes."""
    with plotting.figure(width=4.3, height=3.2) as (canvas, axes):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        yield canvas, Panel(axes)


def finish(canvas: Any, drawn: Panel, name: str, caption: str, axis: Axis) -> Figure | None:
    """The panel as a `Figure`; None if nothing was drawn.

    Of a figure over training the PNG has `axis` along x, and the page any of them.
    """
    if drawn.is_empty:
        return None
    handles = drawn.legend or drawn.axes.get_legend_handles_labels()[0]
    labels = [handle.get_label() for handle in handles]
    if labels and len(labels) <= MOST_NAMES:
        longest = max(map(len, labels))
        columns = 1 if longest > 28 else 2 if longest > 13 else 3
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
    title = drawn.axes.get_title(loc="left")
    alt = f"{title}. {'; '.join(drawn.descriptions)}." if drawn.descriptions else f"{title}."
    variants: list[Axis | None] = [axis, *(other for other in AXES if other != axis)]
    svg, png = {}, b""
    for variant in variants if drawn.by_step else [None]:
        if variant is None or drawn.move_to(variant):
            element = plotting.inline_svg(canvas, f"{name} {variant}")
            label = f'<svg role="img" aria-label="{escape(alt)}" '
            svg[variant] = element.replace("<svg ", label, 1)
            canvas.set_layout_engine(None)  # as it is laid out now; "none" would draw twice
            png = png or _png(canvas)
    return Figure(name, title, caption, alt, svg, png)


def _png(canvas: Any) -> bytes:
    stream = BytesIO()
    canvas.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()


def legend_text(text: str, longest: int = 48) -> str:
    """`text` as an entry of a legend: shown unchanged, except that a long path loses its start."""
    if len(text) > longest:
        text = "…" + text[1 - longest :]
    return plotting.literal(text)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The centred moving average over `window` values, so that a falling curve does not lag.

    The window is narrower towards the start, where curves are steep, and one-sided at the end.
    """
    indices = np.arange(len(values))
    half = np.minimum(max(window, 1) // 2, indices)
    low, high = indices - half, np.minimum(indices + half + 1, len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return (sums[high] - sums[low]) / (high - low)


def thin(x: np.ndarray, y: np.ndarray, limit: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points: the minimum and maximum of each segment, so that no spike is lost."""
    if len(x) <= limit:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), limit // 2 - 1):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    indices = sorted(kept)
    return x[indices], y[indices]
