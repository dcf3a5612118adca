"""The folder of a sweep: its plan, the data its runs share, the state of each run, the table.

sweep.json      the plan, with the recipe of every run   runs/NAME/     the run folder of a run
recipes/        the same recipes, on the shared data     logs/NAME.log  what the run printed
data/, tokenizer.json   prepared once, for all runs      failed.json    runs that ended in an error
runs.csv, runs.parquet  the table of runs                jobs.json      Slurm's job ids
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parcae.config import ConfigError
from parcae.data.shards import MANIFEST, read_manifest
from parcae.data.synthetic import task_of
from parcae.evaluation.item_scores import scores_of_run
from parcae.files import (
    FileError,
    interpreting,
    is_in_use,
    number,
    path_inside,
    read_json,
    read_sealed,
    read_text,
    write_json,
    write_sealed,
    write_text,
    writing,
)
from parcae.laws.model_runs import assign_sets
from parcae.laws.table import SCORES, TABLE_FILE, table_from_rows, write_table
from parcae.recipe import write_toml
from parcae.runs import FINAL_STATUSES, read_result, read_status
from parcae.runs.layout import TOKENIZER_FILE, shard_folders
from parcae.runs.records import naming_imports
from parcae.sweeps.grid import PlannedRun
from parcae.sweeps.worker import RunRequest
from parcae.training.corpora import prepare_corpora
from parcae.training.run import differences
from parcae.training.settings import (
    DataConfig,
    recipe_from_tree,
    recipe_to_dict,
    with_absolute_paths,
)

PLAN_FILE, FAILED_FILE, JOBS_FILE = "sweep.json", "failed.json", "jobs.json"
PARQUET_FILE = "runs.parquet"
FORMAT = 1
AXES = (
    "model.loop.mean_loops",
    "run.seed",
    "run.validation_loops",
    "optimiser.lr",
    "optimiser.muon_lr",
)
"""Settings that may differ between the runs of a sweep, beside the budget and `Grid.settings`."""

RunState = Literal["to do", "queued", "running", "stopped", "failed", "diverged", "finished"]
"""The statuses of a run, and what only a sweep knows. `queued`: waits in Slurm. `stopped`:
interrupted, continues from its last checkpoint. `failed`: ended in an error; started again only on
request. `diverged`, `finished`: has a result."""


class SweepFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.follow_links = False
        """Whether its runs may write through links that lead out of their folders."""

    @property
    def exists(self) -> bool:
        return (self.path / PLAN_FILE).exists()

    @property
    def table_file(self) -> Path:
        return self.path / TABLE_FILE

    def run_folder(self, name: str) -> Path:
        return self.path / "runs" / name

    def log_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def recipe_file(self, name: str) -> Path:
        return self.path / "recipes" / f"{name}.toml"

    def request(self, name: str) -> RunRequest:
        return RunRequest(
            name,
            self.recipe_file(name),
            self.run_folder(name),
            self.log_file(name),
            options=("--follow-links",) if self.follow_links else (),
        )

    def run_names(self) -> list[str]:
        """The names of its runs, without their recipes: these may need a file of the user's."""
        return [run["name"] for run in self._read_runs()]

    def read_plan(self) -> tuple[PlannedRun, ...]:
        runs = []
        for run in self._read_runs():
            with naming_imports(self.run_folder(run["name"])):
                runs.append(self._with_recipe(run))
        return tuple(runs)

    def _read_runs(self) -> list[dict[str, Any]]:
        if not self.exists:
            raise FileError(f"{self.path}: not a sweep: {PLAN_FILE} is missing. Check the path.")
        tree = read_sealed(self.path / PLAN_FILE, "Use another folder.")
        with interpreting(self.path / PLAN_FILE, "Use another folder."):
            runs = [dict(run) for run in tree["runs"]]
            for run in runs:
                path_inside(self.path / "runs", run["name"])
                if not (isinstance(run["settings"], dict) and isinstance(run["model"], str)):
                    raise ValueError(f"the model or settings of {run['name']}")
                number(run["budget"] or 0)
            return runs

    def _with_recipe(self, run: dict[str, Any]) -> PlannedRun:
        path = self.path / PLAN_FILE
        with interpreting(path, "Use another folder.", passed_on=(FileError,)):
            try:
                return PlannedRun(**{**run, "recipe": recipe_from_tree(run["recipe"])})
            except ConfigError as error:
                raise FileError(f"{path}: {run['name']}: {error}") from error

    def write_plan(self, runs: Iterable[PlannedRun]) -> None:
        trees = [
            {
                "name": run.name,
                "model": run.model,
                "budget": run.budget,
                "settings": dict(run.settings),
                "recipe": recipe_to_dict(run.recipe),
            }
            for run in runs
        ]
        write_sealed(self.path / PLAN_FILE, {"format": FORMAT, "runs": trees})

    def extended(self, planned: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
        """The plan in the folder and the runs that are new in `planned`.

        ConfigError if `planned` belongs to another sweep.
        """
        planned = [replace(run, recipe=with_absolute_paths(run.recipe)) for run in planned]
        if not self.exists:
            return tuple(planned)
        before = {run.name: run for run in self.read_plan()}
        for run in planned:
            _check_belongs(run, before, self.path)
        return (*before.values(), *(run for run in planned if run.name not in before))

    def prepare(self, runs: Sequence[PlannedRun], message: Callable[[str], None]) -> DataConfig:
        """Make tokenizer and shards where they are missing, and write a recipe file for each run.

        Returns the `[data]` table that the runs share.
        """
        smallest = min(runs, key=lambda run: run.recipe.model.vocab_size).recipe
        data = with_absolute_paths(smallest).data
        if task_of(data.sources):
            shared: dict[str, Any] = {}
        else:
            folders = shard_folders(self.path, data.sources)
            ready = all((folder / MANIFEST).exists() for folder in folders)
            if not (ready and (self.path / TOKENIZER_FILE).exists()):
                prepare_corpora(with_absolute_paths(smallest), self.path, message)
            shared = {
                "sources": tuple(map(str, folders)),
                "tokenizer": str(self.path / TOKENIZER_FILE),
            }
        for run in runs:
            recipe = replace(run.recipe, data=replace(run.recipe.data, **shared))
            text = write_toml(recipe_to_dict(recipe))
            path = self.recipe_file(run.name)
            if not path.exists() or read_text(path, errors="replace") != text:
                write_text(path, text)
        return replace(data, **shared)

    def states(
        self, runs: Iterable[PlannedRun], job_states: Callable[[], Mapping[str, RunState]]
    ) -> dict[str, RunState]:
        """The state of each run by name.

        `job_states` returns the states of the jobs that Slurm still knows; it is only called if a
        run without a result was submitted.
        """
        statuses = {run.name: read_status(self.run_folder(run.name)) for run in runs}
        failures, submitted = self.read_failures(), self.read_jobs()
        open_runs = [name for name, status in statuses.items() if status not in FINAL_STATUSES]
        alive = job_states() if any(name in submitted for name in open_runs) else {}
        states: dict[str, RunState] = {}
        for name, status in statuses.items():
            if status == "finished" or status == "diverged":
                states[name] = status
            elif submitted.get(name) in alive:
                states[name] = alive[submitted[name]]
            elif name in failures or name in submitted:
                states[name] = "failed"
            elif status == "new":
                states[name] = "to do"
            else:
                states[name] = "running" if is_in_use(self.run_folder(name)) else "stopped"
        return states

    def read_failures(self) -> dict[str, str]:
        """By run: the error it ended in."""
        return _read_texts(self.path / FAILED_FILE)

    def read_jobs(self) -> dict[str, str]:
        """By run: the id of its Slurm job."""
        return _read_texts(self.path / JOBS_FILE)

    def record_start(self, name: str, job: str | None = None) -> None:
        """Forget the failure and the job of earlier attempts; `job` is the id of this one."""
        _set(self.path / FAILED_FILE, self.read_failures(), name, None)
        _set(self.path / JOBS_FILE, self.read_jobs(), name, job)

    def record_failure(self, name: str, reason: str) -> None:
        _set(self.path / FAILED_FILE, self.read_failures(), name, reason)

    def rows(self, runs: Iterable[PlannedRun]) -> list[dict[str, Any]]:
        """The rows of the table: losses and scores of all finished runs."""
        runs = list(runs)
        sets = sets_of(runs)
        return [
            row for run in runs for row in rows_of(run, self.run_folder(run.name), sets[run.name])
        ]

    def collect(self, runs: Iterable[PlannedRun]) -> list[dict[str, Any]]:
        """Write the table of all finished runs, and return its rows."""
        rows = self.rows(runs)
        if rows:
            table = table_from_rows(rows, str(self.table_file))
            write_table(self.table_file, table)
            write_table(self.path / PARQUET_FILE, table)
        return rows


def _read_texts(path: Path) -> dict[str, str]:
    """The texts by name in a JSON file; none where it does not exist."""
    texts = read_json(path) if path.exists() else {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise FileError(f"{path}: not an object of texts. Remove it, or correct it.")
    return texts


def _set(path: Path, before: Mapping[str, str], name: str, value: str | None) -> None:
    """Write `before` with `name` set to `value`, or without it for None, if that changes it.

    A file without entries is removed.
    """
    now = {key: text for key, text in before.items() if key != name}
    if value is not None:
        now[name] = value
    if not now:
        with writing(path):
            path.unlink(missing_ok=True)
    elif now != before:
        write_json(path, now)


def sets_of(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """By run: its set in the table, which follows from the plan, finished or not."""
    sets: dict[str, str] = {}
    for model in dict.fromkeys(run.model for run in runs):
        same = [run for run in runs if run.model == model]
        loops, tokens, flops = (
            np.array(column, dtype=float)
            for column in zip(
                *((run.mean_loops, run.tokens, run.budget or run.flops) for run in same),
                strict=True,
            )
        )
        assigned = assign_sets(loops, tokens, flops)
        sets |= {run.name: name for run, name in zip(same, assigned, strict=True)}
    return sets


def rows_of(run: PlannedRun, folder: Path, set_name: str) -> list[dict[str, Any]]:
    """One row of the table for each number of loops that a finished run was validated at.

    Scores of `parcae eval` on the run are in columns named after their suites.
    """
    result, recipe = read_result(folder), run.recipe
    if result is None or result.status != "finished":
        return []
    scores, limit = scores_of_run(folder)
    common = {
        "set": set_name,
        "budget": run.budget or result.flops,
        "learning_rate": recipe.optimiser.lr,
        "seed": recipe.run.seed,
        "run": run.name,
        "backprop_loops": recipe.model.loop.gradient_loops,
        "parameters": run.parameters,
        "steps": result.steps,
        **run.settings,
    }
    rows: list[dict[str, Any]] = []
    for loops, loss in sorted(result.losses.items()):
        if loss is not None and math.isfinite(loss):
            rows.append(
                {
                    "model": run.model,
                    "mean_loops": run.mean_loops,
                    "tokens": result.tokens,
                    "flops": result.flops,
                    "effective_params": run.effective_parameters,
                    "test_loops": loops,
                    "loss": loss,
                    **common,
                    **_columns(scores.get(loops, {})),
                    **({"eval_limit": limit} if limit and loops in scores else {}),
                }
            )
    return rows


def _columns(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores of suites by the columns of the table; the held-out loss is there already."""
    named = {suite.replace("-", "_"): value for suite, value in scores.items()}
    return {name: value for name, value in named.items() if name in SCORES}


def training_tokens(data: DataConfig) -> int:
    """The number of tokens in the shards that the runs share."""
    manifests = (read_manifest(Path(source)) for source in data.sources)
    return sum(manifest["totals"]["train"]["tokens"] for manifest in manifests)


def _check_belongs(run: PlannedRun, before: Mapping[str, PlannedRun], path: Path) -> None:
    if run.name in before:
        changed = _changed(run, before[run.name], ("run.validation_loops",))
    else:
        alike = [other for other in before.values() if other.model == run.model]
        other = (alike or list(before.values()))[0]
        changed = _changed(run, other, (*AXES, *run.settings, *other.settings))
        changed = [key for key in changed if not key.startswith("budget.")]
        if not alike:
            changed = [key for key in changed if not key.startswith("model.")]
    if changed:
        raise ConfigError(
            f"{changed[0]}: differs from the sweep in {path}. A sweep can be extended by budgets, "
            "loops, models, learning rates, seeds and settings of its grid; for any other change "
            "use another output folder."
        )


def _changed(run: PlannedRun, other: PlannedRun, free: Sequence[str]) -> list[str]:
    keys = differences(recipe_to_dict(other.recipe), recipe_to_dict(run.recipe))
    return [key for key in keys if key not in free]
