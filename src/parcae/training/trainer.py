"""A run from its recipe to its result: steps, and around them what is measured, kept and shown.

result = train(recipe, "runs/mine")                  parcae train recipe.toml --out runs/mine
result = train(recipe, "runs/mine", resume=True)     parcae train --resume runs/mine
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from parcae import console
from parcae.config import ConfigError
from parcae.cpu import keep_freed_memory
from parcae.evaluation.loss import DepthLosses, Loss
from parcae.files import FileError, exclusive, write_json
from parcae.model.flops import parameter_count
from parcae.recipe import plain
from parcae.runs.layout import RESULT_FILE, list_steps
from parcae.training import folder as run_folder
from parcae.training.budget import flops_per_step, tokens_per_step
from parcae.training.checkpoint import Checkpoints
from parcae.training.corpora import Corpora, open_corpora
from parcae.training.determinism import deterministic
from parcae.training.display import Display
from parcae.training.distributed import Processes, processes
from parcae.training.guard import diagnose
from parcae.training.learner import Learner, Step
from parcae.training.log import Log, finite, open_sinks
from parcae.training.peak import find_peak
from parcae.training.settings import Recipe, located, plain_recipe
from parcae.training.stop import StopSignals


def train(recipe: Recipe, out: str | Path, resume: bool = False) -> dict[str, Any]:
    """Train into the folder `out`, and return what result.json says."""
    out, recipe = Path(out), located(recipe)
    keep_freed_memory()
    with ExitStack() as stack:
        workers = stack.enter_context(processes(recipe.run))
        stack.enter_context(deterministic(recipe.run.deterministic, workers.device))
        display = Display(workers.is_first)
        problem = None
        if workers.is_first:
            try:
                stack.enter_context(exclusive(out))
                (run_folder.go_on if resume else run_folder.begin)(out, recipe)
                open_corpora(recipe, out, display.print)
            except (ConfigError, FileError) as error:
                problem = error
        workers.share(problem)
        corpora = open_corpora(recipe, out)
        if recipe.data.verify:
            workers.share(_damage(corpora, workers, display))
        learner = Learner(recipe, workers, corpora)
        stack.callback(learner.close)
        run = Run(recipe, out, workers, learner, display)
        stack.callback(run.close)
        if resume:
            run.resume()
        return run.go()


def _damage(corpora: Corpora, workers: Processes, display: Display) -> FileError | None:
    """What is wrong with this process's part of the shards, if anything."""
    try:
        corpora.verify(workers.rank, workers.size, display.print)
    except FileError as error:
        return error
    return None


