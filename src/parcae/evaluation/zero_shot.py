"""The six zero-shot tasks of the comparison with RDMs, with lm-evaluation-harness's prompts, and a
user's own tasks.

The answer is the choice with the highest log-probability (`accuracy`), or with the highest
log-probability per character (`accuracy_per_character`, the harness's acc_norm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parcae.evaluation.jobs import (
    DataFile,
    PromptJob,
    Record,
)
from parcae.evaluation.metrics import by_loops, credit, mean, standard_error, sums
from parcae.evaluation.prompts import Answer, Prompt, continuations
from parcae.evaluation.results import Samples, coverage, job_result
from parcae.evaluation.scorer import Scorer
from parcae.evaluation.suites import job_name
from parcae.evaluation.tasks import Fields, find, read_lines
from parcae.schema import require, shorten


class Question(NamedTuple):
    context: str
    choices: tuple[str, ...]
    gold: int


def _complete_query(ending: str = "") -> Callable[[Fields], Question]:
    """A reader of files whose query is the prompt itself."""

    def read(fields: Fields) -> Question:
        choices = fields.texts("choices")
        gold = fields.index("gold", len(choices))
        return Question(fields.text("query") + ending, choices, gold)

    return read


def _piqa(fields: Fields) -> Question:
    choices = (fields.text("sol1"), fields.text("sol2"))
    return Question(
        f"Question: {fields.text('goal')}\nAnswer:", choices, fields.index("label", len(choices))
    )


def _boolq(fields: Fields) -> Question:
    """The harness omits the heading of the passage."""
    question = _complete_query("\nAnswer:")(fields)
    return question._replace(context=question.context.removeprefix("Passage: "))


def _sciq(fields: Fields) -> Question:
    choices = fields.texts("choices")
    context = f"{fields.text('support').lstrip()}\nQuestion: {fields.text('question')}\nAnswer:"
    return Question(context, choices, fields.index("gold", len(choices)))


def _arc(fields: Fields) -> Question:
    table = fields.get("choices")
    if not isinstance(table, dict):
        raise fields.error("not an object with text and label", "choices")
    inner = Fields(fields.path, fields.line, table)
    choices, labels = inner.texts("text"), inner.texts("label")
    answer = fields.text("answerKey")
    if answer not in labels or len(labels) != len(choices):
        raise fields.error(
            f"{shorten(answer)} is not one of the labels {shorten(list(labels))}", "answerKey"
        )
    return Question(f"Question: {fields.text('question')}\nAnswer:", choices, labels.index(answer))


def _own(fields: Fields) -> Question:
    """`answer` is the right choice, or its index."""
    question, choices = fields.text("question"), fields.texts("choices")
    answer = fields.get("answer")
    if isinstance(answer, str):
        if choices.count(answer) != 1:
            raise fields.error(
                f"{shorten(answer)} is not exactly one of the choices {shorten(list(choices))}",
                "answer",
            )
        return Question(question, choices, choices.index(answer))
    return Question(question, choices, fields.index("answer", len(choices)))


class Candidate(NamedTuple):
    """A file that can be used, and the split it holds."""

    file: str
    split: str
    read: Callable[[Fields], Question]


class ZeroShotTask(NamedTuple):
    name: str
    title: str
    candidates: tuple[Candidate, ...]
    """The first file that exists is used; the harness's own split comes first."""


