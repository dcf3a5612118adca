"""The training loop: steps, validation, telemetry, checkpoints, logging, and the result."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from parcae.config import ConfigError
from parcae.device import check_compiler
from parcae.evaluation.loss import Loss, LossByLoops
from parcae.files import FileError, check_links, interpreting, lock_folder, nan_to_none, number
from parcae.machine import SpinLimiter, StopSignals, keep_freed_memory
from parcae.model.flops import parameter_count
from parcae.recipe import to_dict
from parcae.registry import imported_files
from parcae.runs.layout import STATE_FILE, WRITTEN, checkpoint_path
from parcae.runs.records import IMPORTED, RunStatus, TrainResult, recorded_imports
from parcae.training.checkpoint_writer import CheckpointWriter
from parcae.training.corpora import Corpora, TaskCorpus, open_corpora
from parcae.training.distributed import Workers, compute_dtype, deterministic, open_workers
from parcae.training.divergence import diagnose
from parcae.training.learner import Learner, Step
from parcae.training.log import Display, Log, open_trackers
from parcae.training.memory_estimate import choose_micro_batch
from parcae.training.messages import end_message, start_messages
from parcae.training.plan import peak_flops
from parcae.training.run import read_recipe, resume_run, start_run, was_restarted
from parcae.training.schedule import flops_per_step, tokens_per_step
from parcae.training.settings import Recipe, recipe_to_dict, with_absolute_paths
from parcae.training.start import read_start

AVERAGED_STEPS = 20
"""The training loss of a run is the mean over its last steps, as many as this."""
STOPPING = (
    "Stopping after this step; a checkpoint will be saved. A second signal ends the run "
    "immediately."
)


def train_recipe(
    recipe: Recipe,
    out: Path,
    resume: bool = False,
    follow_links: bool = False,
    verbose: bool = True,
) -> TrainResult:
    """Train into the run folder `out`, and return the result, which is also in result.json.

    All processes of a run call this; `parcae.train` is the public call.
    """
    recipe = with_absolute_paths(recipe)
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(SpinLimiter())
        workers = stack.enter_context(open_workers(recipe.run))
        if not resume and workers.any(was_restarted(out)):
            recipe, resume = with_absolute_paths(read_recipe(out)), True
        stack.enter_context(deterministic(recipe.run.deterministic, workers.device))
        display = Display(workers.is_first, verbose)
        recipe = _with_precision(recipe, out, resume, workers, display)
        recipe = _with_micro_batch(recipe, out, resume, workers, display)
        failure = None
        with workers.first_works():  # tokenising may take hours
            if workers.is_first:
                try:
                    if recipe.run.compile:
                        check_compiler(workers.device, "run.compile")
                    check_links(out, WRITTEN, follow_links)
                    stack.enter_context(lock_folder(out))
                    recipe = (resume_run if resume else start_run)(out, recipe, display.print)
                except (ConfigError, OSError) as error:
                    failure = error
        workers.raise_together(failure)
        corpora = open_corpora(recipe, out)
        if recipe.data.verify:
            workers.raise_together(_verify(corpora, workers, display))
        learner = Learner(recipe, workers, corpora)
        stack.callback(learner.close)
        trainer = Trainer(recipe, out, workers, learner, display)
        stack.callback(trainer.close)
        if resume:
            trainer.resume()
        return trainer.run()


def _with_precision(
    recipe: Recipe, out: Path, resume: bool, workers: Workers, display: Display
) -> Recipe:
    """The recipe with the precision of its run, or the one that "auto" means for all processes.

    It is recorded in the run's recipe.toml, so that a run that continues elsewhere keeps it.
    """
    if recipe.run.precision != "auto":
        return recipe
    kind = workers.device.type
    if resume:
        precision = read_recipe(out).run.precision
        if precision == "auto":  # of a version that did not record it
            precision = "bfloat16" if kind == "cuda" else "float32"
    else:
        fast = not workers.any(compute_dtype(recipe, workers.device) == torch.float32)
        precision = "bfloat16" if fast else "float32"
        if fast and kind == "cpu":
            display.print("run.precision: auto; bfloat16, for which this CPU has instructions.")
    return replace(recipe, run=replace(recipe.run, precision=precision))


def _with_micro_batch(
    recipe: Recipe, out: Path, resume: bool, workers: Workers, display: Display
) -> Recipe:
    """The recipe with the micro-batch of its run, or one that fits the memory of all processes.

    It is recorded in the run's recipe.toml, since other micro-batches round differently.
    """
    if recipe.data.micro_batch is not None or recipe.data.global_batch % workers.size:
        return recipe
    if resume:
        rows = read_recipe(out).data.micro_batch
    else:
        device, size, local_size = workers.device, workers.size, workers.local_size
        rows, reason = choose_micro_batch(recipe, device, size, local_size)
        rows = int(workers.gather(torch.tensor([rows])).min())
        if rows * size < recipe.data.global_batch:
            display.print(f"data.micro_batch: unset; {rows} rows ({reason}).")
    return replace(recipe, data=replace(recipe.data, micro_batch=rows))


def _verify(corpora: Corpora | TaskCorpus, workers: Workers, display: Display) -> FileError | None:
    """The error in this process's part of the shards, if there is one."""
    try:
        corpora.verify(workers.rank, workers.size, display.print)
    except FileError as error:
        return error
    return None


