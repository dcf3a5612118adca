"""A sweep's folder: what is planned in it, the data its runs share, how far they are.

sweep.json      the plan, with every run's recipe      runs/NAME/     a run's own folder
recipes/        the same as files, on the shared data  logs/NAME.log  what the run printed
data/, tokenizer.json   prepared once, for all runs    failed.json    runs that ended in an error
runs.csv, runs.parquet  the table of runs              jobs.json      Slurm's numbers of the runs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parcae.config import ConfigError
from parcae.data.shards import MANIFEST, read_manifest
from parcae.files import FileError, read_json, read_sealed, write_json, write_sealed, write_text
from parcae.laws.table import Table, table_from_rows, write_table
from parcae.recipe import write_toml
from parcae.runs.layout import DATA_FOLDER, TOKENIZER_FILE
from parcae.sweeps.launch import Job
from parcae.sweeps.plan import PlannedRun
from parcae.sweeps.run_state import outcome_of
from parcae.training.corpora import open_corpora
from parcae.training.folder import differences
from parcae.training.settings import DataConfig, located, plain_recipe, recipe_from_tree

PLAN_FILE, FAILED_FILE, JOBS_FILE = "sweep.json", "failed.json", "jobs.json"
TABLE_FILE = "runs.csv"
FORMAT = 1
AXES = (
    "model.loop.mean_loops",
    "run.seed",
    "run.validation_depths",
    "optimiser.lr",
    "optimiser.muon_lr",
)
"""What may differ between the runs of a sweep, beside the budget and the settings of its grid."""


class SweepFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def exists(self) -> bool:
        return (self.path / PLAN_FILE).exists()

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def recipe(self, name: str) -> Path:
        return self.path / "recipes" / f"{name}.toml"

    def job(self, name: str) -> Job:
        return Job(name, self.recipe(name), self.run(name), self.log(name))

    def read_plan(self) -> tuple[PlannedRun, ...]:
        if not self.exists:
            raise FileError(f"{self.path}: no sweep, {PLAN_FILE} is missing. Check the path.")
        tree = read_sealed(self.path / PLAN_FILE, "Use another folder.")
        return tuple(
            PlannedRun(**{**run, "recipe": recipe_from_tree(run["recipe"])}) for run in tree["runs"]
        )

    def write_plan(self, runs: Iterable[PlannedRun]) -> None:
        trees = [
            {
                "name": run.name,
                "model": run.model,
                "budget": run.budget,
                "settings": dict(run.settings),
                "recipe": plain_recipe(run.recipe),
            }
            for run in runs
        ]
        write_sealed(self.path / PLAN_FILE, {"format": FORMAT, "runs": trees})

    def extended(self, planned: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
        """What the folder holds and what is new in `planned`; another sweep is refused."""
        planned = [replace(run, recipe=located(run.recipe)) for run in planned]
        if not self.exists:
            return tuple(planned)
        before = {run.name: run for run in self.read_plan()}
        for run in planned:
            _check_belongs(run, before, self.path)
        return (*before.values(), *(run for run in planned if run.name not in before))

    def prepare(self, runs: Sequence[PlannedRun], say: Callable[[str], None]) -> DataConfig:
        """Tokenizer and shards, made where they are missing; then a recipe file for each run."""
        smallest = min(runs, key=lambda run: run.recipe.model.vocab_size).recipe
        data = located(smallest).data
        made = [self.path / DATA_FOLDER / str(number) for number in range(len(data.sources))]
        here = [
            Path(source) if (Path(source) / MANIFEST).exists() else own
            for source, own in zip(data.sources, made, strict=True)
        ]
        ready = all((folder / MANIFEST).exists() for folder in here)
        if not (ready and (self.path / TOKENIZER_FILE).exists()):
            open_corpora(located(smallest), self.path, say)
        tokenizer = str(self.path / TOKENIZER_FILE)
        shared = replace(data, sources=tuple(map(str, here)), tokenizer=tokenizer)
        for run in runs:
            own = {"sources": shared.sources, "tokenizer": shared.tokenizer}
            recipe = replace(run.recipe, data=replace(run.recipe.data, **own))
            text = write_toml(plain_recipe(recipe))
            path = self.recipe(run.name)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
        return shared

    def read_failures(self) -> dict[str, str]:
        """By run: why it ended."""
        path = self.path / FAILED_FILE
        return read_json(path) if path.exists() else {}

    def note_failure(self, name: str, reason: str | None) -> None:
        """`None`: it is tried again, or is done."""
        before = self.read_failures()
        now = {key: value for key, value in before.items() if key != name}
        if reason is not None:
            now[name] = reason
        if now != before:
            write_json(self.path / FAILED_FILE, now)

    def read_jobs(self) -> dict[str, str]:
        path = self.path / JOBS_FILE
        return read_json(path) if path.exists() else {}

    def begin(self, name: str, job: str | None = None) -> None:
        """What was noted of earlier attempts is no longer so; `job`: Slurm's number of this one."""
        self.note_failure(name, None)
        before = self.read_jobs()
        now = {key: number for key, number in before.items() if key != name}
        if job is not None:
            now[name] = job
        if now != before:
            write_json(self.path / JOBS_FILE, now)

    def collect(self, runs: Iterable[PlannedRun]) -> Table | None:
        """The table of all runs that are finished, written anew; None while there is none."""
        rows = [row for run in runs for row in rows_of(run, self.run(run.name))]
        if not rows:
            return None
        table = table_from_rows(rows, str(self.path / TABLE_FILE))
        write_table(self.path / TABLE_FILE, table)
        write_table((self.path / TABLE_FILE).with_suffix(".parquet"), table)
        return table


