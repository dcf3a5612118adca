"""fit.json: every law that was fitted to a table, with all that predicting needs; no model code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError
from parcae.files import FileError, read_sealed, write_sealed
from parcae.laws.bootstrap import Draws, interval
from parcae.laws.forms import LAWS, Law
from parcae.laws.isoflop import PowerLaw
from parcae.laws.quality import Quality
from parcae.laws.shape import Shape
from parcae.recipe import suggest

FORMAT = 1
FIT_FILE = "fit.json"
DIGITS = 9
"""Of a draw's parameters: far below the spread of the draws."""
AGAIN = "Write it anew with `parcae fit`."


@dataclass(frozen=True)
class FittedLaw:
    """A law, its parameters, and the parameters of every bootstrap replica."""

    law: Law
    values: dict[str, float]
    draws: Draws | None = None
    quality: Quality | None = None
    frozen: tuple[str, ...] = ()
    converged: float = 1.0
    """Share of the starts followed to the end that converged."""
    agreeing: float = 1.0
    """Share of those that found the same optimum."""
    left_out: dict[float, float] = field(default_factory=dict)
    """By budget: mean relative error of the same law fitted without it."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        if self.draws is None:
            return {}
        return {name: interval(values) for name, values in self.draws.values.items()}


@dataclass(frozen=True)
class FittedModel:
    """What is known about one model."""

    model: str
    shape: Shape
    spans: dict[str, tuple[float, float]]
    """Lowest and highest mean_loops, tokens, flops and test_loops that laws have learnt from."""
    laws: dict[str, FittedLaw]
    """By name of the law; `/frozen` behind it where the training law was held."""
    power_laws: dict[str, PowerLaw]
    """`loops` and `tokens`: optima of the parabolas against FLOPs."""
    warnings: list[str]
    not_fitted: dict[str, str]
    """By law: why not."""

    def law(self, *names: str) -> FittedLaw:
        """The first of these that was fitted."""
        for name in names:
            if name in self.laws:
                return self.laws[name]
        reason = next((self.not_fitted[name] for name in names if name in self.not_fitted), "")
        raise ConfigError(
            f"{self.model}: the law {names[0]!r} was not fitted. {reason or AGAIN}".strip()
        )


def write_fit(path: str | Path, tree: dict[str, Any]) -> None:
    write_sealed(path, plain({"format": FORMAT, **tree}))


def read_fit(path: str | Path) -> dict[str, FittedModel]:
    """The models of a fit.json, or of the folder it lies in, by name."""
    path = Path(path)
    path = path / FIT_FILE if path.is_dir() else path
    tree = read_sealed(path, AGAIN)
    if tree.get("format") != FORMAT:
        raise FileError(f"{path}: of format {tree.get('format')!r}, not {FORMAT}. {AGAIN}")
    try:
        return {name: _model(name, one["fitted"]) for name, one in tree["models"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path}: not a fit ({type(error).__name__}: {error}). {AGAIN}") from None


def choose_model(models: Mapping[str, FittedModel], name: str | None) -> FittedModel:
    """The one asked for, or the only one with a law."""
    if name is not None:
        if name not in models:
            raise ConfigError(f"--model: no {name!r} in the fit. {suggest(name, list(models))}")
        return models[name]
    with_laws = [one for one in models.values() if one.laws]
    if len(with_laws) != 1:
        listed = ", ".join(one.model for one in with_laws) or "none"
        raise ConfigError(f"--model: the fit holds several models: {listed}. Name one.")
    return with_laws[0]


def _model(name: str, tree: dict[str, Any]) -> FittedModel:
    shape = dict(tree["shape"])
    measured = {float(loops): tuple(pair) for loops, pair in shape.pop("measured").items()}
    return FittedModel(
        model=name,
        shape=Shape(**shape, measured=measured),
        spans={key: tuple(span) for key, span in tree["spans"].items()},
        laws={key: _law(one) for key, one in tree["laws"].items()},
        power_laws={
            key: PowerLaw(
                one["factor"],
                one["exponent"],
                tuple(one["budgets"]),
                tuple((factor, exponent) for factor, exponent in one.get("replicas", ())),
            )
            for key, one in tree["power_laws"].items()
        },
        warnings=list(tree["warnings"]),
        not_fitted=dict(tree["not_fitted"]),
    )


def _law(tree: dict[str, Any]) -> FittedLaw:
    law = LAWS[tree["law"]]
    values = {name: float(tree["values"][name]) for name in law.parameters}
    draws = None
    if tree["draws"] is not None:
        columns = {
            name: np.array(tree["draws"]["values"][name], dtype=float) for name in law.parameters
        }
        draws = Draws(columns, tree["draws"]["converged"])
    return FittedLaw(
        law=law,
        values=values,
        draws=draws,
        quality=None if tree["quality"] is None else Quality(**tree["quality"]),
        frozen=tuple(tree["frozen"]),
        converged=tree["converged"],
        agreeing=tree["agreeing"],
        left_out={float(budget): error for budget, error in tree["left_out"].items()},
    )


def plain(value: Any) -> Any:
    """As JSON holds it: laws by name, arrays as lists, what is not finite as null."""
    if isinstance(value, Law):
        return value.name
    if isinstance(value, FittedLaw):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {**fields, "formula": value.law.formula, "intervals": plain(value.intervals())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(float(f"{one:.{DIGITS}g}")) for one in value.ravel().tolist()]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value


def _key(key: Any) -> str:
    return f"{key:g}" if isinstance(key, float) else str(key)
