"""From logits to a token: temperature, top-k, top-p, min-p. Pure functions.

The filters apply one after the other, each to what the last one left: temperature shapes the
probabilities, top-k keeps the k likeliest tokens, top-p the fewest of those that together hold a
share p of what is left, min-p those at least min_p times as likely as the likeliest. Between equal
tokens the smaller id goes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parcae.config import require


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

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "Use 0 or more.")
        if self.top_k is not None:
            whole = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
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
    if logits.isnan().any():
        raise BrokenLogits(
            "logits: not a number. The model has diverged, or its weights are broken."
        )
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    top = logits.max(-1, keepdim=True).values
    # First down from the top: a tiny temperature then gives zeros, not an overflow.
    chances = ((logits - top) / sampling.temperature).softmax(-1)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return chances
    ranked, order = chances.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ranked[..., sampling.top_k :] = 0
    if sampling.top_p is not None:
        ranked = ranked / ranked.sum(-1, keepdim=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(before < sampling.top_p, 0)
    if sampling.min_p is not None:
        ranked = ranked.where(ranked >= sampling.min_p * ranked[..., :1], 0)
    kept = torch.zeros_like(ranked).scatter_(-1, order, ranked)
    return kept / kept.sum(-1, keepdim=True)


def choose(chances: Tensor, noise: Tensor) -> Tensor:
    """The token at which the running sum of `chances` [..., V] passes `noise` [...] in [0, 1)."""
    running = chances.cumsum(-1)
    token = torch.searchsorted(running, noise.unsqueeze(-1) * running[..., -1:], right=True)
    # Rounding may carry the noise to the very end, past the last token that can be drawn.
    likely = chances > 0
    last = likely.shape[-1] - 1 - likely.flip(-1).int().argmax(-1, keepdim=True)
    return token.minimum(last).squeeze(-1)
