"""What a run wrote about itself: recipe.toml, metrics.jsonl and result.json, as plain values.

The fields of result.json are those of `parcae.training.run.TrainResult`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

from parcae.config import ConfigError
from parcae.files import FileError, interpreting, read_sealed
from parcae.recipe import read_toml
from parcae.runs.layout import METRICS_FILE, RECIPE_FILE, RESULT_FILE
from parcae.schema import shorten

Line = dict[str, Any]
RunStatus = Literal["new", "started", "interrupted", "diverged", "finished"]
FINAL_STATUSES: tuple[RunStatus, ...] = ("diverged", "finished")
"""A run with one of these has nothing left to do: to continue it would not change it."""
TAIL_BYTES = 1 << 16
Number = (int, float)
RESULT_FIELDS = {
    "status": str,
    "steps": int,
    "tokens": int,
    "flops": Number,
    "seconds": Number,
    "validation": dict,
}
"""Fields of result.json that commands compute with, and their types; null where unknown."""


def read_recipe_table(run: str | Path) -> dict[str, Any]:
    """The tables of recipe.toml, unchecked; `parcae.training.settings` builds a Recipe of them."""
    try:
        return read_toml(Path(run) / RECIPE_FILE)
    except ConfigError as error:
        raise FileError(str(error)) from None


def read_result(run: str | Path) -> dict[str, Any] | None:
    """What result.json says; None while the run has no result, or none of its last step.

    A resumed run keeps the result of its earlier end until it ends again.
    """
    path = Path(run) / RESULT_FILE
    if not path.exists():
        return None
    result = read_sealed(path, "Remove it, then resume the run to write it again.", required=False)
    with interpreting(path, "Was it edited?"):
        _check_result(result)
    return result if last_step(run) in (0, result.get("steps")) else None


def _check_result(result: Line) -> None:
    """Raise an error of a wrong value or type unless the fields are as a run writes them."""
    for name, expected in RESULT_FIELDS.items():
        value = result.get(name)
        if value is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            raise ValueError(f"{name} is {shorten(value)}")
    if result["status"] not in get_args(RunStatus):
        raise ValueError(f"status is {shorten(result['status'])}")
    for loops, measured in (result.get("validation") or {}).items():
        if int(loops) < 1 or not isinstance(measured["loss"], int | float | None):
            raise ValueError(f"validation at {shorten(loops)} loops is {shorten(measured)}")


def read_status(run: str | Path) -> RunStatus:
    """The status in result.json; without a result `started`, or `new` before the first step."""
    result = read_result(run)
    if result is not None:
        return result["status"]
    return "started" if (Path(run) / METRICS_FILE).exists() else "new"


def read_metrics(run: str | Path) -> dict[str, list[Line]]:
    """The lines of metrics.jsonl by kind: train, validation, telemetry, event.

    The last line may be cut off, by a process that is writing it or was killed; it is ignored.
    """
    path = Path(run) / METRICS_FILE
    try:
        raw = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raw = []
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from None
    rows = [(number, line) for number, line in enumerate(raw, 1) if line.strip()]
    kinds: dict[str, list[Line]] = {}
    for number, line in rows:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == rows[-1][0]:
                break
            reason = error.msg if isinstance(error, json.JSONDecodeError) else f"{error}"
            raise FileError(
                f"{path}, line {number}: not valid JSON ({reason}). Fix or delete that line."
            ) from None
        if not isinstance(value, dict):
            raise FileError(f"{path}, line {number}: not a JSON object. Fix or delete that line.")
        kinds.setdefault(str(value.get("kind")), []).append(value)
    if not kinds:
        raise FileError(f"{path}: the run has logged nothing yet. Wait for its first step.")
    return kinds


def last_step(run: str | Path) -> int:
    """The last optimiser step in metrics.jsonl; 0 before the first. Reads only the file's end."""
    try:
        with (Path(run) / METRICS_FILE).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            continue  # cut off: it is being written
    return 0
