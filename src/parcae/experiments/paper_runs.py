"""What the paper publishes about scaling, and a table of runs simulated from it.

    write_table("runs.csv", paper_table())

The paper does not publish the losses of its runs. Here each run of its grids gets the loss that
the paper's law predicts, with noise of the size of the paper's residuals; the end-to-end models
have the losses the paper measured. A fit of this table can be compared with the coefficients it
was simulated from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from parcae.config import ModelConfig
from parcae.laws.forms import TRAINING, UNIFIED
from parcae.laws.model_runs import make_points
from parcae.laws.table import SETS, Table, table_from_rows
from parcae.model import flops
from parcae.presets import preset

COEFFICIENTS: Mapping[str, Mapping[str, float]] = {
    "parcae-140m": {"E": 2.662, "X": 522733.307, "x": 0.771, "Y": 25420.102, "y": 0.525},
    "parcae-370m": {"E": 2.439, "X": 832134.346, "x": 0.775, "Y": 6386.865, "y": 0.448},
}
TEST_TIME: Mapping[str, float] = {"Z": 0.85, "z": 7.5}
"""Not printed in the paper: derived from its 140M losses 3.28, 2.97, 2.95 at T = 1, 4, 8 (mu 8)."""

BUDGETS: Mapping[str, tuple[float, ...]] = {
    "parcae-140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18),
    "parcae-370m": (32e18, 64e18, 128e18),
}
LOOPS = (2, 4, 6, 8, 10, 12)
GRID_TEST_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
"""T at which each run of the grid is measured for the unified law."""
CURVE_TEST_LOOPS = tuple(range(1, 25))
CURVE_TOKENS = 11.2e9
"""Training tokens of the runs with test-time curves, one for each mu in LOOPS."""

TOKENS: Mapping[str, float] = {"140m": 11.2e9, "370m": 29.6e9, "770m": 61.6e9, "1.3b": 104e9}
HELD_OUT_LOOPS = 8
HELD_OUT_TEST_LOOPS = tuple(range(1, 17))

_PERPLEXITY = {
    "parcae": {"140m": 19.06, "370m": 14.49, "770m": 12.49, "1.3b": 11.42},
    "transformer": {"140m": 21.48, "370m": 15.79, "770m": 13.08, "1.3b": 11.95},
}
_CORE = {
    "parcae": {
        "140m": (14.04, 9.67),
        "370m": (20.0, 12.75),
        "770m": (25.07, 15.19),
        "1.3b": (28.44, 17.08),
    },
    "transformer": {
        "140m": (13.0, 8.8),
        "370m": (17.46, 11.71),
        "770m": (22.42, 14.2),
        "1.3b": (25.45, 15.9),
    },
}

NOISE = {"parcae-140m": 1e-3, "parcae-370m": 3e-4}
"""Standard deviation of log loss between runs. The paper's Huber losses of 0.44e-4 and 0.01e-4 over
36 and 18 runs correspond to residuals of about 2e-3 and 3e-4, part of which is not noise but
misfit of the law."""
NOISE_WITHIN = 1e-4
"""Standard deviation within one run, between T: the validation set is the same."""


def measured_loss(family: str, size: str) -> float:
    """Validation loss of the paper's end-to-end models: `parcae` at T = 8, `transformer`."""
    return math.log(_PERPLEXITY[family][size])


def core_scores(family: str, size: str) -> tuple[float, float]:
    """Core and Core-Extended."""
    return _CORE[family][size]


def paper_table(
    sizes: tuple[str, ...] = ("140m", "370m"), seed: int = 0, noise: float = 1.0
) -> Table:
    """Simulated grids, baselines, test-time curves and end-to-end models of these sizes.

    `noise` scales the standard deviations.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += _grid(f"parcae-{size}", rng, noise)
        rows += _curves(f"parcae-{size}", rng, noise)
    for size in TOKENS:
        rows += _end_to_end(size)
    return table_from_rows(rows, "the paper's grids")


def with_loops(model: str, loops: float) -> ModelConfig:
    config = preset(model)
    return replace(config, loop=replace(config.loop, mean_loops=loops))


@lru_cache
def cost(model: str, loops: float) -> tuple[float, float]:
    """N(mu) and training FLOPs per token."""
    config = with_loops(model, loops)
    return flops.effective_parameters(config), flops.training_flops_per_token(config)


def _grid(model: str, rng: np.random.Generator, noise: float) -> Iterator[dict[str, Any]]:
    for budget in BUDGETS[model]:
        for loops in (1, *LOOPS):
            tokens = budget / cost(model, loops)[1]
            depths = (1,) if loops == 1 else GRID_TEST_LOOPS
            yield from _run(f"grid-{budget:g}-{loops}", model, loops, tokens, depths, rng, noise)


def _curves(model: str, rng: np.random.Generator, noise: float) -> Iterator[dict[str, Any]]:
    depths = CURVE_TEST_LOOPS
    for loops in LOOPS:
        name = f"curve-{loops}"
        yield from _run(name, model, loops, CURVE_TOKENS, depths, rng, noise)


def _run(
    name: str,
    model: str,
    loops: int,
    tokens: float,
    depths: tuple[int, ...],
    rng: np.random.Generator,
    noise: float,
) -> Iterator[dict[str, Any]]:
    size, per_token = cost(model, loops)
    at = make_points(
        loss=np.ones(len(depths)),
        effective_params=size,
        tokens=tokens,
        mean_loops=loops,
        test_loops=depths,
    )
    if loops == 1:
        losses = TRAINING.predict(COEFFICIENTS[model], at)
    else:
        losses = UNIFIED.predict({**COEFFICIENTS[model], **TEST_TIME}, at)
    error = rng.normal(0, NOISE[model]) + rng.normal(0, NOISE_WITHIN, len(depths))
    losses = losses * np.exp(noise * error)
    for depth, loss in zip(depths, losses, strict=True):
        yield _row(name, model, loops, tokens, depth, float(loss), (size, per_token))


def _end_to_end(size: str) -> Iterator[dict[str, Any]]:
    """The measured loss at T = mu, and the decay of `TEST_TIME` at other T."""
    tokens, loops = TOKENS[size], HELD_OUT_LOOPS
    scores = core_scores("transformer", size)
    name, loss = f"transformer-{size}", measured_loss("transformer", size)
    yield _row("end-to-end", name, 1, tokens, 1, loss, cost(name, 1), scores)
    name, loss = f"parcae-{size}", measured_loss("parcae", size)
    amplitude, rate = TEST_TIME["Z"], TEST_TIME["z"]
    scores = core_scores("parcae", size)
    for depth in HELD_OUT_TEST_LOOPS:
        more = amplitude * (math.exp(-rate * depth / loops) - math.exp(-rate))
        here = scores if depth == loops else None
        yield _row("end-to-end", name, loops, tokens, depth, loss + more, cost(name, loops), here)


def _row(
    run: str,
    model: str,
    loops: int,
    tokens: float,
    depth: int,
    loss: float,
    cost: tuple[float, float],
    scores: tuple[float, float] | None = None,
) -> dict[str, Any]:
    row = {
        "model": model,
        "mean_loops": loops,
        "tokens": round(tokens),
        "flops": round(tokens) * cost[1],
        "effective_params": cost[0],
        "test_loops": depth,
        "loss": loss,
        "run": run,
        "set": next(name for name in SETS if run.startswith(name)),
    }
    if scores is not None:
        row |= {"core": scores[0], "core_extended": scores[1]}
    return row
