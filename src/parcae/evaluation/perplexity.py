"""Perplexity of running text, and of the last word of a passage, as lm-evaluation-harness has it.

A text is cut into windows whose predictions do not overlap: the first is predicted from BOS alone,
every other from the token before it and, the last one, from as much text as fits. A passage that
is too long loses tokens on the left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from parcae.config import require
from parcae.evaluation.job import DataFile, Record, mean, standard_error, sums
from parcae.evaluation.prompts import Prompt, Span, cut_left
from parcae.evaluation.scoring import Answer, Scorer
from parcae.files import FileError


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


def continuations(context: str, texts: Sequence[str], scorer: Scorer) -> Prompt:
    """What is scored of each text after `context`, spaces at whose end count as the text's: what
    the encoding of both has beyond the length of the context's own. Where a token spans the two,
    the model still reads the context's own. It never reads the last token, so one more fits. In
    front is what the tokenizer puts there, and BOS where there is no context."""
    kept = context.rstrip()
    spaces = context[len(kept) :]
    bos = [] if scorer.bos is None else [scorer.bos]
    begin = list(scorer.opening) if kept else bos
    read = scorer.encode(kept)
    whole, spans = [], []
    for text in texts:
        both = scorer.encode(kept + spaces + text)
        tokens = begin + (read + both[len(read) :] if len(both) > len(read) else both)
        require(
            len(tokens) > 1,
            "text",
            f"{context + text!r} has no token that another comes before",
            "Give a longer one, or a tokenizer with a token to begin with.",
        )
        start = min(len(begin) + len(read), len(tokens) - 1)
        whole.append(tokens)
        spans.append(Span(max(start, 1), len(tokens)))
    return cut_left(whole, spans, scorer.context_length + 1)


class Passages:
    """LAMBADA: the last word of each passage."""

    seed: int | None = None

    def __init__(self, name: str, passages: Sequence[tuple[str, str]], source: DataFile) -> None:
        self.name, self.passages, self.source = name, passages, source

    def __len__(self) -> int:
        return len(self.passages)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        context, word = self.passages[index]
        return continuations(context, [f" {word}"], scorer)

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        (answer,) = answers
        return {"nats": sums(answer), "greedy": answer.is_greedy(), "cut": prompt.is_cut}

    def summarise(self, records: Sequence[Record], place: int) -> dict[str, Any]:
        right = [float(record["greedy"][place]) for record in records]
        nats = mean([record["nats"][place] for record in records])
        return {
            "accuracy": mean(right),
            "standard_error": standard_error(right),
            "perplexity": exponential(nats),
        }


class RunningText:
    """Whole documents. An item is a window of one; words and bytes count with its first."""

    seed: int | None = None

    def __init__(
        self,
        name: str,
        documents: Sequence[str],
        counted: Sequence[str],
        source: DataFile,
        scorer: Scorer,
    ) -> None:
        """`documents` is what the model reads, `counted` the texts whose words and bytes count."""
        self.name, self.source = name, source
        bos = scorer.bos
        require(bos is not None, "tokenizer", "it has no token to begin with", "Use another.")
        assert bos is not None
        self.windows: list[tuple[int, Window]] = [
            (number, window)
            for number, text in enumerate(documents)
            for window in windows(scorer.encode(text), bos, scorer.context_length)
        ]
        if not self.windows:
            raise FileError(f"{source.path}: it holds no text. Name a file that does.")
        self.words = [len(re.split(r"\s+", text)) for text in counted]
        self.bytes = [len(text.encode()) for text in counted]

    def __len__(self) -> int:
        return len(self.windows)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        tokens, scored = self.windows[index][1]
        count = len(tokens)
        return Prompt((tokens,), (Span(count - scored, count),), (count,))

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        document, window = self.windows[index]
        is_first = index == 0 or self.windows[index - 1][0] != document
        return {
            "document": document,
            "nats": sums(answers[0]),
            "tokens": window.scored,
            "words": self.words[document] if is_first else 0,
            "bytes": self.bytes[document] if is_first else 0,
        }

    def summarise(self, records: Sequence[Record], place: int) -> dict[str, Any]:
        nats = math.fsum(record["nats"][place] for record in records)
        tokens, words, size = (
            sum(record[unit] for record in records) for unit in ("tokens", "words", "bytes")
        )
        return {
            "loss": nats / tokens,
            "perplexity": exponential(nats / tokens),
            "word_perplexity": exponential(nats / words),
            "byte_perplexity": exponential(nats / size),
            "bits_per_byte": nats / math.log(2) / size,
        }


def exponential(nats: float) -> float | None:
    """None where it is beyond any number."""
    return math.exp(nats) if nats < 700 else None
