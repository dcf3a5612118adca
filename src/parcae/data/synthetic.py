"""Tasks in which the number of dependent steps decides: walks, pointers and modular arithmetic.

A row states a problem and asks several questions; the loss is on the answers only. Problems are
drawn again for every step, from (seed, step), so there is nothing to store and nothing to memorise.

    task = TASKS["walks"]
    examples = task.draw(64, np.random.default_rng(0))
    examples.tokens, examples.answers, examples.levels            # [rows, length]
    task.tokenizer().decode(examples.tokens[0])                   # "<|bos|> 4->1 0->7 ... 2 > > >"

A recipe names a task as its only source: `data.sources = ["task:walks"]`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from parcae.config import ConfigError
from parcae.data.loader import Batch
from parcae.data.tokenizer import BOS_NAMES, Tokenizer
from parcae.schema import suggest

BOS = BOS_NAMES[0]
NO_TARGET = -100
"""The target of a position without an answer, which PyTorch's losses ignore."""
PREFIX = "task:"
TRAINING, HELD_OUT = 0, 1


class Examples(NamedTuple):
    """Rows of a task, int64 [rows, length] each."""

    tokens: np.ndarray
    answers: np.ndarray
    """What the model should predict at a position that has a level."""
    levels: np.ndarray
    """How many dependent steps the answer at a position takes; 0 where there is no answer."""

    @classmethod
    def of_text(cls, text: np.ndarray, levels: np.ndarray) -> Examples:
        """Rows in which each answer is the next token, from [rows, length + 1]; `levels` are those
        of the tokens."""
        return cls(text[:, :-1], text[:, 1:], levels[:, 1:])

    def batch(self) -> Batch:
        """Inputs and targets; only answers are targets."""
        targets = np.where(self.levels > 0, self.answers, NO_TARGET)
        return Batch(torch.from_numpy(self.tokens.copy()), torch.from_numpy(targets))


