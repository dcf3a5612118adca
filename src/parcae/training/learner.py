"""Model, optimiser and data of a run: an optimiser step, a validation, telemetry, samples."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from parcae.config import require
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.loss import LossByLoops, Totals, totals_by_loops
from parcae.infer import TEMPERATURE
from parcae.infer.cache import CacheTooLarge
from parcae.infer.engine import Engine
from parcae.infer.sampling import NonFiniteLogits
from parcae.model import build
from parcae.model.base import LanguageModel
from parcae.model.flops import executed_flops
from parcae.model.store import header
from parcae.training.checkpoint_writer import Snapshot
from parcae.training.corpora import TrainingData
from parcae.training.distributed import Workers, compute_dtype, local_part
from parcae.training.divergence import Guard
from parcae.training.optim import Optimiser
from parcae.training.schedule import schedule_factors, total_steps
from parcae.training.settings import Recipe, recipe_to_dict
from parcae.training.telemetry import observe

SAMPLE_DEPTHS = (1, 2, 4, 8)


class Step(NamedTuple):
    """The measurements of one optimiser step, over all processes."""

    loss: float
    gradient_norm: float
    taken: bool
    spike: bool
    """Whether the loss is far above its running mean."""
    flops: float
    """Executed FLOPs; they differ from the nominal ones by the depths that were sampled."""
    mean_depth: float
    max_depth: int


class Sample(TypedDict):
    """A continuation of a prompt after a number of loops."""

    depth: int
    prompt: str
    text: str


class Learner:
    """Model, optimiser and data of a run; `step` counts the optimiser steps taken."""

    def __init__(self, recipe: Recipe, workers: Workers, corpora: TrainingData) -> None:
        run, data = recipe.run, recipe.data
        self.recipe, self.workers, self.corpora = recipe, workers, corpora
        self.dtype = compute_dtype(recipe, workers.device)
        self.model = build(recipe.model)
        if run.compile:
            self.model.compile_layers()
        if run.activation_checkpointing:
            self.model.activation_checkpointing()
        self.wrapped = workers.initialise(self.model, run.seed)
        mixed = None if self.dtype == torch.float32 else self.dtype
        self.optimiser = Optimiser(self.model, recipe.optimiser, workers.replica_group, mixed)
        self.loader = corpora.loader(recipe, workers.rank, workers.size)
        rows = data.global_batch // workers.size
        self.micro_batch = min(data.micro_batch or rows, rows)
        self.bytes_of_token = corpora.bytes_of_token()
        self.can_validate = corpora.can_validate(recipe)
        self.guard = Guard(run.max_nonfinite_steps)
        self.total = total_steps(recipe)
        self.step = 0

    def take_step(self, progress: float) -> Step:
        """Forward and backward over the micro-batches, clip, and step unless a number is bad.

        `progress`, from 0 to 1, is the share of the run that is done, for the schedules.
        """
        batch = next(self.loader)
        rows = range(self.workers.rank, self.recipe.data.global_batch, self.workers.size)
        loss = torch.zeros((), device=self.workers.device)
        depths: list[int] = []
        flops = 0.0
        for start in range(0, len(rows), self.micro_batch):
            row_ids = rows[start : start + self.micro_batch]
            inputs, targets = (self._to_device(x[start : start + len(row_ids)]) for x in batch)
            drawn = self.model.draw(self.recipe.run.seed, self.step, row_ids, inputs.shape[1])
            with self.workers.micro_step(last=start + len(row_ids) == len(rows)):
                with self.autocast():
                    output = self.wrapped(inputs, targets, **drawn)
                scaled_loss = output.loss * (len(row_ids) / len(rows))
                scaled_loss.backward()
            loss += scaled_loss.detach()
            flops += executed_flops(self.recipe.model, output.depths, inputs.shape[1])
            depths += output.depths.loops
        norm = self._clip()
        local = [loss.item(), flops, sum(depths) / len(depths), max(depths)]
        gathered = self.workers.gather(torch.tensor(local, dtype=torch.float64))
        mean_loss, mean_flops, mean_depth, _ = gathered.mean(0).tolist()
        verdict = self.guard.record(mean_loss, norm)
        if verdict != "skip":
            schedule, optimiser = self.recipe.schedule, self.recipe.optimiser
            self.optimiser.step(
                schedule_factors(schedule, optimiser, self.step, progress, self.total)
            )
        self.optimiser.zero_grad()
        self.step += 1
        return Step(
            loss=mean_loss,
            gradient_norm=norm,
            taken=verdict != "skip",
            spike=verdict == "spike",
            flops=mean_flops * self.workers.size,
            mean_depth=mean_depth,
            max_depth=int(gathered[:, 3].max()),
        )

    def _clip(self) -> float:
        limit = self.recipe.optimiser.grad_clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return self.workers.full_norm(norm).item()

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.workers.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.workers.device.type, self.dtype)

    def validate(self) -> LossByLoops:
        """Loss on the held-out rows at every depth of the recipe; the processes split the rows."""
        size, rank = self.workers.size, self.workers.rank
        batches = self.corpora.validation(self.recipe, self.micro_batch)
        mine = (batch for number, batch in enumerate(batches) if number % size == rank)
        with self.workers.full_weights(), self.autocast():
            totals = totals_by_loops(
                self.model, mine, self.recipe.validation_loops, self.bytes_of_token
            )
        counts = self.workers.gather(totals.counts).sum(0)
        return Totals(totals.loops, counts).finish()

    @cached_property
    def _telemetry_rows(self) -> Tensor:
        """The same held-out rows every time; training rows where none are held out."""
        rows = self.recipe.run.telemetry_rows
        if self.can_validate:
            return next(iter(self.corpora.validation(self.recipe, rows))).inputs
        return next(iter(self.corpora.loader(self.recipe))).inputs[:rows]

    def measure_telemetry(self) -> dict[str, Any] | None:
        """Telemetry, on the first process; None on the others, which must call this too."""
        tokens = self._to_device(self._telemetry_rows)
        with self.workers.full_weights(), self.autocast():
            return observe(self.model, tokens) if self.workers.is_first else None

    def sample(self) -> list[Sample]:
        """Continuations of the recipe's prompts at several depths, on the first process only."""
        with self.workers.full_weights(), self.autocast():
            if not self.workers.is_first:
                return []
            return draw_samples(self.model, self.corpora.tokenizer, self.recipe)

    def non_finite(self) -> str | None:
        """A message about the first tensor of the model or optimiser that is not finite, among the
        parts on this process."""
        for kind, tensors in (
            ("weight", self.model.state_dict()),
            ("optimiser state", self.optimiser.tensors()),
        ):
            for name, tensor in tensors.items():
                local = local_part(tensor)
                if local.is_floating_point() and not local.isfinite().all():
                    return f"the {kind} {name} is not finite"
        return None

    def snapshot(self, counters: dict[str, Any]) -> Snapshot:
        return Snapshot(
            step=self.step,
            weights=self.model.state_dict(),
            optimiser=self.optimiser.tensors(),
            header=header(self.recipe.model),
            state={
                "processes": self.workers.size,
                "threads": torch.get_num_threads(),
                "seed": self.recipe.run.seed,
                "recipe": recipe_to_dict(self.recipe),
                "sources": self.corpora.fingerprints(),
                "data": self.loader.state_dict(),
                "guard": self.guard.state(),
                **counters,
            },
        )

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Set all but the tensors, which were read in place."""
        before, now = state.get("processes", self.workers.size), self.workers.size
        require(
            before == now or self.recipe.model.loop.draws_per_sequence,
            "model.loop.draw_per",
            f'depths drawn per "micro-batch" depend on the number of processes, which was {before} '
            f"and is {now}",
            f"Resume with {before}.",
        )
        self.loader.load_state_dict(state["data"])
        self.guard.restore(state["guard"])
        self.step = step

    def close(self) -> None:
        self.loader.close()


def draw_samples(model: LanguageModel, tokenizer: Tokenizer, recipe: Recipe) -> list[Sample]:
    """Continuations with the same prompt, seed and noise at each depth, so only the loops differ.

    A depth at which the model diverges, or for which memory is short, has no sample. A prompt
    longer than the context is cut at its beginning.
    """
    looped = recipe.model.architecture == "looped"
    depths = sorted({*SAMPLE_DEPTHS, recipe.model.loop.nominal_loops}) if looped else [1]
    samples: list[Sample] = []
    engine = Engine(model, max_batch_size=1)
    for prompt in recipe.run.sample_prompts:
        ids = [tokenizer.bos, *tokenizer.encode(prompt)][-recipe.model.context_length :]
        for depth in depths:
            try:
                completion = engine.generate(
                    ids,
                    max_new_tokens=recipe.run.sample_tokens,
                    loops=depth,
                    temperature=TEMPERATURE,
                    top_k=50,
                    seed=recipe.run.seed,
                    stop_tokens=(tokenizer.bos,),
                )
            except (NonFiniteLogits, CacheTooLarge):
                continue
            text = tokenizer.decode(completion.tokens)
            samples.append({"depth": depth, "prompt": prompt, "text": text})
    return samples
