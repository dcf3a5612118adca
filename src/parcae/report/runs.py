"""Runs as the report shows them: from recipe.toml, metrics.jsonl and result.json.

NaN stands for a number that is missing, and for anything that is not a finite number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parcae.config import ConfigError, LoopConfig, ModelConfig
from parcae.files import FileError
from parcae.presets import model_from_table
from parcae.recipe import flatten
from parcae.runs import (
    TrainResult,
    find_run,
    list_checkpoints,
    read_metrics,
    read_recipe_table,
    read_result,
    read_state,
)
from parcae.runs.layout import METRICS_FILE, RECIPE_FILE
from parcae.runs.records import Line

Axis = Literal["step", "tokens", "flops"]
AXES: dict[Axis, str] = {"step": "step", "tokens": "training tokens", "flops": "training FLOPs"}
"""What figures over training can have along x, with the label of the axis."""
HELD_OUT_SETTINGS = (
    "model.context_length",
    "data.packing",
    "data.split_long",
    "run.validation_rows",
)
"""What decides, beside the held-out documents, which rows a run is validated on."""
MOST_LOOPS = 256
"""Numbers of loops, or of blocks, that are drawn."""
MAX_LISTED = 3
"""Runs that a note names."""
LARGEST = 1e30
"""Numbers beyond this have diverged and would only spoil the axis of a figure."""


@dataclass(frozen=True)
class Measured:
    """A validation at one number of loops."""

    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Validation:
    """A validation at one step, by the number of loops."""

    step: float
    depths: dict[int, Measured]


@dataclass(frozen=True)
class Run:
    """All that a run has written, whether it has ended or not."""

    folder: Path
    name: str
    """The end of the folder's path, long enough to differ from the other runs."""
    recipe: Mapping[str, Any]
    recipe_text: str
    lines: Mapping[str, list[Line]]
    """The lines of metrics.jsonl by kind."""
    result: TrainResult | None

    @property
    def title(self) -> str:
        """The folder and its parent, such as `demo/run`."""
        return "/".join(self.folder.resolve().parts[-2:]).lstrip("/")

    @property
    def start(self) -> str | None:
        """The checkpoint whose weights the run started from, and their checksum."""
        table = self.recipe.get("start")
        if not isinstance(table, Mapping) or not table.get("checkpoint"):
            return None
        return f"{table['checkpoint']} (sha256 {str(table.get('sha256'))[:12]})"

    @property
    def train(self) -> list[Line]:
        return self.lines.get("train", [])

    @property
    def telemetry(self) -> list[Line]:
        return self.lines.get("telemetry", [])

    @property
    def events(self) -> list[Line]:
        return self.lines.get("event", [])

    @cached_property
    def config(self) -> ModelConfig | None:
        try:
            return model_from_table(self.recipe.get("model", {}))
        except (ConfigError, TypeError, ValueError):  # of another version, or not imported
            return None

    @property
    def nominal_depth(self) -> int | None:
        """The number of loops the model is used with: the mean of training. The recipe has it
        even where the injection or sampler is of a file that was not imported."""
        if self.config is not None:
            return self.config.loop.nominal_loops
        mean: Any = flatten(self.recipe).get("model.loop.mean_loops")
        try:
            return LoopConfig(mean_loops=mean).nominal_loops
        except ConfigError:
            return None

    @cached_property
    def validations(self) -> list[Validation]:
        """In order; the last one is that of result.json, if there is one."""
        validations = [_read_validation(line) for line in self.lines.get("validation", [])]
        if isinstance(table := self.value("validation"), Mapping):
            end = number(self.value("steps"))
            final = {depth: _read_measured(entry) for depth, entry in _by_depth(table).items()}
            validations = [v for v in validations if not v.step >= end]
            validations.append(Validation(end, final))
        return [v for v in validations if v.depths]

    def along(self, steps: np.ndarray, axis: Axis) -> np.ndarray:
        """Where steps are on an axis; NaN if the run has not logged the quantity."""
        if axis == "step":
            return steps
        at, amounts = column(self.train, axis)
        if not len(at):
            return np.full(len(steps), math.nan)
        return np.interp(steps, [0.0, *at], [0.0, *amounts])

    @property
    def held_out(self) -> tuple[str, ...] | None:
        """What identifies the rows it was validated on; None where no checkpoint tells."""
        try:
            state = read_state(list_checkpoints(self.folder)[-1])
            documents = [source["validation"] for source in state["sources"]]
        except (IndexError, KeyError, TypeError, FileError):
            return None
        settings = flatten(self.recipe)
        return *documents, *(str(settings.get(key)) for key in HELD_OUT_SETTINGS)

    @property
    def status(self) -> str:
        if isinstance(status := self.value("status"), str):
            return status
        ends = ("interrupted", "diverged")
        last = self.events[-1].get("what") if self.events else None
        return last if last in ends else "no result yet"

    def value(self, key: str) -> Any:
        """A value of result.json; None if it is missing."""
        return getattr(self.result, key, None)

    def amount(self, key: str) -> float:
        """A number of result.json, or of the last training line of a run that has not ended."""
        value = number(self.value(key))
        if not math.isnan(value) or self.result is not None:
            return value
        if key == "steps":
            return number(self.train[-1].get("step")) if self.train else math.nan
        _, values = column(self.train, key)
        return float(values[-1]) if len(values) else math.nan

    @property
    def train_loss(self) -> float:
        """Mean loss of the last steps, from result.json or the last training line."""
        return self.amount("train_loss")

    def median(self, key: str) -> float:
        """The median of a number over the training lines."""
        _, values = column(self.train, key)
        return float(np.median(values)) if len(values) else math.nan

    @property
    def parameters(self) -> float:
        value = number(self.value("parameters"))
        if math.isnan(value) and self.config is not None:
            from parcae.model.flops import parameter_count

            return float(parameter_count(self.config))
        return value


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read runs in the order given, each once, under names that differ."""
    for folder in folders:
        find_run(folder)
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    return [read_run(path, name) for path, name in zip(paths, distinct_names(paths), strict=True)]


def note_on_validation(runs: Sequence[Run]) -> str | None:
    """A note where the losses of runs are not of the same held-out rows."""
    rows = {run.name: held_out for run in runs if run.validations and (held_out := run.held_out)}
    first = next(iter(rows), "")
    others = [name for name in rows if rows[name] != rows[first]]
    if not others:
        return None
    listed = ", ".join(others[:MAX_LISTED]) + (" and others" if len(others) > MAX_LISTED else "")
    return (
        f"{first} and {listed} were validated on different rows, so these losses cannot be "
        "compared. `parcae eval RUN --val-data FILE` scores each of them on the same text."
    )


@dataclass(frozen=True)
class Sweep:
    """A sweep whose runs are reported."""

    folder: Path
    planned: int
    """Number of runs in its plan; those that have not started are not among the runs."""


def read_sources(folders: Sequence[str | Path]) -> tuple[list[Run], list[Sweep]]:
    """The runs in these folders of runs and sweeps, and the sweeps among them."""
    listed: list[Path] = []
    sweeps: list[Sweep] = []
    for folder in map(Path, folders):
        if (folder / RECIPE_FILE).exists() or not folder.is_dir():
            listed.append(folder)
            continue
        from parcae.sweeps.folder import SweepFolder  # imports PyTorch

        sweep = SweepFolder(folder)
        if not sweep.exists:
            listed.append(folder)
            continue
        plan = [sweep.run_folder(name) for name in sweep.run_names()]
        started = [path for path in plan if (path / METRICS_FILE).is_file()]
        if not started:
            raise FileError(f"{folder}: no run of this sweep has started. Run the sweep.")
        listed += started
        sweeps.append(Sweep(folder, len(plan)))
    return read_runs(listed), sweeps


def read_run(folder: Path, name: str | None = None) -> Run:
    find_run(folder)
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        recipe=read_recipe_table(folder),
        recipe_text=(folder / RECIPE_FILE).read_text(encoding="utf-8"),
        lines=read_metrics(folder),
        result=read_result(folder),
    )


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that all differ."""

    def end(path: Path, length: int) -> str:
        return "/".join(part.strip("/") for part in path.parts[-length:]) or "/"

    names = []
    for path in paths:
        length = 1
        others = [other for other in paths if other != path]
        while length < len(path.parts) and any(
            end(other, length) == end(path, length) for other in others
        ):
            length += 1
        names.append(end(path, length))
    return names


