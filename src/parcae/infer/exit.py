"""When a token has looped enough.

    kl:0.01        KL(p_t || p_(t-1)) of two successive predictions is below 0.01 nats
    entropy:0.01   the prediction's entropy moved by less than 0.01 nats
    state:0.05     ||h_t - h_(t-1)|| < 0.05 ||h_t||
    budget:4       after 4 loops

The first two read the state through coda and head after every loop, which is most of what a
shallow core costs; `state` costs two norms. Reading is made cheaper by looking at the whole
vocabulary once: after that the comparison is over the `CANDIDATES` tokens that were likeliest then.

A token that exits stands still: see `Cache.settle`. Prompts are read at full depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from parcae.config import ConfigError, require

Kind = Literal["kl", "entropy", "state", "budget"]
CANDIDATES = 256


@dataclass(frozen=True)
class ExitRule:
    kind: Kind
    threshold: float

    def __post_init__(self) -> None:
        require(
            self.kind in get_args(Kind),
            "exit",
            f"{self.kind!r} is not a rule",
            f"Use one of {', '.join(get_args(Kind))}, as in kl:0.01.",
        )
        fits = 0 <= self.threshold < math.inf
        require(fits, "exit", f"{self.threshold} is out of range", "Use a number from 0 on.")
        if self.kind == "budget":
            whole = self.threshold >= 1 and self.threshold == int(self.threshold)
            require(whole, "exit", f"{self.threshold:g} is not a number of loops", "Try budget:4.")

    @classmethod
    def parse(cls, text: str | ExitRule) -> ExitRule:
        if isinstance(text, ExitRule):
            return text
        kind, _, number = str(text).partition(":")
        try:
            threshold = float(number)
        except ValueError:
            raise ConfigError(
                f"exit: {text!r} is not a rule. Write kl:0.01, entropy:0.01, state:0.05 or "
                "budget:4."
            ) from None
        return cls(kind, threshold)  # type: ignore[arg-type]

    def most_loops(self, limit: int) -> int:
        return min(limit, int(self.threshold)) if self.kind == "budget" else limit

    @property
    def least_change(self) -> float:
        """By how much a loop must move what the rule looks at; 0 where that is no matter."""
        return 0.0 if self.kind == "budget" else self.threshold

    def __str__(self) -> str:
        return f"{self.kind}:{self.threshold:g}"


def compared_tokens(vocabulary: int) -> int:
    """Over how many tokens of a vocabulary predictions are compared."""
    return vocabulary if vocabulary <= 4 * CANDIDATES else CANDIDATES


Read = Callable[[], Tensor]
"""What the head would read from the tokens at hand, computed when it is asked for."""


class Watch:
    """Follows the tokens of one pass from loop to loop, each under a rule of its own, or none."""

    def __init__(
        self, rules: Sequence[ExitRule | None], head: Callable[[Tensor], Tensor], table: Tensor
    ) -> None:
        self.rules = list(rules)
        self.head, self.table = head, table
        self._candidates: Tensor | None = None
        self._before: Tensor | None = None
        self.reading: Tensor | None = None
        """The last reading [N, d_e], for tokens that exit on it."""

    def finished(self, loop: int, before: Tensor, after: Tensor, read: Read) -> list[bool]:
        """Which tokens stop after this loop."""
        self.reading = None
        moved: dict[str, list[float]] = {}
        kinds = {rule.kind for rule in self.rules if rule is not None}
        if "state" in kinds:
            change = torch.linalg.vector_norm(after - before, dim=-1)
            norm = torch.linalg.vector_norm(after, dim=-1)
            moved["state"] = (change / norm.clamp(min=1e-30)).tolist()
        if kinds & {"kl", "entropy"}:
            self.reading = read()
            now = self._predict(self.reading)
            if self._before is not None:
                moved |= {kind: _CHANGES[kind](now, self._before) for kind in kinds & {*_CHANGES}}
            self._before = now
        return [self._stops(rule, loop, moved, i) for i, rule in enumerate(self.rules)]

    def keep(self, tokens: Sequence[int]) -> None:
        """The other tokens have ended."""
        self.rules = [self.rules[index] for index in tokens]
        if self._before is not None:
            self._before = self._before[list(tokens)]
        if self._candidates is not None:
            self._candidates = self._candidates[list(tokens)]

    @staticmethod
    def _stops(rule: ExitRule | None, loop: int, moved: dict[str, list[float]], i: int) -> bool:
        if rule is None:
            return False
        if rule.kind == "budget":
            return loop >= rule.threshold
        return rule.kind in moved and moved[rule.kind][i] < rule.threshold

    def _predict(self, x: Tensor) -> Tensor:
        """Log-probabilities over the vocabulary the first time, over candidates from then on."""
        if self._candidates is not None:
            rows = self.table[self._candidates].float()
            return torch.einsum("nd,ncd->nc", x, rows).log_softmax(-1)
        logits = self.head(x)
        count = compared_tokens(logits.shape[-1])
        if count == logits.shape[-1]:
            return logits.log_softmax(-1)
        best = logits.topk(count, dim=-1)
        self._candidates = best.indices
        return best.values.log_softmax(-1)


def _kl(now: Tensor, before: Tensor) -> list[float]:
    return (now.exp() * (now - before)).sum(-1).clamp(min=0).tolist()


def _entropy_change(now: Tensor, before: Tensor) -> list[float]:
    entropy = [-(p.exp() * p).sum(-1) for p in (now, before)]
    return (entropy[0] - entropy[1]).abs().tolist()


_CHANGES = {"kl": _kl, "entropy": _entropy_change}
