"""A training run as one call: from a recipe to a run folder and its result.

result = parcae.train("recipes/demo.toml", out="runs/mine", budget={"steps": 100})
result = parcae.train("runs/mine", resume=True)
result.status, result.losses, pandas.DataFrame(result.table())
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parcae.config import ConfigError, require
from parcae.files import FileError, interpreting, read_text, write_text
from parcae.recipe import flatten, merge, write_toml
from parcae.registry import import_options
from parcae.runs import TrainResult, find_run
from parcae.runs.checkpoints import last_state
from parcae.runs.layout import (
    CHECKPOINTS_FOLDER,
    DATA_FOLDER,
    METRICS_FILE,
    RECIPE_FILE,
    RESULT_FILE,
    TOKENIZER_FILE,
)
from parcae.runs.records import naming_imports, recorded_imports
from parcae.training.settings import (
    Recipe,
    recipe_from_file,
    recipe_from_tree,
    recipe_to_dict,
    resolve_recipe,
)
from parcae.training.start import with_recorded_start

HEADER = "# Every setting of this run, resolved; written by parcae.\n"
MOVED = {"data": {"sources", "tokenizer"}}
"""Paths that may differ when a run is resumed, if they lead to the same data."""
FREE_TO_CHANGE = {
    "data": {"micro_batch", "prefetch", "verify"},
    "run": {
        "device",
        "parallel",
        "compile",
        "activation_checkpointing",
        "deterministic",
        "validate_every",
        "validation_loops",
        "telemetry_every",
        "telemetry_rows",
        "checkpoint_every",
        "keep_last",
        "keep_best",
        "sample_prompts",
        "sample_tokens",
        "max_nonfinite_steps",
        "trackers",
    },
}
"""Settings that do not change what is learned, and may differ when a run is resumed. Rows to
validate on may not: the best checkpoint is chosen by losses on the same rows."""


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: str | Path | None = None,
    follow_links: bool = False,
    verbose: bool = True,
    **overrides: Any,
) -> TrainResult:
    """Train a model into the run folder `out`, and return the result.

    `recipe` is the path of a recipe, the name of one that comes with parcae ("demo"), a dict of its
    tables, or a `Recipe`. With `resume` the run in `out` continues from its newest intact
    checkpoint; `recipe` may then be the run folder itself. `start_from`, anything that
    `parcae.load` takes, gives a new run its weights, model and tokenizer; optimiser, schedule and
    data are new. A run folder with symbolic links that lead out of it, such as one whose `data` was
    moved to another disk, is written to only with `follow_links`. `verbose=False` prints nothing;
    every message also goes to the logger `parcae.training`. Keyword arguments are tables over the
    recipe: `train("demo", out="runs/a", budget={"steps": 100})`. `out` is
    runs/<name of the recipe> by default.
    """
    if start_from is not None:
        message = "a resumed run continues from its own weights"
        require(not resume, "start_from", message, "Pass either start_from or resume.")
        overrides = merge(overrides, {"start": {"checkpoint": str(start_from)}})
    if resume and out is None:
        if not isinstance(recipe, str | Path):
            raise ConfigError("out: missing. Give the folder of the run to resume.")
        out, recipe = recipe, read_recipe(Path(recipe), overrides)
    else:
        if out is None:
            if not isinstance(recipe, str | Path):
                raise ConfigError("out: missing. Give the folder of the run.")
            out = default_folder(recipe)
        recipe = resolve_recipe(recipe, overrides)
    from parcae.training.trainer import train_recipe  # the recipe's errors do not wait for torch

    return train_recipe(recipe, Path(out), resume, follow_links, verbose)


def was_restarted(run: Path) -> bool:
    """Whether `torchrun` has started this process again, after one died, and there is a run.

    Nodes may count restarts differently, so the processes of a run have to agree on it.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return restarts.isdecimal() and int(restarts) > 0 and (run / METRICS_FILE).exists()


def default_folder(recipe: str | Path) -> Path:
    """The run folder of a recipe's file or name: runs/<name of the recipe>."""
    name = Path(recipe).name
    return Path("runs") / name.removesuffix(".toml")


