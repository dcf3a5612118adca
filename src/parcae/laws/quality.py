"""How good a fit is, and what it does not know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parcae.laws.bootstrap import Draws, interval
from parcae.laws.fit import Fit, Search, fit, objective
from parcae.laws.forms import Law
from parcae.laws.points import Points

WIDE = 10.0
"""A floor or an exponent whose interval spans a factor above this is not identified."""
NEGLIGIBLE = 1e-4
"""A term that nowhere makes up this share of the loss has no visible parameters."""
FLAT = 1e12
"""Condition of the standardised Hessian beyond which double precision sees a flat valley."""
FEW_CONVERGED = 0.9


@dataclass(frozen=True)
class Quality:
    """Relative errors are shares of the loss: 0.01 is one per cent."""

    points: int
    objective: float
    r_squared: float
    mean_error: float
    max_error: float
    condition: float
    """Of the Hessian in standardised coordinates."""


def relative_errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.abs(predicted / measured - 1)


def quality(found: Fit) -> Quality:
    residuals = found.residuals()
    logs = np.log(found.points.loss)
    errors = relative_errors(found.predict(found.points), found.points.loss)
    return Quality(
        points=len(found.points),
        objective=found.objective,
        r_squared=float(1 - (residuals**2).sum() / ((logs - logs.mean()) ** 2).sum()),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        condition=condition(found),
    )


def condition(found: Fit) -> float:
    frozen = {name: found.values[name] for name in found.frozen}
    problem = objective(found.law, found.points, np.inf, frozen)
    theta = problem.bound.from_plain(found.law.coordinates(found.values))[list(problem.free)]
    hessian = problem.curvature(theta)[:, :, 0]
    size = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    scaled = hessian / np.outer(size, size)
    if not np.isfinite(scaled).all():  # a term that explains nothing at all
        return 1e300
    return float(min(np.linalg.cond(scaled), 1e300))


def leave_one_budget_out(
    law: Law, points: Points, budget: np.ndarray, search: Search
) -> dict[float, float]:
    """By budget: the mean relative error at its runs of a law that has not seen them."""
    errors = {}
    if len(np.unique(budget)) < 3:
        return errors
    for one in np.unique(budget):
        left = points.take(budget == one)
        rest = points.take(budget != one)
        if len(rest) > len(law.parameters):
            predicted = fit(law, rest, search).predict(left)
            errors[float(one)] = float(relative_errors(predicted, left.loss).mean())
    return errors


def warnings(found: Fit, draws: Draws | None) -> list[str]:
    """What a reader of the parameters must know, in words."""
    said = []
    name = found.law.name
    for decay in found.law.decays:
        share = _largest_share(found, decay.parameters)
        if share < NEGLIGIBLE:
            said.append(
                f"{name}: the term {decay.amplitude} is nowhere above {share:.1g} of the loss, so "
                f"{decay.amplitude} and {decay.rate} are not identified."
            )
    floor = found.law.floor
    if floor is not None and found.values[floor] < NEGLIGIBLE * found.points.loss.min():
        said.append(
            f"{name}: {floor} went to zero: these runs are too far from any floor to tell it, and "
            "the other terms took its place. Trust predictions near the grid, not the parameters."
        )
    if draws is not None:
        amplitudes = {decay.amplitude for decay in found.law.decays}
        for parameter in found.law.parameters:
            if parameter in amplitudes or parameter in (*found.frozen, *found.law.exponents):
                continue
            low, high = interval(draws.values[parameter])
            if high > WIDE * low:
                said.append(
                    f"{name}: {parameter} is not identified: its interval runs from {low:.3g} to "
                    f"{high:.3g}. Trust predictions within the grid, not the parameter."
                )
        if draws.converged < FEW_CONVERGED:
            said.append(
                f"{name}: only {draws.converged:.0%} of the replicas converged; its intervals are "
                "rough."
            )
    if (number := condition(found)) > FLAT:
        said.append(
            f"{name}: the optimum is flat (condition {number:.1g}): the points do not fix all "
            "parameters."
        )
    if found.converged < FEW_CONVERGED:
        said.append(f"{name}: only {found.converged:.0%} of the starts converged.")
    return said


def _largest_share(found: Fit, parameters: tuple[str, ...]) -> float:
    """Of one term in the predicted losses."""
    bound = found.law.bind(found.points)
    losses, terms = bound.forward(found.law.coordinates(found.values))
    places = [decay.parameters for decay in found.law.decays]
    return float((terms[places.index(parameters)] / losses).max())
