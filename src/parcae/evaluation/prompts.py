"""What a scorer reads and returns: prompts as token sequences with scored spans, and answers.

    continuations(context, texts, scorer)     a text after a context, as lm-evaluation-harness does
    windows(tokens, bos, context)             a long text, each token predicted once

The few-shot prompts of CORE are in core_suite.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from parcae.config import require
from parcae.infer.rows import common_prefix

if TYPE_CHECKING:
    from parcae.evaluation.scorer import Scorer


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """The alternatives of an item as token sequences, with their scored spans."""

    sequences: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]
    """Lengths of the sequences before tokens were dropped on the left."""
    lost: int = 0
    """Tokens dropped from a span, for the alternative that lost most."""
    is_aligned: bool = True
    """Whether the answer begins with a token of its own; if not, the token that spans the end of
    the question and the beginning of the answer is scored."""

    @property
    def is_cut(self) -> bool:
        return any(len(s) < n for s, n in zip(self.sequences, self.lengths, strict=True))


@dataclass(frozen=True, eq=False)
class Answer:
    """The scored span of one alternative, at every depth."""

    nats: Tensor
    """Loss of each token [loops, span], float64; NaN at a depth where the model diverged."""
    likeliest: Tensor
    """The model's own most likely tokens [loops, span]."""
    expected: Tensor
    """The tokens of the span [span]."""

    def is_greedy(self) -> list[bool]:
        """Whether every token of the span is the likeliest one, at each depth."""
        return (self.likeliest == self.expected).all(1).tolist()

    def diverged(self) -> list[int]:
        """Indices of the numbers of loops without a prediction."""
        return self.nats.isnan().any(1).nonzero().flatten().tolist()


def cut_left(sequences: Sequence[Sequence[int]], spans: Sequence[Span], context: int) -> Prompt:
    """The prompt with the last `context` tokens of each sequence. A span that does not fit is cut
    such that one token remains before it."""
    kept, moved, lost = [], [], 0
    for tokens, (start, end) in zip(sequences, spans, strict=True):
        dropped = max(len(tokens) - context, 0)
        kept.append(tuple(tokens[dropped:]))
        moved.append(Span(max(start - dropped, 1), end - dropped))
        if dropped > 0:
            lost = max(lost, dropped + 1 - start)
    return Prompt(tuple(kept), tuple(moved), tuple(map(len, sequences)), lost)


def common_suffix(sequences: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all sequences end with."""
    return common_prefix(*(sequence[::-1] for sequence in sequences))


def continuations(context: str, texts: Sequence[str], scorer: Scorer) -> Prompt:
    """The prompt that scores each of `texts` after `context`.

    Spaces at the end of the context belong to the text. The scored tokens are those which the
    encoding of both has beyond the length of the context's own encoding; where a token spans the
    two, the model still reads the context's own tokens. It never reads the last token, so one more
    fits. The sequence begins with the tokenizer's own prefix, or with BOS where the context is
    empty.
    """
    trimmed = context.rstrip()
    spaces = context[len(trimmed) :]
    bos = [] if scorer.bos is None else [scorer.bos]
    prefix = list(scorer.prefix) if trimmed else bos
    context_tokens = scorer.encode(trimmed)
    sequences, spans = [], []
    for text in texts:
        both = scorer.encode(trimmed + spaces + text)
        tokens = prefix + (
            context_tokens + both[len(context_tokens) :]
            if len(both) > len(context_tokens)
            else both
        )
        require(
            len(tokens) > 1,
            "text",
            f"{context + text!r} has no token with another one before it",
            "Give a longer text, or a tokenizer with a BOS token.",
        )
        start = min(len(prefix) + len(context_tokens), len(tokens) - 1)
        sequences.append(tokens)
        spans.append(Span(max(start, 1), len(tokens)))
    return cut_left(sequences, spans, scorer.context_length + 1)


class Window(NamedTuple):
    tokens: tuple[int, ...]
    scored: int
    """How many of its tokens, the last ones, are predicted."""


def windows(tokens: Sequence[int], prefix: int, context: int) -> Iterator[Window]:
    """All of `tokens`, each predicted once, by a model that reads `context` tokens at a time."""
    first = tuple(tokens[:context])
    if first:
        yield Window((prefix, *first), len(first))
    for start in range(context, len(tokens), context):
        end = min(start + context, len(tokens))
        yield Window(tuple(tokens[end - context - 1 : end]), end - start)
