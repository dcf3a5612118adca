"""A picture of a `DepthProfile`: loops downwards, tokens across, colour for loss and for change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parcae import plotting as draw
from parcae.evaluation.depth import DepthProfile

MONOSPACE = "DejaVu Sans Mono"
LONGEST_LABEL = 14
SOFT = "#5b6770"
LETTERS = str.maketrans({" ": "␣", "\n": "↵", "\r": "←", "\t": "→"})
"""White space that can be seen."""


def picture(profile: DepthProfile, labels: Sequence[str], title: str, path: str | Path) -> Path:
    """`labels`: the text of each predicted token."""
    from matplotlib.colors import LogNorm, Normalize

    columns, loops = len(labels), profile.loops
    width = max(7.5, 0.26 * columns + 2.6)
    height = max(1.3, 0.2 * loops + 0.3) + 0.8
    loss, change = profile.loss.numpy(), profile.change.numpy().clip(min=1e-8)
    gain = loss - loss[0]
    far = max(float(abs(gain).max()), 1e-3)
    with draw.figure(3, 1, width=width, height=height) as (canvas, (above, middle, below)):
        canvas.suptitle(_drawable(title), x=0.012, ha="left", fontweight="bold", fontsize=12)
        shades = Normalize(0, max(float(loss.max()), 1e-6))
        _panel(canvas, above, loss, "YlGnBu", shades, "{:.2f}")
        _title(above, "Loss of each token after T loops, in nats", "mean")
        _mark_settled(above, profile)
        _panel(canvas, middle, gain, "RdBu_r", Normalize(-far, far), "{:+.2f}")
        _title(middle, "What the loops changed: the same, less the loss after one loop", "mean")
        shades = LogNorm(min(float(change.min()), 0.5), 1.0)
        _panel(canvas, below, change, "magma", shades, "{:.2g}")
        words = r"How far each loop moved the state: $\|h_t - h_{t-1}\| \, / \, \|h_t\|$"
        _title(below, words, "mean")
        for axes in (above, middle, below):
            _label(axes, labels, loops)
        return draw.save(canvas, path)


def _title(axes: Any, words: str, right: str) -> None:
    axes.set_title(words, fontweight="normal", fontsize=10)
    axes.set_title(right, loc="right", fontweight="normal", fontsize=8, color=SOFT, ha="left")


def _panel(canvas: Any, axes: Any, values: Any, colours: str, norm: Any, number: str) -> None:
    """A cell for each number, and each row's mean to its right."""
    mesh = axes.pcolormesh(values, cmap=colours, norm=norm, edgecolors="white", linewidth=0.6)
    bar = canvas.colorbar(mesh, ax=axes, pad=0.012, fraction=0.03, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, which="major")
    bar.ax.tick_params(length=0, which="minor")
    axes.grid(False)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for row in _rows(len(values)):
        words = number.format(values[row].mean())
        place = (values.shape[1] + 0.25, row + 0.5)
        axes.annotate(words, place, va="center", fontsize=8, color=SOFT, annotation_clip=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _mark_settled(axes: Any, profile: DepthProfile) -> None:
    """A line under the loop from which on the likeliest token stays the same."""
    levels = [loop - 0.1 for loop in profile.settled.tolist()]
    starts = [column + 0.12 for column in range(len(levels))]
    ends = [column + 0.88 for column in range(len(levels))]
    words = "from here on the likeliest token stays the same"
    axes.hlines(levels, starts, ends, color=draw.PALETTE[1], lw=2, label=words)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.985), fontsize=8, handlelength=1.2)


def _label(axes: Any, labels: Sequence[str], loops: int) -> None:
    places = [column + 0.5 for column in range(len(labels))]
    shown = [_drawable(_short(label)) for label in labels]
    axes.set_xticks(places, shown, rotation=90, fontsize=8, family=MONOSPACE, parse_math=False)
    rows = _rows(loops)
    axes.set_yticks([row + 0.5 for row in rows], [str(row + 1) for row in rows], fontsize=8)
    axes.set_ylabel("T", fontsize=9, rotation=0, ha="right", va="center")


def _rows(loops: int) -> list[int]:
    """Those that are labelled: all, or some dozen with the first and the last."""
    step = max(1, -(-loops // 16))
    return [row for row in range(loops) if row in (0, loops - 1) or (row + 1) % step == 0]


def _short(label: str) -> str:
    label = re.sub(" {3,}", lambda run: f"␣×{len(run[0])}", label).translate(LETTERS)
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _drawable(text: str) -> str:
    """Letters that the font does not have become boxes, without a warning for each."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(MONOSPACE))
    return "".join(c if font.get_char_index(ord(c)) else "□" for c in text)