class Run:
    def __init__(
        self, recipe: Recipe, out: Path, workers: Processes, learner: Learner, display: Display
    ) -> None:
        self.recipe, self.out, self.workers = recipe, out, workers
        self.learner, self.display = learner, display
        keep = recipe.run
        self.checkpoints = Checkpoints(out, workers, keep.keep_last, keep.keep_best)
        self.log: Log | None = None
        self.peak = find_peak(workers.device, learner.dtype) if workers.is_first else None
        self.seconds = 0.0
        self.executed_flops = 0.0
        self.validated: dict[int, DepthLosses] = {}
        """The last validation, by its step."""
        self.best_loss = math.inf
        self.train_loss = math.nan
        """Running mean of the loss."""
        self.first_look: dict[str, Any] | None = None
        self._watch = 0.0

    @property
    def done(self) -> float:
        """The share of the run that lies behind, by steps or by the clock, whichever is ahead."""
        total, minutes = self.learner.total, self.recipe.budget.clock_minutes
        by_steps = self.learner.step / total if total else 0.0
        by_clock = min(1.0, self.seconds / (60 * minutes)) if minutes else 0.0
        return max(by_steps, by_clock)

    def go(self) -> dict[str, Any]:
        problem = None
        if self.workers.is_first:
            try:
                settings, step = plain_recipe(self.recipe), self.learner.step
                sinks = open_sinks(self.recipe.run.sinks, self.out, settings, step)
                self.log = Log(self.out, step, sinks)
            except (ConfigError, FileError) as error:
                problem = error
        self.workers.share(problem)
        self._introduce()
        status, diagnosis = "finished", None
        with self.display, StopSignals() as stop:
            self._watch = time.perf_counter()
            while status == "finished" and self.done < 1:
                self._one_step()
                # A checkpoint that could not be written stops the run too: saving raises its error.
                asked = self.workers.any(stop.asked or self.checkpoints.failed)
                if self.learner.guard.is_hopeless:
                    status, diagnosis = "diverged", self._diagnose()
                elif asked and self.done < 1:
                    status = "interrupted"
            if status == "finished" and self.learner.step not in self.validated:
                self._validate()
            if status != "diverged":
                self._save()
            self.checkpoints.wait()
        return self._conclude(status, diagnosis)

    def _one_step(self) -> None:
        started = time.perf_counter()
        measured = self.learner.take_step(self.done)
        took = time.perf_counter() - started
        self._count(measured)
        self._report(measured, took)
        settings, improved = self.recipe.run, False
        first = self.learner.step == 1 and settings.telemetry_every > 0
        if first or self._is_due(settings.telemetry_every):
            self._look()
        if self._is_due(settings.validate_every):
            improved = self._validate()
        self._spend()
        wanted = self._is_due(settings.checkpoint_every) or (improved and settings.keep_best)
        # The end has its own. While steps are skipped, what is wrong may be in the weights, and
        # must not push out the last good checkpoint.
        if wanted and measured.taken and self.done < 1:
            self._save()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.learner.step % every == 0

    def _count(self, measured: Step) -> None:
        self._spend()
        self.executed_flops += measured.flops
        if measured.taken:
            before = measured.loss if math.isnan(self.train_loss) else self.train_loss
            self.train_loss = 0.95 * before + 0.05 * measured.loss

    def _spend(self) -> None:
        """Count the time since this was last done."""
        before, self._watch = self._watch, time.perf_counter()
        seconds = self._watch - before
        if self.recipe.budget.clock_minutes:  # it may decide, so all must read the same one
            seconds = self.workers.gather(torch.tensor([seconds])).mean().item()
        self.seconds += seconds

    def _report(self, measured: Step, took: float) -> None:
        step, tokens = self.learner.step, tokens_per_step(self.recipe)
        spike = measured.taken and self.learner.guard.is_spike(measured.loss)
        each = measured.flops / took / self.workers.size
        numbers: dict[str, Any] = {
            "loss": measured.loss,
            "gradient_norm": measured.gradient_norm,
            "lr": self.learner.optimiser.learning_rates(),
            "tokens": step * tokens,
            "flops": step * flops_per_step(self.recipe),
            "executed_flops": self.executed_flops,
            "mean_depth": measured.mean_depth,
            "max_depth": measured.max_depth,
            "tokens_per_second": tokens / took,
            "peak_fraction": None if self.peak is None else self.peak.share(each),
            "seconds": self.seconds,
            "skipped": not measured.taken,
        }
        self._write("train", **numbers)
        self.display.update(step, self.done, self.seconds, numbers)
        if not measured.taken:
            norm = measured.gradient_norm
            self._event("skipped", f"loss {measured.loss}, gradient norm {norm}: step not taken")
        elif spike:
            usual = self.learner.guard.mean
            self._event("spike", f"loss {measured.loss:.3f} where {usual:.3f} is usual")

    def _write(self, kind: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(kind, self.learner.step, **values)

    def _event(self, what: str, message: str) -> None:
        self._write("event", what=what, message=message)
        self.display.print(f"step {self.learner.step}: {what}: {message}")

    def _look(self) -> None:
        seen = self.learner.look()
        if seen is not None:
            self._write("telemetry", **seen)
            self.first_look = self.first_look or finite(seen)

    def _validate(self) -> bool:
        """Whether it is the best so far."""
        if not self.learner.can_validate:
            return False
        losses = self.learner.validate()
        self.validated = {self.learner.step: losses}
        bits = {t: loss.bits_per_byte for t, loss in losses.items()}
        self._write(
            "validation", losses={t: loss.loss for t, loss in losses.items()}, bits_per_byte=bits
        )
        words = "  ".join(f"T={t} {loss.loss:.3f}" for t, loss in losses.items())
        self.display.print(f"step {self.learner.step}  held-out loss  {words}")
        nominal = losses[self.recipe.model.loop.nominal_loops].loss
        improved = nominal < self.best_loss
        if improved:
            self.best_loss = nominal
        return improved

    def _save(self) -> None:
        losses = self.validated.get(self.learner.step)
        nominal = self.recipe.model.loop.nominal_loops
        counters = {
            "seconds": self.seconds,
            "executed_flops": self.executed_flops,
            "best_loss": finite(self.best_loss),
            "train_loss": finite(self.train_loss),
            "first_look": self.first_look,
            "validation_loss": finite(losses[nominal].loss) if losses else None,
            "validation": finite({t: asdict(loss) for t, loss in (losses or {}).items()}),
        }
        self.checkpoints.save(self.learner.snapshot(counters))

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole; without any, from the beginning."""
        found = self.checkpoints.latest()
        if found is None:
            self.display.print(f"{self.out}: no checkpoint yet, so it starts again.")
            return
        step, problems = found
        for problem in problems:
            self.display.print(f"{problem} Going back to step {step}.")
        learner = self.learner
        state = self.checkpoints.load(step, learner.model.state_dict(), learner.optimiser.tensors())
        learner.restore(step, state)
        self.seconds, self.executed_flops = state["seconds"], state["executed_flops"]
        self.best_loss = math.inf if state["best_loss"] is None else state["best_loss"]
        self.train_loss = math.nan if state["train_loss"] is None else state["train_loss"]
        self.first_look = state["first_look"]
        losses = {int(t): Loss(**values) for t, values in state["validation"].items()}
        self.validated = {step: losses} if losses else {}
        self.workers.wait()  # the others may still be reading
        self.checkpoints.set_aside_after(step)

    def _diagnose(self) -> str:
        seen = self.learner.look()
        lr = self.learner.optimiser.learning_rates()
        return diagnose(None if seen is None else finite(seen), self.first_look, lr)

    def _introduce(self) -> None:
        recipe, learner = self.recipe, self.learner
        count, tokens = parameter_count(recipe.model), tokens_per_step(recipe)
        length = (
            f"{recipe.budget.minutes:g} minutes"
            if learner.total is None
            else f"{learner.total:,} steps, {console.format_count(learner.total * tokens)} tokens"
        )
        if recipe.budget.at_most_minutes is not None:
            length += f", at most {recipe.budget.at_most_minutes:g} minutes"
        loop = recipe.model.loop
        loops = (
            f"{loop.mean_loops:g} loops on average, {loop.gradient_loops} with gradient"
            if recipe.model.architecture == "looped"
            else "a Transformer"
        )
        self.display.print(
            f"{console.format_count(count)} parameters, {loops}; {length}; "
            f"{self.workers.device.type} in {str(learner.dtype).removeprefix('torch.')}"
            + (f", {self.workers.size} processes" if self.workers.size > 1 else "")
            + f"; into {self.out}"
        )
        if learner.step:
            finished = ", its end: nothing is left to do" if self.done >= 1 else ""
            self.display.print(f"Resumed at step {learner.step}{finished}.")
        warmup = recipe.schedule.warmup_steps
        if learner.total is not None and warmup > learner.total:
            self.display.print(
                f"The warm-up of {warmup:,} steps is longer than the run: its learning rates are "
                "never reached. See schedule.warmup_steps."
            )
        if not learner.can_validate:
            self.display.print(
                "No row of documents is held out, so there is no validation: see "
                "data.validation_fraction."
            )

    def _conclude(self, status: str, diagnosis: str | None) -> dict[str, Any]:
        step, learner = self.learner.step, self.learner
        samples = learner.sample() if status == "finished" else []
        result = {
            "status": status,
            "diagnosis": diagnosis,
            "parameters": parameter_count(self.recipe.model),
            "steps": step,
            "tokens": step * tokens_per_step(self.recipe),
            "flops": step * flops_per_step(self.recipe),
            "executed_flops": self.executed_flops,
            "seconds": self.seconds,
            "train_loss": self.train_loss,
            "validation": {t: asdict(loss) for t, loss in self.validated.get(step, {}).items()},
            "skipped_steps": learner.guard.skipped,
            "spikes": learner.guard.spikes,
            "device": self.workers.device.type,
            "processes": self.workers.size,
            "seed": self.recipe.run.seed,
            "torch": torch.__version__,
            "samples": samples,
            "model": plain(self.recipe.model),
        }
        result = finite(result)
        if self.workers.is_first:
            write_json(self.out / RESULT_FILE, result)
        self._farewell(status, diagnosis)
        return result

    def _farewell(self, status: str, diagnosis: str | None) -> None:
        resume = f"parcae train --resume {self.out}"
        saved = list_steps(self.out)
        where = f"step {saved[-1]}" if saved else "nothing"
        early = self.learner.total is not None and self.learner.step < self.learner.total
        limit = f", the limit, after {self.learner.step} of {self.learner.total} steps"
        duration = console.format_duration(self.seconds)
        words = {
            "finished": f"Finished in {duration}{limit if early else ''}: {self.out}",
            "interrupted": f"Stopped at step {self.learner.step}; saved. Go on with: {resume}",
            "diverged": f"Gave up at step {self.learner.step}: no finite loss or gradient for "
            f"{self.recipe.run.bad_steps_in_a_row} steps. {diagnosis} Saved: {where}.",
        }
        if status == "diverged":
            self._event("diverged", str(diagnosis))
        self.display.print(words[status])

    def close(self) -> None:
        self.checkpoints.close()
        if self.log is not None:
            self.log.close()