class Task(ABC):
    """A distribution of rows; all have the same length."""

    @property
    @abstractmethod
    def vocabulary(self) -> list[str]:
        """The text of each token, without spaces."""

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def tokenizer(self) -> Tokenizer:
        """Reads and prints rows: the texts of tokens, with spaces between them."""
        return Tokenizer.of_words(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    @abstractmethod
    def length(self) -> int:
        """Input tokens of a row."""

    @property
    @abstractmethod
    def levels(self) -> range:
        """The levels that are tested; training may have fewer."""

    @abstractmethod
    def draw(
        self, rows: int, random: np.random.Generator, *, every_level: bool = False
    ) -> Examples:
        """Random rows; `every_level`: with the levels that training leaves out."""

    def held_out(self, rows: int, batch_rows: int) -> Iterator[Batch]:
        """The same `rows` every time, which no training draws."""
        random = np.random.default_rng((HELD_OUT, 0))
        for start in range(0, rows, batch_rows):
            yield self.draw(min(batch_rows, rows - start), random).batch()

    def answers_in(self, tokens: Sequence[int]) -> list[int]:
        """What a model of the task should predict at each position; NO_TARGET: nothing."""
        return [*tokens[1:], NO_TARGET]


@dataclass(frozen=True)
class PointerChasing(Task):
    """A permutation as shuffled (node, successor) pairs, then queries (hops, start) -> end.

    With `unary` a query is the start followed by one arrow per hop, so that numbers of hops that
    never occurred in training can be asked for.
    """

    nodes: int = 6
    hops: int = 4
    """Most hops in training."""
    tested_hops: int = 4
    queries: int = 8
    unary: bool = False

    @property
    def vocabulary(self) -> list[str]:
        hops = [f"{hops}:" for hops in range(1, self.tested_hops + 1)]
        return [*_numbers(self.nodes), BOS, *(("_", ">") if self.unary else hops)]

    @property
    def levels(self) -> range:
        return range(1, self.tested_hops + 1)

    @property
    def _query_length(self) -> int:
        return self.tested_hops + 2 if self.unary else 3

    @property
    def length(self) -> int:
        return 2 * self.nodes + self.queries * self._query_length

    def draw(
        self, rows: int, random: np.random.Generator, *, every_level: bool = False
    ) -> Examples:
        successors = _permutations(rows, self.nodes, random)
        order = _permutations(rows, self.nodes, random)
        each = np.arange(rows)[:, None]
        pairs = np.stack((order, successors[each, order]), 2).reshape(rows, -1)
        shape = (rows, self.queries)
        hops = random.integers(1, (self.tested_hops if every_level else self.hops) + 1, shape)
        start = random.integers(0, self.nodes, shape)
        end = start
        for hop in range(1, int(hops.max()) + 1):
            end = np.where(hop <= hops, successors[each, end], end)
        queries = self._unary(hops, start) if self.unary else self._numbered(hops, start)
        queries = np.concatenate((queries, end[..., None]), 2)
        levels = np.zeros_like(queries)
        levels[..., -1] = hops
        first = np.full((rows, 1), self.nodes)
        flat = (first, pairs, queries.reshape(rows, -1))
        zeros = np.zeros((rows, 1 + 2 * self.nodes), dtype=levels.dtype)
        return Examples.of_text(
            np.concatenate(flat, 1), np.concatenate((zeros, levels.reshape(rows, -1)), 1)
        )

    def _numbered(self, hops: np.ndarray, start: np.ndarray) -> np.ndarray:
        return np.stack((self.nodes + hops, start), 2)

    def _unary(self, hops: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Blanks, the start, and an arrow for each hop: `tested_hops` + 1 tokens."""
        blank, arrow = self.nodes + 1, self.nodes + 2
        place = np.arange(self.tested_hops + 1) - (self.tested_hops - hops)[..., None]
        return np.where(place < 0, blank, np.where(place == 0, start[..., None], arrow))


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _permutations(rows: int, nodes: int, random: np.random.Generator) -> np.ndarray:
    return random.random((rows, nodes)).argsort(1)


@dataclass(frozen=True)
class Walks(Task):
    """A permutation as shuffled edges, one token each, then walks along them.

    A walk is its start and an arrow for every further step. Every position asks where the walk is
    after the step from it, so a walk of eight steps has eight answers, and no position shows the
    answer of another.
    """

    nodes: int = 8
    steps: int = 8
    """Of a walk in training."""
    tested_steps: int = 8
    walks: int = 4

    @property
    def vocabulary(self) -> list[str]:
        nodes = _numbers(self.nodes)
        return [*nodes, ">", "_", BOS, *(f"{a}->{b}" for a in nodes for b in nodes)]

    @property
    def levels(self) -> range:
        return range(1, self.tested_steps + 1)

    @property
    def length(self) -> int:
        return 1 + self.nodes + self.walks * self.tested_steps

    def draw(
        self, rows: int, random: np.random.Generator, *, every_level: bool = False
    ) -> Examples:
        arrow, blank, first, edge = range(self.nodes, self.nodes + 4)
        successors = _permutations(rows, self.nodes, random)
        order = _permutations(rows, self.nodes, random)
        each = np.arange(rows)[:, None]
        edges = edge + order * self.nodes + successors[each, order]
        steps = self.tested_steps if every_level else self.steps
        node = random.integers(0, self.nodes, (rows, self.walks))
        walks = np.full((rows, self.walks, self.tested_steps), blank)
        walks[..., :steps] = arrow
        walks[..., 0] = node
        answers, levels = np.zeros_like(walks), np.zeros_like(walks)
        for step in range(steps):
            node = successors[each, node]
            answers[..., step], levels[..., step] = node, step + 1
        none = np.zeros((rows, 1 + self.nodes), dtype=walks.dtype)
        start = np.full((rows, 1), first)
        return Examples(
            np.concatenate((start, edges, walks.reshape(rows, -1)), 1),
            *(np.concatenate((none, part.reshape(rows, -1)), 1) for part in (answers, levels)),
        )

    def answers_in(self, tokens: Sequence[int]) -> list[int]:
        """Where a walk is after the step from each position; an edge that is missing ends it."""
        first_edge = self.nodes + 3
        edges = (divmod(token - first_edge, self.nodes) for token in tokens if token >= first_edge)
        successors, node, answers = dict(edges), NO_TARGET, []
        for token in tokens:
            if token < self.nodes:
                node = token
            walks = token <= self.nodes
            node = successors.get(node, NO_TARGET) if walks else NO_TARGET
            answers.append(node)
        return answers


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """Values of random expressions in prefix form, such as `- * 3 4 2 = 3` modulo 7."""

    modulus: int = 7
    operators: int = 4
    """Most operators of an expression; it is the level of the answer."""
    expressions: int = 4

    @property
    def vocabulary(self) -> list[str]:
        return [*_numbers(self.modulus), "+", "-", "*", BOS, "_", "="]

    @property
    def levels(self) -> range:
        return range(1, self.operators + 1)

    @property
    def length(self) -> int:
        return self.expressions * (2 * self.operators + 3)

    def draw(
        self, rows: int, random: np.random.Generator, *, every_level: bool = False
    ) -> Examples:
        first, blank, equals = self.modulus + 3, self.modulus + 4, self.modulus + 5
        width = 2 * self.operators + 3
        tokens = np.full((rows, 1 + self.length), blank)
        levels = np.zeros_like(tokens)
        tokens[:, 0] = first
        counts = random.integers(1, self.operators + 1, (rows, self.expressions))
        for row in range(rows):
            for index, count in enumerate(counts[row]):
                expression, value = self._expression(int(count), random)
                end = (index + 1) * width
                tokens[row, end - 1 - len(expression) : end + 1] = [*expression, equals, value]
                levels[row, end] = count
        return Examples.of_text(tokens, levels)

    def _expression(self, operators: int, random: np.random.Generator) -> tuple[list[int], int]:
        if operators == 0:
            digit = int(random.integers(self.modulus))
            return [digit], digit
        kind, left = int(random.integers(3)), int(random.integers(operators))
        a, x = self._expression(left, random)
        b, y = self._expression(operators - 1 - left, random)
        value = (x + y, x - y, x * y)[kind] % self.modulus
        return [self.modulus + kind, *a, *b], value


TASKS: dict[str, Task] = {
    "walks": Walks(),
    "walks-unseen": Walks(steps=4),
    "pointers": PointerChasing(),
    "pointers-large": PointerChasing(nodes=8, hops=8, tested_hops=8),
    "pointers-unseen": PointerChasing(hops=4, tested_hops=8, queries=4, unary=True),
    "arithmetic": ModularArithmetic(),
}


def task_of(sources: Sequence[str]) -> Task | None:
    """The task that a recipe names as its only source; None where it names texts."""
    named = [source for source in sources if source.startswith(PREFIX)]
    if not named:
        return None
    if len(sources) > 1:
        raise ConfigError(f"data.sources: {named[0]} is one of several. A task is the only source.")
    return find_task(named[0])


def find_task(source: str) -> Task:
    """The task with the name "task:NAME"."""
    name = source.removeprefix(PREFIX)
    if name not in TASKS:
        raise ConfigError(f"data.sources: no task is called {name!r}. {suggest(name, list(TASKS))}")
    return TASKS[name]


class TaskLoader:
    """A process's rows of the batch of every step, which is a function of (seed, step)."""

    sources = plans = ()

    def __init__(
        self, task: Task, rows: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.task, self.rows, self.seed, self.step = task, rows, seed, 0
        self.mine = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        random = np.random.default_rng((TRAINING, self.seed, self.step))
        self.step += 1
        inputs, targets = self.task.draw(self.rows, random).batch()
        return Batch(inputs[self.mine], targets[self.mine])

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def close(self) -> None:
        pass
