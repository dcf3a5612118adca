"""Few-shot evaluation one question at a time: nothing shared, full logits.

The oracle of the tests and the baseline of `benchmarks/evaluation.py`. It follows the reference
release step by step and does not import `parcae.evaluation`.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Scored:
    prompts: list[str]
    tokens: list[list[int]]
    spans: list[tuple[int, int]]
    losses: list[float]
    """Mean over each alternative's span."""
    greedy: list[int]
    """The model's most likely tokens for the span of the last alternative."""
    correct: bool


def read(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in data.decode().strip().split("\n")]
    random.Random(1337).shuffle(rows)
    return rows


def texts(kind: str, item: dict, examples: list[dict], delimiter: str) -> list[str]:
    shown = ""
    for one in examples:
        if kind == "multiple_choice":
            shown += one["query"] + delimiter + one["choices"][one["gold"]]
        elif kind == "schema":
            shown += one["context_options"][one["gold"]] + delimiter + one["continuation"]
        else:
            shown += one["context"].strip() + delimiter + one["continuation"]
        shown += "\n\n"
    if kind == "multiple_choice":
        return [shown + item["query"] + delimiter + choice for choice in item["choices"]]
    if kind == "schema":
        ending = delimiter + item["continuation"]
        return [shown + context + ending for context in item["context_options"]]
    asked = shown + item["context"].strip() + delimiter
    return [asked.strip(), asked + item["continuation"]]


def spans(kind: str, tokens: list[list[int]]) -> list[tuple[int, int]]:
    if kind == "language_modeling":
        without, whole = tokens
        assert whole[: len(without)] == without
        return [(len(without), len(whole))]
    shortest = min(len(one) for one in tokens)
    same = 0
    if kind == "multiple_choice":
        while same < shortest and len({one[same] for one in tokens}) == 1:
            same += 1
        return [(same, len(one)) for one in tokens]
    while same < shortest and len({one[-1 - same] for one in tokens}) == 1:
        same += 1
    return [(len(one) - same, len(one)) for one in tokens]


@torch.no_grad()
def score(
    model: Any, tokenizer: Any, task: Any, rows: list[dict], index: int, seed: int, loops: int
) -> Scored:
    """Of item `index` of the shuffled rows, all alternatives as one padded batch."""
    others = [other for other in range(len(rows)) if other != index]
    examples = random.Random(seed + index).sample(others, task.shots)
    prompts = texts(task.kind, rows[index], [rows[i] for i in examples], task.delimiter)
    tokens = [[tokenizer.bos, *tokenizer.encode(text)] for text in prompts]
    found = spans(task.kind, tokens)
    tokens = tokens[-len(found) :]
    context = model.config.context_length
    for place, (one, (start, end)) in enumerate(zip(tokens, found, strict=True)):
        dropped = max(len(one) - context, 0)
        tokens[place] = one[dropped:]
        found[place] = (start - dropped, end - dropped)
    longest = max(map(len, tokens))
    ids = torch.tensor([one + [tokenizer.bos] * (longest - len(one)) for one in tokens])
    targets = torch.roll(ids, -1, 1)
    logits = (
        model(ids, loops=loops, state="zero").logits if model_loops(model) else model(ids).logits
    )
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    nats = nats.view(ids.shape)
    losses = [nats[i, s - 1 : e - 1].mean().item() for i, (s, e) in enumerate(found)]
    start, end = found[-1]
    greedy = logits[-1, start - 1 : end - 1].argmax(-1).tolist()
    if task.kind == "language_modeling":
        correct = greedy == tokens[-1][start:end]
    else:
        correct = losses.index(min(losses)) == rows[index]["gold"]
    return Scored(prompts, tokens, found, losses, greedy, correct)


def model_loops(model: Any) -> bool:
    return model.config.architecture != "transformer"