def read_recipe(run: Path, flags: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of an existing run, with flags over it."""
    with naming_imports(run):
        return recipe_from_file(find_run(run) / RECIPE_FILE, flags)


def start_run(run: Path, recipe: Recipe, report: Callable[[str], None]) -> Recipe:
    """Write the recipe of a new run and prepare its data; a folder that holds a run is refused.

    A run that never reached its first step starts again, without what was prepared for another
    recipe. Returns the recipe as it was written. `report` is called before each long operation.
    """
    from parcae.data.preparation import remove_prepared
    from parcae.training.corpora import check_sources, prepare_corpora

    if (run / METRICS_FILE).exists():
        raise ConfigError(
            f"{run}: exists and holds a run. Continue it with `parcae train --resume {run}"
            f"{import_options(recorded_imports(run))}`, or use another `out`."
        )
    check_sources(recipe)
    recipe = with_recorded_start(recipe)
    text, path = _recipe_text(recipe), run / RECIPE_FILE
    before = read_text(path, errors="replace") if path.exists() else None
    if before is None or not before.startswith(HEADER):
        for name in (RECIPE_FILE, TOKENIZER_FILE, DATA_FOLDER, CHECKPOINTS_FOLDER, RESULT_FILE):
            if (run / name).exists():
                raise ConfigError(
                    f"{run / name}: exists, but {run} is not a run folder. Use another `out`."
                )
    elif before != text:
        for folder in (run / DATA_FOLDER).glob("[0-9]*"):
            remove_prepared(folder)
        (run / TOKENIZER_FILE).unlink(missing_ok=True)
    write_text(path, text)
    prepare_corpora(recipe, run, report)
    return recipe


def resume_run(run: Path, recipe: Recipe, report: Callable[[str], None]) -> Recipe:
    """Write the recipe of a resumed run; one that would change what is learned is refused.

    It is compared with that of the newest checkpoint, so that recipe.toml may have been edited.
    """
    from parcae.data.preparation import remove_prepared
    from parcae.training.corpora import check_moved, check_same_data, open_corpora, prepare_corpora

    state = last_state(run)
    before = read_recipe(run) if state is None else recipe_from_tree(state["recipe"])
    _check_unchanged(before, recipe, run, 0 if state is None else state["step"])
    check_moved(recipe, before, run)
    copies = set((run / DATA_FOLDER).glob("[0-9]*"))
    prepare_corpora(recipe, run, report)
    if state is not None:
        try:
            corpora = open_corpora(recipe, run)
            with interpreting(run / CHECKPOINTS_FOLDER, "Was a state.json edited?", (ConfigError,)):
                check_same_data(corpora, state["sources"], run)
        except (ConfigError, FileError):
            for folder in set((run / DATA_FOLDER).glob("[0-9]*")) - copies:
                remove_prepared(folder)
            raise
    write_text(run / RECIPE_FILE, _recipe_text(recipe))
    return recipe


def _check_unchanged(before: Recipe, now: Recipe, run: Path, step: int) -> None:
    """Refuse a setting that changes what is learned. Another budget may follow `step` where the
    steps so far would have been the same with it."""
    old, new = flatten(recipe_to_dict(before)), flatten(recipe_to_dict(now))
    for key in differences(old, new):
        table, _, name = key.partition(".")
        if name in MOVED.get(table, ()):
            continue
        if key == "run.precision" and old[key] == "auto":  # recorded before it was resolved
            continue
        reason = "which changes what it learns"
        if table == "budget":
            if _extends(before, now, step):
                continue
            reason = "on which its learning rates or weight decays so far depend"
        if name in FREE_TO_CHANGE.get(table, ()):
            if key != "data.micro_batch" or now.model.loop.draws_per_sequence:
                continue
            reason = 'on which the depths depend with model.loop.draw_per = "micro-batch"'
        values = [json.dumps(side[key]) if key in side else "none" for side in (new, old)]
        remedy = "Keep it, or start a new run"
        if table != "model" or name.startswith("loop."):  # others may not fit the weights
            setting = f"--{key} {shlex.quote(values[0])}"
            remedy += (
                f" from these weights: parcae train {run / RECIPE_FILE} --start-from {run} "
                f"{setting} --out NEW{import_options(recorded_imports(run))}"
            )
        raise ConfigError(
            f"{key}: {values[0]}, but the run in {run} has {values[1]}, {reason}. {remedy}."
        )


def _extends(before: Recipe, now: Recipe, step: int) -> bool:
    """Whether all steps so far have the learning rates, momenta and weight decays of both budgets:
    they have, if the last one has, since these only begin to fall once."""
    from parcae.training.schedule import schedule_factors, total_steps

    factors = []
    for recipe in (before, now):
        total = total_steps(recipe)
        if total is None or recipe.budget.clock_minutes is not None or total < step:
            return False
        last = schedule_factors(
            recipe.schedule, recipe.optimiser, step - 1, (step - 1) / total, total
        )
        uses_muon = recipe.optimiser.kind == "muon-adamw"
        factors.append(last if uses_muon else last._replace(weight_decay=1.0))
    return step == 0 or factors[0] == factors[1]


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys, as `table.key`, whose values differ."""
    keys: list[str] = []
    for key in sorted({*a, *b}):
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            keys += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            keys.append(f"{prefix}{key}")
    return keys


def _recipe_text(recipe: Recipe) -> str:
    return HEADER + write_toml(recipe_to_dict(recipe))
