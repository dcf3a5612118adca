"""The table the paper's scaling sections rest on, made anew from its published coefficients.

    write_table("runs.csv", paper_table())

The paper does not publish the losses of its runs. Here each run of its grids gets the loss its own
law gives, with noise of the size of the paper's residuals; the end-to-end models keep the losses
that were measured. So laws, figures and tables can be tried on data of the real shape, and what a
fit finds can be held against what was put in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from parcae.config import ModelConfig
from parcae.laws import forms as laws
from parcae.laws import paper
from parcae.laws.points import points
from parcae.laws.table import Table, table_from_rows
from parcae.model import flops
from parcae.presets import preset

NOISE = {"parcae-140m": 1e-3, "parcae-370m": 3e-4}
"""Standard deviation of log loss from run to run. The paper's Huber losses of 0.44e-4 and 0.01e-4
over 36 and 18 runs are what residuals of about 2e-3 and 3e-4 give, of which part is no noise but
what the law does not describe."""
NOISE_WITHIN = 1e-4
"""The same of one run from T to T: the validation set is the same."""


def paper_table(
    sizes: tuple[str, ...] = ("140m", "370m"), seed: int = 0, noise: float = 1.0
) -> Table:
    """Grids, baselines, test-time curves and end-to-end models of these sizes; `noise` scales."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += _grid(f"parcae-{size}", rng, noise)
        rows += _curves(f"parcae-{size}", rng, noise)
    for size in paper.TOKENS:
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
    for budget in paper.BUDGETS[model]:
        for loops in (1, *paper.LOOPS):
            tokens = budget / cost(model, loops)[1]
            depths = (1,) if loops == 1 else paper.GRID_TEST_LOOPS
            yield from _run(f"grid-{budget:g}-{loops}", model, loops, tokens, depths, rng, noise)


def _curves(model: str, rng: np.random.Generator, noise: float) -> Iterator[dict[str, Any]]:
    depths = paper.CURVE_TEST_LOOPS
    for loops in paper.LOOPS:
        name = f"curve-{loops}"
        yield from _run(name, model, loops, paper.CURVE_TOKENS, depths, rng, noise)


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
    at = points(
        loss=np.ones(len(depths)),
        effective_params=size,
        tokens=tokens,
        mean_loops=loops,
        test_loops=depths,
    )
    if loops == 1:
        losses = laws.TRAINING.predict(paper.COEFFICIENTS[model], at)
    else:
        losses = laws.UNIFIED.predict({**paper.COEFFICIENTS[model], **paper.TEST_TIME}, at)
    error = rng.normal(0, NOISE[model]) + rng.normal(0, NOISE_WITHIN, len(depths))
    losses = losses * np.exp(noise * error)
    for depth, loss in zip(depths, losses, strict=True):
        yield _row(name, model, loops, tokens, depth, float(loss), (size, per_token))


def _end_to_end(size: str) -> Iterator[dict[str, Any]]:
    """Measured at T = mu; around it the decay that `paper.TEST_TIME` describes."""
    tokens, loops = paper.TOKENS[size], paper.HELD_OUT_LOOPS
    scores = paper.core_scores("transformer", size)
    name, loss = f"transformer-{size}", paper.measured_loss("transformer", size)
    yield _row("end-to-end", name, 1, tokens, 1, loss, cost(name, 1), scores)
    name, loss = f"parcae-{size}", paper.measured_loss("parcae", size)
    amplitude, rate = paper.TEST_TIME["Z"], paper.TEST_TIME["z"]
    scores = paper.core_scores("parcae", size)
    for depth in paper.HELD_OUT_TEST_LOOPS:
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
        "role": "fit" if run.startswith("grid") else "held-out",
    }
    if scores is not None:
        row |= {"core": scores[0], "core_extended": scores[1]}
    return row
