"""What a run wrote about itself: recipe.toml, metrics.jsonl and result.json (`TrainResult`)."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from parcae.config import ConfigError
from parcae.files import (
    LARGEST_LINES,
    FileError,
    interpreting,
    open_file,
    read_lines,
    read_sealed,
    write_sealed,
)
from parcae.recipe import flatten, read_toml
from parcae.registry import IMPORT_OPTION, import_options
from parcae.runs.layout import METRICS_FILE, RECIPE_FILE, RESULT_FILE, run_of
from parcae.schema import shorten, type_hints, without_none
from parcae.tables import html_curve, html_table

Line = dict[str, Any]
RunStatus = Literal["new", "started", "interrupted", "diverged", "finished"]
FINAL_STATUSES: tuple[RunStatus, ...] = ("diverged", "finished")
"""A run with one of these has nothing left to do: to continue it would not change it."""
TAIL_BYTES = 1 << 16
IMPORTED = "imported"
"""The kind of event that records a file of `--import`."""


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a training run: the contents of its result.json, and its folder."""

    folder: Path
    status: RunStatus
    """"finished", "interrupted" or "diverged"."""
    diagnosis: str | None
    """The likely cause of a divergence."""
    parameters: int
    steps: int
    tokens: int
    flops: float
    """Nominal FLOPs, as budgets count them."""
    executed_flops: float
    seconds: float
    train_loss: float | None
    """Mean training loss in nats per token of the last `trainer.AVERAGED_STEPS` steps."""
    validation: dict[int, dict[str, float | None]]
    """By loops: loss (nats per token), perplexity and bits_per_byte on held-out rows."""
    skipped_steps: int
    spikes: int
    device: str
    processes: int
    seed: int
    torch: str
    """Version of PyTorch."""
    samples: list[dict[str, Any]]
    """Continuations of the recipe's prompts: depth, prompt, text."""
    model: dict[str, Any]
    """The model's configuration."""

    @property
    def losses(self) -> dict[int, float | None]:
        """Validation loss in nats per token by number of loops."""
        return {depth: values["loss"] for depth, values in self.validation.items()}

    def table(self, kind: str = "train") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind (train, validation, telemetry or event).

        Nested values become columns such as `lr.muon`.
        """
        return [flatten(line) for line in read_metrics(self.folder).get(kind, [])]

    def _repr_html_(self) -> str:
        """How the run ended, its training loss as a curve, and what was validated by loops."""
        title = html.escape(f"{self.folder}: {self.status}, {self.steps:,} steps")
        try:
            losses = [line.get("loss") for line in self.table()]
        except FileError:  # the folder has gone
            losses = []
        curve = html_curve([math.nan if loss is None else float(loss) for loss in losses])
        rows = [{"loops": loops, **values} for loops, values in self.validation.items()]
        return f"<p>{title}</p>{curve}{html_table(rows)}"

    def to_dict(self) -> dict[str, Any]:
        """The contents of result.json."""
        tree = asdict(self)
        del tree["folder"]
        tree["validation"] = {str(depth): values for depth, values in self.validation.items()}
        return tree

    def write(self) -> None:
        write_sealed(self.folder / RESULT_FILE, self.to_dict())


def read_recipe_table(run: str | Path) -> dict[str, Any]:
    """The tables of recipe.toml, unchecked; `parcae.training.settings` builds a Recipe of them."""
    try:
        return read_toml(Path(run) / RECIPE_FILE)
    except ConfigError as error:
        raise FileError(str(error)) from None


def read_result(run: str | Path) -> TrainResult | None:
    """What result.json says; None while the run has no result, or none of its last step.

    A resumed run keeps the result of its earlier end until it ends again.
    """
    path = Path(run) / RESULT_FILE
    if not path.exists():
        return None
    tree = read_sealed(path, "Remove it, then resume the run to write it again.", required=False)
    with interpreting(path, "Was it edited?"):
        result = _parse_result(Path(run), tree)
    return result if last_step(run) in (0, result.steps) else None


def _parse_result(folder: Path, tree: Line) -> TrainResult:
    """Raise an error of a wrong value or type unless the fields are as a run writes them."""
    hints = type_hints(TrainResult)
    values = {}
    for field in fields(TrainResult)[1:]:
        value, hint = tree[field.name], without_none(hints[field.name])
        is_null = value is None and hint is not hints[field.name]
        if not is_null and not _is_a(value, hint):
            raise ValueError(f"{field.name} is {shorten(value)}")
        values[field.name] = value
    by_loops = {int(loops): measured for loops, measured in values["validation"].items()}
    for loops, measured in by_loops.items():
        if loops < 1 or not isinstance(measured["loss"], int | float | None):
            raise ValueError(f"validation at {shorten(loops)} loops is {shorten(measured)}")
    return TrainResult(folder, **{**values, "validation": by_loops})


def _is_a(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kind = int | float if hint is float else get_origin(hint) or hint
    return isinstance(value, kind) and not isinstance(value, bool)


def read_status(run: str | Path) -> RunStatus:
    """The status in result.json; without a result `started`, or `new` before the first step."""
    result = read_result(run)
    if result is not None:
        return result.status
    return "started" if (Path(run) / METRICS_FILE).exists() else "new"


def read_metrics(run: str | Path) -> dict[str, list[Line]]:
    """The lines of metrics.jsonl by kind: train, validation, telemetry, event.

    The last line may be cut off, by a process that is writing it or was killed; it is ignored.
    """
    path = Path(run) / METRICS_FILE
    kinds: dict[str, list[Line]] = {}
    problem = None
    for number, line in enumerate(read_lines(path) if path.exists() else (), 1):
        if not line.strip():
            continue
        if problem is not None:
            raise FileError(f"{path}, {problem}. Fix or delete that line.")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else f"{error}"
            problem = f"line {number}: not valid JSON ({reason})"
            continue
        if not isinstance(value, dict):
            raise FileError(f"{path}, line {number}: not a JSON object. Fix or delete that line.")
        kinds.setdefault(str(value.get("kind")), []).append(value)
    if not kinds:
        raise FileError(f"{path}: the run has logged nothing yet. Wait for its first step.")
    return kinds


def recorded_imports(run: str | Path) -> list[str]:
    """The files of `--import` that the run was trained with. They are named in messages, never
    imported by themselves: the folder may be a stranger's."""
    try:
        events = read_metrics(run).get("event", [])
    except FileError:
        return []
    paths = [event.get("message") for event in events if event.get("what") == IMPORTED]
    return list(dict.fromkeys(path for path in paths if isinstance(path, str)))


@contextmanager
def naming_imports(path: str | Path) -> Iterator[None]:
    """Add to an error that asks for `--import FILE` which files the run was trained with."""
    try:
        yield
    except (ConfigError, FileError) as error:
        run = run_of(path)
        options = import_options(recorded_imports(run)) if run is not None else ""
        if IMPORT_OPTION not in str(error) or not options:
            raise
        raise type(error)(f"{error} The run was trained with{options}.") from None


def last_step(run: str | Path) -> int:
    """The last optimiser step in metrics.jsonl; 0 before the first. Reads only the file's end."""
    try:
        with open_file(Path(run) / METRICS_FILE, LARGEST_LINES) as stream:
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
