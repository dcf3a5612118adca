"""CORE and CORE-Extended: in-context learning, scored as the reference release scores it.

multiple choice       the alternative with the lowest mean loss over its span is the answer
schema                alike, over the ending that the alternatives share
language modelling    right if the model would have said every token of the answer itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parcae.evaluation.items import Item, read_items
from parcae.evaluation.job import (
    DataFile,
    Record,
    by_depth,
    credit,
    mean,
    means,
    standard_error,
    sums,
)
from parcae.evaluation.prompts import Prompt, draw_examples, render, shuffled, tokenised
from parcae.evaluation.scoring import Answer, Scorer
from parcae.evaluation.tasks import Task
from parcae.files import FileError


class Questions:
    """A task's items in the order in which they are evaluated; read once for all seeds."""

    def __init__(self, task: Task, source: DataFile) -> None:
        self.task, self.source = task, source
        read = read_items(source.path, task.kind)
        self.rows = shuffled(len(read))
        self.items: list[Item] = [read[row] for row in self.rows]
        if task.shots >= len(self.items):
            raise FileError(
                f"{source.path}: {len(self.items)} questions are too few for {task.name}, which "
                f"shows {task.shots} others before each. Is it truncated?"
            )

    def __len__(self) -> int:
        return len(self.items)

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing."""
        if self.task.kind == "language_modeling":
            return 0.0
        return mean([1 / len(item.answers) for item in self.items])


class InContext:
    """One task at one seed, on its first `limit` items. Examples come from all items, so a limited
    run scores the same prompts as a whole one."""

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
        return render(self.task, items[index], [items[other] for other in examples])

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        return tokenised(
            self.task.kind, self.texts(index), scorer.encode, scorer.bos, scorer.context_length
        )

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        kept: Record = {"row": self.questions.rows[index], "cut": prompt.is_cut}
        if self.task.kind == "language_modeling":
            (answer,) = answers
            greedy = answer.is_greedy()
            kept["losses"] = by_depth([sums(answer)])
            kept["said"] = answer.likeliest.tolist()
            if not prompt.is_aligned:
                kept["unaligned"] = True
            kept["credit"] = [float(right) for right in greedy]
        else:
            gold = self.questions.items[index].gold
            losses = by_depth([means(answer) for answer in answers])
            kept["gold"] = gold
            kept["losses"] = losses
            kept["credit"] = [credit(scores, gold) for scores in losses]
        return kept

    def summarise(self, records: Sequence[Record], place: int) -> dict[str, Any]:
        credits = [record["credit"][place] for record in records]
        return {"accuracy": mean(credits), "standard_error": standard_error(credits)}
