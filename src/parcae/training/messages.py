"""What a run prints when it starts and when it ends; steps are shown by `log.Display`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parcae import console
from parcae.model.flops import parameter_count
from parcae.registry import import_options, imported_files
from parcae.runs import TrainResult
from parcae.runs.layout import list_steps
from parcae.training.data_use import use_of_loader
from parcae.training.learner import Learner
from parcae.training.plan import UTILISATION, step_seconds
from parcae.training.schedule import flops_per_step, tokens_per_step

SLOW_STEP_SECONDS = 5.0
"""A first step that is expected to take longer is announced."""


def start_messages(
    learner: Learner, out: Path, progress: float, peak: float | None
) -> Iterator[str]:
    """Lines about a run that starts; `progress` is the share that is done, `peak` in FLOP/s."""
    recipe, workers = learner.recipe, learner.workers
    yield _summary(learner, out)
    if workers.is_first:
        for use in use_of_loader(recipe, learner.loader):
            yield use.describe()
            if (warning := use.warning()) is not None:
                yield warning
        if (notes := _first_step(learner, peak)) and progress < 1:
            yield notes
    if learner.step:
        finished = ", the last one: nothing is left to do" if progress >= 1 else ""
        yield f"Resumed at step {learner.step}{finished}."
    warmup = recipe.schedule.warmup_steps
    if learner.total is not None and warmup > learner.total:
        yield (
            f"schedule.warmup_steps: {warmup:,} steps are more than the run has: the "
            "warm-up never finishes."
        )
    if not learner.can_validate:
        unsplit = "; a text file is one document unless data.separator or data.document_start"
        yield (
            "The held-out documents do not fill a row, so there is no validation. Increase "
            "data.validation_fraction"
            + ("." if recipe.data.read_options.splits else f"{unsplit} splits it.")
        )


def _summary(learner: Learner, out: Path) -> str:
    """Model, length, device and folder of a run."""
    recipe, workers = learner.recipe, learner.workers
    count, tokens = parameter_count(recipe.model), tokens_per_step(recipe)
    length = (
        f"{recipe.budget.minutes:g} minutes"
        if learner.total is None
        else f"{console.format_items(learner.total, 'step')}, "
        f"{console.format_count(learner.total * tokens)} tokens"
    )
    if recipe.budget.max_minutes is not None:
        length += f", at most {recipe.budget.max_minutes:g} minutes"
    loop = recipe.model.loop
    loops = (
        f"{loop.mean_loops:g} loops on average, {loop.gradient_loops} with gradient"
        if recipe.model.architecture == "looped"
        else "a Transformer"
    )
    return (
        f"{console.format_count(count)} parameters, {loops}; {length}; "
        f"{workers.device.type} in {str(learner.dtype).removeprefix('torch.')}"
        + (f", {workers.size} processes" if workers.size > 1 else "")
        + f"; into {out}"
    )


def _first_step(learner: Learner, peak: float | None) -> str:
    """Why the first step may take long, during which nothing else is printed; often empty."""
    recipe, size = learner.recipe, learner.workers.size
    seconds = step_seconds(recipe, peak, size, UTILISATION)
    notes: list[str] = []
    if seconds is not None and seconds > SLOW_STEP_SECONDS and peak is not None:
        notes.append(
            f"A step takes about {console.format_duration(seconds)}: "
            f"{console.format_flops(flops_per_step(recipe))} FLOPs at {UTILISATION:.0%} of "
            f"{console.format_si(peak * size, 'FLOP/s')}."
        )
        minutes = recipe.budget.clock_minutes
        if minutes is not None and seconds > 60 * minutes:
            notes.append("That is the whole budget: use a smaller data.global_batch.")
    if recipe.run.compile:
        notes.append("The first steps include compilation, which may take minutes.")
    return " ".join(notes)


def end_message(result: TrainResult, learner: Learner) -> str:
    """The last line of a run: how it ended, and how to continue."""
    step, run = result.steps, result.folder
    if result.status == "interrupted":
        command = f"parcae train --resume {run}{import_options(imported_files())}"
        return f"Stopped at step {step}; saved. Continue with: {command}"
    if result.status == "diverged":
        cause = "its weights are not finite"
        if learner.guard.has_diverged:
            bad_steps = learner.recipe.run.max_nonfinite_steps
            cause = f"no finite loss or gradient for {bad_steps} steps"
        saved = list_steps(run)
        where = f"step {saved[-1]}" if saved else "nothing"
        return f"Diverged at step {step}: {cause}. {result.diagnosis} Saved: {where}."
    early = learner.total is not None and step < learner.total
    limit = f", the limit, after {step} of {learner.total} steps" if early else ""
    return f"Finished in {console.format_duration(result.seconds)}{limit}: {run}"
