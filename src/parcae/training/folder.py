"""A run's folder: who may use it, what recipe it follows, what it holds at the end.

recipe.toml     every setting, resolved        tokenizer.json   of the data
metrics.jsonl   what was measured (log.py)     data/            what was tokenised for the run
checkpoints/    see checkpoint.py              result.json      what the run came to
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcae.config import ConfigError
from parcae.files import FileError, write_text
from parcae.recipe import write_toml
from parcae.runs.layout import (
    CHECKPOINTS_FOLDER,
    DATA_FOLDER,
    METRICS_FILE,
    RECIPE_FILE,
    RESULT_FILE,
    TOKENIZER_FILE,
)
from parcae.training.settings import Recipe, plain_recipe, recipe_from_file

HEADER = "# Every setting of this run, resolved; written by parcae.\n"
FREE_TO_CHANGE = {
    "data": {"prefetch", "verify"},
    "run": {
        "device",
        "parallel",
        "checkpoint_every",
        "keep_last",
        "keep_best",
        "sample_prompts",
        "sample_tokens",
        "sinks",
    },
}
"""Settings that do not change what is learned, and so may differ when a run goes on."""


def read_recipe(folder: Path, flags: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a run that exists, with flags over it."""
    if not (folder / RECIPE_FILE).exists():
        raise FileError(f"{folder}: no run to resume, {RECIPE_FILE} is missing. Check the path.")
    return recipe_from_file(folder / RECIPE_FILE, flags)


def begin(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of a new run; a folder that holds a run is refused.

    One that never came to its first step, for want of data say, is no run: it starts anew, without
    what another recipe has prepared.
    """
    if (folder / METRICS_FILE).exists():
        raise ConfigError(
            f"{folder}: holds a run already. Go on with it by `parcae train --resume {folder}`, "
            "or use another --out."
        )
    text, path = _text(recipe), folder / RECIPE_FILE
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    ours = before is not None and before.startswith(HEADER)
    if not ours:
        for name in (RECIPE_FILE, TOKENIZER_FILE, DATA_FOLDER, CHECKPOINTS_FOLDER, RESULT_FILE):
            if (folder / name).exists():
                raise ConfigError(
                    f"{folder / name}: there already, and not of a run. Use another --out."
                )
    elif before != text:
        for made in (folder / DATA_FOLDER).glob("[0-9]*"):
            shutil.rmtree(made, ignore_errors=True)
        (folder / TOKENIZER_FILE).unlink(missing_ok=True)
    write_text(path, text)


def go_on(folder: Path, recipe: Recipe) -> None:
    """Refuse a recipe that would not continue what the folder holds."""
    before, now = plain_recipe(read_recipe(folder)), plain_recipe(recipe)
    changed = [key for key in differences(before, now) if not _is_free(key)]
    if changed:
        raise ConfigError(
            f"{changed[0]}: differs from the run in {folder}, which would not be the same run. "
            "Leave the setting out, or start a new run with another --out."
        )
    write_text(folder / RECIPE_FILE, _text(recipe))
    (folder / RESULT_FILE).unlink(missing_ok=True)  # it tells of an end that is none now


def _text(recipe: Recipe) -> str:
    return HEADER + write_toml(plain_recipe(recipe))


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys, as `table.key`, whose values differ."""
    found: list[str] = []
    for key in sorted({*a, *b}):
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}")
    return found


def _is_free(key: str) -> bool:
    table, _, name = key.partition(".")
    return name in FREE_TO_CHANGE.get(table, ())
