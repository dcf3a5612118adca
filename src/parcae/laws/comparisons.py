"""What the paper's tables compare: looping with fixed depth, with Transformers, law with law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from parcae.laws.design import Design, is_transformer
from parcae.laws.fit import Fit
from parcae.laws.fit_file import FittedLaw
from parcae.laws.forms import UNIFIED
from parcae.laws.objective import huber
from parcae.laws.optimum import frontier, training_part
from parcae.laws.points import Points
from parcae.laws.predict import Estimate, estimate
from parcae.laws.quality import relative_errors
from parcae.laws.table import Table

SCORES = ("loss", "core", "core_extended")
SAME_TOKENS = 0.01


@dataclass(frozen=True)
class FixedDepth:
    """One budget: the best looped run, what the law expects of the best, and the run at mu = 1."""

    budget: float
    best_loops: float
    best_loss: float
    fixed_loss: float | None
    law_loops: Estimate | None
    law_loss: Estimate | None


def against_fixed_depth(design: Design, training: FittedLaw | None) -> list[FixedDepth]:
    rows = []
    grid, base, shape = design.training(), design.baselines(), design.shape
    for budget in design.budgets:
        here = grid & (design.budget == budget)
        if not here.any():
            continue
        best = np.flatnonzero(here)[design.points.loss[here].argmin()]
        fixed = design.points.loss[base & (design.budget == budget)]
        loops = loss = None
        if training is not None:
            loops = estimate(training, lambda v, b=budget: frontier(v, shape, b)[0])
            loss = estimate(training, lambda v, b=budget: frontier(v, shape, b)[1])
        rows.append(
            FixedDepth(
                budget=float(budget),
                best_loops=float(design.points.mean_loops[best]),
                best_loss=float(design.points.loss[best]),
                fixed_loss=float(fixed.min()) if len(fixed) else None,
                law_loops=loops,
                law_loss=loss,
            )
        )
    return rows


@dataclass(frozen=True)
class HeldOut:
    """A run that no law has seen."""

    mean_loops: float
    tokens: float
    measured: float
    predicted: Estimate
    """At T = mu, by the training law."""
    error: float
    """Relative."""
    curve_error: float | None
    """Mean over T of the unified law's relative error; None for runs with one T."""
    oracle_error: float | None
    """The same with the measured loss at T = mu in place of the training law."""


def held_out(design: Design, training: FittedLaw, unified: FittedLaw | None) -> list[HeldOut]:
    rows = []
    for curve in design.curves(design.held_out(), 1):
        at_mu = curve.test_loops == np.round(curve.mean_loops)
        if not at_mu.any():
            continue
        nominal = curve.take(at_mu)
        loss = estimate(
            training,
            lambda v, at=nominal: np.atleast_2d(training.law.predict(training_part(v), at))[:, 0],
        )
        measured = float(nominal.loss[0])
        whole = oracle = None
        if unified is not None and len(curve) > 1:
            predicted = unified.law.predict(unified.values, curve)
            whole = float(relative_errors(predicted, curve.loss).mean())
            near = oracle_curve(unified, measured, curve)
            oracle = float(relative_errors(near, curve.loss).mean())
        rows.append(
            HeldOut(
                mean_loops=float(curve.mean_loops[0]),
                tokens=float(curve.tokens[0]),
                measured=measured,
                predicted=loss,
                error=abs(loss.value / measured - 1),
                curve_error=whole,
                oracle_error=oracle,
            )
        )
    return rows


def oracle_curve(unified: FittedLaw, loss_at_mu: float, curve: Points) -> np.ndarray:
    """The unified law's decay on top of the measured loss at T = mu."""
    floor = UNIFIED.predict({**unified.values, "Z": 1e-300}, curve)
    return loss_at_mu + unified.law.predict(unified.values, curve) - floor


@dataclass(frozen=True)
class Conditioning:
    """One way to let the decay depend on mu: total Huber losses, as the paper's table has them."""

    formula: str
    grid: float
    """All parameters fitted together."""
    grid_frozen: float
    """With the training law held, only (Z, z[, gamma]) fitted."""
    held_out: float | None
    held_out_frozen: float | None
    gamma: float | None


def conditioning(joint: Fit, frozen: Fit, unseen: Sequence[Points]) -> Conditioning:
    def total(fit: Fit) -> float | None:
        if not unseen:
            return None
        return float(sum(huber(np.log(fit.predict(curve) / curve.loss)).sum() for curve in unseen))

    return Conditioning(
        formula=joint.law.formula.split(" + ")[-1],
        grid=joint.objective,
        grid_frozen=frozen.objective,
        held_out=total(joint),
        held_out_frozen=total(frozen),
        gamma=joint.values.get("gamma"),
    )


@dataclass(frozen=True)
class GapShare:
    """How much of the way to the next larger Transformer a looped model goes."""

    looped: str
    transformer: str
    larger: str
    score: str
    share: float


def gap_shares(table: Table) -> list[GapShare]:
    """For every looped model and Transformer of one size, trained on the same tokens."""
    sizes = {name: _best_row(table, name, None)[1] for name in table.models if is_transformer(name)}
    transformers = sorted(
        (name for name, size in sizes.items() if np.isfinite(size)), key=lambda name: sizes[name]
    )
    found = []
    for smaller, larger in pairwise(transformers):
        size = smaller.partition("-")[2]
        for looped in table.models:
            if is_transformer(looped) or looped.partition("-")[2] != size:
                continue
            tokens = float(table["tokens"][_best_row(table, smaller, None)[0]])
            places = [
                _best_row(table, looped, tokens)[0],
                _best_row(table, smaller, None)[0],
                _best_row(table, larger, None)[0],
            ]
            if places[0] < 0:
                continue
            for score in SCORES:
                if score not in table:
                    continue
                mine, small, large = (float(table[score][place]) for place in places)
                if np.isfinite([mine, small, large]).all() and small != large:
                    share = (mine - small) / (large - small)
                    found.append(GapShare(looped, smaller, larger, score, share))
    return found


def _best_row(table: Table, model: str, tokens: float | None) -> tuple[int, float]:
    """The row of lowest loss at T = mu (with about these tokens), and N there; -1 if there is none.
    Where scores were measured, among the rows that have them."""
    loops = np.maximum(1, np.round(table["mean_loops"]))
    wanted = np.array([name == model for name in table["model"].tolist()])
    wanted &= table["test_loops"] == loops
    if tokens is not None:
        wanted &= np.abs(table["tokens"] / tokens - 1) < SAME_TOKENS
    if "core" in table and np.isfinite(table["core"][wanted]).any():
        wanted &= np.isfinite(table["core"])
    places = np.flatnonzero(wanted)
    if not len(places):
        return -1, float("nan")
    best = int(places[table["loss"][places].argmin()])
    return best, float(table["effective_params"][best])
