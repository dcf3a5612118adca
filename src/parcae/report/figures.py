"""The figures of a report: training, then the loop. Each is None where a run logged nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parcae import plotting
from parcae.report.canvas import (
    Figure,
    finish,
    panel,
)
from parcae.report.runs import Run, Validation
from parcae.report.series import column, smooth

Draw = Callable[[Sequence[Run]], Figure | None]

SMOOTH_FRACTION = 40
"""Curves are smoothed over one part in so many of the run."""
MARKED_EVENTS = ("spike", "skipped", "diverged")


def named(runs: Sequence[Run], run: Run, what: str) -> str:
    """A curve's name: the quantity in a report of one run, the run's name among several."""
    return what if len(runs) == 1 else run.name


def loss_curves(runs: Sequence[Run]) -> Figure | None:
    with panel("Loss over training", "nats per token") as (canvas, p):
        at_start = 0.0
        for i, run in enumerate(runs):
            steps, losses = column(run.train, "loss")
            trend = smooth(losses, len(losses) // SMOOTH_FRACTION)
            at_start = max(at_start, float(trend[0]) if len(trend) else 0.0)
            p.line(steps, losses, color=plotting.colour(i), faint=True)
            label = named(runs, run, "training, smoothed")
            p.line(steps, trend, label, color=plotting.colour(i), dash=plotting.dash(i))
            measured = [(v.step, _nominal_loss(run, v)) for v in run.validations]
            points = np.array(measured, dtype=float).reshape(-1, 2)
            if np.isfinite(points).all(axis=1).any():
                color = plotting.colour(1) if len(runs) == 1 else plotting.colour(i)
                what = f"validation at T = {run.nominal_depth}" if len(runs) == 1 else None
                p.axes.plot(*points.T, "D", color=color, mec="white", ms=7, label=what)
                p.values.append(points[np.isfinite(points[:, 1]), 1])
                seen = points[np.isfinite(points[:, 1]), 1]
                p.said.append(f"{run.name}, validation: from {seen[0]:.3g} to {seen[-1]:.3g}")
            for event in run.events:
                if event.get("what") in MARKED_EVENTS and isinstance(event.get("step"), int):
                    p.axes.axvline(
                        event["step"], color=plotting.colour(i), linewidth=0.8, alpha=0.4
                    )
        p.cut_above(1.5 * at_start)
        return finish(
            canvas,
            p,
            "loss",
            "Faint is every step, bold the running mean, diamonds are validation at the depth "
            "the model is used at; thin vertical lines mark spikes and skipped steps.",
        )


def loss_by_depth(runs: Sequence[Run]) -> Figure | None:
    with panel("Loss against loops", "validation loss, nats per token", "loops T") as (canvas, p):
        depths: set[int] = set()
        for i, run in enumerate(runs):
            for j, (moment, label) in enumerate(_moments(runs, run)):
                depths |= set(moment.depths)
                x = np.array([*moment.depths], dtype=float)
                y = np.array([one.loss for one in moment.depths.values()])
                color = plotting.colour(j) if len(runs) == 1 else plotting.colour(i)
                p.line(x, y, label, color=color, dash=plotting.dash(i), marked=True)
                if len(x) == 1 and np.isfinite(y[0]):  # no loop: a level to compare with
                    p.axes.axhline(y[0], color=color, linewidth=1, linestyle="--", zorder=1)
        for i, run in enumerate(runs):
            if run.nominal_depth and run.nominal_depth > 1 and not p.is_empty:
                color = plotting.GREY if len(runs) == 1 else plotting.colour(i)
                p.axes.axvline(run.nominal_depth, color=color, linewidth=1, linestyle=":", zorder=1)
        if not p.is_empty:
            plotting.loop_ticks(p.axes, sorted(depths))
        return finish(
            canvas,
            p,
            "loss_by_depth",
            "Dotted is the mean depth of training: a good loop keeps falling up to it "
            "and stays flat beyond; a curve that turns up there does not extrapolate. A model "
            "without a loop is a level line.",
        )


def _moments(runs: Sequence[Run], run: Run) -> list[tuple[Validation, str]]:
    """First, middle and last of a single run; the last of each among several."""
    seen = run.validations
    if len(runs) > 1:
        return [(v, run.name) for v in seen[-1:]]
    places = sorted({0, len(seen) // 2, len(seen) - 1}) if seen else []
    names = [f"step {seen[i].step:.0f}" if seen[i].step >= 0 else "end" for i in places]
    return [(seen[i], name) for i, name in zip(places, names, strict=True)]


def _nominal_loss(run: Run, validation: Validation) -> float:
    measured = validation.depths.get(run.nominal_depth or 0)
    return measured.loss if measured else math.nan


def over_training(
    name: str, title: str, unit: str, key: str, look: str, *, telemetry: bool = False
) -> Draw:
    """One quantity against the step, one curve per run, noisy ones with a running mean."""

    def draw(runs: Sequence[Run]) -> Figure | None:
        with panel(title, unit) as (canvas, p):
            for i, run in enumerate(runs):
                steps, values = column(run.telemetry if telemetry else run.train, key)
                label = run.name if len(runs) > 1 else None
                if not telemetry and len(values) > 2 * SMOOTH_FRACTION:
                    p.line(steps, values, color=plotting.colour(i), faint=True)
                    values = smooth(values, len(values) // SMOOTH_FRACTION)
                p.line(steps, values, label, color=plotting.colour(i), dash=plotting.dash(i))
                if label is None and len(values):
                    p.said.append(f"from {values[0]:.3g} to {values[-1]:.3g}")
            p.log_if_wide()
            if key == "spectral_radius" and not p.is_empty:
                p.axes.axhline(1.0, color=plotting.RED, linewidth=1, linestyle="--")
            return finish(canvas, p, name, look)

    return draw


def several_over_training(
    name: str, title: str, unit: str, keys: dict[str, str], look: str, *, telemetry: bool = False
) -> Draw:
    """Related quantities in one panel: by colour for one run, by dash for several."""

    def draw(runs: Sequence[Run]) -> Figure | None:
        alone, colors = len(runs) == 1, {}
        with panel(title, unit) as (canvas, p):
            for i, run in enumerate(runs):
                for j, (key, what) in enumerate(keys.items()):
                    steps, values = column(run.telemetry if telemetry else run.train, key)
                    color = plotting.colour(j if alone else i)
                    if not telemetry and len(values) > 2 * SMOOTH_FRACTION:
                        if alone:
                            p.line(steps, values, color=color, faint=True)
                        values = smooth(values, len(values) // SMOOTH_FRACTION)
                    said = what if alone else f"{run.name}, {what}"
                    if p.line(
                        steps, values, said, color=color, dash="-" if alone else plotting.DASHES[j]
                    ):
                        colors[run.name] = color
            p.log_if_wide()
            if not alone and not p.is_empty:
                p.legend_of(colors, [*keys.values()])
            return finish(canvas, p, name, look)

    return draw


def learning_rates(runs: Sequence[Run]) -> Figure | None:
    alone, colors = len(runs) == 1, {}
    with panel("Learning rates", "learning rate") as (canvas, p):
        groups: list[str] = []
        for i, run in enumerate(runs):
            rates = [
                {**line["lr"], "step": line.get("step")}
                for line in run.train
                if isinstance(line.get("lr"), dict)
            ]
            for group in dict.fromkeys(key for line in rates for key in line if key != "step"):
                groups = groups if group in groups else [*groups, group]
                j = groups.index(group)
                said = group if alone else f"{run.name}, {group}"
                # Groups with the same rate lie on each other: dashes let both be seen.
                color, dash = (
                    plotting.colour(j if alone else i),
                    plotting.DASHES[j % len(plotting.DASHES)],
                )
                if p.line(*column(rates, group), said, color=color, dash=dash):
                    colors[run.name] = color
        if not alone and not p.is_empty:
            p.legend_of(colors, groups)
        look = "Each optimiser's rate as it was used: warm-up, plateau and the fall to zero."
        return finish(canvas, p, "learning_rates", look)


TRAINING: tuple[Draw, ...] = (
    loss_curves,
    loss_by_depth,
    over_training(
        "gradient_norm",
        "Gradient norm",
        "norm before clipping",
        "gradient_norm",
        "It should settle; a rise that lasts comes before most divergences.",
    ),
    learning_rates,
    several_over_training(
        "depth",
        "Loops drawn in training",
        "loops",
        {"mean_depth": "mean of the batch", "max_depth": "deepest sequence"},
        "The mean should scatter around the configured depth, or climb to it under a curriculum.",
    ),
    over_training(
        "speed",
        "Throughput",
        "tokens per second",
        "tokens_per_second",
        "Dips are validations, checkpoints or a busy machine; a slow fall deserves a look.",
    ),
)
