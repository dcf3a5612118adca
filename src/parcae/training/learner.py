"""A model that learns: one optimiser step, one validation, one look inside, on any processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parcae.evaluation.loss import DepthLosses, Totals, totals_by_depth
from parcae.model import create
from parcae.model.flops import executed
from parcae.model.store import header
from parcae.training.budget import total_steps
from parcae.training.checkpoint import Snapshot
from parcae.training.corpora import TrainingData
from parcae.training.distributed import Processes
from parcae.training.guard import Guard
from parcae.training.optim import Optimiser
from parcae.training.samples import Sample, draw_samples
from parcae.training.schedule import factors
from parcae.training.settings import Recipe
from parcae.training.telemetry import observe


class Step(NamedTuple):
    """What one optimiser step measured, over all processes."""

    loss: float
    gradient_norm: float
    taken: bool
    flops: float
    """Executed, which differs from the nominal by the depths that were drawn."""
    mean_depth: float
    max_depth: int


class Learner:
    """Model, optimiser and data of a run; `step` counts the optimiser steps behind it."""

    def __init__(self, recipe: Recipe, workers: Processes, corpora: TrainingData) -> None:
        run, data = recipe.run, recipe.data
        self.recipe, self.workers, self.corpora = recipe, workers, corpora
        self.dtype = compute_dtype(run.precision, workers.device)
        self.model = create(recipe.model, seed=run.seed).to(workers.device)
        if run.compile:
            self.model.compile_layers()
        if run.checkpoint_loops:
            self.model.checkpoint_loops()
        self.wrapped = workers.wrap(self.model)
        self.optimiser = Optimiser(self.model, recipe.optimiser, workers.replicas)
        self.loader = corpora.loader(recipe, workers.rank, workers.size)
        share = data.global_batch // workers.size
        self.micro_batch = min(data.micro_batch or share, share)
        self.bytes_of_token = corpora.bytes_of_token()
        self.can_validate = corpora.can_validate(recipe)
        self.guard = Guard(run.bad_steps_in_a_row)
        self.total = total_steps(recipe)
        self.step = 0

    def take_step(self, done: float) -> Step:
        """Forward and backward over the micro-batches, clip, and step unless a number is bad.

        `done` is the share of the run that lies behind, for the schedules.
        """
        batch = next(self.loader)
        rows = range(self.workers.rank, self.recipe.data.global_batch, self.workers.size)
        loss = torch.zeros((), device=self.workers.device)
        depths: list[int] = []
        flops = 0.0
        for start in range(0, len(rows), self.micro_batch):
            mine = rows[start : start + self.micro_batch]
            inputs, targets = (self._here(x[start : start + len(mine)]) for x in batch)
            chance = self.model.draw(self.recipe.run.seed, self.step, mine, inputs.shape[1])
            with self.workers.accumulating(last=start + len(mine) == len(rows)):
                with self.autocast():
                    output = self.wrapped(inputs, targets, **chance)
                share = output.loss * (len(mine) / len(rows))
                share.backward()
            loss += share.detach()
            flops += executed(self.recipe.model, output.depths, inputs.shape[1])
            depths += output.depths.loops
        norm = self._clip()
        local = [loss.item(), flops, sum(depths) / len(depths), max(depths)]
        everyone = self.workers.gather(torch.tensor(local, dtype=torch.float64))
        mean_loss, mean_flops, mean_depth, _ = everyone.mean(0).tolist()
        taken = self.guard.accepts(mean_loss, norm)
        if taken:
            schedule, optimiser = self.recipe.schedule, self.recipe.optimiser
            self.optimiser.step(factors(schedule, optimiser, self.step, done, self.total))
        self.optimiser.zero_grad()
        self.step += 1
        deepest = int(everyone[:, 3].max())
        flops = mean_flops * self.workers.size
        return Step(mean_loss, norm, taken, flops, mean_depth, deepest)

    def _clip(self) -> float:
        limit = self.recipe.optimiser.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return self.workers.whole_norm(norm).item()

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self.workers.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.workers.device.type, self.dtype)

    def validate(self) -> DepthLosses:
        """Loss on the held-out rows at every depth the recipe names; the processes share them."""
        size, rank = self.workers.size, self.workers.rank
        batches = self.corpora.validation(self.recipe, self.micro_batch)
        mine = (batch for number, batch in enumerate(batches) if number % size == rank)
        depths = self.recipe.validation_depths
        with self.workers.gathered(), self.autocast():
            totals = totals_by_depth(self.model, mine, depths, self.bytes_of_token)
        counts = self.workers.gather(totals.counts).sum(0)
        return Totals(totals.depths, counts).finish()

    @cached_property
    def _rows_to_look_at(self) -> Tensor:
        """Held-out rows, always the same ones; those of the first batch where none are held out."""
        rows = self.recipe.run.telemetry_rows
        if self.can_validate:
            return next(iter(self.corpora.validation(self.recipe, rows))).inputs
        return next(iter(self.corpora.loader(self.recipe))).inputs[:rows]

    def look(self) -> dict[str, Any] | None:
        """Telemetry, from the first process; all take part."""
        tokens = self._here(self._rows_to_look_at)
        with self.workers.gathered(), self.autocast():
            return observe(self.model, tokens) if self.workers.is_first else None

    def sample(self) -> list[Sample]:
        """Continuations of the recipe's prompts at several depths."""
        with self.workers.gathered(), self.autocast():
            if not self.workers.is_first:
                return []
            return draw_samples(self.model, self.corpora.tokenizer, self.recipe)

    def snapshot(self, counters: dict[str, Any]) -> Snapshot:
        return Snapshot(
            step=self.step,
            weights=self.model.state_dict(),
            optimiser=self.optimiser.tensors(),
            header=header(self.recipe.model),
            state={
                "seed": self.recipe.run.seed,
                "data": self.loader.state_dict(),
                "guard": self.guard.state(),
                **counters,
            },
        )

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """The plain part; the tensors were filled in place."""
        self.loader.load_state_dict(state["data"])
        self.guard.restore(state["guard"])
        self.step = step

    def close(self) -> None:
        self.loader.close()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if precision == "bfloat16" else torch.float32
