"""Items per second of few-shot multiple choice, compared with scoring one question at a time.

    python benchmarks/evaluation.py --task-data FOLDER [--model CHECKPOINT] [--items 16]

The baseline is `one_at_a_time.py`: the alternatives of an item as one padded batch, each with the
whole few-shot prompt, full logits, one depth after the other. Both start from text, so the time
includes tokenising. Measurements are interleaved, and the answers are compared. Without --model the
model is parcae-3m with random weights and a tokenizer trained on the text of the tasks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import one_at_a_time
import parcae
from parcae.console import err, out, table
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.core_suite import InContext, Questions
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.metrics import credit
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.shared_prefix import batches
from parcae.evaluation.suites import SEEDS
from parcae.evaluation.tasks import Item, locate, tasks_named
from parcae.files import write_json
from parcae.machine import keep_freed_memory
from parcae.runs import open_checkpoint

TASKS = ("arc_easy", "hellaswag", "commonsense_qa", "mmlu_fewshot", "piqa", "boolq")
DEPTHS = {"T = 8": (8,), "T = 1, 2, 4, 8": (1, 2, 4, 8)}
PRESET = "parcae-3m"


def random_model(texts: list[str]) -> tuple[Any, Any]:
    config = parcae.preset(PRESET, {"context_length": 1024})
    model = parcae.create(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # some weights start at zero, which would make all answers equal
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model, Tokenizer.train(texts, size=config.vocab_size)


def open_questions(names: list[str], folder: Path) -> list[Questions]:
    questions = []
    for task in tasks_named(names):
        path = locate(task, folder)
        if path is None:
            raise SystemExit(f"{task.name}: its data is not in {folder}.")
        questions.append(Questions(task, DataFile(path, "evaluation")))
    return questions


def score_together(scorer: LoopedScorer, job: InContext, items: int) -> list[list[float]]:
    """Losses of every alternative at every depth, for each item."""
    prompts = [job.prompt(index, scorer) for index in range(items)]
    losses: dict[int, list[float]] = {}
    for batch in batches([scorer.cost(prompt) for prompt in prompts], scorer.batch_tokens):
        scored = scorer.score([prompts[index] for index in batch])
        for index, answers in zip(batch, scored, strict=True):
            losses[index] = [
                answer.nats[depth].mean().item()
                for depth in range(len(scorer.loops))
                for answer in answers
            ]
    return [losses[index] for index in range(items)]


def score_one_at_a_time(
    model: Any,
    tokenizer: Any,
    job: InContext,
    rows: list[dict],
    items: int,
    depths: tuple[int, ...],
) -> list[list[float]]:
    return [
        [
            loss
            for depth in depths
            for loss in one_at_a_time.score(
                model, tokenizer, job.task, rows, index, SEEDS[0], depth
            ).losses
        ]
        for index in range(items)
    ]


def timed(work: Callable[[], list[list[float]]]) -> tuple[float, list[list[float]]]:
    start = time.perf_counter()
    losses = work()
    return time.perf_counter() - start, losses


def compare(
    model: Any,
    tokenizer: Any,
    questions: Questions,
    depths: tuple[int, ...],
    items: int,
    rounds: int,
) -> dict[str, Any]:
    job = InContext(questions, SEEDS[0])
    rows = one_at_a_time.read(questions.source.path)
    scorer = LoopedScorer(model, tokenizer, depths)
    fast, slow, worst, differing = [], [], 0.0, 0
    for _ in range(rounds):
        seconds, losses = timed(lambda: score_together(scorer, job, items))
        fast.append(seconds)
        seconds, expected = timed(
            lambda: score_one_at_a_time(model, tokenizer, job, rows, items, depths)
        )
        slow.append(seconds)
        for index, (a, b) in enumerate(zip(losses, expected, strict=True)):
            worst = max(worst, *(abs(x - y) for x, y in zip(a, b, strict=True)))
            item = questions.items[index]
            differing += credits(a, len(depths), item) != credits(b, len(depths), item)
    return {
        "by_minima": min(slow) / min(fast),
        "by_medians": statistics.median(slow) / statistics.median(fast),
        "items_per_second": items / min(fast),
        "items_per_second_one_at_a_time": items / min(slow),
        "largest_difference_of_losses": worst,
        "differing_answers": differing,
    }


def credits(losses: list[float], depths: int, item: Item) -> list[float]:
    """The credit of an item at each depth."""
    count = len(item.answers)
    return [credit(losses[i * count : (i + 1) * count], item.gold) for i in range(depths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task-data", type=Path, required=True, help="folder of task files")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: random weights)")
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), help=f"names (default: {' '.join(TASKS)})"
    )
    parser.add_argument("--items", type=int, default=16, help="items per task (default: 16)")
    parser.add_argument("--rounds", type=int, default=4, help="measurements (default: 4)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    arguments = parser.parse_args()
    keep_freed_memory()
    questions = open_questions(arguments.tasks, arguments.task_data)
    if arguments.model is None:
        texts = [text for task in questions for item in task.items[:500] for text in item.questions]
        model, tokenizer = random_model(texts)
    else:
        model, tokenizer, _ = open_checkpoint(arguments.model)
    results: dict[str, dict[str, Any]] = {}
    for task in questions:
        for name, depths in DEPTHS.items():
            err.print(f"{task.task.name}, {name}")
            label = f"{task.task.name}, {task.task.shots} shots, {name}"
            results[label] = compare(
                model, tokenizer, task, depths, arguments.items, arguments.rounds
            )
    columns = (
        "task",
        "items/s",
        "one at a time",
        "ratio of minima",
        "ratio of medians",
        "largest difference of losses",
        "differing answers",
    )
    lines = [
        (
            label,
            f"{result['items_per_second']:.2f}",
            f"{result['items_per_second_one_at_a_time']:.2f}",
            f"{result['by_minima']:.2f}",
            f"{result['by_medians']:.2f}",
            f"{result['largest_difference_of_losses']:.1e}",
            result["differing_answers"],
        )
        for label, result in results.items()
    ]
    out.print(table("Few-shot multiple choice", columns, lines))
    if arguments.out is not None:
        write_json(arguments.out, results)


if __name__ == "__main__":
    main()
