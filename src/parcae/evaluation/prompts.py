"""From questions to token sequences, with the span of each that is scored.

These are the few-shot prompts of CORE and CORE-Extended; the delimiters of tasks are in tasks.csv,
and the prompts of the zero-shot set in zero_shot.py.

1. The items of a task are shuffled once, with seed 1337.
2. The few-shot examples of item i are drawn from all other items, with seed + i.
3. Each alternative is a text: examples, separated by blank lines; question; delimiter; answer.
4. Each text is a token sequence: BOS and its tokens, of which the last `context` are kept.

The scored span, as token positions [start, end):

    multiple choice       from the first token in which the alternatives differ
    schema                the longest common ending of the alternatives
    language modelling    the answer
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parcae.evaluation.items import Item
from parcae.evaluation.tasks import Kind, Task

SHUFFLE_SEED = 1337
SEEDS = (1234, 2345, 3456)
"""Of the few-shot examples, by default."""
BLANK_LINE = "\n\n"

Encode = Callable[[str], list[int]]


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """The alternatives of an item as token sequences, with their scored spans."""

    sequences: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]
    """Of the sequences before tokens were dropped on the left."""
    lost: int = 0
    """Tokens dropped from a span, for the alternative that lost most."""
    is_aligned: bool = True
    """Whether the answer begins with a token of its own; if not, the token that spans the end of
    the question and the beginning of the answer is scored."""

    @property
    def is_cut(self) -> bool:
        return any(len(s) < n for s, n in zip(self.sequences, self.lengths, strict=True))


def shuffled(count: int) -> list[int]:
    """Rows of the file in the order of evaluation."""
    order = list(range(count))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order


def draw_examples(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Indices, in the shuffled order, of the examples of item `index`, drawn from all others."""
    drawn = random.Random(seed + index).sample(range(count - 1), shots)
    return [other + (other >= index) for other in drawn]


def render(task: Task, item: Item, examples: Sequence[Item]) -> list[str]:
    """The texts of an item's alternatives; for language modelling, the text without the answer and
    the text with it."""
    trim = str.strip if task.kind == "language_modeling" else str
    shown = [
        f"{trim(example.questions[example.gold])}{task.delimiter}{example.answers[example.gold]}"
        for example in examples
    ]
    asked = [f"{trim(question)}{task.delimiter}" for question in item.questions]
    texts = [
        BLANK_LINE.join([*shown, question + answer])
        for question, answer in zip(asked, item.answers, strict=True)
    ]
    if task.kind == "language_modeling":
        return [BLANK_LINE.join([*shown, asked[0]]).strip(), *texts]
    return texts


def tokenised(
    kind: Kind, texts: Sequence[str], encode: Encode, bos: int | None, context: int
) -> Prompt:
    """The prompt of an item, from the texts of its alternatives."""
    is_aligned = True
    prefix = [] if bos is None else [bos]
    sequences = [prefix + encode(text) for text in texts]
    if kind == "language_modeling":
        question, sequences = sequences[0], sequences[1:]
        start = min(common_prefix([question, *sequences]), len(sequences[0]) - 1)
        is_aligned = start == len(question)
        spans = [Span(start, len(sequences[0]))]
    elif kind == "multiple_choice":
        start = min(common_prefix(sequences), min(map(len, sequences)) - 1)
        spans = [Span(start, len(tokens)) for tokens in sequences]
    else:
        shared = max(common_suffix(sequences), 1)
        spans = [Span(len(tokens) - shared, len(tokens)) for tokens in sequences]
    return replace(cut_left(sequences, spans, context), is_aligned=is_aligned)


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


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all sequences begin with."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    for index in range(shortest):
        if any(other[index] != first[index] for other in sequences[1:]):
            return index
    return shortest


def common_suffix(sequences: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all sequences end with."""
    return common_prefix([sequence[::-1] for sequence in sequences])
