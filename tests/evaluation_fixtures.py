"""A small trained-looking model with a tokenizer, and a folder of small task files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from parcae.config import LoopConfig, ModelConfig
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.prompts import Answer, Prompt
from parcae.evaluation.scorer import LoopedScorer, Scorer
from parcae.evaluation.shared_prefix import batches
from parcae.model import create
from parcae.model.store import save

SENTENCE = "the cat sat on a mat and saw that one dog run far away from home in light rain"
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS)] * 50, size=320)


@pytest.fixture(scope="session")
def small_model(small_tokenizer: Tokenizer):
    torch.manual_seed(3)
    model = create(
        ModelConfig(
            vocab_size=small_tokenizer.vocab_size,
            context_length=64,
            width=48,
            heads=3,
            prelude_layers=1,
            core_layers=2,
            coda_layers=1,
            loop=LoopConfig(mean_loops=3),
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def scorer(small_model, small_tokenizer) -> LoopedScorer:
    return LoopedScorer(small_model, small_tokenizer, [1, 2, 4], batch_tokens=256)


@pytest.fixture(scope="session")
def checkpoint(small_model, small_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(small_model, folder)
    small_tokenizer.save(folder / "tokenizer.json")
    return folder


def score_all(
    scorer: Scorer, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
) -> list[list[Answer]]:
    """The answers to all prompts in their order, scored in batches."""
    answers: dict[int, list[Answer]] = {}
    for batch in batches([scorer.cost(prompt) for prompt in prompts], scorer.batch_tokens):
        chosen = None if seeds is None else [seeds[index] for index in batch]
        scored = scorer.score([prompts[index] for index in batch], chosen)
        answers.update(zip(batch, scored, strict=True))
    return [answers[index] for index in range(len(prompts))]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory) -> Path:
    """COPA, Winograd, BIG-Bench operators, LAMBADA and WikiText, a few lines each."""
    folder = tmp_path_factory.mktemp("tasks")
    phrase = [" ".join(WORDS[i : i + 3]) for i in range(16)]
    write_lines(
        folder / "commonsense_reasoning/copa.jsonl",
        [
            {"query": phrase[i], "choices": [phrase[i + 1], WORDS[i]], "gold": i % 2}
            for i in range(12)
        ],
    )
    write_lines(
        folder / "language_understanding/winograd_wsc.jsonl.gz",
        [
            {"context_options": [phrase[i], phrase[i + 2]], "continuation": "and so", "gold": 0}
            for i in range(9)
        ],
    )
    write_lines(
        folder / "symbolic_problem_solving/bigbench_operators.jsonl",
        [{"context": phrase[i], "continuation": WORDS[i + 3]} for i in range(14)],
    )
    write_lines(
        folder / "language_understanding/lambada_openai.jsonl",
        [{"context": phrase[i], "continuation": WORDS[i + 3]} for i in range(10)],
    )
    article = " \n = Cats = \n \n " + " ".join(WORDS * 8) + " \n = = Dogs = = \n " + WORDS[0]
    (folder / "wiki.test.raw").write_text(article + " \n = Rain = \n \n the rain \n")
    return folder
