"""The zero-shot set of the comparison with RDMs, with lm-evaluation-harness's prompts.

The answer is the choice with the highest log-probability (accuracy), or with the highest one per
character (accuracy_per_character, the harness's acc_norm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parcae.evaluation.items import Fields, read_lines
from parcae.evaluation.job import (
    DataFile,
    Record,
    by_depth,
    credit,
    mean,
    standard_error,
    sums,
)
from parcae.evaluation.perplexity import continuations
from parcae.evaluation.prompts import Prompt
from parcae.evaluation.scoring import Answer, Scorer
from parcae.evaluation.tasks import find


class Question(NamedTuple):
    context: str
    choices: tuple[str, ...]
    gold: int


def _ready(ending: str = "") -> Callable[[Fields], Question]:
    """Files that hold the prompt itself."""

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
    """The harness shows the passage without its heading."""
    question = _ready("\nAnswer:")(fields)
    return question._replace(context=question.context.removeprefix("Passage: "))


def _sciq(fields: Fields) -> Question:
    choices = fields.texts("choices")
    context = f"{fields.text('support').lstrip()}\nQuestion: {fields.text('question')}\nAnswer:"
    return Question(context, choices, fields.index("gold", len(choices)))


def _arc(fields: Fields) -> Question:
    held = fields.get("choices")
    if not isinstance(held, dict):
        raise fields.error("it is not an object with text and label", "choices")
    inner = Fields(fields.path, fields.line, held)
    choices, labels = inner.texts("text"), inner.texts("label")
    answer = fields.text("answerKey")
    if answer not in labels or len(labels) != len(choices):
        raise fields.error(f"{answer!r} is not one of the labels {list(labels)}", "answerKey")
    return Question(f"Question: {fields.text('question')}\nAnswer:", choices, labels.index(answer))


class Candidate(NamedTuple):
    """A file that can serve, with the split it holds."""

    file: str
    split: str
    read: Callable[[Fields], Question]


class ZeroShotTask(NamedTuple):
    name: str
    title: str
    candidates: tuple[Candidate, ...]
    """The first that is there is used; the harness's own split comes first."""


TASKS = (
    ZeroShotTask(
        "hellaswag",
        "HellaSwag",
        (Candidate("language_understanding/hellaswag.jsonl", "validation", _ready()),),
    ),
    ZeroShotTask(
        "arc_challenge",
        "ARC-c",
        (
            Candidate("world_knowledge/arc_challenge.jsonl", "test", _ready("\nAnswer:")),
            Candidate("zeroshot/arc_challenge_validation.jsonl", "validation", _arc),
        ),
    ),
    ZeroShotTask(
        "arc_easy",
        "ARC-e",
        (
            Candidate("world_knowledge/arc_easy.jsonl", "test", _ready("\nAnswer:")),
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


class ZeroShot:
    """One of the tasks, on its first `limit` questions."""

    seed: int | None = None

    def __init__(self, task: ZeroShotTask, questions: Sequence[Question], source: DataFile) -> None:
        self.name, self.title = f"zero-shot/{task.name}", task.title
        self.questions, self.source = questions, source

    def __len__(self) -> int:
        return len(self.questions)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        context, choices, _ = self.questions[index]
        return continuations(context, [f" {choice}" for choice in choices], scorer)

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        _, choices, gold = self.questions[index]
        nats = by_depth([sums(answer) for answer in answers])
        per_character = [
            [one / max(len(choice), 1) for one, choice in zip(row, choices, strict=True)]
            for row in nats
        ]
        return {
            "gold": gold,
            "nats": nats,
            "credit": [credit(row, gold) for row in nats],
            "credit_per_character": [credit(row, gold) for row in per_character],
            "cut": prompt.is_cut,
        }

    def summarise(self, records: Sequence[Record], place: int) -> dict[str, Any]:
        credits = [record["credit"][place] for record in records]
        return {
            "accuracy": mean(credits),
            "standard_error": standard_error(credits),
            "accuracy_per_character": mean(
                [record["credit_per_character"][place] for record in records]
            ),
        }


def open_task(task: ZeroShotTask, folder: Path, limit: int | None = None) -> ZeroShot | None:
    for candidate in task.candidates:
        if (path := find(folder, candidate.file)) is not None:
            questions = read_lines(path, candidate.read)[:limit]
            return ZeroShot(task, questions, DataFile(path, candidate.split))
    return None