def _loss(values: Mapping[str, Any]) -> Loss:
    numbers: dict[str, Any] = {name: x and number(x) for name, x in values.items()}
    return Loss(**numbers)


class Trainer:
    """One run of `train_recipe`, on one of its processes."""

    def __init__(
        self, recipe: Recipe, out: Path, workers: Workers, learner: Learner, display: Display
    ) -> None:
        self.recipe, self.out, self.workers = recipe, out, workers
        self.learner, self.display = learner, display
        keep = recipe.run
        self.checkpoints = CheckpointWriter(out, workers, keep.keep_last, keep.keep_best)
        self.log: Log | None = None
        self.peak = peak_flops(workers.device, learner.dtype) if workers.is_first else None
        """FLOP/s of this device; raised by a step that was faster."""
        self.seconds = 0.0
        """Time of this run so far, with validation, telemetry and checkpoints."""
        self.training_seconds = 0.0
        """Time of the optimiser steps alone, by which a budget in minutes counts; the mean of all
        processes, so that they agree on the end."""
        self.executed_flops = 0.0
        self.last_validation: tuple[int, LossByLoops] | None = None
        """Its step and losses."""
        self.best_loss = math.inf
        self.recent_losses: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self.first_telemetry: dict[str, Any] | None = None
        self._clock = 0.0

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1, by steps or clock, whichever is ahead.

        The clock counts steps only. A validation would advance the schedule at once by all the time
        that it takes, and the last one would end the run before its learning rate is zero.
        """
        total, minutes = self.learner.total, self.recipe.budget.clock_minutes
        by_steps = self.learner.step / total if total else 0.0
        by_clock = min(1.0, self.training_seconds / (60 * minutes)) if minutes else 0.0
        return max(by_steps, by_clock)

    @property
    def train_loss(self) -> float:
        """Mean loss of the last `AVERAGED_STEPS` steps that were taken; NaN before the first."""
        losses = self.recent_losses
        return math.fsum(losses) / len(losses) if losses else math.nan

    def run(self) -> TrainResult:
        failure = None
        if self.workers.is_first:
            try:
                settings, step = recipe_to_dict(self.recipe), self.learner.step
                trackers = open_trackers(self.recipe.run.trackers, self.out, settings, step)
                self.log = Log(self.out, step, trackers)
            except (ConfigError, OSError) as error:
                failure = error
        self.workers.raise_together(failure)
        if self.log is not None and (imported := imported_files()):
            recorded = recorded_imports(self.out)
            for path in imported:
                if path not in recorded:
                    self._write("event", what=IMPORTED, message=path)
        for message in start_messages(self.learner, self.out, self.progress, self.peak):
            self.display.print(message)
        with self.display, StopSignals(message=STOPPING if self.workers.is_first else None) as stop:
            if self.checkpoints.newest is None:
                self._start_from_weights()
            self._clock = time.perf_counter()
            status = self._train_steps(stop)
            if status == "finished" and self._losses_of(self.learner.step) is None:
                self._validate()
            if status != "diverged" and not self._save():
                status = "diverged"
            diagnosis = self._diagnose() if status == "diverged" else None
            self.checkpoints.wait()
        return self._finish(status, diagnosis)

    def _train_steps(self, stop: StopSignals) -> RunStatus:
        """Train to the end of the budget, a signal or a divergence; returns which it was."""
        while self.progress < 1:
            self._train_step()
            # A checkpoint that could not be written stops the run too: saving raises its error.
            stopping = self.workers.any(stop.asked or self.checkpoints.failed)
            if self.learner.guard.has_diverged:
                return "diverged"
            if stopping and self.progress < 1:
                return "interrupted"
        return "finished"

    def _start_from_weights(self) -> None:
        """Read the weights the recipe starts from, if any, and save them as step 0.

        A resumed run does not need their source any more.
        """
        start = self.recipe.start
        if start.checkpoint is None:
            return
        self.display.print(f"Starting from the weights in {start.checkpoint}.")
        read_start(self.learner.model, start, self.workers)
        self._validate()
        self._save()
        self.checkpoints.wait()

    def _train_step(self) -> None:
        started = time.perf_counter()
        measured = self.learner.take_step(self.progress)
        took = time.perf_counter() - started
        self._count(measured, took)
        self._report(measured, took)
        settings, improved = self.recipe.run, False
        first = self.learner.step == 1 and settings.telemetry_every > 0
        if first or self._is_due(settings.telemetry_every):
            self._measure_telemetry()
        if self._is_due(settings.validate_every):
            improved = self._validate()
        self._count_time()
        due = self._is_due(settings.checkpoint_every) or (improved and settings.keep_best)
        # The last step is saved by `run`. While steps are skipped the weights may be bad, and must
        # not replace the last good checkpoint.
        if due and measured.taken and self.progress < 1:
            self._save()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.learner.step % every == 0

    def _count(self, measured: Step, took: float) -> None:
        self._count_time()
        if self.peak is not None:
            self.peak = max(self.peak, measured.flops / took / self.workers.size)
        if self.recipe.budget.clock_minutes:
            took = self.workers.gather(torch.tensor([took], dtype=torch.float64)).mean().item()
        self.training_seconds += took
        self.executed_flops += measured.flops
        if measured.taken:
            self.recent_losses.append(measured.loss)

    def _count_time(self) -> None:
        """Add the time since the last call to `seconds`."""
        before, self._clock = self._clock, time.perf_counter()
        self.seconds += self._clock - before

    def _report(self, measured: Step, took: float) -> None:
        step, tokens = self.learner.step, tokens_per_step(self.recipe)
        device_flops = measured.flops / took / self.workers.size
        numbers: dict[str, Any] = {
            "loss": measured.loss,
            "train_loss": self.train_loss,
            "gradient_norm": measured.gradient_norm,
            "lr": self.learner.optimiser.learning_rates(),
            "tokens": step * tokens,
            "flops": step * flops_per_step(self.recipe),
            "executed_flops": self.executed_flops,
            "mean_depth": measured.mean_depth,
            "max_depth": measured.max_depth,
            "tokens_per_second": tokens / took,
            "peak_fraction": None if self.peak is None else device_flops / self.peak,
            "seconds": self.seconds,
            "training_seconds": self.training_seconds,
            "skipped": not measured.taken,
        }
        self._write("train", **numbers)
        self.display.update(step, self.progress, self.seconds, numbers)
        if not measured.taken:
            norm = measured.gradient_norm
            self._event("skipped", f"loss {measured.loss}, gradient norm {norm}: step not taken")
        elif measured.spike:
            mean = self.learner.guard.loss_mean
            self._event("spike", f"loss {measured.loss:.3f}, running mean {mean:.3f}")

    def _write(self, kind: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(kind, self.learner.step, **values)

    def _event(self, what: str, message: str) -> None:
        self._write("event", what=what, message=message)
        self.display.print(f"step {self.learner.step}: {what}: {message}")

    def _measure_telemetry(self) -> None:
        telemetry = self.learner.measure_telemetry()
        if telemetry is not None:
            self._write("telemetry", **telemetry)
            self.first_telemetry = self.first_telemetry or nan_to_none(telemetry)

    def _validate(self) -> bool:
        """Validate where rows are held out; returns whether the loss is the lowest so far."""
        if not self.learner.can_validate:
            return False
        losses = self.learner.validate()
        self.last_validation = (self.learner.step, losses)
        bits = {t: loss.bits_per_byte for t, loss in losses.items()}
        self._write(
            "validation", losses={t: loss.loss for t, loss in losses.items()}, bits_per_byte=bits
        )
        text = "  ".join(f"T={t} {loss.loss:.3f}" for t, loss in losses.items())
        self.display.print(f"step {self.learner.step}  validation loss  {text}")
        deciding = self.deciding_loss(losses)
        improved = deciding < self.best_loss
        if improved:
            self.best_loss = deciding
        return improved

    def _losses_of(self, step: int) -> LossByLoops | None:
        """The validation of this step; None if there was none."""
        last = self.last_validation
        return last[1] if last is not None and last[0] == step else None

    def deciding_loss(self, losses: LossByLoops) -> float:
        """The validation loss by which the best checkpoint is chosen: at the mean of training."""
        return losses[self.recipe.model.loop.nominal_loops].loss

    def _save(self) -> bool:
        """Save a checkpoint, unless weights are not finite: the last one then stays the newest.

        Returns whether it was saved.
        """
        problem = self.learner.non_finite()
        if self.workers.any(problem is not None):
            reason = problem or "a tensor of another process is not finite"
            self._event("not saved", f"{reason}, so this step is not saved")
            return False
        losses = self._losses_of(self.learner.step)
        counters = {
            "seconds": self.seconds,
            "training_seconds": self.training_seconds,
            "executed_flops": self.executed_flops,
            "best_loss": nan_to_none(self.best_loss),
            "recent_losses": list(self.recent_losses),
            "first_telemetry": self.first_telemetry,
            "validation_loss": nan_to_none(self.deciding_loss(losses)) if losses else None,
            "validation": nan_to_none({t: asdict(loss) for t, loss in (losses or {}).items()}),
        }
        self.checkpoints.save(self.learner.snapshot(counters))
        return True

    def resume(self) -> None:
        """Continue from the newest intact checkpoint; without any, from the beginning."""
        latest = self.checkpoints.latest()
        if latest is None:
            self.display.print(f"{self.out}: no checkpoint yet; starting from the beginning.")
            return
        step, problems = latest
        for problem in problems:
            self.display.print(f"{problem} Going back to step {step}.")
        learner = self.learner
        state = self.checkpoints.load(step, learner.model.state_dict(), learner.optimiser.tensors())
        path = checkpoint_path(self.out, step) / STATE_FILE
        with interpreting(path, "Was it edited?", passed_on=(ConfigError,)):
            self._restore(step, state)
        threads, before = torch.get_num_threads(), state.get("threads")
        if self.workers.device.type == "cpu" and before not in (None, threads):
            self.display.print(
                f"The run had {before} threads and now has {threads}: sums are rounded "
                "differently, so it continues as a run like this one, but not bit for bit. "
                f"OMP_NUM_THREADS={before} would."
            )
        self.workers.barrier()  # the others may still be reading
        self.checkpoints.set_aside_after(step)

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        """Set all but the tensors from the contents of state.json."""
        self.learner.restore(step, state)
        self.seconds, self.executed_flops = (
            number(state["seconds"]),
            number(state["executed_flops"]),
        )
        self.training_seconds = number(state["training_seconds"])
        self.best_loss = math.inf if state["best_loss"] is None else number(state["best_loss"])
        self.recent_losses.extend(map(number, state["recent_losses"]))
        self.first_telemetry = state["first_telemetry"]
        losses = {int(t): _loss(values) for t, values in state["validation"].items()}
        if losses:
            self.deciding_loss(losses)  # has to be among them
        self.last_validation = (step, losses) if losses else None

    def _diagnose(self) -> str:
        telemetry = self.learner.measure_telemetry()
        lr = self.learner.optimiser.learning_rates()
        return diagnose(
            None if telemetry is None else nan_to_none(telemetry), self.first_telemetry, lr
        )

    def _finish(self, status: RunStatus, diagnosis: str | None) -> TrainResult:
        step, learner = self.learner.step, self.learner
        losses = self._losses_of(step) or {}
        result = TrainResult(
            folder=self.out,
            status=status,
            diagnosis=diagnosis,
            parameters=parameter_count(self.recipe.model),
            steps=step,
            tokens=step * tokens_per_step(self.recipe),
            flops=step * flops_per_step(self.recipe),
            executed_flops=self.executed_flops,
            seconds=self.seconds,
            train_loss=nan_to_none(self.train_loss),
            validation={t: nan_to_none(asdict(loss)) for t, loss in losses.items()},
            skipped_steps=learner.guard.skipped,
            spikes=learner.guard.spikes,
            device=self.workers.device.type,
            processes=self.workers.size,
            seed=self.recipe.run.seed,
            torch=str(torch.__version__),
            samples=[dict(sample) for sample in learner.sample()] if status == "finished" else [],
            model=to_dict(self.recipe.model),
        )
        if self.workers.is_first:
            result.write()
        if status == "diverged":
            self._event("diverged", str(diagnosis))
        self.display.print(end_message(result, learner))
        return result

    def close(self) -> None:
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()
