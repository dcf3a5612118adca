"""Early exit: when a token stops looping.

    state:0.05     ||h_t - h_(t-1)|| < 0.05 ||h_t||
    kl:0.01        KL(p_t || p_(t-1)) of two successive predictions is below 0.01 nats
    budget:4       after 4 loops

`state` costs two norms per loop. `kl` runs coda and head after every loop, which is most of the
cost of a shallow core. To make it cheaper, only the first prediction covers the whole vocabulary;
later ones cover the `CANDIDATES` tokens that were likeliest then.

`register_exit_rule` adds a rule by name. Later tokens attend to the last keys and values of a token
that stopped early: see `Cache.settle`. Prompts are read at full depth. The built-in rules are
implemented a second time for the CPU in native/pass.cpp: change both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parcae.config import ConfigError, require
from parcae.registry import Registry

CANDIDATES = 256


@dataclass(frozen=True, eq=False)
class LoopStep:
    """What an exit rule can look at after a loop, for the N tokens of a pass that still loop."""

    loop: int
    """The number of loops that have run, counted from 1."""
    state: Tensor
    """h after this loop [N, d_h]."""
    previous_state: Tensor
    """h before this loop [N, d_h]; zeros before the first."""
    log_probs: Tensor | None = None
    """Log-probabilities predicted after this loop [N, C], for rules that ask for predictions. C is
    the vocabulary, or the likeliest `CANDIDATES` tokens of the first loop if that is much larger.
    """
    previous_log_probs: Tensor | None = None
    """Log-probabilities after the loop before [N, C]; None after the first loop."""


StopFunction = Callable[[LoopStep, float], Tensor]
"""(step, threshold) -> boolean tensor [N]: the tokens that stop after this loop."""


class _Entry(NamedTuple):
    stops: StopFunction
    predictions: bool


def _state(step: LoopStep, threshold: float) -> Tensor:
    change = torch.linalg.vector_norm(step.state - step.previous_state, dim=-1)
    norm = torch.linalg.vector_norm(step.state, dim=-1)
    return (change / norm.clamp(min=1e-30)).double() < threshold


def _kl(step: LoopStep, threshold: float) -> Tensor:
    now, before = step.log_probs, step.previous_log_probs
    assert now is not None
    if before is None:
        return torch.zeros(len(now), dtype=torch.bool, device=now.device)
    return (now.exp() * (now - before)).sum(-1).clamp(min=0).double() < threshold


def _budget(step: LoopStep, threshold: float) -> Tensor:
    return torch.full((len(step.state),), step.loop >= threshold, device=step.state.device)


STATE, KL, BUDGET = _Entry(_state, False), _Entry(_kl, True), _Entry(_budget, False)
EXIT_RULES = Registry(
    "exit rule",
    {
        "state": "parcae.infer.exit:STATE",
        "kl": "parcae.infer.exit:KL",
        "budget": "parcae.infer.exit:BUDGET",
    },
)


def register_exit_rule(
    name: str, rule: StopFunction | None = None, *, predictions: bool = False
) -> Any:
    """Add a rule for `exit="name:THRESHOLD"` in requests and `--exit name:THRESHOLD`.

    `rule(step, threshold)` is called after every loop with a `LoopStep` and the threshold of the
    request, and returns a boolean tensor [N]: the tokens that stop. With `predictions=True` the
    step has log-probabilities; coda and head then run after every loop. Passes with a registered
    rule run through PyTorch, not C++. Also a decorator: `@register_exit_rule("name")`.
    """

    def add(rule: StopFunction) -> StopFunction:
        EXIT_RULES.register(name, _Entry(rule, predictions))
        return rule

    return add if rule is None else add(rule)


@dataclass(frozen=True)
class ExitRule:
    """A registered rule and its threshold, written `NAME:THRESHOLD`."""

    name: str
    threshold: float

    def __post_init__(self) -> None:
        EXIT_RULES.check(self.name, "exit")
        fits = 0 <= self.threshold < math.inf
        require(fits, "exit", f"{self.threshold} is out of range", "Use a number >= 0.")
        if self.name == "budget":
            whole = self.threshold >= 1 and self.threshold == int(self.threshold)
            require(whole, "exit", f"{self.threshold:g} is not a number of loops", "Try budget:4.")

    @classmethod
    def parse(cls, text: str | ExitRule) -> ExitRule:
        if isinstance(text, ExitRule):
            return text
        name, _, number = str(text).partition(":")
        try:
            threshold = float(number)
        except ValueError:
            raise ConfigError(
                f"exit: {text!r} is not NAME:THRESHOLD. Write kl:0.01, state:0.05 or budget:4, for "
                "example."
            ) from None
        return cls(name, threshold)

    @property
    def reads_predictions(self) -> bool:
        return EXIT_RULES[self.name].predictions

    def stops(self, step: LoopStep) -> list[bool]:
        """Which tokens stop after this loop."""
        stops = EXIT_RULES[self.name].stops(step, self.threshold)
        count = len(step.state)
        valid = isinstance(stops, Tensor) and stops.dtype == torch.bool and stops.shape == (count,)
        if not valid:
            raise TypeError(f"exit rule {self.name!r}: must return a boolean tensor [{count}].")
        return stops.tolist()

    def __str__(self) -> str:
        return f"{self.name}:{self.threshold:g}"


def compared_tokens(vocabulary: int) -> int:
    """Over how many tokens of a vocabulary predictions are compared."""
    return vocabulary if vocabulary <= 4 * CANDIDATES else CANDIDATES


class ExitMonitor:
    """Applies the exit rules to the tokens of one pass, loop by loop; each has its rule, or None.

    `head` gives logits [N, V] from the output of the coda [N, d_e]; `unembedding` is [V, d_e].
    """

    def __init__(
        self,
        rules: Sequence[ExitRule | None],
        head: Callable[[Tensor], Tensor],
        unembedding: Tensor,
    ) -> None:
        self.rules = list(rules)
        self.head, self.unembedding = head, unembedding
        self._candidates: Tensor | None = None
        self._log_probs: Tensor | None = None
        self.reading: Tensor | None = None
        """The output of the coda after the last loop [N, d_e], if a rule asked for it."""

    def stopped(
        self, loop: int, before: Tensor, after: Tensor, read: Callable[[], Tensor]
    ) -> list[bool]:
        """Which tokens stop after this loop. `read` runs the coda on the current states."""
        rules = {rule for rule in self.rules if rule is not None}
        previous, log_probs, self.reading = self._log_probs, None, None
        if any(rule.reads_predictions for rule in rules):
            self.reading = read()
            log_probs = self._log_probs = self._predict(self.reading)
        step = LoopStep(loop, after, before, log_probs, previous)
        stops = {rule: rule.stops(step) for rule in rules}
        return [rule is not None and stops[rule][i] for i, rule in enumerate(self.rules)]

    def keep(self, tokens: Sequence[int]) -> None:
        """Drop all tokens but those with these indices."""
        self.rules = [self.rules[index] for index in tokens]
        if self._log_probs is not None:
            self._log_probs = self._log_probs[list(tokens)]
        if self._candidates is not None:
            self._candidates = self._candidates[list(tokens)]

    def _predict(self, x: Tensor) -> Tensor:
        """Log-probabilities: over the vocabulary the first time, then over the candidates."""
        if self._candidates is not None:
            rows = self.unembedding[self._candidates].float()
            return torch.einsum("nd,ncd->nc", x.float(), rows).log_softmax(-1)
        logits = self.head(x)
        count = compared_tokens(logits.shape[-1])
        if count == logits.shape[-1]:
            return logits.log_softmax(-1)
        best = logits.topk(count, dim=-1)
        self._candidates = best.indices
        return best.values.log_softmax(-1)
