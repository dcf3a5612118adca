"""Questions a fit can answer, with intervals: how deep, how long, how good, how much.

recommend(model, 1e19)              loops and tokens for a budget, and the loss they reach
loss_at(model, 8, 11.2e9, 4)        the loss of a run, at any T
loops_worth(model, 8, 11.2e9, 1e-3) the T from which more loops no longer help
flops_needed(model, 2.9)            what a loss costs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from parcae.config import ConfigError
from parcae.laws.bootstrap import interval
from parcae.laws.fit_file import FittedLaw, FittedModel
from parcae.laws.forms import TRAINING
from parcae.laws.optimum import Values, flops_for, frontier, training_part
from parcae.laws.shape import DEEPEST


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float | None = None
    high: float | None = None
    """The middle 90 % of the bootstrap; None where the law has no replicas."""


@dataclass(frozen=True)
class ByParabolas:
    """What the power laws through the parabolas' optima say."""

    loops: Estimate
    tokens: Estimate


@dataclass(frozen=True)
class Recommendation:
    flops: float
    loops: Estimate
    """Where the law is lowest, a real number."""
    tokens: Estimate
    loss: Estimate
    whole_loops: int
    """The better of the whole numbers next to it; with its tokens and loss."""
    whole_tokens: float
    whole_loss: float
    by_parabolas: ByParabolas | None
    notes: list[str]


@dataclass(frozen=True)
class Answer:
    """An estimate, and what to know about it."""

    estimate: Estimate
    notes: list[str]


def recommend(model: FittedModel, flops: float) -> Recommendation:
    _positive("flops", flops)
    fitted, shape = model.law("training", "unified"), model.shape

    def loops(values: Values) -> np.ndarray:
        return frontier(values, shape, flops)[0]

    best = estimate(fitted, loops)
    whole, loss = _best_whole(fitted, model, flops, best.value)
    parabolas = None
    if {"loops", "tokens"} <= set(model.power_laws):
        parabolas = ByParabolas(*(_by_power_law(model, n, flops) for n in ("loops", "tokens")))
    return Recommendation(
        flops=flops,
        loops=best,
        tokens=estimate(fitted, lambda values: flops / shape.flops_per_token(loops(values))),
        loss=estimate(fitted, lambda values: frontier(values, shape, flops)[1]),
        whole_loops=whole,
        whole_tokens=flops / _cost(model, whole),
        whole_loss=loss,
        by_parabolas=parabolas,
        notes=[*_beyond(model, flops=flops, mean_loops=best.value), *_at_the_end(best.value)],
    )


def _by_power_law(model: FittedModel, name: str, flops: float) -> Estimate:
    law = model.power_laws[name]
    ends = interval(law.at(flops)) if law.replicas else (None, None)
    return Estimate(float(law(flops)), *ends)


def loss_at(
    model: FittedModel, loops: float, tokens: float, test_loops: float | None = None
) -> Answer:
    _positive("tokens", tokens)
    _at_least_one("loops", loops)
    if test_loops is not None:
        _at_least_one("test-loops", test_loops)
    names = ("training", "unified") if test_loops is None else ("unified",)
    fitted = model.law(*names)
    at = model.shape.points(loops, tokens, test_loops)
    law = TRAINING if test_loops is None else fitted.law

    def loss(values: Values) -> np.ndarray:
        chosen = {name: values[name] for name in law.parameters}
        return np.atleast_2d(law.predict(chosen, at))[:, 0]

    asked = {"mean_loops": loops, "tokens": tokens}
    asked |= {} if test_loops is None else {"test_loops": test_loops}
    return Answer(estimate(fitted, loss), _beyond(model, **asked))


def loops_worth(model: FittedModel, loops: float, tokens: float, tolerance: float) -> Answer:
    """The T at which the loss is within a share `tolerance` of what endless loops would reach."""
    _positive("tolerance", tolerance)
    _at_least_one("loops", loops)
    _positive("tokens", tokens)
    fitted = model.law("unified")
    at = model.shape.points(loops, tokens)

    def depth(values: Values) -> np.ndarray:
        floor = np.atleast_2d(TRAINING.predict(training_part(values), at))[:, 0]
        excess = np.atleast_1d(values["Z"]) / (tolerance * floor)
        return np.maximum(1.0, loops * np.log(excess) / np.atleast_1d(values["z"]))

    found = estimate(fitted, depth)
    return Answer(found, _beyond(model, mean_loops=loops, tokens=tokens, test_loops=found.value))


def flops_needed(model: FittedModel, loss: float) -> Answer:
    _positive("loss", loss)
    fitted, shape = model.law("training", "unified"), model.shape
    found = estimate(fitted, lambda values: flops_for(values, shape, loss)[0])
    if not np.isfinite(found.value):
        _, lowest = frontier(fitted.values, shape, 1e60)
        raise ConfigError(
            f"--loss: {model.model} never reaches {loss:g}: with endless data and {DEEPEST:g} "
            f"loops its law ends at {lowest[0]:.4f}. Ask for more, or fit a larger model."
        )
    loops = float(flops_for(fitted.values, shape, loss)[1][0])
    return Answer(found, _beyond(model, flops=found.value, mean_loops=loops))


def estimate(fitted: FittedLaw, what: Callable[[Values], np.ndarray]) -> Estimate:
    """A quantity of the fit, with the interval of the same quantity over its replicas."""
    value = float(np.atleast_1d(what(fitted.values))[0])
    if fitted.draws is None:
        return Estimate(value)
    return Estimate(value, *interval(np.atleast_1d(what(fitted.draws.values))))


def _best_whole(
    fitted: FittedLaw, model: FittedModel, flops: float, loops: float
) -> tuple[int, float]:
    near = sorted({max(1, int(np.floor(loops))), int(np.ceil(loops))})
    tokens = [flops / _cost(model, one) for one in near]
    at = model.shape.points(near, tokens)
    losses = TRAINING.predict(training_part(fitted.values), at)
    best = int(losses.argmin())
    return near[best], float(losses[best])


def _cost(model: FittedModel, loops: int) -> float:
    """FLOPs per token: as measured where there were runs, else on the line through them."""
    measured = model.shape.measured.get(float(loops))
    return float(model.shape.flops_per_token(loops)) if measured is None else measured[1]


def _beyond(model: FittedModel, **asked: float) -> list[str]:
    """A note for everything that lies outside of what the laws have learnt from."""
    notes = []
    for name, value in asked.items():
        low, high = model.spans[name]
        if not low * 0.999 <= value <= high * 1.001:
            notes.append(
                f"{name} {value:.4g} lies outside the runs ({low:.4g} to {high:.4g}): "
                "an extrapolation."
            )
    return notes


def _at_the_end(loops: float) -> list[str]:
    if loops > 0.98 * DEEPEST:
        return [f"the law still falls at {DEEPEST:g} loops: it knows no optimum here."]
    if loops < 1.005:
        return ["the law is lowest without looping: this budget is too small for it."]
    return []


def _at_least_one(name: str, value: float) -> None:
    if not (np.isfinite(value) and value >= 1):
        raise ConfigError(f"--{name}: {value:g} loops are not possible. Use 1 or more.")


def _positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"--{name}: {value:g} is not a positive number. Use one, such as 1e19.")
