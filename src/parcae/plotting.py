"""Style, colours, ticks and files of all figures. page.css has the same colours for pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from parcae.console import format_count, format_flops
from parcae.files import atomic_path

PALETTE = ("#3b6fb6", "#d1603d", "#4f9d69", "#8a5fa8", "#c9a227", "#5b6770", "#b0467a", "#2a9d9d")
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY, MAGENTA, TEAL = PALETTE
RED, LIGHT_GREY, DARK_GREY = "#b3261e", "#999999", "#333333"
DASHES = ("-", "--", ":", "-.")

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
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = 5.2,
    height: float = 3.6,
    ratios: Sequence[float] | None = None,
) -> Iterator[Any]:
    """Yield a figure and its axes, drawn without a display and closed afterwards.

    `width` and `height` are those of one panel, in inches; `ratios` are the relative widths of
    columns, equal by default.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    with plt.rc_context(style):
        canvas, axes = plt.subplots(
            rows,
            columns,
            figsize=(width * columns, height * rows),
            width_ratios=ratios,
            layout="constrained",
        )
        try:
            yield canvas, axes
        finally:
            plt.close(canvas)


def save(canvas: Any, path: str | Path) -> Path:
    """Write the figure atomically; the suffix of `path` is the format."""
    path = Path(path)
    kind = path.suffix.lstrip(".") or "png"
    with atomic_path(path) as temporary:
        canvas.savefig(temporary, format=kind)
    return path


def inline_svg(canvas: Any, name: str) -> str:
    """The figure as an `<svg>` element for a page with `page_style()`, in its colours and font.

    `name` makes the ids in it differ from those of other figures on the page.
    """
    import io

    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        canvas.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, 'DejaVu Sans', sans-serif", svg)
    svg = re.sub(r"#[0-9a-f]{6}", lambda match: PAGE_COLOURS.get(match[0], match[0]), svg)
    return svg.replace('<g id="figure_1">', "<g>")


PAGE_COLOURS = {
    **{color: f"var(--c{index})" for index, color in enumerate(PALETTE)},
    "#000000": "var(--ink)",
    DARK_GREY: "var(--ink)",
    "#ffffff": "var(--paper)",
    "#e6e6e6": "var(--line)",
    RED: "var(--red)",
}
"""The colours of figures by the variables of page.css, which are others in the dark."""


def page_style() -> str:
    """The CSS that all pages share: their colours, light and dark, and their font."""
    return resources.files("parcae").joinpath("page.css").read_text(encoding="utf-8")


def colour(index: int) -> str:
    """The colour of the curve with this index; they repeat after eight."""
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    """The dash pattern of the curve with this index: another one when the colours repeat."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def shades(count: int) -> list[Any]:
    """`count` colours from dark to light, for curves in an order."""
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0.05, 0.85, max(count, 1))))


def literal(text: str) -> str:
    """`text` as matplotlib shows it unchanged: no formula, not hidden for its underscore."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def count_ticks(axis: Any) -> None:
    """Label a logarithmic axis (`axes.xaxis` or `axes.yaxis`) with a few counts: 20k, 50k, 100k.

    Call it after the limits are set.
    """
    from matplotlib.ticker import LogLocator

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    candidates = ((1.0, (1, 1.5, 2, 3, 4, 5, 7)), (2.3, (1, 2, 5)), (3.5, (1, 3)))
    digits = next((digits for limit, digits in candidates if decades < limit), (1,))
    axis.set_major_locator(LogLocator(subs=digits, numticks=8))
    axis.set_major_formatter(lambda value, _: format_count(value))
    axis.set_minor_locator(_no_ticks())


def value_ticks(axis: Any, values: Sequence[float] | np.ndarray) -> None:
    """Ticks at `values` themselves, such as the numbers of loops that were used."""
    axis.set_ticks(values, labels=[f"{value:g}" for value in values])
    axis.set_minor_locator(_no_ticks())


def flop_ticks(axis: Any, budgets: Sequence[float] | np.ndarray) -> None:
    """Ticks at the FLOP budgets themselves: 1e18."""
    axis.set_ticks(budgets, labels=[format_flops(value) for value in budgets], fontsize=8.5)
    axis.set_minor_locator(_no_ticks())


def loop_ticks(axes: Any, loops: Sequence[int]) -> None:
    """A scale of doublings along x with as many of the numbers of loops as have room: of many
    only the powers of two."""
    axes.set_xscale("log", base=2)
    powers = [value for value in loops if math.log2(value).is_integer()]
    chosen: list[int] = []
    for value in powers if len(loops) > 10 and len(powers) > 4 else loops:
        if not chosen or math.log2(value / chosen[-1]) > 0.3:
            chosen.append(value)
    value_ticks(axes.xaxis, chosen)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