TASKS = (
    ZeroShotTask(
        "hellaswag",
        "HellaSwag",
        (Candidate("language_understanding/hellaswag.jsonl", "validation", _complete_query()),),
    ),
    ZeroShotTask(
        "arc_challenge",
        "ARC-c",
        (
            Candidate("world_knowledge/arc_challenge.jsonl", "test", _complete_query("\nAnswer:")),
            Candidate("zeroshot/arc_challenge_validation.jsonl", "validation", _arc),
        ),
    ),
    ZeroShotTask(
        "arc_easy",
        "ARC-e",
        (
            Candidate("world_knowledge/arc_easy.jsonl", "test", _complete_query("\nAnswer:")),
            Candidate("zeroshot/arc_easy_validation.jsonl", "validation", _arc),
        ),
    ),
    ZeroShotTask(
        "piqa", "PIQA", (Candidate("zeroshot/piqa_validation.jsonl", "validation", _piqa),)
    ),
    ZeroShotTask(
        "boolq",
        "BoolQ",
        (Candidate("reading_comprehension/boolq.jsonl", "validation", _boolq),),
    ),
    ZeroShotTask(
        "sciq",
        "SciQ",
        (
            Candidate("zeroshot/sciq_test.jsonl", "test", _sciq),
            Candidate("zeroshot/sciq_validation.jsonl", "validation", _sciq),
        ),
    ),
)


class ZeroShot(PromptJob):
    """One task, on its first `limit` questions."""

    def __init__(self, name: str, questions: Sequence[Question], source: DataFile) -> None:
        self.name, self.questions, self.source = name, questions, source

    def __len__(self) -> int:
        return len(self.questions)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        context, choices, _ = self.questions[index]
        return continuations(context, [f" {choice}" for choice in choices], scorer)

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        _, choices, gold = self.questions[index]
        nats = by_loops([sums(answer) for answer in answers])
        per_character = [
            [loss / max(len(choice), 1) for loss, choice in zip(losses, choices, strict=True)]
            for losses in nats
        ]
        return {
            "gold": gold,
            "nats": nats,
            "credit": [credit(losses, gold) for losses in nats],
            "credit_per_character": [credit(losses, gold) for losses in per_character],
            "cut": prompt.is_cut,
        }

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]:
        credits = [record["credit"][depth_index] for record in records]
        per_character = [record["credit_per_character"][depth_index] for record in records]
        return {
            "accuracy": mean(credits),
            "standard_error": standard_error(credits),
            "accuracy_per_character": mean(per_character),
        }


@dataclass(frozen=True)
class ZeroShotSuite:
    by_task: Mapping[str, ZeroShot | None]
    """None where the data is missing."""

    @property
    def jobs(self) -> list[ZeroShot]:
        return [job for job in self.by_task.values() if job is not None]

    def result(self, samples: Samples, loops: Sequence[int]) -> dict[str, Any]:
        tasks = {
            name: None if job is None else job_result(job, samples, loops)
            for name, job in self.by_task.items()
        }
        scored = [task for task in tasks.values() if task is not None]
        return {
            **coverage(tasks),
            "by_loops": {depth: self._score(scored, depth) for depth in map(str, loops)},
            "tasks": tasks,
        }

    def _score(self, tasks: Sequence[dict[str, Any]], depth: str) -> dict[str, Any] | None:
        rows = [metrics for task in tasks if (metrics := task["by_loops"][depth]) is not None]
        if not rows or len(rows) < len(tasks):
            return None
        return {"score": mean([metrics["accuracy"] for metrics in rows])}


def open_zero_shot_suite(folder: Path, limit: int | None) -> ZeroShotSuite:
    return ZeroShotSuite({task.name: open_task(task, folder, limit) for task in TASKS})


def open_task(task: ZeroShotTask, folder: Path, limit: int | None = None) -> ZeroShot | None:
    """The job of a task; None where the folder has none of its files."""
    for candidate in task.candidates:
        if (path := find(folder, candidate.file)) is not None:
            questions = read_lines(path, candidate.read)[:limit]
            name = job_name("zero-shot", task.name)
            return ZeroShot(name, questions, DataFile(path, candidate.split))
    return None


def open_own_tasks(paths: Sequence[Path], limit: int | None) -> ZeroShotSuite:
    """A task for each file, named after it."""
    tasks: dict[str, ZeroShot | None] = {}
    for path in paths:
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        require(name not in tasks, "tasks", f"two files are called {name!r}", "Rename one.")
        questions = read_lines(path, _own)[:limit]
        tasks[name] = ZeroShot(job_name("own", name), questions, DataFile(path, "own"))
    return ZeroShotSuite(tasks)
