"""Small runs for the tests of training: random documents, a tiny model, seconds on one core."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from parcae.recipe import merge
from parcae.training.settings import Recipe, recipe_from_tree, recipe_to_dict

TREE: dict[str, Any] = {
    "model": {
        "vocab_size": 300,
        "context_length": 16,
        "width": 32,
        "heads": 2,
        "prelude_layers": 1,
        "core_layers": 1,
        "coda_layers": 1,
        "loop": {"mean_loops": 3},
    },
    "data": {
        "sources": [],
        "global_batch": 4,
        "micro_batch": 2,
        "validation_fraction": 0.2,
        "split_long": True,
    },
    "budget": {"steps": 20},
    "run": {
        "device": "cpu",
        "validate_every": 5,
        "validation_rows": 4,
        "telemetry_every": 5,
        "checkpoint_every": 3,
    },
}

RDM: dict[str, Any] = {
    "injection": "concatenation",
    "mlp": "swiglu",
    "qk_norm": False,
    "init": "scaled",
    "readout": False,
    "prelude_norm": False,
    "value_embeddings": False,
    "mlp_width": 64,
}
"""Changes of the model that make it a pre-norm RDM."""


def write_text(folder: Path, documents: int = 60) -> Path:
    """Text with something to learn: words that follow each other in a fixed order."""
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    path = folder / "text.jsonl"
    with path.open("w") as stream:
        for _ in range(documents):
            start = int(rng.integers(len(words)))
            text = " ".join(
                words[(start + i) % len(words)] for i in range(int(rng.integers(9, 40)))
            )
            stream.write(json.dumps({"text": text}) + "\n")
    return path


def recipe(text: Path, **changes: Any) -> Recipe:
    """`recipe(text, budget={"steps": 3})`."""
    return recipe_from_tree(merge(merge(TREE, {"data": {"sources": [str(text)]}}), changes))


def lines(run: Path, kind: str, *keys: str) -> list[tuple]:
    """(step, value of each key ...) of every line of a kind in metrics.jsonl."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], *(x[key] for key in keys)) for x in found if x["kind"] == kind]


def curve(run: Path) -> list[tuple]:
    return lines(run, "train", "loss", "gradient_norm", "mean_depth", "tokens", "executed_flops")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def clean_processes() -> Any:
    """Processes that start at once, from a parent that has imported but not run anything.

    It has imported pytest because every child imports the module of its test.
    """
    context = multiprocessing.get_context("forkserver")
    imported = ["parcae.training.trainer", "torch._inductor", "matplotlib.pyplot", "pytest"]
    context.set_forkserver_preload(imported)
    return context


def compute_in_float64() -> None:
    """Let this process make weights, and compute everything, in float64.

    The model computes some things in float32 whatever its weights are, by `Tensor.float()`.
    """
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe_from_tree(merge(recipe_to_dict(recipe), changes))
