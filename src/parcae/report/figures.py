"""The figures of a report: TRAINING and LOOP. Each is a function of runs and of what is along x in
figures over training; it returns None if the runs logged nothing for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parcae import plotting
from parcae.config import ModelConfig
from parcae.report.panel import FEW_POINTS, MOST_NAMES, Figure, finish, panel, smooth
from parcae.report.runs import Axis, Run, Validation, column, number, numbers
from parcae.runs.records import Line

Draw = Callable[[Sequence[Run], Axis], Figure | None]

SMOOTH_FRACTION = 40
"""Curves are smoothed over this part of the run: 1/40."""
LOSS_RANGE = 0.03
"""The smallest range of an axis of losses: 0.1 nats at a loss of 3.3."""
MOST_MARKS, MOST_GROUPS = 200, 16
"""Events that are marked, and optimisers whose rates are drawn."""
MARKED_EVENTS = ("spike", "skipped", "diverged")


def named(runs: Sequence[Run], run: Run, what: str) -> str:
    """The name of a curve: the quantity in a report of one run, else the name of the run."""
    return what if len(runs) == 1 else run.name


def loss_curves(runs: Sequence[Run], axis: Axis) -> Figure | None:
    with panel("Loss over training", "nats per token") as (canvas, p):
        for i, run in enumerate(runs):
            steps, losses = column(run.train, "loss")
            trend = smooth(losses, len(losses) // SMOOTH_FRACTION)
            color, dash = plotting.colour(i), plotting.dash(i)
            if len(runs) <= MOST_NAMES:
                p.line(steps, losses, color=color, faint=True, run=run)
            label = named(runs, run, "training, smoothed")
            p.line(steps, trend, label, color=color, dash=dash, run=run)
            measured = [(v.step, _nominal_loss(run, v)) for v in run.validations]
            points = np.array(measured, dtype=float).reshape(-1, 2)
            points = points[np.isfinite(points).all(axis=1)]
            if len(points):
                shade = plotting.colour(1) if len(runs) == 1 else color
                what = f"validation at T = {run.nominal_depth}" if len(runs) == 1 else None
                size = 6 if len(points) <= FEW_POINTS else 3.5
                look = {"color": shade, "mec": "white", "mew": 0.7, "ms": size, "label": what}
                (marks,) = p.axes.plot(*points.T, "D", **look)
                p.by_step.append((marks, points[:, 0], run))
                p.points.append((points[:, 0], points[:, 1]))
                p.describe(f"{run.name}, validation", points[:, 1])
            marked = [e for e in run.events if e.get("what") in MARKED_EVENTS]
            steps = sorted({step for e in marked if math.isfinite(step := number(e.get("step")))})
            for step in steps[:: 1 + len(steps) // MOST_MARKS]:
                p.mark(step, color, run)
        p.limit(LOSS_RANGE, cut_start=True)
        return finish(
            canvas,
            p,
            "loss",
            "Faint: every step; bold: moving average; diamonds: validation at the mean loops of "
            "training. Thin vertical lines mark spikes and skipped steps.",
            axis,
        )


def loss_by_depth(runs: Sequence[Run], axis: Axis) -> Figure | None:
    with panel("Loss against loops", "validation loss, nats per token", "loops T") as (canvas, p):
        depths: set[int] = set()
        for i, run in enumerate(runs):
            for last in run.validations[-1:]:
                depths |= set(last.depths)
                x = np.array([*last.depths], dtype=float)
                y = np.array([measured.loss for measured in last.depths.values()])
                color, label = plotting.colour(i), named(runs, run, f"step {last.step:.0f}")
                p.line(x, y, label, color=color, dash=plotting.dash(i), marked=True)
                if len(x) == 1 and np.isfinite(y[0]):  # no loop: a level to compare with
                    p.axes.axhline(y[0], color=color, linewidth=1, linestyle="--", zorder=1)
        for i, run in enumerate(runs):
            if run.nominal_depth and run.nominal_depth > 1 and not p.is_empty:
                color = plotting.GREY if len(runs) == 1 else plotting.colour(i)
                p.axes.axvline(run.nominal_depth, color=color, linewidth=1, linestyle=":", zorder=1)
        if not p.is_empty:
            plotting.loop_ticks(p.axes, sorted(depths))
        p.limit(LOSS_RANGE)
        return finish(
            canvas,
            p,
            "loss_by_depth",
            "Dotted: the mean loops of training. The loss of a stable loop falls up to there and "
            "stays flat beyond; a curve that rises there does not extrapolate. A model without a "
            "loop is a horizontal line.",
            axis,
        )


def _nominal_loss(run: Run, validation: Validation) -> float:
    measured = validation.depths.get(run.nominal_depth or 0)
    return measured.loss if measured else math.nan


def over_training(
    name: str, title: str, unit: str, key: str, caption: str, *, telemetry: bool = False
) -> Draw:
    """One quantity against the step, one curve per run, smoothed if it is noisy."""

    def draw(runs: Sequence[Run], axis: Axis) -> Figure | None:
        with panel(title, unit) as (canvas, p):
            for i, run in enumerate(runs):
                steps, values = column(run.telemetry if telemetry else run.train, key)
                label = run.name if len(runs) > 1 else None
                if not telemetry and len(values) > 2 * SMOOTH_FRACTION:
                    if len(runs) <= MOST_NAMES:
                        p.line(steps, values, color=plotting.colour(i), faint=True, run=run)
                    values = smooth(values, len(values) // SMOOTH_FRACTION)
                color, dash = plotting.colour(i), plotting.dash(i)
                p.line(steps, values, label, color=color, dash=dash, run=run)
                if label is None:
                    p.describe("", values)
            p.log_if_wide()
            p.limit()
            if key == "spectral_radius" and not p.is_empty:
                p.axes.axhline(1.0, color=plotting.RED, linewidth=1, linestyle="--")
            return finish(canvas, p, name, caption, axis)

    return draw


def several_over_training(
    name: str, title: str, unit: str, keys: dict[str, str], caption: str, *, telemetry: bool = False
) -> Draw:
    """Related quantities in one panel: by colour for one run, by dash for several."""

    def draw(runs: Sequence[Run], axis: Axis) -> Figure | None:
        alone, colors = len(runs) == 1, {}
        with panel(title, unit) as (canvas, p):
            for i, run in enumerate(runs):
                for j, (key, what) in enumerate(keys.items()):
                    steps, values = column(run.telemetry if telemetry else run.train, key)
                    color = plotting.colour(j if alone else i)
                    if not telemetry and len(values) > 2 * SMOOTH_FRACTION:
                        if alone:
                            p.line(steps, values, color=color, faint=True, run=run)
                        values = smooth(values, len(values) // SMOOTH_FRACTION)
                    label = what if alone else f"{run.name}, {what}"
                    dash = "-" if alone else plotting.DASHES[j]
                    if p.line(steps, values, label, color=color, dash=dash, run=run):
                        colors[run.name] = color
            p.log_if_wide()
            p.limit()
            if not alone and not p.is_empty:
                p.legend_of(colors, [*keys.values()])
            return finish(canvas, p, name, caption, axis)

    return draw


def learning_rates(runs: Sequence[Run], axis: Axis) -> Figure | None:
    alone, colors = len(runs) == 1, {}
    with panel("Learning rates", "learning rate") as (canvas, p):
        groups: list[str] = []
        for i, run in enumerate(runs):
            rates = [
                {**line["lr"], "step": line.get("step")}
                for line in run.train
                if isinstance(line.get("lr"), dict)
            ]
            names = dict.fromkeys(key for line in rates for key in line if key != "step")
            for group in [*names][:MOST_GROUPS]:
                groups = groups if group in groups else [*groups, group]
                j = groups.index(group)
                label = group if alone else f"{run.name}, {group}"
                # Groups with the same rate overlap: dashes show both.
                color, dash = (
                    plotting.colour(j if alone else i),
                    plotting.DASHES[j % len(plotting.DASHES)],
                )
                steps, values = column(rates, group)
                if p.line(steps, values, label, color=color, dash=dash, run=run):
                    colors[run.name] = color
        if not alone and not p.is_empty:
            p.legend_of(colors, groups)
        p.limit()
        caption = "The rate of each optimiser: warm-up, plateau, decay to zero."
        return finish(canvas, p, "learning_rates", caption, axis)


def per_loop(name: str, title: str, unit: str, key: str, caption: str) -> Draw:
    """A quantity by loop, at the first and the last measurement of each run."""

    def draw(runs: Sequence[Run], axis: Axis) -> Figure | None:
        with panel(title, unit, "loop t") as (canvas, p):
            for i, run in enumerate(runs):
                for line, label, is_last in _first_and_last(runs, run):
                    values = numbers(line.get(key))
                    loops = np.arange(1, len(values) + 1, dtype=float)
                    color = plotting.colour(int(is_last)) if len(runs) == 1 else plotting.colour(i)
                    p.line(loops, values, label, color=color, dash=plotting.dash(i), marked=True)
            p.log_if_wide()
            p.limit()
            return finish(canvas, p, name, caption, axis)

    return draw


def block_norms(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Norms after every block of the prelude and of the first loop, as in the paper's appendix."""
    with panel("Norms through the blocks", "mean norm of a position", "") as (canvas, p):
        positions: list[str] = []
        for i, run in enumerate(runs):
            for line, label, is_last in _first_and_last(runs, run):
                prelude, first = (
                    numbers(line.get("prelude_norms")),
                    numbers(line.get("first_loop_norms")),
                )
                names = block_names(run.config, len(prelude), len(first))
                positions = max(positions, names, key=len)
                color = plotting.colour(int(is_last)) if len(runs) == 1 else plotting.colour(i)
                values = np.concatenate((prelude, first))
                x = np.arange(len(values), dtype=float)
                p.line(x, values, label, color=color, dash=plotting.dash(i), marked=True)
        p.log_if_wide()
        p.limit()
        if not p.is_empty:
            p.axes.set_xticks(range(len(positions)), positions, rotation=40, ha="right", fontsize=8)
        return finish(
            canvas,
            p,
            "block_norms",
            "In the order of computation, through the prelude and the first loop: an unstable "
            "model blows up at the block where the norm jumps.",
            axis,
        )


