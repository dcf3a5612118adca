"""What `parcae sweep` reads from its words and shows of its runs."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from parcae import console
from parcae.config import ConfigError
from parcae.files import is_in_use
from parcae.sweeps.estimate import Estimate
from parcae.sweeps.folder import TABLE_FILE, SweepFolder, training_tokens
from parcae.sweeps.plan import PlannedRun
from parcae.sweeps.run_state import outcome_of
from parcae.sweeps.slurm import job_states

STARTABLE = ("to do", "stopped", "running here")
"""A run that still runs here, under a sweep that was killed, is about to stop: it is waited for."""


def words(text: str | None) -> tuple[str, ...]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def numbers(flag: str, text: str | None, whole: bool = False) -> tuple[float, ...]:
    """`1e13,2e13`; whole ones as integers."""
    found = []
    for word in words(text):
        try:
            value = float(word)
        except ValueError:
            raise ConfigError(f"{flag}: {word!r} is no number. Write {flag} 1,2,4.") from None
        if whole and not value.is_integer():
            raise ConfigError(f"{flag}: {word} is not a whole number.")
        found.append(int(value) if value.is_integer() and abs(value) < 1e9 else value)
    if text is not None and not found:
        raise ConfigError(f"{flag}: no number follows. Write {flag} 1,2,4.")
    return tuple(dict.fromkeys(found))


def grid_settings(given: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`optimiser.beta2=0.9,0.95` and `data.packing=best-fit,concatenate`, one for each --grid."""
    found: dict[str, tuple[Any, ...]] = {}
    for word in given:
        key, equals, text = word.partition("=")
        if not equals or "." not in key or not text:
            raise ConfigError(
                f"--grid: {word!r} is not a setting with values. Write table.key=1,2."
            )
        found[key.lstrip("-").replace("-", "_")] = tuple(_value(part) for part in words(text))
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def say(text: str) -> None:
    console.out.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def states(runs: Sequence[PlannedRun], folder: SweepFolder) -> dict[str, str]:
    """By run: done, diverged, failed; queued or running, in a job; running here, stopped, to do."""
    jobs, failures = folder.read_jobs(), folder.read_failures()
    outcomes = {run.name: outcome_of(folder.run(run.name)) for run in runs}
    asked = any(name in jobs and not outcomes[name].is_final for name in outcomes)
    alive = job_states() if asked else {}
    found = {}
    for name, outcome in outcomes.items():
        if outcome.is_final:
            found[name] = "done" if outcome.stage == "finished" else "diverged"
        elif jobs.get(name) in alive:
            found[name] = alive[jobs[name]]
        elif name in failures or name in jobs:
            found[name] = "failed"
        elif outcome.stage == "new":
            found[name] = "to do"
        else:
            found[name] = "running here" if is_in_use(folder.run(name)) else "stopped"
    return found


def to_do(runs: Sequence[PlannedRun], folder: SweepFolder, retry: bool) -> list[PlannedRun]:
    now = states(runs, folder)
    wanted = (*STARTABLE, "failed") if retry else STARTABLE
    return [run for run in runs if now[run.name] in wanted]


def prepare(runs: Sequence[PlannedRun], folder: SweepFolder) -> None:
    """The data of all runs; a person should know when they read some of it again."""
    there = training_tokens(folder.prepare(runs, say))
    longest = max(runs, key=lambda run: run.tokens)
    if longest.tokens > there:
        say(
            f"The sources hold {console.format_count(there)} tokens: {longest.name} reads them "
            f"{longest.tokens / there:.2g} times."
        )


def show_plan(
    runs: Sequence[PlannedRun], folder: SweepFolder, guess: Estimate, workers: int
) -> None:
    now = states(runs, folder)
    columns = ("run", "loops", "with gradient", "parameters", "effective", "tokens", "steps")
    columns = (*columns, "FLOPs", "ETA", "state")
    rows = [
        (
            run.name,
            f"{run.mean_loops:g}",
            run.recipe.model.loop.gradient_loops,
            console.format_count(run.parameters),
            console.format_count(run.effective_parameters),
            console.format_count(run.tokens),
            f"{run.steps:,}",
            console.format_flops(run.flops),
            console.format_duration(guess.seconds[run.name]) if run.name in guess.seconds else "",
            now[run.name],
        )
        for run in runs
    ]
    console.out.print(console.table(f"{len(runs)} runs in {folder.path}", columns, rows))
    left = [run for run in runs if now[run.name] in STARTABLE]
    wall = guess.wall(left, workers)
    side = f"{workers} at a time" if workers > 1 else "one after another"
    total = sum(run.flops for run in left)
    text = f"To do: {len(left)} runs, {console.format_flops(total)} FLOPs"
    text += f", about {console.format_duration(wall)}, {side}" if wall is not None and left else ""
    say(f"{text} (ETA: {guess.how}).")
    for line in warnings(runs):
        say(line)


def tell_kept_depths(planned: Sequence[PlannedRun], runs: Sequence[PlannedRun]) -> None:
    """A grown grid may ask for test loops that the runs which are there were not planned with."""
    there = {run.name: set(run.recipe.validation_depths) for run in runs}
    lacking = {run.name: set(run.recipe.validation_depths) - there[run.name] for run in planned}
    kept = [name for name, depths in lacking.items() if depths]
    if kept:
        depths = ", ".join(map(str, sorted(set().union(*lacking.values()))))
        say(
            f"Test loops {depths} are measured in new runs only: {len(kept)} that are there, such "
            f"as {kept[0]}, keep theirs. For all runs at the same, use another --out."
        )


def warnings(runs: Sequence[PlannedRun]) -> list[str]:
    """What the plan would let a person regret later."""
    found = []
    off = {
        run.name: run.flops / run.budget - 1
        for run in runs
        if run.budget and abs(run.flops / run.budget - 1) > 0.02
    }
    if off:
        name = max(off, key=lambda key: abs(off[key]))
        found.append(
            f"Steps are whole: {len(off)} runs miss their budget by more than 2 %, {name} by "
            f"{off[name]:+.1%}. Larger budgets or a smaller data.global_batch come nearer."
        )
    return found


def show_states(runs: Sequence[PlannedRun], folder: SweepFolder) -> int:
    """A table of what has come out; returns how many have failed or diverged."""
    now, failures = states(runs, folder), folder.read_failures()
    rows = []
    for run in runs:
        result = outcome_of(folder.run(run.name)).result
        nominal = str(run.recipe.model.loop.nominal_loops)
        loss = result.get("validation", {}).get(nominal, {}).get("loss")
        took = result.get("seconds")
        rows.append(
            (
                run.name,
                now[run.name],
                "" if loss is None else f"{loss:.4f}",
                console.format_count(run.tokens),
                console.format_flops(run.flops),
                "" if took is None else console.format_duration(took),
            )
        )
    columns = ("run", "state", "loss at its loops", "tokens", "FLOPs", "took")
    console.out.print(console.table(str(folder.path), columns, rows))
    bad = [run.name for run in runs if now[run.name] in ("failed", "diverged")]
    for name in bad:
        reason = failures.get(name, "its job ended without a result.")
        say(f"{now[name]}: {name}: {reason} See {folder.log(name)}")
    if any(now[name] == "failed" for name in bad):
        say(f"Once mended: parcae sweep {folder.path} --retry")
    counts = Counter(now.values())
    say(", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    if (folder.path / TABLE_FILE).exists():
        say(f"Table: {folder.path / TABLE_FILE}  Laws: parcae fit {folder.path}")
    return len(bad)
