"""How long the runs of a sweep take: measured on a few steps, or from the speed of the device."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parcae import console
from parcae.data.loader import Batch
from parcae.device import is_available
from parcae.model.flops import token_flops
from parcae.sweeps.grid import PlannedRun
from parcae.training.distributed import Workers, training_device
from parcae.training.learner import Learner
from parcae.training.plan import UTILISATION, plan
from parcae.training.schedule import flops_per_step
from parcae.training.settings import Recipe

TRIAL_SECONDS = 0.5
LARGEST_TRIAL = {"cpu": 2e11, "cuda": 2e15, "mps": 2e13}
"""FLOPs of a step above which no step is measured, by the type of device."""
START_SECONDS = 5.0
"""Time of each run for imports and opening data."""


@dataclass(frozen=True)
class Estimate:
    seconds: Mapping[str, float]
    """By run; empty where nothing is known."""
    method: str
    """How it was estimated, in words."""

    def wall_seconds(self, runs: Sequence[PlannedRun], workers: int) -> float | None:
        """Seconds until the last run ends when each worker takes the next run that waits."""
        if not all(run.name in self.seconds for run in runs):
            return None
        busy_until = [0.0] * workers
        for run in runs:
            heapq.heapreplace(busy_until, busy_until[0] + self.seconds[run.name])
        return max(busy_until)


def estimate(
    runs: Sequence[PlannedRun],
    threads: int,
    utilisation: float | None = None,
    device_flops: str | float | None = None,
) -> Estimate:
    """Measure steps of each model if it is small enough for this machine and neither
    `utilisation` nor `device_flops` is given; otherwise divide FLOPs by the device's speed."""
    if not runs:
        return Estimate({}, "no run is left to do")
    given = utilisation is not None or device_flops is not None
    if not given and _can_measure(runs):
        speeds = _measured_speeds(runs, threads)
        with_threads = ""
        if _device_type(runs) == "cpu":
            with_threads = f" with {console.format_items(threads, 'thread')}"
        return Estimate(
            {run.name: _seconds(run, speeds[_key(run)]) for run in runs},
            f"measured on a few steps of each model{with_threads}, one model at a time; runs side "
            "by side are slower",
        )
    share = UTILISATION if utilisation is None else utilisation
    device = plan(runs[0].recipe, 1, share, device_flops)
    if device.device_flops is None:
        return Estimate({}, "unknown, as the speed of the device is not known: give `device_flops`")
    speed = share * device.device_flops
    peak = console.format_si(device.device_flops, "FLOP/s")
    return Estimate(
        {run.name: _seconds(run, speed) for run in runs},
        f"at {share:.0%} of the {peak} of one {device.device}",
    )


def _seconds(run: PlannedRun, speed: float) -> float:
    return START_SECONDS + (run.flops + _validation_flops(run)) / speed


def _validation_flops(run: PlannedRun) -> float:
    recipe, cost = run.recipe, token_flops(run.recipe.model)
    loops, every = recipe.validation_loops, recipe.run.validate_every
    times = max(1, -(-run.steps // every)) if every else 1
    each = len(loops) * cost.outside + max(loops) * cost.per_loop
    return times * recipe.run.validation_rows * recipe.model.context_length * each


def _device_type(runs: Sequence[PlannedRun]) -> str:
    device = runs[0].recipe.run.device
    return training_device(device).type if is_available(device) else "absent"


def _can_measure(runs: Sequence[PlannedRun]) -> bool:
    largest = max(flops_per_step(run.recipe) for run in runs)
    return largest <= LARGEST_TRIAL.get(_device_type(runs), 0.0)


def _key(run: PlannedRun) -> tuple[str, float]:
    return run.model, run.mean_loops


def _measured_speeds(runs: Sequence[PlannedRun], threads: int) -> dict[tuple[str, float], float]:
    """FLOP/s by model and mean loops."""
    models = {_key(run): run.recipe for run in runs}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        recipes = console.track(models.items(), "measuring steps", len(models))
        return {key: measured_speed(recipe) for key, recipe in recipes}
    finally:
        torch.set_num_threads(before)


def measured_speed(recipe: Recipe) -> float:
    """FLOP/s of training steps on rows of random tokens."""
    learner = Learner(recipe, Workers(training_device(recipe.run.device)), RandomData())
    learner.take_step(0.0)  # the first step is slower than the others
    work, start = 0.0, time.perf_counter()
    while not work or time.perf_counter() < start + TRIAL_SECONDS:
        work += learner.take_step(0.0).flops  # reads the loss, so the device has finished
    return work / (time.perf_counter() - start)


class RandomData:
    """`TrainingData` of random tokens: the speed of a step does not depend on what is read."""

    tokenizer = None

    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        shape = (recipe.data.global_batch, recipe.model.context_length + 1)
        while True:
            rows = torch.randint(recipe.model.vocab_size, shape, generator=generator)
            yield Batch(rows[:, :-1], rows[:, 1:])

    def validation(self, recipe: Recipe, batch_rows: int) -> Iterator[Batch]:
        return iter(())

    def can_validate(self, recipe: Recipe) -> bool:
        return False

    def fingerprints(self) -> list[dict[str, str]]:
        return []

    def bytes_of_token(self) -> None:
        return None
