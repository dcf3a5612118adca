"""One figure of the report: its lines, axes and legend, and the text beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np

from parcae import plotting

FEW_POINTS = 12
"""Up to this many points get markers: a line through a single point would be invisible."""
WIDE_RANGE = 30.0
DOTS_PER_INCH = 160
"""Sharp at half the width of a desktop page, and legible on a phone."""


@dataclass(frozen=True)
class Figure:
    """A drawn panel as PNG, with its texts."""

    name: str
    title: str
    caption: str
    """One sentence: what to look at."""
    alt: str
    """For readers who cannot see the figure."""
    png: bytes


@dataclass
class Panel:
    """The axes of a figure, with what was drawn on them."""

    axes: Any
    values: list[np.ndarray] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)
    """Of each curve, for the alternative text."""
    legend: list[Any] | None = None
    """Handles of a legend other than one entry per curve."""

    @property
    def is_empty(self) -> bool:
        return not self.values

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
    ) -> bool:
        """Draw a curve, with gaps where values are NaN; False if all are."""
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.any():
            return False
        if len(x) > 2 * FEW_POINTS:
            x, y = thin(x[finite], y[finite])
        few = finite.sum() <= FEW_POINTS
        self.axes.plot(
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
        self.values.append(y[np.isfinite(y)])
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

    def log_if_wide(self) -> None:
        """Make y logarithmic if all values are positive and span orders of magnitude."""
        values = np.concatenate(self.values) if self.values else np.ones(1)
        if values.min() > 0 and values.max() / values.min() > WIDE_RANGE:
            self.axes.set_yscale("log")

    def cut_above(self, limit: float) -> None:
        """Limit y, with a note, if a few values far above `limit` would flatten the rest."""
        drawn = np.concatenate(self.values) if self.values else np.zeros(1)
        if drawn.max() > 2 * limit > 0:
            low = float(drawn.min())
            self.axes.set_ylim(low - 0.05 * (limit - low), limit)
            note = {"ha": "right", "va": "top", "fontsize": 8, "color": plotting.GREY}
            self.axes.text(
                0.99, 0.99, "higher values are cut off", transform=self.axes.transAxes, **note
            )


@contextmanager
def panel(title: str, y: str, x: str = "step") -> Iterator[tuple[Any, Panel]]:
    """Yield a figure with one panel, with these labels of its axes."""
    with plotting.figure(width=4.8, height=3.5) as (canvas, axes):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        yield canvas, Panel(axes)


def finish(canvas: Any, drawn: Panel, name: str, caption: str) -> Figure | None:
    """The panel as a `Figure`; None if nothing was drawn."""
    if drawn.is_empty:
        return None
    handles = drawn.legend or drawn.axes.get_legend_handles_labels()[0]
    labels = [handle.get_label() for handle in handles]
    if labels:
        longest = max(map(len, labels))
        columns = 1 if longest > 32 else 2 if longest > 14 else 3
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
    title = drawn.axes.get_title(loc="left")
    stream = BytesIO()
    canvas.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    alt = f"{title}. {'; '.join(drawn.descriptions)}." if drawn.descriptions else f"{title}."
    return Figure(name, title, caption, alt, stream.getvalue())


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
