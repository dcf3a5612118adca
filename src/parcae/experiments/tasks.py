"""Tasks in which the number of dependent steps decides: walks, pointers and modular arithmetic.

A row states a problem and asks several questions; the loss is on the answers only. Problems are
drawn again for every step, from (seed, step), so there is nothing to store and nothing to memorise.

    task = TASKS["walks"]
    examples = task.draw(64, np.random.default_rng(0))
    examples.tokens, examples.answers, examples.levels            # [rows, length]

A recipe names a task as its only source, "task:pointers"; `train_task` trains it into a run folder
like any other; `python -m parcae.experiments.tasks train RECIPE --out RUN` does so in a process.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from parcae.config import ConfigError
from parcae.data.loader import Batch
from parcae.files import check_links, lock_folder, write_text
from parcae.machine import SpinLimiter, keep_freed_memory
from parcae.model.base import IGNORED_TARGET, LanguageModel
from parcae.recipe import write_toml
from parcae.runs import TrainResult
from parcae.runs.layout import METRICS_FILE, RECIPE_FILE, WRITTEN
from parcae.schema import suggest
from parcae.training.distributed import Workers, deterministic, training_device
from parcae.training.learner import Learner
from parcae.training.log import Display
from parcae.training.run import read_recipe
from parcae.training.settings import Recipe, recipe_from_file, recipe_to_dict
from parcae.training.trainer import Trainer

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
        targets = np.where(self.levels > 0, self.answers, IGNORED_TARGET)
        return Batch(torch.from_numpy(self.tokens.copy()), torch.from_numpy(targets))


class Task(ABC):
    """A distribution of rows; all have the same length."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

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
    def vocab_size(self) -> int:
        return self.nodes + 1 + (2 if self.unary else self.tested_hops)

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
    def vocab_size(self) -> int:
        return self.nodes + 3 + self.nodes**2

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


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """Values of random expressions in prefix form, such as `- * 3 4 2 = 3` modulo 7."""

    modulus: int = 7
    operators: int = 4
    """Most operators of an expression; it is the level of the answer."""
    expressions: int = 4

    @property
    def vocab_size(self) -> int:
        return self.modulus + 6

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


def find_task(source: str) -> Task:
    """The task that a recipe names as "task:NAME"."""
    name = source.removeprefix(PREFIX)
    if name not in TASKS:
        raise ConfigError(f"data.sources: no task is called {name!r}. {suggest(name, list(TASKS))}")
    return TASKS[name]


@dataclass(frozen=True)
class TaskData:
    """A task as the data of a training run; see `training.corpora.TrainingData`."""

    task: Task
    tokenizer: Any = None

    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> TaskLoader:
        return TaskLoader(self.task, recipe.data.global_batch, recipe.run.seed)

    def validation(self, recipe: Recipe, batch_rows: int) -> Iterator[Batch]:
        rows = recipe.run.validation_rows
        random = np.random.default_rng((HELD_OUT, 0))
        for start in range(0, rows, batch_rows):
            yield self.task.draw(min(batch_rows, rows - start), random).batch()

    def can_validate(self, recipe: Recipe) -> bool:
        return True

    def bytes_of_token(self) -> None:
        return None

    def fingerprints(self) -> list[dict[str, str]]:
        return []


class TaskLoader:
    """The batch of every step, a function of (seed, step)."""

    sources = plans = ()

    def __init__(self, task: Task, rows: int, seed: int) -> None:
        self.task, self.rows, self.seed, self.step = task, rows, seed, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        random = np.random.default_rng((TRAINING, self.seed, self.step))
        self.step += 1
        return self.task.draw(self.rows, random).batch()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def close(self) -> None:
        pass


def train_task(
    recipe: Recipe, out: Path, resume: bool = False, follow_links: bool = False
) -> TrainResult:
    """`parcae.train` for a recipe whose source is a task; on one device."""
    task = find_task(recipe.data.sources[0])
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(SpinLimiter())
        workers = Workers(training_device(recipe.run.device))
        stack.enter_context(deterministic(recipe.run.deterministic, workers.device))
        check_links(out, WRITTEN, follow_links)
        stack.enter_context(lock_folder(out))
        if not resume:
            _start(out, recipe)
        learner = Learner(recipe, workers, TaskData(task))
        stack.callback(learner.close)
        trainer = Trainer(recipe, out, workers, learner, Display(True))
        stack.callback(trainer.close)
        if resume:
            trainer.resume()
        return trainer.run()


def _start(run: Path, recipe: Recipe) -> None:
    if (run / METRICS_FILE).exists():
        raise ConfigError(f"{run}: exists and holds a run. Resume it, or use another folder.")
    write_text(run / RECIPE_FILE, write_toml(recipe_to_dict(recipe)))


@torch.no_grad()
def accuracies(
    model: LanguageModel, task: Task, loops: Sequence[int], rows: int = 512
) -> dict[int, dict[int, float]]:
    """The share of right answers by number of loops, then by level, on `rows` held-out rows."""
    examples = task.draw(rows, np.random.default_rng((HELD_OUT, 1)), every_level=True)
    inputs, targets = examples.batch()
    levels = torch.from_numpy(examples.levels)
    right: dict[int, torch.Tensor] = {}
    for depth, x in model.readings(inputs, loops, state="zero"):
        right[depth] = model.logits(x).argmax(-1) == targets
    return {
        depth: {level: correct[levels == level].float().mean().item() for level in task.levels}
        for depth, correct in right.items()
    }


def main(arguments: Sequence[str]) -> int:
    """`train RECIPE --out RUN` or `train --resume RUN`: the command line of `parcae train`."""
    parser = argparse.ArgumentParser(prog="python -m parcae.experiments.tasks")
    train = parser.add_subparsers(required=True).add_parser("train")
    train.add_argument("recipe", nargs="?", type=Path)
    train.add_argument("--out", type=Path)
    train.add_argument("--resume", type=Path, metavar="RUN")
    train.add_argument("--follow-links", action="store_true")
    options = parser.parse_args(arguments)
    if options.resume is not None:
        recipe, out = read_recipe(options.resume), options.resume
    else:
        recipe, out = recipe_from_file(options.recipe), options.out
    result = train_task(recipe, out, options.resume is not None, options.follow_links)
    return 1 if result.status == "diverged" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