def block_names(config: ModelConfig | None, prelude: int, first: int) -> list[str]:
    """Where norms were measured; a log may or may not begin with the norm of the embedding."""
    normed = bool(config and config.prelude_norm) and prelude > 0
    embedded = config is not None and prelude - normed > config.prelude_layers
    blocks = [f"prelude {i}" for i in range(1, prelude + 1 - normed - embedded)]
    inside = ["injection", *(f"core {i}" for i in range(1, first))] if first else []
    before = ["embedding"] if embedded else []
    return [*before, *blocks, *(["prelude norm"] if normed else []), *inside]


def _first_and_last(runs: Sequence[Run], run: Run) -> list[tuple[Line, str, bool]]:
    """The first and last measurement of a single run; the last of each of several."""
    lines = run.telemetry
    if len(runs) > 1:
        return [
            (line, f"{run.name}, step {number(line.get('step')):.0f}", True) for line in lines[-1:]
        ]
    chosen = [*lines[:1], *lines[-1:]] if len(lines) > 1 else lines
    return [(line, f"step {number(line.get('step')):.0f}", i > 0) for i, line in enumerate(chosen)]


SPECTRAL_NORMS = {
    "transition_norm": ("A, transition", "largest singular value", "The matrix within the loop."),
    "input_norm": ("B, input", "largest singular value", "The matrix into the loop."),
    "readout_norm": ("C, readout", "largest singular value", "The matrix out of the loop."),
    "readout_expansion": ("growth by C", "factor", "By which C changes the norm of the state."),
}


