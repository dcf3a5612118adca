"""Everything that can be learnt from a table of runs, in one go.

    study = run_study(read_table("runs.csv"))
    study.models["parcae-140m"].fitted.laws["training"].values

What the data does not carry is not fitted, and `not_fitted` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parcae.laws import forms as laws
from parcae.laws import isoflop as parabola
from parcae.laws import test_time
from parcae.laws.bootstrap import LEVEL, bootstrap, interval
from parcae.laws.comparisons import (
    Conditioning,
    FixedDepth,
    GapShare,
    HeldOut,
    against_fixed_depth,
    conditioning,
    gap_shares,
    held_out,
)
from parcae.laws.design import Design, design_of, is_transformer
from parcae.laws.fit import Fit, FitError, Search, fit
from parcae.laws.fit_file import FittedLaw, FittedModel
from parcae.laws.quality import leave_one_budget_out, quality, warnings
from parcae.laws.table import Table
from parcae.laws.test_time import CurveFit, FormScore, Recovery

Step = Callable[[str], None]
"""Told what comes next, for a display of progress."""
STEPS = 5
"""Of each model."""


@dataclass(frozen=True)
class Effort:
    """How hard to look; the defaults are the paper's numbers of starts."""

    starts: int = 500
    unified_starts: int = 1000
    draws: int = 200
    """Bootstrap replicas; 0 for none."""
    halving: bool = True
    seed: int = 0

    def search(self, starts: int) -> Search:
        return Search(starts=starts, seed=self.seed, halving=self.halving)


@dataclass
class ModelStudy:
    """One model: what was fitted, and what follows."""

    design: Design
    laws: dict[str, FittedLaw] = field(default_factory=dict)
    power_laws: dict[str, parabola.PowerLaw] = field(default_factory=dict)
    parabolas: dict[str, list[parabola.Parabola]] = field(default_factory=dict)
    forms: list[FormScore] = field(default_factory=list)
    curve_fits: list[CurveFit] = field(default_factory=list)
    recovery: Recovery | None = None
    conditionings: list[Conditioning] = field(default_factory=list)
    fixed_depth: list[FixedDepth] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_fitted: dict[str, str] = field(default_factory=dict)

    @property
    def fitted(self) -> FittedModel:
        seen = self.design.points.take(self.design.learns)
        flops = self.design.flops[self.design.learns]
        columns = {"mean_loops": seen.mean_loops, "tokens": seen.tokens, "flops": flops}
        columns["test_loops"] = seen.test_loops
        return FittedModel(
            model=self.design.model,
            shape=self.design.shape,
            spans={k: (float(v.min()), float(v.max())) for k, v in columns.items() if len(v)},
            laws=self.laws,
            power_laws=self.power_laws,
            warnings=self.warnings,
            not_fitted=self.not_fitted,
        )

    @property
    def power_intervals(self) -> dict[str, tuple[float, float]]:
        """Of the exponents."""
        return {n: interval(law.exponents()) for n, law in self.power_laws.items() if law.replicas}

    @contextmanager
    def trying(self, *names: str) -> Iterator[None]:
        """What the data cannot carry becomes a reason instead of a fit."""
        try:
            yield
        except FitError as error:
            for name in names:
                self.not_fitted[name] = str(error)


@dataclass(frozen=True)
class Study:
    table: Table
    models: dict[str, ModelStudy]
    gaps: list[GapShare]
    effort: Effort

    def tree(self) -> dict[str, Any]:
        """What fit.json holds."""
        return {
            "data": {
                "source": self.table.source,
                "sha256": self.table.sha256,
                "rows": len(self.table),
            },
            "effort": self.effort,
            "level": LEVEL,
            "models": {name: _model_tree(one) for name, one in self.models.items()},
            "gap_shares": self.gaps,
        }


def run_study(table: Table, effort: Effort | None = None, step: Step = lambda _: None) -> Study:
    effort = effort or Effort()
    models = {}
    for name in table.models:
        if not is_transformer(name):
            models[name] = study_model(design_of(table, name), effort, step)
    if not models:
        raise FitError(f"{table.source}: no looped models, only Transformers. Add looped runs.")
    if not any(one.laws or one.forms or one.parabolas for one in models.values()):
        reasons = dict.fromkeys(text for one in models.values() for text in one.not_fitted.values())
        raise FitError(f"{table.source}: no law can be fitted. {' '.join(reasons)}")
    return Study(table, models, gap_shares(table), effort)


def study_model(design: Design, effort: Effort, step: Step) -> ModelStudy:
    study = ModelStudy(design)
    step(f"{design.model}: parabolas")
    _parabolas(study, effort)
    step(f"{design.model}: training law")
    with study.trying("training"):
        _training(study, effort)
    step(f"{design.model}: test-time curves")
    with study.trying("test-time"):
        _test_time(study)
    step(f"{design.model}: unified law")
    with study.trying("unified"):
        _unified(study, effort)
    step(f"{design.model}: comparisons")
    if design.learns.any():
        study.fixed_depth = against_fixed_depth(design, study.laws.get("training"))
    if "training" in study.laws:
        study.held_out = held_out(design, study.laws["training"], study.laws.get("unified"))
    return study


