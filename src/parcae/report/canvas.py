"""One panel of the report: how lines, legends and axes look, and what a panel becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np

from parcae import plotting
from parcae.report.series import thin

FEW_POINTS = 12
"""So few are marked one by one; a single point would not be seen as a line."""
WIDE_RANGE = 30.0
DOTS_PER_INCH = 160
"""Sharp where a figure fills half a desktop's page; letters stay legible on a phone."""


@dataclass(frozen=True)
class Figure:
    """A drawn panel and the words that go with it."""

    name: str
    title: str
    look: str
    """One sentence: what to look at."""
    alt: str
    png: bytes


@dataclass
class Panel:
    """A pair of axes that remembers what was drawn on it."""

    axes: Any
    values: list[np.ndarray] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What the text for those who do not see the figure says, curve by curve."""
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
        """NaN leaves a gap; nothing but NaN draws nothing, and says so."""
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
            seen = y[np.isfinite(y)]
            self.said.append(f"{label}: from {seen[0]:.3g} to {seen[-1]:.3g}")
        return True

    def legend_of(self, colors: Mapping[str, str], dashes: Sequence[str]) -> None:
        """Runs by colour and quantities by dash: their sum, where all curves are their product."""
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
        """A logarithmic axis where values are positive and span orders of magnitude."""
        values = np.concatenate(self.values) if self.values else np.ones(1)
        if values.min() > 0 and values.max() / values.min() > WIDE_RANGE:
            self.axes.set_yscale("log")

    def cut_above(self, limit: float) -> None:
        """Cut the axis, and say so, where a few values would press everything else flat."""
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
    with plotting.figure(width=4.8, height=3.5) as (canvas, axes):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        yield canvas, Panel(axes)


def finish(canvas: Any, drawn: Panel, name: str, look: str) -> Figure | None:
    """The panel as PNG with its words, or None if there was nothing to draw."""
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
    alt = f"{title}. {'; '.join(drawn.said)}." if drawn.said else f"{title}."
    return Figure(name, title, look, alt, stream.getvalue())


def legend_text(text: str, longest: int = 48) -> str:
    """As it is read: no formulas, nothing hidden for a leading underscore, no endless paths."""
    if len(text) > longest:
        text = "…" + text[1 - longest :]
    return plotting.literal(text)
