"""Figures of the loop itself: does the state stay bounded and settle, and where do norms grow?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parcae import plotting
from parcae.config import ModelConfig
from parcae.report.canvas import Figure, finish, panel
from parcae.report.figures import Draw, over_training, several_over_training
from parcae.report.runs import Run
from parcae.report.series import number, numbers
from parcae.runs.records import Line


def per_loop(name: str, title: str, unit: str, key: str, look: str) -> Draw:
    """A quantity loop by loop, at the first and the last look of each run."""

    def draw(runs: Sequence[Run]) -> Figure | None:
        with panel(title, unit, "loop t") as (canvas, p):
            for i, run in enumerate(runs):
                for line, label, is_last in _first_and_last(runs, run):
                    values = numbers(line.get(key))
                    loops = np.arange(1, len(values) + 1, dtype=float)
                    color = plotting.colour(int(is_last)) if len(runs) == 1 else plotting.colour(i)
                    p.line(loops, values, label, color=color, dash=plotting.dash(i), marked=True)
            p.log_if_wide()
            return finish(canvas, p, name, look)

    return draw


def block_norms(runs: Sequence[Run]) -> Figure | None:
    """The appendix's diagnosis: norms after every block of the prelude and of the first loop."""
    with panel("Norms through the blocks", "mean norm of a position", "") as (canvas, p):
        places: list[str] = []
        for i, run in enumerate(runs):
            for line, label, is_last in _first_and_last(runs, run):
                prelude, first = (
                    numbers(line.get("prelude_norms")),
                    numbers(line.get("first_loop_norms")),
                )
                names = block_names(run.config, len(prelude), len(first))
                places = max(places, names, key=len)
                color = plotting.colour(int(is_last)) if len(runs) == 1 else plotting.colour(i)
                values = np.concatenate((prelude, first))
                x = np.arange(len(values), dtype=float)
                p.line(x, values, label, color=color, dash=plotting.dash(i), marked=True)
        p.log_if_wide()
        if not p.is_empty:
            p.axes.set_xticks(range(len(places)), places, rotation=40, ha="right", fontsize=8)
        return finish(
            canvas,
            p,
            "block_norms",
            "From left to right through the prelude and the first loop: the block at which the "
            "norm jumps is where an unstable model blows up.",
        )


def block_names(config: ModelConfig | None, prelude: int, first: int) -> list[str]:
    """Where norms were taken; a log may or may not begin with that of the embedding."""
    normed = bool(config and config.prelude_norm) and prelude > 0
    embedded = config is not None and prelude - normed > config.prelude_layers
    blocks = [f"prelude {i}" for i in range(1, prelude + 1 - normed - embedded)]
    inside = ["injection", *(f"core {i}" for i in range(1, first))] if first else []
    before = ["embedding"] if embedded else []
    return [*before, *blocks, *(["prelude norm"] if normed else []), *inside]


def _first_and_last(runs: Sequence[Run], run: Run) -> list[tuple[Line, str, bool]]:
    """Both ends of a single run; the last look of each among several."""
    seen = run.telemetry
    if len(runs) > 1:
        return [(line, run.name, True) for line in seen[-1:]]
    chosen = [*seen[:1], *seen[-1:]] if len(seen) > 1 else seen
    return [(line, f"step {number(line.get('step')):.0f}", i > 0) for i, line in enumerate(chosen)]


LOOP: tuple[Draw, ...] = (
    over_training(
        "state_norm",
        "State norm over training",
        r"mean norm of $h_T$",
        "state_norm",
        "It may grow, but should level off; growth without end is the first sign of instability.",
        telemetry=True,
    ),
    over_training(
        "residual",
        "Recurrent residual over training",
        r"$\|h_T - h_{T-1}\|$",
        "residual",
        "How far the last loop still moves the state: small means that the loop has settled.",
        telemetry=True,
    ),
    per_loop(
        "state_norm_by_loop",
        "State norm, loop by loop",
        r"mean norm of $h_t$",
        "state_norms",
        "Flat after a few loops is a bounded state; a straight line on a logarithmic axis is an "
        "exploding one.",
    ),
    per_loop(
        "residual_by_loop",
        "Residual, loop by loop",
        r"$\|h_t - h_{t-1}\|$",
        "residuals",
        "A falling curve converges: each loop changes the state less than the one before.",
    ),
    over_training(
        "spectral_radius",
        "Spectral radius of the transition",
        "spectral radius",
        "spectral_radius",
        "Below the red line at 1 the state's memory fades from loop to loop, whatever it is given.",
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
        "Matrices into, within and out of the loop, and how much longer or shorter C makes the "
        "state; one that grows alone is the one to watch.",
        telemetry=True,
    ),
    block_norms,
)
