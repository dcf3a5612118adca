"""Panels that several experiments draw: loss against loops, curves over training, points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parcae import plotting
from parcae.experiments.experiment import Results, Row, loss_at

Curves = Mapping[str, Mapping[str, Any]]
"""Labels of the rows of each curve, by the name in the legend."""


def draw_loss_by_loops(
    panel: Any, results: Results, curves: Curves, loops: Sequence[int], *, mean: float | None = None
) -> None:
    """Held-out loss against loops: the mean over seeds, with a band from the lowest to the highest.

    Numbers of loops at which a run is far off scale are cut; `mean`: loops in training.
    """
    heights: list[float] = []
    for index, (name, labels) in enumerate(curves.items()):
        losses = np.array([[loss_at(row, t) for t in loops] for row in results.where(**labels)])
        if not len(losses):
            continue
        colour = plotting.colour(index)
        panel.plot(loops, losses.mean(0), color=colour, marker="o", label=name)
        panel.fill_between(loops, losses.min(0), losses.max(0), color=colour, alpha=0.15, lw=0)
        heights += losses[np.isfinite(losses)].tolist()
    if heights:
        low = min(heights)
        high = min(max(heights), low + 3 * max(np.median(heights) - low, 0.1))
        panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    if mean is not None:
        panel.axvline(mean, color=plotting.LIGHT_GREY, linestyle=":", linewidth=1.2)
    plotting.loop_ticks(panel, loops)
    panel.set(xlabel="loops T", ylabel="held-out loss, nats per token")
    if panel.lines:
        panel.legend(fontsize=8.5)


def draw_over_training(
    panel: Any, results: Results, curves: Curves, kind: str, column: str, *, log: bool = False
) -> None:
    """One line per run over its steps; `kind` is training or telemetry."""
    for index, (name, labels) in enumerate(curves.items()):
        for number, row in enumerate(results.where(**labels)):
            steps, values = series(row, kind, column)
            label = name if number == 0 else None
            panel.plot(steps, values, color=plotting.colour(index), alpha=0.8, label=label, lw=1.3)
    panel.set(xlabel="step", yscale="log" if log else "linear")
    if panel.lines:
        panel.legend(fontsize=8.5)


def series(row: Row, kind: str, column: str) -> tuple[list[int], list[float]]:
    """Steps and values of a curve; NaN where a value was not finite."""
    curve = row.get(kind) or {}
    values = [math.nan if value is None else value for value in curve.get(column, [])]
    return curve.get("step", [])[: len(values)], values


def draw_points(
    panel: Any,
    groups: Mapping[str, Sequence[float]],
    ylabel: str,
    colours: Sequence[int] | None = None,
) -> None:
    """A column of points for each group, one per seed, with a line at their mean.

    `colours`: their indices in the palette, by default one of its own for each group.
    """
    for index, values in enumerate(groups.values()):
        finite = [value for value in values if math.isfinite(value)]
        colour = plotting.colour(index if colours is None else colours[index])
        panel.plot([index] * len(finite), finite, "o", color=colour, alpha=0.8)
        if finite:
            panel.hlines(np.mean(finite), index - 0.25, index + 0.25, color=colour)
        if len(finite) < len(values):
            panel.text(index, 0.97, "diverged", transform=panel.get_xaxis_transform(), ha="center")
    panel.set_xticks(range(len(groups)), labels=list(groups), fontsize=8.5)
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_ylabel(ylabel)