def _training(study: ModelStudy, effort: Effort) -> None:
    design = study.design
    design.check_training()
    rows = design.training()
    found = fit(laws.TRAINING, design.points.take(rows), effort.search(effort.starts))
    left = leave_one_budget_out(
        laws.TRAINING, found.points, design.budget[rows], effort.search(effort.starts)
    )
    study.laws["training"] = _keep(study, found, effort, left)


def _unified(study: ModelStudy, effort: Effort) -> None:
    design = study.design
    design.check_training()
    design.check_test_time()
    points = design.points.take(design.learns)
    if len(np.unique(points.test_loops)) < 3:
        raise FitError(
            f"{design.model}: the grid was measured at fewer than three test_loops, so the decay "
            "with T cannot be told. Measure its runs at more."
        )
    if "training" not in study.laws:
        raise FitError(study.not_fitted["training"])
    training = study.laws["training"].values
    search = effort.search(effort.unified_starts)
    unseen = design.curves(design.held_out(), 2)
    for law in laws.CONDITIONINGS:
        joint, frozen = fit(law, points, search), fit(law, points, search, frozen=training)
        study.conditionings.append(conditioning(joint, frozen, unseen))
        best = law is laws.UNIFIED
        study.laws[law.name] = _keep(study, joint, effort if best else replace(effort, draws=0))
        study.laws[f"{law.name}/frozen"] = _keep(study, frozen, replace(effort, draws=0))


def _keep(
    study: ModelStudy, found: Fit, effort: Effort, left_out: dict[float, float] | None = None
) -> FittedLaw:
    draws = bootstrap(found, effort.draws, effort.seed) if effort.draws else None
    if draws is not None:
        study.warnings += warnings(found, draws)
    return FittedLaw(
        law=found.law,
        values=found.values,
        draws=draws,
        quality=quality(found),
        frozen=found.frozen,
        converged=found.converged,
        agreeing=found.agreeing,
        left_out=left_out or {},
    )


def _test_time(study: ModelStudy) -> None:
    design = study.design
    design.check_test_time()
    listed = design.curves(np.ones(len(design.points), dtype=bool), test_time.FEWEST)
    if not listed:
        raise FitError(
            f"{design.model}: no run was measured at {test_time.FEWEST} or more test_loops, which "
            "a curve of three parameters needs. Measure at more."
        )
    kept, said = test_time.usable(listed)
    study.warnings += said
    if not kept:
        raise FitError(f"{design.model}: no curve changes with T. Check how losses were measured.")
    study.forms, study.curve_fits = test_time.compare_forms(kept)
    study.recovery = test_time.recovery(study.curve_fits)


def _parabolas(study: ModelStudy, effort: Effort) -> None:
    design = study.design
    rows = design.training()
    points, budget = design.points.take(rows), design.budget[rows]
    study.warnings += design.mixed_settings()
    for name, where in (("loops", points.mean_loops), ("tokens", points.tokens)):
        with study.trying(f"parabolas in {name}"):
            design.check_losses()
            found = parabola.fit_parabolas(where, points.loss, budget)
            study.parabolas[name] = found
            if name == "loops":
                study.warnings += _edges(found)
            with study.trying(f"power law of {name}"):
                law = parabola.fit_power_law(found)
                if effort.draws:
                    drawn = parabola.replicas(
                        found, where, points.loss, budget, effort.draws, effort.seed
                    )
                    law = parabola.with_replicas(law, drawn)
                    study.warnings += _doubtful(name, law)
                study.power_laws[name] = law


def _doubtful(name: str, law: parabola.PowerLaw) -> list[str]:
    if law.replicas:
        return []
    return [
        f"power law of {name}: most bootstrap replicas have no two optima within the runs, so it "
        "has no interval. Widen the range of mean_loops."
    ]


def _edges(found: list[parabola.Parabola]) -> list[str]:
    said = []
    for one in found:
        if not one.is_convex:
            said.append(
                f"parabola at {one.budget:.3g} FLOPs opens downwards: its runs show no optimum."
            )
        elif not one.is_inside:
            side = "below" if one.optimum < one.low else "above"
            said.append(
                f"parabola at {one.budget:.3g} FLOPs: its lowest point lies {side} the grid, which "
                f"runs from {one.low:g} to {one.high:g} loops. It is left out of the power law; "
                "train beyond the grid to know it."
            )
    return said


def _model_tree(one: ModelStudy) -> dict[str, Any]:
    return {
        "fitted": one.fitted,
        "parabolas": one.parabolas,
        "power_law_intervals": one.power_intervals,
        "test_time_forms": one.forms,
        "test_time_curves": [
            {
                "mean_loops": float(fitted.curve.mean_loops[0]),
                "tokens": float(fitted.curve.tokens[0]),
                "values": fitted.values,
            }
            for fitted in one.curve_fits
        ],
        "recovery": one.recovery,
        "conditionings": one.conditionings,
        "fixed_depth": one.fixed_depth,
        "held_out": one.held_out,
    }
