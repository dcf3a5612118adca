"""A run folder, read: recipe.toml, metrics.jsonl and, once it has ended, result.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError, ModelConfig
from parcae.presets import model_from_table
from parcae.report.series import column, number
from parcae.runs import check_run_folder, read_metrics, read_recipe_table, read_result
from parcae.runs.layout import RECIPE_FILE
from parcae.runs.records import Line


@dataclass(frozen=True)
class Measured:
    """A validation at one depth; NaN for what was not measured."""

    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Validation:
    step: float
    depths: dict[int, Measured]


@dataclass(frozen=True)
class Run:
    """What is known of a run, ended or not."""

    folder: Path
    name: str
    """The folder's, with as much of its parents as tells it from the other runs."""
    recipe: Mapping[str, Any]
    recipe_text: str
    lines: Mapping[str, list[Line]]
    """The lines of metrics.jsonl by kind."""
    result: Mapping[str, Any] | None

    @property
    def title(self) -> str:
        """`demo/run`: where a folder stands often says more than what it is called."""
        return "/".join(self.folder.resolve().parts[-2:]).lstrip("/")

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
        except (ConfigError, TypeError, ValueError):  # of another version: the rest can be shown
            return None

    @property
    def nominal_depth(self) -> int | None:
        """The depth the model is used at: the mean it was trained with."""
        return self.config.loop.nominal_loops if self.config else None

    @cached_property
    def validations(self) -> list[Validation]:
        """In order; the last one is that of result.json, where there is one."""
        found = [_read_validation(line) for line in self.lines.get("validation", [])]
        if isinstance(table := self.value("validation"), Mapping):
            end = number(self.value("steps"))
            final = {depth: _read_measured(entry) for depth, entry in _by_depth(table).items()}
            found = [one for one in found if not one.step >= end]
            found.append(Validation(end, final))
        return [one for one in found if one.depths]

    @property
    def status(self) -> str:
        if isinstance(status := self.value("status"), str):
            return status
        ends = ("interrupted", "diverged")
        last = self.events[-1].get("what") if self.events else None
        return last if last in ends else "no result yet"

    def value(self, key: str) -> Any:
        """Of result.json; None where it is not there."""
        return self.result.get(key) if self.result else None

    def amount(self, key: str) -> float:
        """Of result.json, or of the last training line of a run that has not ended."""
        value = number(self.value(key))
        if not math.isnan(value) or self.result is not None:
            return value
        if key == "steps":
            return number(self.train[-1].get("step")) if self.train else math.nan
        _, values = column(self.train, key)
        return float(values[-1]) if len(values) else math.nan

    @property
    def train_loss(self) -> float:
        """That of result.json, or while there is none the mean of the last tenth of the steps."""
        _, losses = column(self.train, "loss")
        if self.result is not None or not len(losses):
            return number(self.value("train_loss"))
        return float(np.mean(losses[-max(1, len(losses) // 10) :]))

    def typical(self, key: str) -> float:
        """The median over the training lines."""
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
    """The runs in the order given, each once, under names that differ."""
    for folder in folders:
        check_run_folder(folder)
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    return [read_run(path, name) for path, name in zip(paths, distinct(paths), strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    check_run_folder(folder)
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        recipe=read_recipe_table(folder),
        recipe_text=(folder / RECIPE_FILE).read_text(encoding="utf-8"),
        lines=read_metrics(folder),
        result=read_result(folder),
    )


def distinct(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that no two share."""

    def end(place: Path, length: int) -> str:
        return "/".join(part.strip("/") for part in place.parts[-length:]) or "/"

    names = []
    for place in places:
        length = 1
        others = [other for other in places if other != place]
        while length < len(place.parts) and any(
            end(other, length) == end(place, length) for other in others
        ):
            length += 1
        names.append(end(place, length))
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
    """JSON's keys are text; they are put in the order of the numbers they spell."""
    if not isinstance(table, Mapping):
        return {}
    return dict(sorted((int(key), value) for key, value in table.items() if str(key).isdecimal()))
