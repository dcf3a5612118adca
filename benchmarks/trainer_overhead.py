"""What the trainer costs over the bare forward, backward and optimiser step.

    python benchmarks/trainer_overhead.py [--preset parcae-3m] [--steps 40] [--rounds 5]

In turns, in one process: `steps` steps of a run with everything a recipe turns on by default (data
loading, draws by row, clipping, guards, telemetry, log, display), and as many bare steps on rows
that are already there. Validation and checkpoints are left out: how often they run is the user's
choice; what telemetry costs at its default interval is in.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from parcae.files import lock_folder
from parcae.machine import keep_freed_memory
from parcae.training.corpora import open_corpora, prepare_corpora
from parcae.training.distributed import open_workers
from parcae.training.learner import Learner
from parcae.training.log import Display, Log
from parcae.training.schedule import schedule_factors
from parcae.training.settings import recipe_from_tree
from parcae.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="parcae-3m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as out:
        compare(arguments, Path(out))


def compare(arguments: argparse.Namespace, out: Path) -> None:
    recipe = recipe_from_tree(
        {
            "model": {"preset": arguments.preset, "context_length": arguments.context},
            "data": {"sources": ["builtin"], "global_batch": arguments.rows, "split_long": True},
            "budget": {"steps": 10**6},
            "run": {"device": "cpu", "validate_every": 0, "checkpoint_every": 0},
        }
    )
    with open_workers(recipe.run) as workers, lock_folder(out):
        prepare_corpora(recipe, out, lambda _: None)
        learner = Learner(recipe, workers, open_corpora(recipe, out))
        run = Trainer(recipe, out, workers, learner, Display(is_first=True))
        run.log = Log(out)
        bare = Bare(learner)
        times: dict[str, list[float]] = {"trainer": [], "bare": []}
        run._train_step()
        for _ in range(arguments.rounds):
            first = learner.step
            times["trainer"].append(seconds(run._train_step, arguments.steps))
            # The same depths, drawn before the clock starts, so both do the same work.
            steps = [bare.prepare(first + i) for i in range(arguments.steps)]
            given = iter(steps)
            times["bare"].append(seconds(lambda given=given: bare.step(next(given)), len(steps)))
        learner.close()
    ratios = [a / b for a, b in zip(times["trainer"], times["bare"], strict=True)]
    print(f"{arguments.preset}, {arguments.rows} rows of {arguments.context}")
    for name, taken in times.items():
        print(f"{name:8s} {min(taken) / arguments.steps * 1e3:8.2f} ms a step at best")
    minima = min(times["trainer"]) / min(times["bare"])
    print(f"trainer / bare: {minima:.3f} by minima, {statistics.median(ratios):.3f} by medians")


def seconds(function, repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        function()
    return time.perf_counter() - start


class Bare:
    """Forward, backward, optimiser step, and nothing else."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.batch = next(learner.corpora.loader(learner.recipe))

    def prepare(self, step: int):
        rows = range(len(self.batch.inputs))
        recipe = self.learner.recipe
        return self.learner.model.draw(recipe.run.seed, step, rows, self.batch.inputs.shape[1])

    def step(self, chance) -> None:
        learner, recipe = self.learner, self.learner.recipe
        learner.model(*self.batch, **chance).loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.model.parameters(), recipe.optimiser.grad_clip)
        learner.optimiser.step(
            schedule_factors(recipe.schedule, recipe.optimiser, 0, 0.0, learner.total)
        )
        learner.optimiser.zero_grad()


if __name__ == "__main__":
    main()
