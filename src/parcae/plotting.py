"""The look of our figures: one palette, one style, PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parcae.files import atomic_path

PALETTE = ("#3b6fb6", "#d1603d", "#4f9d69", "#8a5fa8", "#c9a227", "#5b6770", "#b0467a", "#2a9d9d")

STYLE = {
    "figure.dpi": 140,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 2.0,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, *, width: float = 5.2, height: float = 3.6
) -> Iterator[Any]:
    """A figure and its axes in our style, drawn without a screen and closed afterwards."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    with plt.rc_context(style):
        canvas, axes = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), layout="constrained"
        )
        try:
            yield canvas, axes
        finally:
            plt.close(canvas)


def save(canvas: Any, path: str | Path) -> Path:
    """Write the figure whole or not at all; the suffix decides the format."""
    path = Path(path)
    with atomic_path(path) as temporary:
        canvas.savefig(temporary, format=path.suffix.lstrip(".") or "png")
    return path
