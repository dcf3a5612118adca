"""The figures of a report: TRAINING and LOOP. Each is a function of runs that returns None if they
logged nothing for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from parcae import plotting
from parcae.config import ModelConfig
from parcae.report.panel import Figure, finish, panel, smooth
from parcae.report.runs import Run, Validation, column, number, numbers
from parcae.runs.records import Line

Draw = Callable[[Sequence[Run]], Figure | None]

SMOOTH_FRACTION = 40
"""Curves are smoothed over this part of the run: 1/40."""
MARKED_EVENTS = ("spike", "skipped", "diverged")


def named(runs: Sequence[Run], run: Run, what: str) -> str:
    """The name of a curve: the quantity in a report of one run, else the name of the run."""
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
                p.describe(f"{run.name}, validation", points[:, 1])
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
            "Faint: every step; bold: moving average; diamonds: validation at the mean loops of "
            "training. Thin vertical lines mark spikes and skipped steps.",
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
            "Dotted: the mean loops of training. The loss of a stable loop falls up to there and "
            "stays flat beyond; a curve that rises there does not extrapolate. A model without a "
            "loop is a horizontal line.",
        )


def _moments(runs: Sequence[Run], run: Run) -> list[tuple[Validation, str]]:
    """The first, middle and last validation of a single run; the last of each of several."""
    validations = run.validations
    if len(runs) > 1:
        return [(v, run.name) for v in validations[-1:]]
    last = len(validations) - 1
    chosen = [validations[i] for i in sorted({0, (last + 1) // 2, last})] if validations else []
    return [(v, f"step {v.step:.0f}" if v.step >= 0 else "end") for v in chosen]


def _nominal_loss(run: Run, validation: Validation) -> float:
    measured = validation.depths.get(run.nominal_depth or 0)
    return measured.loss if measured else math.nan


def over_training(
    name: str, title: str, unit: str, key: str, caption: str, *, telemetry: bool = False
) -> Draw:
    """One quantity against the step, one curve per run, smoothed if it is noisy."""

    def draw(runs: Sequence[Run]) -> Figure | None:
        with panel(title, unit) as (canvas, p):
            for i, run in enumerate(runs):
                steps, values = column(run.telemetry if telemetry else run.train, key)
                label = run.name if len(runs) > 1 else None
                if not telemetry and len(values) > 2 * SMOOTH_FRACTION:
                    p.line(steps, values, color=plotting.colour(i), faint=True)
                    values = smooth(values, len(values) // SMOOTH_FRACTION)
                p.line(steps, values, label, color=plotting.colour(i), dash=plotting.dash(i))
                if label is None:
                    p.describe("", values)
            p.log_if_wide()
            if key == "spectral_radius" and not p.is_empty:
                p.axes.axhline(1.0, color=plotting.RED, linewidth=1, linestyle="--")
            return finish(canvas, p, name, caption)

    return draw


def several_over_training(
    name: str, title: str, unit: str, keys: dict[str, str], caption: str, *, telemetry: bool = False
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
                    label = what if alone else f"{run.name}, {what}"
                    if p.line(
                        steps, values, label, color=color, dash="-" if alone else plotting.DASHES[j]
                    ):
                        colors[run.name] = color
            p.log_if_wide()
            if not alone and not p.is_empty:
                p.legend_of(colors, [*keys.values()])
            return finish(canvas, p, name, caption)

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
                label = group if alone else f"{run.name}, {group}"
                # Groups with the same rate overlap: dashes show both.
                color, dash = (
                    plotting.colour(j if alone else i),
                    plotting.DASHES[j % len(plotting.DASHES)],
                )
                if p.line(*column(rates, group), label, color=color, dash=dash):
                    colors[run.name] = color
        if not alone and not p.is_empty:
            p.legend_of(colors, groups)
        caption = "The rate of each optimiser: warm-up, plateau, decay to zero."
        return finish(canvas, p, "learning_rates", caption)


def per_loop(name: str, title: str, unit: str, key: str, caption: str) -> Draw:
    """A quantity by loop, at the first and the last measurement of each run."""

    def draw(runs: Sequence[Run]) -> Figure | None:
        with panel(title, unit, "loop t") as (canvas, p):
            for i, run in enumerate(runs):
                for line, label, is_last in _first_and_last(runs, run):
                    values = numbers(line.get(key))
                    loops = np.arange(1, len(values) + 1, dtype=float)
                    color = plotting.colour(int(is_last)) if len(runs) == 1 else plotting.colour(i)
                    p.line(loops, values, label, color=color, dash=plotting.dash(i), marked=True)
            p.log_if_wide()
            return finish(canvas, p, name, caption)

    return draw


def block_norms(runs: Sequence[Run]) -> Figure | None:
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
        if not p.is_empty:
            p.axes.set_xticks(range(len(positions)), positions, rotation=40, ha="right", fontsize=8)
        return finish(
            canvas,
            p,
            "block_norms",
            "From left to right through the prelude and the first loop: an unstable model blows up "
            "at the block where the norm jumps.",
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
        return [(line, run.name, True) for line in lines[-1:]]
    chosen = [*lines[:1], *lines[-1:]] if len(lines) > 1 else lines
    return [(line, f"step {number(line.get('step')):.0f}", i > 0) for i, line in enumerate(chosen)]


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
        "Below the red line at 1 the linear part of the loop is stable for every input.",
        telemetry=True,
    ),
    several_over_training(
        "spectral_norms",
        "Spectral norms",
        "largest singular value",
        {
            "transition_norm": "A, transition",
            "input_norm": "B, input",
            "readout_norm": "C, readout",
            "readout_expansion": "growth by C",
        },
        "Matrices into, within and out of the loop, and the factor by which C changes the norm of "
        "the state.",
        telemetry=True,
    ),
    block_norms,
)
