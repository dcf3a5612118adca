"""How long the runs of a sweep will take: from steps that are tried, or from a share of the
device's best speed."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from parcae import console
from parcae.data.loader import Batch
from parcae.model.flops import token_flops
from parcae.sweeps.plan import PlannedRun
from parcae.training.budget import flops_per_step
from parcae.training.corpora import Corpora
from parcae.training.distributed import Processes, find_device
from parcae.training.learner import Learner
from parcae.training.plan import UTILISATION, plan
from parcae.training.settings import Recipe

TRIAL_SECONDS = 0.5
LARGEST_TRIAL = {"cpu": 2e11, "cuda": 2e15, "mps": 2e13}
"""FLOPs of a step above which steps are not tried."""
START_SECONDS = 5.0
"""Of each run, for imports and opening data."""


@dataclass(frozen=True)
class Estimate:
    seconds: Mapping[str, float]
    """By run; empty where nothing is known."""
    how: str

    def wall(self, runs: Sequence[PlannedRun], workers: int) -> float | None:
        """Seconds until the last run ends when each worker takes the next that waits."""
        if not all(run.name in self.seconds for run in runs):
            return None
        free = [0.0] * workers
        for run in runs:
            heapq.heapreplace(free, free[0] + self.seconds[run.name])
        return max(free)


def estimate(
    runs: Sequence[PlannedRun],
    threads: int,
    utilisation: float | None = None,
    device_flops: str | float | None = None,
) -> Estimate:
    """Tried where the model is small enough for this machine and no share is given."""
    if not runs:
        return Estimate({}, "nothing is left to do")
    given = utilisation is not None or device_flops is not None
    if not given and _can_try(runs):
        rates = _tried(runs, threads)
        many = f" with {threads} thread{'s' if threads > 1 else ''}" if _kind(runs) == "cpu" else ""
        how = f"from steps of each model, tried{many}, one at a time; side by side they are slower"
        return Estimate({run.name: _seconds(run, rates[_key(run)]) for run in runs}, how)
    share = UTILISATION if utilisation is None else utilisation
    found = plan(runs[0].recipe, 1, share, device_flops)
    if found.device_flops is None:
        return Estimate({}, "unknown: the device's speed is not known; give --device-flops")
    rate = share * found.device_flops
    how = (
        f"at {share:.0%} of {console.format_si(found.device_flops, 'FLOP/s')} of one {found.device}"
    )
    return Estimate({run.name: _seconds(run, rate) for run in runs}, how)


def _seconds(run: PlannedRun, rate: float) -> float:
    return START_SECONDS + (run.flops + _validation_flops(run)) / rate


def _validation_flops(run: PlannedRun) -> float:
    recipe, cost = run.recipe, token_flops(run.recipe.model)
    depths, every = recipe.validation_depths, recipe.run.validate_every
    times = max(1, -(-run.steps // every)) if every else 1
    each = len(depths) * cost.outside + max(depths) * cost.per_loop
    return times * recipe.run.validation_rows * recipe.model.context_length * each


def _kind(runs: Sequence[PlannedRun]) -> str:
    device = runs[0].recipe.run.device
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return "absent" if not available.get(device, True) else find_device(device).type


def _can_try(runs: Sequence[PlannedRun]) -> bool:
    largest = max(flops_per_step(run.recipe) for run in runs)
    return largest <= LARGEST_TRIAL.get(_kind(runs), 0.0)


def _key(run: PlannedRun) -> tuple[str, float]:
    return run.model, run.mean_loops


def _tried(runs: Sequence[PlannedRun], threads: int) -> dict[tuple[str, float], float]:
    """FLOP/s by model and loops."""
    models = {_key(run): run.recipe for run in runs}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        each = console.track(models.items(), "trying steps", len(models))
        return {key: _rate(recipe) for key, recipe in each}
    finally:
        torch.set_num_threads(before)


def _rate(recipe: Recipe) -> float:
    device = find_device(recipe.run.device)
    learner = Learner(recipe, Processes(device), cast(Corpora, RandomRows()))
    learner.take_step(0.0)  # the first is slower than all that follow
    work, start = 0.0, time.perf_counter()
    while not work or time.perf_counter() < start + TRIAL_SECONDS:
        work += learner.take_step(0.0).flops  # reads the loss, so the device has finished
    return work / (time.perf_counter() - start)


class RandomRows:
    """In the place of `Corpora`: speed does not depend on what is read."""

    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> Any:
        return self._rows(recipe)

    def _rows(self, recipe: Recipe) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        shape = (recipe.data.global_batch, recipe.model.context_length + 1)
        while True:
            rows = torch.randint(recipe.model.vocab_size, shape, generator=generator)
            yield Batch(rows[:, :-1], rows[:, 1:])

    def bytes_of_token(self) -> None:
        return None

    def can_validate(self, recipe: Recipe) -> bool:
        return False
