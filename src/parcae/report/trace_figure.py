"""The figure of `parcae.trace_loops`: what every loop does to every token of one text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.evaluation.loop_trace import LoopTrace

MONOSPACE = "DejaVu Sans Mono"
MAX_LABEL = 14
SOFT = "#5b6770"
LETTERS = str.maketrans({" ": "␣", "\n": "↵", "\r": "←", "\t": "→"})
"""Visible signs for white space."""


def draw_trace(trace: LoopTrace, labels: Sequence[str], title: str, path: str | Path) -> Path:
    """Draw what the loops change, the loss and the change of the state by colour, loops downwards
    and tokens across. `labels` are the texts of the predicted tokens."""
    from matplotlib.colors import LogNorm, Normalize

    columns, loops = len(labels), trace.loops
    width = max(7.5, 0.26 * columns + 2.6)
    height = max(1.3, 0.2 * loops + 0.3) + 0.8
    loss, change = trace.loss.numpy(), trace.change.numpy().clip(min=1e-8)
    gain = loss - loss[0]
    far = max(float(abs(gain).max()), 1e-3)
    with plotting.figure(3, 1, width=width, height=height) as (canvas, (above, middle, below)):
        lines = [_drawable(title), *textwrap.wrap(trace.conclusion, int(12 * width))]
        canvas.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=10)
        _panel(canvas, above, gain, "RdBu_r", Normalize(-far, far), "{:+.2f}")
        _title(above, "Change of the loss since the first loop, in nats", "mean")
        _mark_settled(above, trace)
        shades = Normalize(0, max(float(loss.max()), 1e-6))
        _panel(canvas, middle, loss, "YlGnBu", shades, "{:.2f}")
        _title(middle, "Loss of each token after T loops, in nats", "mean")
        shades = LogNorm(min(float(change.min()), 0.5), 1.0)
        _panel(canvas, below, change, "magma", shades, "{:.2g}")
        label = r"Relative change of the state by each loop: $\|h_t - h_{t-1}\| \, / \, \|h_t\|$"
        _title(below, label, "mean")
        for axes in (above, middle, below):
            _label(axes, labels, loops)
        return plotting.save(canvas, path)


def _title(axes: Any, text: str, right: str) -> None:
    axes.set_title(text, fontweight="normal", fontsize=10)
    axes.set_title(right, loc="right", fontweight="normal", fontsize=8, color=SOFT, ha="left")


def _panel(canvas: Any, axes: Any, values: Any, colours: str, norm: Any, number: str) -> None:
    """A cell for each value, and the mean of each row to its right."""
    mesh = axes.pcolormesh(values, cmap=colours, norm=norm, edgecolors="white", linewidth=0.6)
    bar = canvas.colorbar(mesh, ax=axes, pad=0.012, fraction=0.03, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, which="major")
    bar.ax.tick_params(labelsize=8, length=0, which="minor")
    axes.grid(False)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for row in _rows(len(values)):
        text = number.format(values[row].mean())
        position = (values.shape[1] + 0.25, row + 0.5)
        axes.annotate(text, position, va="center", fontsize=8, color=SOFT, annotation_clip=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _mark_settled(axes: Any, trace: LoopTrace) -> None:
    """Mark the loop after which the most likely token no longer changes."""
    levels = [loop - 0.1 for loop in trace.settled.tolist()]
    starts = [column + 0.12 for column in range(len(levels))]
    ends = [column + 0.88 for column in range(len(levels))]
    label = "the most likely token no longer changes"
    axes.hlines(levels, starts, ends, color=plotting.PALETTE[1], lw=2, label=label)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.985), fontsize=8, handlelength=1.2)


def _label(axes: Any, labels: Sequence[str], loops: int) -> None:
    positions = [column + 0.5 for column in range(len(labels))]
    shown = [_drawable(_short(label)) for label in labels]
    axes.set_xticks(positions, shown, rotation=90, fontsize=8, family=MONOSPACE, parse_math=False)
    rows = _rows(loops)
    axes.set_yticks([row + 0.5 for row in rows], [str(row + 1) for row in rows], fontsize=8)
    axes.set_ylabel("T", fontsize=9, rotation=0, ha="right", va="center")


def _rows(loops: int) -> list[int]:
    """The rows that get a label: at most about 16, with the first and the last."""
    step = max(1, -(-loops // 16))
    return [row for row in range(loops) if row in (0, loops - 1) or (row + 1) % step == 0]


def _short(label: str) -> str:
    label = re.sub(" {3,}", lambda run: f"␣×{len(run[0])}", label).translate(LETTERS)
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…"


def _drawable(text: str) -> str:
    """Replace characters that the font does not have by boxes, which matplotlib would warn of."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(MONOSPACE))
    return "".join(c if font.get_char_index(ord(c)) else "□" for c in text)
