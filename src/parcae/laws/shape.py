"""What a model costs as it loops: N(mu) and FLOPs per token, from the table alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parcae.laws.points import Points, points

DEEPEST = 256.0
"""No optimum is looked for beyond so many loops."""
GRID = 600


@dataclass(frozen=True)
class Shape:
    """Straight lines in mu: each loop adds the same parameters and the same FLOPs.

    FLOPs per token are those of the paper's rule mu_bwd = ceil(mu / 2) taken at even mu, where it
    is exactly half; with an odd mu the true cost is one loop's backward more. Below the shallowest
    looped runs the line bends towards what fixed depth (mu = 1) was measured to cost.
    """

    params: float
    """All parameters once."""
    params_per_loop: float
    flops: float
    """Training FLOPs per token outside the loop."""
    flops_per_loop: float
    measured: Mapping[float, tuple[float, float]]
    """By mean_loops: N(mu) and FLOPs per token, as they are in the table."""

    def effective_params(self, loops: np.ndarray | float) -> np.ndarray:
        return self.params + (np.asarray(loops, dtype=float) - 1) * self.params_per_loop

    def flops_per_token(self, loops: np.ndarray | float) -> np.ndarray:
        loops = np.asarray(loops, dtype=float)
        line = self.flops + loops * self.flops_per_loop
        first = min((depth for depth in self.measured if depth > 1), default=1.0)
        if 1.0 not in self.measured or first == 1.0:
            return line
        ends = (self.measured[1.0][1], self.flops + first * self.flops_per_loop)
        return np.where(loops < first, np.interp(loops, (1.0, first), ends), line)

    def points(self, loops: object, tokens: object, test_loops: object = None) -> Points:
        """Where to ask a law for its loss (the losses in it are only placeholders)."""
        loops, tokens = np.broadcast_arrays(
            np.asarray(loops, dtype=float), np.asarray(tokens, dtype=float)
        )
        test = loops if test_loops is None else np.asarray(test_loops, dtype=float)
        test = np.broadcast_to(test, loops.shape)
        return points(
            loss=np.ones(loops.size),
            effective_params=self.effective_params(loops).ravel(),
            tokens=tokens.ravel(),
            mean_loops=loops.ravel(),
            test_loops=test.ravel(),
        )

    def loops_grid(self, deepest: float = DEEPEST) -> np.ndarray:
        return np.geomspace(1.0, deepest, GRID)


def shape_from(mean_loops: np.ndarray, params: np.ndarray, flops_per_token: np.ndarray) -> Shape:
    """Lines through what the table holds, of looped runs if there are at least two depths."""
    measured = {}
    for loops in np.unique(mean_loops):
        here = mean_loops == loops
        measured[float(loops)] = (
            float(np.median(params[here])),
            float(np.median(flops_per_token[here])),
        )
    depths = np.array(list(measured))
    looped = depths[depths > 1] if (depths > 1).sum() >= 2 else depths
    pairs = np.array([measured[float(loops)] for loops in looped])
    if len(looped) == 1:
        return Shape(pairs[0, 0], 0.0, pairs[0, 1], 0.0, measured)
    slope_n, at_zero = np.polyfit(looped, pairs[:, 0], 1)
    slope_f, flops = np.polyfit(looped, pairs[:, 1], 1)
    return Shape(float(at_zero + slope_n), float(slope_n), float(flops), float(slope_f), measured)
