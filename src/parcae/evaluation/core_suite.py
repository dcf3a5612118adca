"""CORE and CORE-Extended: few-shot tasks, scored as the reference release scores them.

1. The items of a task are shuffled once, with seed 1337.
2. The few-shot examples of item i are drawn from all other items, with seed + i.
3. Each alternative is a text: examples, separated by blank lines; question; delimiter; answer.
4. Each text is a token sequence: BOS and its tokens, of which the last `context` are kept.

The scored span, as token positions [start, end), and what is right:

    multiple choice       from the first token in which the alternatives differ; the answer is the
                          alternative with the lowest mean loss over its span
    schema                the longest common ending of the alternatives; likewise
    language modelling    the answer; right if every token is the model's most likely one
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Any

from parcae.evaluation.jobs import (
    DataFile,
    PromptJob,
    Record,
    summary,
)
from parcae.evaluation.metrics import by_loops, credit, mean, means, standard_error, sums
from parcae.evaluation.prompts import Answer, Prompt, Span, common_suffix, cut_left
from parcae.evaluation.results import Samples, coverage
from parcae.evaluation.scorer import Scorer
from parcae.evaluation.tasks import Baselines, Item, Kind, Task, locate, read_items
from parcae.files import FileError
from parcae.infer.rows import common_prefix

SHUFFLE_SEED = 1337
BLANK_LINE = "\n\n"


def shuffled_order(count: int) -> list[int]:
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


def tokenise_item(
    kind: Kind,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    bos: int | None,
    context: int,
) -> Prompt:
    """The prompt of an item, from the texts of its alternatives."""
    is_aligned = True
    prefix = [] if bos is None else [bos]
    sequences = [prefix + encode(text) for text in texts]
    if kind == "language_modeling":
        question, sequences = sequences[0], sequences[1:]
        start = min(common_prefix(question, *sequences), len(sequences[0]) - 1)
        is_aligned = start == len(question)
        spans = [Span(start, len(sequences[0]))]
    elif kind == "multiple_choice":
        start = min(common_prefix(*sequences), min(map(len, sequences)) - 1)
        spans = [Span(start, len(tokens)) for tokens in sequences]
    else:
        shared = max(common_suffix(sequences), 1)
        spans = [Span(len(tokens) - shared, len(tokens)) for tokens in sequences]
    return replace(cut_left(sequences, spans, context), is_aligned=is_aligned)


class Questions:
    """The items of a task in the order of evaluation; read once for all seeds."""

    def __init__(self, task: Task, source: DataFile) -> None:
        self.task, self.source = task, source
        items = read_items(source.path, task.kind)
        self.rows = shuffled_order(len(items))
        """The row of the file of each item."""
        self.items: list[Item] = [items[row] for row in self.rows]
        if task.shots >= len(self.items):
            raise FileError(
                f"{source.path}: {len(self.items)} questions are too few for {task.name}, which "
                f"needs {task.shots} others as examples. Is the file truncated?"
            )

    def __len__(self) -> int:
        return len(self.items)

    @property
    def chance(self) -> float:
        """Expected accuracy of a random choice."""
        if self.task.kind == "language_modeling":
            return 0.0
        return mean([1 / len(item.answers) for item in self.items])


def open_questions(task: Task, folder: Path) -> Questions | None:
    """The questions of a task; None where the folder does not have them."""
    path = locate(task, folder)
    if path is None:
        return None
    stand_in = task.stand_in is not None and path.name.startswith(Path(task.stand_in).name)
    return Questions(task, DataFile(path, "evaluation", stand_in))


class InContext(PromptJob):
    """One task at one seed, on its first `limit` items. Examples come from all items, so that a
    limited evaluation scores the same prompts as a complete one."""

    def __init__(self, questions: Questions, seed: int, limit: int | None = None) -> None:
        self.questions = questions
        self.task = questions.task
        self.name, self.seed = self.task.name, seed
        self.source = questions.source
        self.count = len(questions) if limit is None else min(limit, len(questions))

    def __len__(self) -> int:
        return self.count

    def texts(self, index: int) -> list[str]:
        assert self.seed is not None
        items, shots = self.questions.items, self.task.shots
        examples = draw_examples(len(items), index, shots, self.seed)
        return render(self.task, items[index], [items[example] for example in examples])

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        return tokenise_item(
            self.task.kind, self.texts(index), scorer.encode, scorer.bos, scorer.context_length
        )

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        record: Record = {"row": self.questions.rows[index], "cut": prompt.is_cut}
        if self.task.kind == "language_modeling":
            (answer,) = answers
            record["losses"] = by_loops([sums(answer)])
            record["said"] = answer.likeliest.tolist()
            if not prompt.is_aligned:
                record["unaligned"] = True
            record["credit"] = [float(right) for right in answer.is_greedy()]
        else:
            gold = self.questions.items[index].gold
            losses = by_loops([means(answer) for answer in answers])
            record["gold"] = gold
            record["losses"] = losses
            record["credit"] = [credit(of_depth, gold) for of_depth in losses]
        return record

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]:
        credits = [record["credit"][depth_index] for record in records]
        return {"accuracy": mean(credits), "standard_error": standard_error(credits)}


@dataclass(frozen=True)
class InContextSuite:
    """CORE, CORE-Extended, or other tasks of their table."""

    by_task: list[tuple[Task, list[InContext] | None]]
    """The jobs of each task, one per seed, or a single one where the seed changes nothing; None
    where the data is missing."""
    seeds: tuple[int, ...]
    baselines: Baselines

    @property
    def jobs(self) -> list[InContext]:
        return [job for _, jobs in self.by_task for job in jobs or ()]

    def result(self, samples: Samples, loops: Sequence[int]) -> dict[str, Any]:
        tasks = {
            task.name: None if jobs is None else TaskScores(self, task, jobs, samples, loops)
            for task, jobs in self.by_task
        }
        scored = [task for task in tasks.values() if task is not None]
        return {
            "baselines": self.baselines,
            "seeds": list(self.seeds),
            **coverage(tasks),
            "by_loops": {str(depth): self._score(scored, i) for i, depth in enumerate(loops)},
            "tasks": {name: task and task.result() for name, task in tasks.items()},
        }

    def _score(self, tasks: Sequence[TaskScores], depth_index: int) -> dict[str, Any] | None:
        """The mean over tasks, of each seed and of all seeds; None where a task has no score."""
        rows = [row for task in tasks if (row := task.centred(depth_index)) is not None]
        if not rows or len(rows) < len(tasks):
            return None
        scores = [mean(column) for column in zip(*rows, strict=True)]
        return {
            "score": mean(scores),
            "deviation": _deviation(scores),
            "by_seed": dict(zip(map(str, self.seeds), scores, strict=True)),
        }


def open_in_context_suite(
    tasks: Sequence[Task],
    folder: Path,
    scorer: Scorer,
    *,
    seeds: tuple[int, ...],
    limit: int | None,
    baselines: Baselines,
) -> InContextSuite:
    by_task: list[tuple[Task, list[InContext] | None]] = []
    for task in tasks:
        questions = open_questions(task, folder)
        # without examples and with a fixed initial state, the seed changes nothing
        used = seeds if task.shots or scorer.draws_state else seeds[:1]
        if questions is None:
            by_task.append((task, None))
        else:
            by_task.append((task, [InContext(questions, seed, limit) for seed in used]))
    return InContextSuite(by_task, seeds, baselines)


class TaskScores:
    """The scores of a task at every seed and depth."""

    def __init__(
        self,
        suite: InContextSuite,
        task: Task,
        jobs: Sequence[InContext],
        samples: Samples,
        loops: Sequence[int],
    ) -> None:
        self.suite, self.task, self.loops = suite, task, loops
        self.questions = jobs[0].questions
        by_job = []
        for job in jobs:
            records = samples.of(job, loops)
            self.description = job.describe(records)
            by_job.append([summary(job, records, i) for i in range(len(loops))])
        by_seed = [by_job[min(i, len(jobs) - 1)] for i in range(len(suite.seeds))]
        self.by_depth = [_all_or_none(column) for column in zip(*by_seed, strict=True)]
        """Metrics [depth][seed]; None at a depth where the model diverged."""

    def result(self) -> dict[str, Any]:
        return {
            "title": self.task.title,
            "type": self.task.kind,
            "shots": self.task.shots,
            "baseline": self.task.baselines[self.suite.baselines],
            "uniform_chance": 100 * self.questions.chance,
            "items": len(self.questions),
            **self.description,
            "by_loops": {str(depth): self._metrics(i) for i, depth in enumerate(self.loops)},
        }

    def centred(self, depth_index: int) -> list[float] | None:
        """Centred accuracy of each seed."""
        metrics = self.by_depth[depth_index]
        if metrics is None:
            return None
        return [self.task.centred(m["accuracy"], self.suite.baselines) for m in metrics]

    def _metrics(self, depth_index: int) -> dict[str, Any] | None:
        metrics, centred = self.by_depth[depth_index], self.centred(depth_index)
        if metrics is None or centred is None:
            return None
        accuracies = [of_seed["accuracy"] for of_seed in metrics]
        return {
            "accuracy": mean(accuracies),
            "deviation": _deviation(accuracies),
            "standard_error": metrics[0]["standard_error"],
            "centred": mean(centred),
        }


def _all_or_none(metrics: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    known = [of_seed for of_seed in metrics if of_seed is not None]
    return known if len(known) == len(metrics) else None


def _deviation(numbers: Sequence[float]) -> float | None:
    """The sample standard deviation; None for a single number."""
    return stdev(numbers) if len(numbers) > 1 else None
