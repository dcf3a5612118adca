"""From questions to token sequences, with the part of each that is scored.

    1337                        shuffles a task's items, once
    seed + i                    draws the examples shown before item i, from all others
    example blank line ... question delimiter answer      one text for each alternative
    BOS and its tokens, the last `context` of them        one sequence for each text

What is scored, as token positions [start, end):

    multiple choice       from where the alternatives first differ
    schema                their longest common ending
    language modelling    what the answer adds to the question
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
BLANK_LINE = "\n\n"

Encode = Callable[[str], list[int]]


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """An item ready to be scored: alternatives as token sequences with their scored spans."""

    sequences: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]
    """Before tokens were dropped on the left."""
    lost: int = 0
    """Tokens to be scored among those dropped, at most for an alternative."""
    is_aligned: bool = True
    """Whether an answer begins where a token does; else that token is scored, question and all."""

    @property
    def is_cut(self) -> bool:
        return any(len(s) < n for s, n in zip(self.sequences, self.lengths, strict=True))


def shuffled(count: int) -> list[int]:
    """Places of the file in the order in which they are evaluated."""
    order = list(range(count))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order


def draw_examples(count: int, index: int, shots: int, seed: int) -> list[int]:
    """Indices, in the shuffled order, of what is shown before item `index`: a sample of all others,
    whose list is never made, since some tasks have very many."""
    drawn = random.Random(seed + index).sample(range(count - 1), shots)
    return [place + (place >= index) for place in drawn]


def render(task: Task, item: Item, examples: Sequence[Item]) -> list[str]:
    """The texts of an item's alternatives; for language modelling the text without the answer,
    then the one with it."""
    trim = str.strip if task.kind == "language_modeling" else str
    shown = [
        f"{trim(one.questions[one.gold])}{task.delimiter}{one.answers[one.gold]}"
        for one in examples
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
    is_aligned = True
    begin = [] if bos is None else [bos]
    whole = [begin + encode(text) for text in texts]
    if kind == "language_modeling":
        without, whole = whole[0], whole[1:]
        start = min(common_prefix([without, *whole]), len(whole[0]) - 1)
        is_aligned = start == len(without)
        spans = [Span(start, len(whole[0]))]
    elif kind == "multiple_choice":
        start = min(common_prefix(whole), min(map(len, whole)) - 1)
        spans = [Span(start, len(tokens)) for tokens in whole]
    else:
        shared = max(common_suffix(whole), 1)
        spans = [Span(len(tokens) - shared, len(tokens)) for tokens in whole]
    return replace(cut_left(whole, spans, context), is_aligned=is_aligned)


def cut_left(sequences: Sequence[Sequence[int]], spans: Sequence[Span], context: int) -> Prompt:
    """Sequences no longer than `context`; where a span itself is cut, what is left has one token
    before it to be predicted from."""
    kept, moved, lost = [], [], 0
    for tokens, (start, end) in zip(sequences, spans, strict=True):
        dropped = max(len(tokens) - context, 0)
        kept.append(tuple(tokens[dropped:]))
        moved.append(Span(max(start - dropped, 1), end - dropped))
        if dropped > 0:
            lost = max(lost, dropped + 1 - start)
    return Prompt(tuple(kept), tuple(moved), tuple(map(len, sequences)), lost)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    for place in range(shortest):
        if any(other[place] != first[place] for other in sequences[1:]):
            return place
    return shortest


def common_suffix(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all end with."""
    return common_prefix([sequence[::-1] for sequence in sequences])
