"""Does a model learn in bfloat16 what it learns in float32? Paired runs, and their difference.

    python benchmarks/precision_quality.py OUT FILE [--seeds 3] [--steps 2000] [--table.key VALUE]

Trains parcae-3m on a text in both precisions and prints, for each number of loops, the mean
difference of the held-out loss (bfloat16 - float32) with its standard error, and for each run the
largest spectral radius and state norm. Settings of a recipe change all runs, such as
--optimiser.muon_lr 0.064. Started again, it continues where it was stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import parcae
from parcae.recipe import merge, parse_flags
from parcae.runs import read_metrics, read_result

LOOPS = (1, 4, 8, 16)
PRECISIONS = ("float32", "bfloat16")


def recipe(arguments: argparse.Namespace, seed: int, precision: str) -> dict[str, Any]:
    given = {
        "model": {"preset": "parcae-3m", "context_length": 256, "loop": {"mean_loops": 8}},
        "data": {"sources": [str(arguments.data)], "validation_fraction": 0.04, "global_batch": 16},
        "budget": {"steps": arguments.steps},
        "run": {
            "device": "cpu",
            "compile": True,
            "seed": seed,
            "precision": precision,
            "validate_every": 0,
            "validation_loops": list(LOOPS),
            "checkpoint_every": 100,
            "keep_last": 1,
            "keep_best": False,
        },
    }
    return merge(given, parse_flags(arguments.settings))


def train(arguments: argparse.Namespace, seed: int, precision: str) -> dict[int, float]:
    """Held-out loss by loops of a run, which is trained as far as it is not."""
    out = arguments.out / f"{precision}-{seed}"
    result = read_result(out) if out.exists() else None
    if result is None or result.status == "interrupted":
        tables = recipe(arguments, seed, precision)
        begun = (out / "metrics.jsonl").exists()
        result = parcae.train(out if begun else tables, None if begun else out, resume=begun)
    if result.status == "interrupted":
        raise SystemExit(130)
    looks = read_metrics(out)["telemetry"]
    radius = max(look["spectral_radius"] or math.inf for look in looks)
    norm = max(look["state_norms"][-1] or math.inf for look in looks)
    print(f"{out.name}: {result.status}, spectral radius {radius:.4f}, state norm {norm:.3g}")
    return {loops: math.inf if x is None else x for loops, x in result.losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("data", type=Path, help="text to learn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    arguments, arguments.settings = parser.parse_known_args()
    pairs = [[train(arguments, seed, p) for p in PRECISIONS] for seed in range(arguments.seeds)]
    print(f"{'loops':>5}{'float32':>10}{'difference':>12}{'standard error':>16}")
    for loops in pairs[0][0]:
        differences = [mixed[loops] - exact[loops] for exact, mixed in pairs]
        error = math.nan
        if len(pairs) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(pairs))
        exact = statistics.mean(exact[loops] for exact, _ in pairs)
        print(f"{loops:5}{exact:10.4f}{statistics.mean(differences):12.4f}{error:16.4f}")


if __name__ == "__main__":
    main()
