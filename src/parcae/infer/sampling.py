"""From logits to a token: repetition penalty, temperature, top-k, top-p, min-p. Pure functions.

The filters are applied in this order, each to the result of the one before: the penalty lowers the
logits of tokens already seen, temperature scales logits, top-k keeps the k likeliest tokens, top-p
the fewest of those whose probabilities sum to p, min-p those at least min_p times as likely as the
likeliest. Of equally likely tokens the smaller id ranks first.

A token is drawn as argmin_i noise_i / p_i with exponential noise, the exponential form of the
Gumbel-max trick. The noise is keyed by (seed, position), so two predictions that are close nearly
always choose the same token, which is why drafts are accepted when sampling.

Every filter exists twice:
`pick` and `draw_rows` choose tokens on the CPU, in float64. `sample_rows` chooses those of many
rows where their logits are, without waiting for the device: the same filters in float32, all rows
at once, and noise of a hash, which a device can compute for any (seed, position) by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from parcae.config import require
from parcae.infer import TEMPERATURE
from parcae.rng import keyed_generator

TOP_P_CANDIDATES = 512
"""Tokens among which top-p looks first; it nearly always keeps fewer."""
DRAWN_TOGETHER = 1 << 14
"""Rows are sampled together up to this many logits, which stay in a core's cache and for which
PyTorch hardly starts threads. A small row takes less time than the start of each operator on it."""


class NonFiniteLogits(ValueError):
    """The model's logits are not finite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = TEMPERATURE
    """0 takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    """Positive logits of tokens already seen are divided by it, negative ones multiplied."""

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax of the logits."""
        return self.temperature == 0 and self.repetition_penalty == 1

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    def __post_init__(self) -> None:
        for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, key)
            number = isinstance(value, Real) and not isinstance(value, bool)
            omitted = value is None and key in ("top_p", "min_p")
            require(number or omitted, key, f"{value!r} is not a number", "Give one, such as 0.9.")
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
    """The probability of each token [..., V] in float64; 0 for tokens that are filtered out."""
    check_logits(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    rows = logits.reshape(-1, logits.shape[-1])
    return _probabilities(rows, [sampling] * len(rows)).reshape(logits.shape)


def _probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[R, V] in float64, from finite logits; each row has its own filters, and its own temperature,
    which is not 0."""
    logits = logits.double()
    top = logits.amax(-1, keepdim=True)
    temperature = logits.new_tensor([sampling.temperature for sampling in samplings])
    # Subtract the maximum first: a tiny temperature then gives zeros, not an overflow.
    probs = ((logits - top) / temperature[:, None]).softmax(-1)
    for index, sampling in enumerate(samplings):
        if sampling.has_filters:
            probs[index] = _filtered(probs[index], sampling)
    return probs


def _filtered(probs: Tensor, sampling: Sampling) -> Tensor:
    """One row [V]. Every filter keeps a prefix of the ranking."""
    order = _rank(probs, sampling)
    ranked = probs[order]
    if sampling.top_k is not None:
        ranked = ranked[: sampling.top_k]
        ranked = ranked / ranked.sum()
    if sampling.top_p is not None:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked[: int((before < sampling.top_p).sum())]
    if sampling.min_p is not None:
        ranked = ranked[ranked >= sampling.min_p * ranked[0]]
    filtered = torch.zeros_like(probs)
    filtered[order[: len(ranked)]] = ranked / ranked.sum()
    return filtered


def _rank(probs: Tensor, sampling: Sampling) -> Tensor:
    """Ids of all tokens that the filters could keep, likeliest first, ties by id.

    Sorting a whole vocabulary takes longer than a loop, so tokens below a bound that can be found
    without sorting are omitted.
    """
    floor = probs.new_zeros(())
    if sampling.top_k is not None:
        if sampling.top_k < len(probs):
            floor = probs.topk(sampling.top_k).values[-1]
    else:
        if sampling.min_p is not None:  # a little lower, to be safe against rounding
            floor = probs.max() * sampling.min_p * (1 - 1e-9)
        if sampling.top_p is not None and len(probs) > TOP_P_CANDIDATES:
            likeliest = probs.topk(TOP_P_CANDIDATES).values
            if likeliest.sum() > sampling.top_p + 1e-9:
                floor = torch.maximum(floor, likeliest[-1])
    ids = (probs >= floor).nonzero()[:, 0]
    return ids[probs[ids].sort(descending=True, stable=True).indices]


def check_logits(logits: Tensor) -> None:
    """NonFiniteLogits for NaN, infinity, or only minus infinity: the maximum shows all of them."""
    check_largest(bool(logits.amax(-1).isfinite().all()))


def check_largest(finite: bool) -> None:
    if not finite:
        raise non_finite_logits()


def non_finite_logits() -> NonFiniteLogits:
    message = "logits: not a number. The model has diverged, or its weights are broken."
    return NonFiniteLogits(message)


def penalise(logits: Tensor, seen: Collection[int], sampling: Sampling) -> Tensor:
    """Logits [V] with the repetition penalty applied to tokens already seen."""
    if sampling.repetition_penalty == 1.0 or not seen:
        return logits
    ids = torch.tensor(sorted(set(seen)), device=logits.device)
    selected = logits[ids]
    factor = sampling.repetition_penalty
    lowered = torch.where(selected > 0, selected / factor, selected * factor)
    return logits.index_copy(0, ids, lowered)


NoiseFunction = Callable[[int, int, int], Tensor]
"""(seed, position, size of the vocabulary) -> the noise of a token [V]."""


@lru_cache(maxsize=64)
def noise(seed: int, position: int, size: int) -> Tensor:
    """The noise of the token at `position` [V] in float64. Cached because a draft and its
    verification use the same; do not modify it."""
    generator = keyed_generator(seed, position, 0, "sample")
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)


def noise_key(seed: int) -> int:
    """A seed as a number of 63 bits, for `counter_noise`."""
    return keyed_generator(seed, 0, 0, "counter").initial_seed() >> 1


def _mix_bits(x: Tensor) -> Tensor:
    """A random-looking permutation of int64: the finaliser of SplitMix64. Shifts are made logical
    by a mask, as int64 has a sign; products wrap."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def counter_noise(keys: Tensor, positions: Tensor, size: int) -> Tensor:
    """Exponential noise of tokens at `positions` [R, V] in float32, from keys of `noise_key` [R]: a
    function of (key, position, token) only, computed on the device of the keys."""
    tokens = torch.arange(1, size + 1, device=keys.device)
    streams = _mix_bits(keys + _mix_bits(positions + 1))
    # A factor of 32 bits: compiled code is C++, where the overflow of a loop's index is undefined.
    bits = _mix_bits(streams[:, None] + tokens * 0x9E3779B1) & 0x7FFFFFFFFFFFFFFF
    # Precise near 0, where the least noise decides; 1 would be infinite noise.
    uniform = (bits.float() * 2.0**-63).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def noise_of_device(seed: int, position: int, size: int) -> Tensor:
    """`counter_noise` of one token [V], as `noise` gives it."""
    key, position_tensor = torch.tensor([noise_key(seed)]), torch.tensor([position])
    return counter_noise(key, position_tensor, size)[0].double()


@dataclass(frozen=True, eq=False)
class RowSampling:
    """How the tokens of R rows are chosen, as tensors [R]."""

    keys: Tensor
    """Keys by `noise_key`."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    filters: bool
    """Whether any row has top-k, top-p or min-p."""
    penalties: bool
    """Whether any row has a repetition penalty."""

    @classmethod
    def of(
        cls, rows: Sequence[tuple[Sampling, int] | None], size: int, device: torch.device
    ) -> RowSampling:
        """From the sampling and seed of each row, None for rows without a sequence; `size` is that
        of the vocabulary."""
        settings = [(Sampling(temperature=0), 0) if row is None else row for row in rows]

        def floats(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float32, device=device)

        def or_else(value: float | None, default: float) -> float:
            return default if value is None else value

        return cls(
            keys=torch.tensor([noise_key(seed) for _, seed in settings], device=device),
            temperature=floats(s.temperature for s, _ in settings),
            top_k=torch.tensor([s.top_k or size for s, _ in settings], device=device),
            top_p=floats(or_else(s.top_p, 1.0) for s, _ in settings),
            min_p=floats(or_else(s.min_p, 0.0) for s, _ in settings),
            repetition_penalty=floats(s.repetition_penalty for s, _ in settings),
            filters=any(s.has_filters for s, _ in settings),
            penalties=any(s.repetition_penalty != 1 for s, _ in settings),
        )


def row_probabilities(logits: Tensor, sampling: RowSampling) -> Tensor:
    """The probability of each token [R, V] in float32, for rows whose temperature is not 0; those
    of the others mean nothing."""
    temperature = sampling.temperature[:, None]
    top = logits.amax(-1, keepdim=True)
    probs = ((logits - top) / torch.where(temperature > 0, temperature, 1.0)).softmax(-1)
    if not sampling.filters:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(logits.shape[1], device=logits.device) < sampling.top_k[:, None]
    ranked = ranked * kept
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    # Rounding must not cut the tail of a row that does not limit it.
    top_p = sampling.top_p[:, None]
    kept &= (before < top_p) | (top_p >= 1)
    kept &= ranked >= sampling.min_p[:, None] * ranked[:, :1]
    ranked = ranked * kept
    return torch.zeros_like(probs).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def sample_rows(
    logits: Tensor, sampling: RowSampling, positions: Tensor, seen: Tensor | None = None
) -> Tensor:
    """The tokens at `positions` [R] of R rows, from their logits [R, V] in float32 and, for
    penalties, which tokens each has seen [R, V]. Nothing is read back from the device."""
    if sampling.penalties and seen is not None:
        factor = sampling.repetition_penalty[:, None]
        lowered = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, lowered, logits)
    likeliest = logits.argmax(-1)
    noise = counter_noise(sampling.keys, positions, logits.shape[1])
    drawn = (row_probabilities(logits, sampling) / noise.clamp(min=1e-38)).argmax(-1)
    return torch.where(sampling.temperature > 0, drawn, likeliest)


def choose(probs: Tensor, noise: Tensor) -> Tensor:
    """argmin of noise / probs over [..., V]; a token with probability 0 is never chosen."""
    return (probs / noise.clamp(min=1e-300)).argmax(-1)


def likeliest(logits: np.ndarray) -> int:
    """The argmax, the first of equals; NonFiniteLogits if it is not finite."""
    best = int(logits.argmax())  # argmax finds NaN
    check_largest(math.isfinite(logits[best]))
    return best


def pick(
    logits: Tensor,
    sampling: Sampling,
    seed: int,
    position: int,
    seen: Sequence[int],
    noise: NoiseFunction = noise,
) -> int:
    """The token at `position`, from its logits [V] and the tokens before it."""
    logits = penalise(logits, seen, sampling)
    if sampling.temperature == 0:
        return likeliest(logits.detach().numpy())
    [token] = draw_rows(logits[None], [sampling], [noise(seed, position, len(logits))])
    if token is None:
        raise non_finite_logits()
    return token


def draw_rows(
    logits: Tensor, samplings: Sequence[Sampling], noises: Sequence[Tensor]
) -> list[int | None]:
    """The token of each row, from logits [R, V] after penalties and the noise of each row [V]; None
    where logits are not finite. A row's token does not depend on the other rows."""
    tokens: list[int | None] = []
    count = max(1, DRAWN_TOGETHER // logits.shape[1])
    for start in range(0, len(logits), count):
        part = slice(start, start + count)
        tokens += _draw_rows(logits[part], samplings[part], noises[part])
    return tokens


def _draw_rows(
    logits: Tensor, samplings: Sequence[Sampling], noises: Sequence[Tensor]
) -> list[int | None]:
    finite = logits.amax(-1).isfinite().tolist()
    if not all(finite):
        logits = logits.where(torch.tensor(finite)[:, None], 0.0)
    drawn = choose(_probabilities(logits, samplings), torch.stack(tuple(noises))).tolist()
    return [token if fine else None for token, fine in zip(drawn, finite, strict=True)]
