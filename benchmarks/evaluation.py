"""Items per second of few-shot multiple choice, against one question at a time, in turns.

    python benchmarks/evaluation.py --eval-data FOLDER [--model CHECKPOINT] [--items 16]

The plain way is that of `one_at_a_time.py`: an item's alternatives as one padded batch, each with
the whole few-shot prompt, full logits, one depth after the other. Both sides start from text, so
tokenising counts. Answers are compared while they are timed. Without --model it is parcae-3m with
random weights and a tokenizer trained on the tasks' own text.
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
from parcae.evaluation.in_context import InContext, Questions
from parcae.evaluation.jobs import DataFile, credit
from parcae.evaluation.prompts import SEEDS
from parcae.evaluation.scorer import LoopedScorer, batches
from parcae.evaluation.tasks import locate, tasks_named
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
    with torch.no_grad():  # some of it starts at zero, which would leave nothing to compare
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model, Tokenizer.train(texts, size=config.vocab_size)


def open_questions(names: list[str], folder: Path) -> list[Questions]:
    found = []
    for task in tasks_named(names):
        path = locate(task, folder)
        if path is None:
            raise SystemExit(f"{task.name}: its data is not in {folder}.")
        found.append(Questions(task, DataFile(path, "evaluation")))
    return found


def ours(scorer: LoopedScorer, job: InContext, items: int) -> list[list[float]]:
    """Losses of every alternative at every depth, item by item."""
    prompts = [job.prompt(index, scorer) for index in range(items)]
    losses: dict[int, list[float]] = {}
    for batch in batches([scorer.cost(prompt) for prompt in prompts], scorer.batch_tokens):
        scored = scorer.score([prompts[index] for index in batch])
        for index, answers in zip(batch, scored, strict=True):
            losses[index] = [
                answer.nats[depth].mean().item()
                for depth in range(len(scorer.depths))
                for answer in answers
            ]
    return [losses[index] for index in range(items)]


def plainly(
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
    found = work()
    return time.perf_counter() - start, found


def compare(
    model: Any, tokenizer: Any, asked: Questions, depths: tuple[int, ...], items: int, rounds: int
) -> dict[str, Any]:
    job = InContext(asked, SEEDS[0])
    rows = one_at_a_time.read(asked.source.path)
    scorer = LoopedScorer(model, tokenizer, depths)
    fast, slow, worst, differing = [], [], 0.0, 0
    for _ in range(rounds):
        seconds, found = timed(lambda: ours(scorer, job, items))
        fast.append(seconds)
        seconds, wanted = timed(lambda: plainly(model, tokenizer, job, rows, items, depths))
        slow.append(seconds)
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            worst = max(worst, *(abs(x - y) for x, y in zip(a, b, strict=True)))
            differing += verdicts(a, depths, asked, index) != verdicts(b, depths, asked, index)
    return {
        "by_minima": min(slow) / min(fast),
        "by_medians": statistics.median(slow) / statistics.median(fast),
        "items_per_second": items / min(fast),
        "items_per_second_plainly": items / min(slow),
        "largest_difference_of_losses": worst,
        "differing_verdicts": differing,
    }


def verdicts(
    losses: list[float], depths: tuple[int, ...], asked: Questions, index: int
) -> list[float]:
    item = asked.items[index]
    count = len(item.answers)
    return [
        credit(losses[place * count : (place + 1) * count], item.gold)
        for place in range(len(depths))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a checkpoint; random weights if left out")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--items", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    keep_freed_memory()
    questions = open_questions(arguments.tasks, arguments.eval_data)
    if arguments.model is None:
        texts = [text for one in questions for item in one.items[:500] for text in item.questions]
        model, tokenizer = random_model(texts)
    else:
        model, tokenizer, _ = open_checkpoint(arguments.model)
    found: dict[str, dict[str, Any]] = {}
    for asked in questions:
        for name, depths in DEPTHS.items():
            err.print(f"{asked.task.name}, {name}")
            label = f"{asked.task.name}, {asked.task.shots} shots, {name}"
            found[label] = compare(
                model, tokenizer, asked, depths, arguments.items, arguments.rounds
            )
    columns = ("", "items/s", "plainly", "ratio of minima", "of medians", "worst", "differ")
    lines = [
        (
            label,
            f"{one['items_per_second']:.2f}",
            f"{one['items_per_second_plainly']:.2f}",
            f"{one['by_minima']:.2f}",
            f"{one['by_medians']:.2f}",
            f"{one['largest_difference_of_losses']:.1e}",
            one["differing_verdicts"],
        )
        for label, one in found.items()
    ]
    out.print(table("Few-shot multiple choice", columns, lines))
    if arguments.out is not None:
        write_json(arguments.out, found)


if __name__ == "__main__":
    main()
