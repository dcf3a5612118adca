"""From logits to a token: repetition penalty, temperature, top-k, top-p, min-p. Pure functions.

The filters apply one after the other, each to what the last one left: the penalty lowers the logits
of tokens already seen, temperature shapes the probabilities, top-k keeps the k likeliest tokens,
top-p the fewest of those that together hold a share p of what is left, min-p those at least min_p
times as likely as the likeliest. Between equal tokens the smaller id goes first.

A draw is a race: token i arrives after noise_i / p_i, with noise from the exponential distribution,
and the first one wins. Every token has noise of its own, keyed by (seed, position): two predictions
that are close then choose the same token nearly always, which is what lets a draft be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from parcae.config import require
from parcae.rng import keyed_generator

FEW = 512
"""Tokens among which top-p looks first; nearly always it keeps fewer."""


class BrokenLogits(ValueError):
    """A model that predicts nothing."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; valid once it exists."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    """Above 1: positive logits of tokens seen are divided by it, negative ones multiplied."""

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but the logits decides."""
        return self.temperature == 0 and self.repetition_penalty == 1

    def __post_init__(self) -> None:
        for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, key)
            number = isinstance(value, Real) and not isinstance(value, bool)
            missing = value is None and key in ("top_p", "min_p")
            require(number or missing, key, f"{value!r} is not a number", "Give one, such as 0.9.")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "Use 0 or more.")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 1e-3 <= penalty <= 1e3, "Use 1 for none, or more.")
        if self.top_k is not None:
            whole = isinstance(self.top_k, SupportsIndex) and not isinstance(self.top_k, bool)
            _check("top_k", self.top_k, whole and self.top_k >= 1, "Use a whole number from 1 on.")
        if self.top_p is not None:
            _check("top_p", self.top_p, 0 < self.top_p <= 1, "Use more than 0 and at most 1.")
        if self.min_p is not None:
            _check("min_p", self.min_p, 0 <= self.min_p <= 1, "Use a number from 0 to 1.")


def _check(key: str, value: object, fits: bool, remedy: str) -> None:
    require(fits, key, f"{value} is out of range", remedy)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What each token is drawn with, [..., V] in float64; tokens that were filtered out have 0."""
    logits = logits.double()
    check_logits(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    top = logits.max(-1, keepdim=True).values
    # First down from the top: a tiny temperature then gives zeros, not an overflow.
    chances = ((logits - top) / sampling.temperature).softmax(-1)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return chances
    rows = [_filtered(row, sampling) for row in chances.reshape(-1, chances.shape[-1])]
    return torch.stack(rows).reshape_as(chances)


def _filtered(chances: Tensor, sampling: Sampling) -> Tensor:
    """One row [V]. Every filter keeps the first so many of the ranking."""
    order = _rank(chances, sampling)
    ranked = chances[order]
    if sampling.top_k is not None:
        ranked = ranked[: sampling.top_k]
        ranked = ranked / ranked.sum()
    if sampling.top_p is not None:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked[: int((before < sampling.top_p).sum())]
    if sampling.min_p is not None:
        ranked = ranked[ranked >= sampling.min_p * ranked[0]]
    kept = torch.zeros_like(chances)
    kept[order[: len(ranked)]] = ranked / ranked.sum()
    return kept


def _rank(chances: Tensor, sampling: Sampling) -> Tensor:
    """Ids of all tokens that the filters could keep, likeliest first, of equals the smaller id.

    Sorting a whole vocabulary takes longer than a loop, so tokens below a bound that is found
    without sorting are left out.
    """
    floor = chances.new_zeros(())
    if sampling.top_k is not None:
        if sampling.top_k < len(chances):
            floor = chances.topk(sampling.top_k).values[-1]
    else:
        if sampling.min_p is not None:  # a little lower, so that rounding decides nothing here
            floor = chances.max() * sampling.min_p * (1 - 1e-9)
        if sampling.top_p is not None and len(chances) > FEW:
            likeliest = chances.topk(FEW).values
            if likeliest.sum() > sampling.top_p + 1e-9:
                floor = torch.maximum(floor, likeliest[-1])
    ids = (chances >= floor).nonzero()[:, 0]
    return ids[chances[ids].sort(descending=True, stable=True).indices]


def check_logits(logits: Tensor) -> None:
    """NaN anywhere, infinity, or nothing but minus infinity: the maximum shows them all."""
    check_largest(bool(logits.amax(-1).isfinite().all()))


def check_largest(finite: bool) -> None:
    if not finite:
        raise BrokenLogits(
            "logits: not a number. The model has diverged, or its weights are broken."
        )


def penalise(logits: Tensor, seen: Collection[int], sampling: Sampling) -> Tensor:
    """Logits [V] with those of tokens already seen lowered."""
    if sampling.repetition_penalty == 1.0 or not seen:
        return logits
    ids = torch.tensor(sorted(set(seen)), device=logits.device)
    held = logits[ids]
    factor = sampling.repetition_penalty
    return logits.index_copy(0, ids, torch.where(held > 0, held / factor, held * factor))


@lru_cache(maxsize=64)
def noise(seed: int, position: int, size: int) -> Tensor:
    """What decides the token at `position`, whoever asks for it: [V] in float64. A draft and the
    text ask for the same, one after the other; nobody may change it."""
    generator = keyed_generator(seed, position, 0, "sample")
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)


def choose(chances: Tensor, noise: Tensor) -> Tensor:
    """The token that arrives first; one with probability 0 never does. Both are [..., V]."""
    return (chances / noise.clamp(min=1e-300)).argmax(-1)


def likeliest(logits: np.ndarray) -> int:
    """Of equals the first."""
    best = int(logits.argmax())  # not a number counts as the largest
    check_largest(math.isfinite(logits[best]))
    return best


def pick(logits: Tensor, sampling: Sampling, seed: int, position: int, seen: Sequence[int]) -> int:
    """The token at `position`, from its logits [V] and the tokens before it."""
    logits = penalise(logits, seen, sampling)
    if sampling.temperature == 0:
        return likeliest(logits.detach().numpy())
    chances = probabilities(logits, sampling)
    return int(choose(chances, noise(seed, position, len(chances))))