def _read_validation(line: Line) -> Validation:
    losses, bits = _by_depth(line.get("losses")), _by_depth(line.get("bits_per_byte"))
    return Validation(
        number(line.get("step")),
        {d: _read_measured({"loss": x, "bits_per_byte": bits.get(d)}) for d, x in losses.items()},
    )


def _read_measured(entry: Any) -> Measured:
    entry = entry if isinstance(entry, Mapping) else {"loss": entry}
    loss, perplexity = number(entry.get("loss")), number(entry.get("perplexity"))
    if math.isnan(perplexity) and loss < 60:
        perplexity = math.exp(loss)
    return Measured(loss, perplexity, number(entry.get("bits_per_byte")))


def _by_depth(table: Any) -> dict[int, Any]:
    """The entries with numbers of loops as keys, which are text in JSON, in increasing order."""
    if not isinstance(table, Mapping):
        return {}
    entries = {int(key): table[key] for key in table if re.fullmatch("[0-9]{1,6}", str(key))}
    return {depth: entries[depth] for depth in sorted(entries)[:MOST_LOOPS]}


def number(value: Any) -> float:
    """`value` if it is a finite number; NaN for anything else: null, text, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < LARGEST else math.nan


def numbers(values: Any) -> np.ndarray:
    """A list of numbers as an array, with NaN for what is not a finite number, to `MOST_LOOPS`."""
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    return np.array([number(value) for value in listed[:MOST_LOOPS]], dtype=float)


def column(lines: Iterable[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one key, of the lines where both are numbers."""
    pairs = np.array([(number(line.get("step")), number(line.get(key))) for line in lines])
    pairs = pairs.reshape(-1, 2)
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    return pairs[:, 0], pairs[:, 1]
