"""What a law is fitted to: losses, and what they were measured at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Points:
    """One entry per measured loss; arrays of equal length."""

    effective_params: np.ndarray
    """N(mu): the parameters of the model with its core unrolled mean_loops times."""
    tokens: np.ndarray
    mean_loops: np.ndarray
    """mu: mean loops in training."""
    test_loops: np.ndarray
    """T: loops the loss was measured with."""
    loss: np.ndarray
    run: np.ndarray
    """Which run a loss belongs to: losses of one run err together."""

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: np.ndarray) -> Points:
        """The points at these places, or where this mask is true."""
        return Points(*(getattr(self, field.name)[rows] for field in fields(self)))

    def runs(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each run with the mask of its points."""
        for run in np.unique(self.run):
            yield int(run), self.run == run


def points(
    *,
    loss: object,
    effective_params: object = 1.0,
    tokens: object = 1.0,
    mean_loops: object = 1.0,
    test_loops: object = None,
    run: object = None,
) -> Points:
    """Points from anything like arrays; what is left out is 1, T is mu, and runs are all apart."""
    losses = np.asarray(loss, dtype=float)

    def column(values: object) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, dtype=float), losses.shape).copy()

    loops = column(mean_loops)
    return Points(
        effective_params=column(effective_params),
        tokens=column(tokens),
        mean_loops=loops,
        test_loops=loops if test_loops is None else column(test_loops),
        loss=losses,
        run=np.arange(losses.size) if run is None else np.asarray(run),
    )
