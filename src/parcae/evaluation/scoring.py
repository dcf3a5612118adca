"""What a model makes of the scored spans of some prompts, whoever's model it is.

    scorer = LoopedScorer(model, tokenizer, depths=(1, 4, 8))       or ForeignScorer
    for answers in scorer.score(prompts):
        answers[0].nats[-1]        # of the first alternative's span, after eight loops

Prompts are scored in batches of about `batch_tokens` tokens, long ones first: what lies together
is alike in length, and if memory does not suffice that shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.evaluation.prompts import Prompt
from parcae.infer.sampling import BrokenLogits, check_logits

LARGEST_LOGITS = 1 << 25
"""Numbers held at once when predictions are read."""


@dataclass(frozen=True, eq=False)
class Answer:
    """One alternative's span, at every depth."""

    nats: Tensor
    """Of each token of the span [depths, span], float64; NaN at a depth that is lost."""
    likeliest: Tensor
    """What the model would have said in its place, alike."""
    expected: Tensor
    """What stands there [span]."""

    def is_greedy(self) -> list[bool]:
        """At each depth: is every token of the span the likeliest?"""
        return (self.likeliest == self.expected).all(1).tolist()

    def lost(self) -> list[int]:
        """Places of the depths at which the model had no prediction."""
        return self.nats.isnan().any(1).nonzero().flatten().tolist()


class Scorer(Protocol):
    name: str
    identity: str
    """Changes with the weights and with whatever else changes an answer."""
    depths: tuple[int, ...]
    """Loops to score at; (1,) for a model without a loop."""
    is_looped: bool
    draws_state: bool
    """Whether the looped state starts from a draw, so that a seed changes every answer."""
    context_length: int
    batch_tokens: int
    bos: int | None
    opening: tuple[int, ...]
    """What the tokenizer itself puts before a text, which the harness leaves to it."""

    def encode(self, text: str) -> list[int]: ...

    def cost(self, prompt: Prompt) -> int:
        """Tokens to compute."""
        ...

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """Of every alternative of every prompt. `seeds`: one for each prompt, for models whose
        looped state starts from a draw."""
        ...


def batches(costs: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of prompts that are scored together: by falling cost, each batch within `most` unless
    a prompt exceeds it alone."""
    batch: list[int] = []
    total = 0
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if batch and total + costs[place] > most:
            yield batch
            batch, total = [], 0
        batch.append(place)
        total += costs[place]
    if batch:
        yield batch


def score_all(
    scorer: Scorer, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
) -> list[list[Answer]]:
    """In the order given, in batches."""
    found: dict[int, list[Answer]] = {}
    for places in batches([scorer.cost(prompt) for prompt in prompts], scorer.batch_tokens):
        chosen = None if seeds is None else [seeds[place] for place in places]
        answers = scorer.score([prompts[place] for place in places], chosen)
        found.update(zip(places, answers, strict=True))
    return [found[place] for place in range(len(prompts))]


def read_predictions(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Nats of the targets [N] and the likeliest tokens [N], a few predictions at a time."""
    nats, likeliest = [], []
    rows = max(LARGEST_LOGITS // vocabulary, 1)
    for part, wanted in zip(x.split(rows), targets.split(rows), strict=True):
        predicted = logits(part).float()
        check_logits(predicted)
        found = F.cross_entropy(predicted, wanted, reduction="none").double().cpu()
        if not found.isfinite().all():
            raise BrokenLogits("logits: minus infinity for a token that is asked about.")
        nats.append(found)
        likeliest.append(predicted.argmax(-1).cpu())
    return torch.cat(nats), torch.cat(likeliest)
