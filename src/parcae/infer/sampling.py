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

import torch
from torch import Tensor

from parcae.config import require
from parcae.model.depth import row_generator

FEW = 512
"""Tokens that are ranked first where top-p or min-p asks how many matter."""


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

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "Use 0 or more.")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0 < penalty < math.inf, "Use 1 for none, or more.")
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
    check_logits(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    top = logits.max(-1, keepdim=True).values
    # First down from the top: a tiny temperature then gives zeros, not an overflow.
    chances = ((logits - top) / sampling.temperature).softmax(-1)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return chances
    ranked, order = _rank(chances, sampling)
    if sampling.top_k is not None:
        ranked[..., sampling.top_k :] = 0
    if sampling.top_p is not None:
        ranked = ranked / ranked.sum(-1, keepdim=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(before < sampling.top_p, 0)
    if sampling.min_p is not None:
        ranked = ranked.where(ranked >= sampling.min_p * ranked[..., :1], 0)
    kept = torch.zeros_like(chances).scatter_(-1, order, ranked)
    return kept / kept.sum(-1, keepdim=True)


def _rank(chances: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Likeliest first, at least as far as the filters can look: sorting a whole vocabulary takes
    longer than a loop."""
    size, enough = chances.shape[-1], sampling.top_k or FEW
    if enough < size // 2:
        best, order = chances.topk(enough, dim=-1, sorted=True)
        top_p = sampling.top_p if sampling.top_k is None else None
        reaches = top_p is None or bool((best.sum(-1) >= top_p + 1e-6).all())
        cut = chances < best[..., -1:]
        if sampling.top_k is None and top_p is None:
            reaches = bool((best[..., -1] < (sampling.min_p or 0) * best[..., 0]).all())
        if reaches and bool((cut.sum(-1) == size - enough).all()) and _all_differ(best):
            return best, order
    ranked = chances.sort(dim=-1, descending=True, stable=True)
    return ranked.values, ranked.indices


def _all_differ(ranked: Tensor) -> bool:
    """Ties need the stable sort: between equal tokens the smaller id goes first."""
    return bool((ranked[..., 1:] < ranked[..., :-1]).all())


def check_logits(logits: Tensor) -> None:
    if logits.isnan().any():
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


def noise(seed: int, position: int, size: int) -> Tensor:
    """What decides the token at `position`, whoever asks for it: [V] in float64."""
    generator = row_generator(seed, position, 0, "sample")
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)


def choose(chances: Tensor, noise: Tensor) -> Tensor:
    """The token that arrives first; one with probability 0 never does. Both are [..., V]."""
    return (chances / noise.clamp(min=1e-300)).argmax(-1)


def pick(logits: Tensor, sampling: Sampling, seed: int, position: int, seen: Sequence[int]) -> int:
    """The token at `position`, from its logits [V] and the tokens before it."""
    logits = penalise(logits, seen, sampling)
    if sampling.temperature == 0:
        best = int(logits.argmax())  # not a number counts as the largest
        check_logits(logits[best])
        return best
    chances = probabilities(logits, sampling)
    return int(choose(chances, noise(seed, position, len(chances))))