def spectral_norms(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Of a single run; several have a figure for each matrix."""
    names = {key: what for key, (what, _, _) in SPECTRAL_NORMS.items()}
    draw = several_over_training(
        "spectral_norms",
        "Spectral norms",
        "largest singular value",
        names,
        "Matrices into, within and out of the loop, and the factor by which C changes the norm of "
        "the state.",
        telemetry=True,
    )
    return draw(runs, axis) if len(runs) == 1 else None


def compared(draw: Draw) -> Draw:
    """A figure that only several runs have."""
    return lambda runs, axis: draw(runs, axis) if len(runs) > 1 else None


TRAINING: tuple[Draw, ...] = (
    loss_curves,
    loss_by_depth,
    over_training(
        "gradient_norm",
        "Gradient norm",
        "norm before clipping",
        "gradient_norm",
        "It should settle; a lasting rise precedes most divergences.",
    ),
    learning_rates,
    several_over_training(
        "depth",
        "Loops drawn in training",
        "loops",
        {"mean_depth": "mean of the batch", "max_depth": "deepest sequence"},
        "The mean should scatter around the configured mean, or rise to it under a curriculum.",
    ),
    over_training(
        "speed",
        "Throughput",
        "tokens per second",
        "tokens_per_second",
        "Dips are validations, checkpoints or other load on the machine.",
    ),
)

LOOP: tuple[Draw, ...] = (
    over_training(
        "state_norm",
        "State norm over training",
        r"mean norm of $h_T$",
        "state_norm",
        "It may grow, but should level off; unbounded growth is the first sign of instability.",
        telemetry=True,
    ),
    over_training(
        "residual",
        "Recurrent residual over training",
        r"$\|h_T - h_{T-1}\|$",
        "residual",
        "How far the last loop still moves the state: small if the loop has converged.",
        telemetry=True,
    ),
    per_loop(
        "state_norm_by_loop",
        "State norm by loop",
        r"mean norm of $h_t$",
        "state_norms",
        "Flat after a few loops: the state is bounded. A straight line on a logarithmic axis: it "
        "explodes.",
    ),
    per_loop(
        "residual_by_loop",
        "Residual by loop",
        r"$\|h_t - h_{t-1}\|$",
        "residuals",
        "A falling curve converges: each loop changes the state less than the previous one.",
    ),
    over_training(
        "spectral_radius",
        "Spectral radius of the transition",
        "spectral radius",
        "spectral_radius",
        "Below 1, a red line where it is in view, the linear part of the loop is stable for every "
        "input. An A that depends on the input has none.",
        telemetry=True,
    ),
    spectral_norms,
    *(
        compared(over_training(key, f"Spectral norms: {what}", unit, key, caption, telemetry=True))
        for key, (what, unit, caption) in SPECTRAL_NORMS.items()
    ),
    block_norms,
)
