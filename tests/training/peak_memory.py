"""Prints [bytes that a training step took, bytes that the plan says]: PRESET ROWS CHECKPOINTED.

A program of its own, since a process's peak never falls. A small step is taken first, which loads
what PyTorch's builds load at their first use: up to some hundred megabytes of libraries.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

from parcae.data.tokenizer import Tokenizer
from parcae.training.corpora import open_corpora, prepare_corpora
from parcae.training.distributed import open_workers
from parcae.training.learner import Learner
from parcae.training.memory_estimate import estimate_memory
from parcae.training.settings import recipe_from_tree

WORDS = "alpha beta gamma delta epsilon zeta eta theta"


def main(preset: str, rows: int, checkpointed: bool, folder: Path) -> None:
    for name, arguments in {"first": ("parcae-1m", 1), "measured": (preset, rows)}.items():
        (folder / name).mkdir()
        result = step(*arguments, checkpointed, folder / name)
    print(json.dumps(result))


def step(preset: str, rows: int, checkpointed: bool, folder: Path) -> list[int]:
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
    line = json.dumps({"text": " ".join([WORDS] * 60)})
    text.write_text("".join(f"{line}\n" for _ in range(8 * rows)))
    Tokenizer.train([WORDS], 300).save(tokenizer)
    recipe = recipe_from_tree(
        {
            "model": {"preset": preset, "loop": {"sampler": "fixed", "mean_loops": 6}},
            "data": {
                "sources": [str(text)],
                "tokenizer": str(tokenizer),
                "validation_fraction": 0.0,
                "global_batch": 2 * rows,
                "micro_batch": rows,
            },
            "budget": {"steps": 1},
            "run": {
                "device": "cpu",
                "precision": "float32",
                "activation_checkpointing": checkpointed,
            },
        }
    )
    with open_workers(recipe.run) as workers:
        prepare_corpora(recipe, folder / "run", lambda _: None)
        corpora = open_corpora(recipe, folder / "run")
        gc.collect()  # what the first step leaves
        before = status("VmRSS")
        learner = Learner(recipe, workers, corpora)
        learner.take_step(0.0)
        peak = status("VmHWM")
        learner.close()
    return [peak - before, estimate_memory(recipe, torch.float32, rows, 2).total]


def status(key: str) -> int:
    """Bytes, by the kernel; `ru_maxrss` would count the parent's memory from before the exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(key))
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", Path(scratch))