def rows_of(run: PlannedRun, folder: Path) -> list[dict[str, Any]]:
    """One row for each depth that a finished run was validated at."""
    outcome = outcome_of(folder)
    if outcome.stage != "finished":
        return []
    result, recipe = outcome.result, run.recipe
    common = {
        "budget": run.budget or result["flops"],
        "learning_rate": recipe.optimiser.lr,
        "seed": recipe.run.seed,
        "run": run.name,
        "backprop_loops": recipe.model.loop.gradient_loops,
        "parameters": run.parameters,
        "steps": result["steps"],
        **run.settings,
    }
    rows = []
    for depth, measured in sorted(result["validation"].items(), key=lambda pair: int(pair[0])):
        if measured["loss"] is not None and math.isfinite(measured["loss"]):
            rows.append(
                {
                    "model": run.model,
                    "mean_loops": run.mean_loops,
                    "tokens": result["tokens"],
                    "flops": result["flops"],
                    "effective_params": run.effective_parameters,
                    "test_loops": int(depth),
                    "loss": measured["loss"],
                    **common,
                }
            )
    return rows


def training_tokens(data: DataConfig) -> int:
    """How many there are in the shards that the runs share."""
    manifests = (read_manifest(Path(source)) for source in data.sources)
    return sum(manifest["totals"]["train"]["tokens"] for manifest in manifests)


def _check_belongs(run: PlannedRun, before: Mapping[str, PlannedRun], path: Path) -> None:
    if run.name in before:
        changed = _changed(run, before[run.name], ("run.validation_depths",))
    else:
        alike = [other for other in before.values() if other.model == run.model]
        other = (alike or list(before.values()))[0]
        changed = _changed(run, other, (*AXES, *run.settings, *other.settings))
        changed = [key for key in changed if not key.startswith("budget.")]
        if not alike:
            changed = [key for key in changed if not key.startswith("model.")]
    if changed:
        raise ConfigError(
            f"{changed[0]}: differs from the sweep in {path}. A sweep may grow by budgets, loops, "
            "models, learning rates, seeds and grids; for other changes use another --out."
        )


def _changed(run: PlannedRun, other: PlannedRun, free: Sequence[str]) -> list[str]:
    found = differences(plain_recipe(other.recipe), plain_recipe(run.recipe))
    return [key for key in found if key not in free]
