"""Answers from fitted laws, with intervals: `parcae.predict`.

parcae.predict(fit, flops=1e19)                           loops and tokens for a FLOP budget
parcae.predict(fit, loops=8, tokens=11e9, test_loops=4)   the loss of a run, at any T
parcae.predict(fit, loops=8, tokens=11e9, tolerance=1e-3) the T from which loops hardly help
parcae.predict(fit, loss=2.9)                             the FLOPs that reach a loss
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError, require
from parcae.laws.bootstrap import Estimate, LawResult, Values, estimate, interval
from parcae.laws.fit import REMEDY, FitResult, ModelLaws, read_fit, to_plain
from parcae.laws.forms import TRAINING
from parcae.laws.isoflop import flops_for, frontier, optimum, training_part
from parcae.laws.model_runs import MAX_SEARCHED_LOOPS
from parcae.recipe import suggest
from parcae.schema import require_range
from parcae.tables import ShownAsTable


@dataclass(frozen=True)
class PowerLawOptimum:
    """Loops and tokens by the power laws through the optima of the parabolas."""

    loops: Estimate
    tokens: Estimate


@dataclass(frozen=True)
class Recommendation:
    """The best use of a FLOP budget."""

    flops: float
    loops: Estimate
    """The minimum of the law, a real number; half of the loops have gradient."""
    tokens: Estimate
    loss: Estimate
    whole_loops: int
    """The best whole number near it, with its tokens and loss; an odd one costs one more loop with
    gradient."""
    whole_tokens: float
    whole_loss: float
    by_parabolas: PowerLawOptimum | None
    notes: list[str]


@dataclass(frozen=True)
class Answer:
    """An estimate, and notes such as that it is an extrapolation."""

    estimate: Estimate
    notes: list[str]


@dataclass(frozen=True)
class Prediction(ShownAsTable):
    """The answers of `predict`; None for what was not asked."""

    model: str
    recommendation: Recommendation | None = None
    """For `flops`."""
    flops: Answer | None = None
    """For `loss`: the training FLOPs that reach it."""
    loss: Answer | None = None
    """For `loops` and `tokens` (and `test_loops`): the loss of that run."""
    saturation_loops: Answer | None = None
    """For `tolerance`: the T at which the loss is within this share of its limit."""

    @property
    def notes(self) -> list[str]:
        """The notes of all answers, without repeats."""
        answers = (self.recommendation, self.flops, self.loss, self.saturation_loops)
        notes = [note for answer in answers if answer is not None for note in answer.notes]
        return list(dict.fromkeys(notes))

    def table(self) -> list[dict[str, Any]]:
        """One row per quantity, with its 90 % interval."""
        estimates: dict[str, Estimate | None] = {}
        if best := self.recommendation:
            estimates |= {"loops": best.loops, "tokens": best.tokens, "loss": best.loss}
            if best.by_parabolas:
                estimates["loops by power law"] = best.by_parabolas.loops
                estimates["tokens by power law"] = best.by_parabolas.tokens
        names = {
            "flops needed": self.flops,
            "loss of the run": self.loss,
            "test loops": self.saturation_loops,
        }
        estimates |= {name: answer.estimate for name, answer in names.items() if answer}
        return [
            {"model": self.model, "quantity": name, **to_plain(value)}
            for name, value in estimates.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The answers that were asked for, as JSON types."""
        return {name: value for name, value in to_plain(self).items() if value is not None}


def predict(
    fit: FitResult | Mapping[str, ModelLaws] | str | Path,
    *,
    model: str | None = None,
    flops: float | None = None,
    loss: float | None = None,
    loops: float | None = None,
    tokens: float | None = None,
    test_loops: float | None = None,
    tolerance: float | None = None,
) -> Prediction:
    """Answer questions from a fit: the result of `parcae.fit`, or a path to fit.json or its folder.

    Give `flops` (a training budget), `loss` (a loss to reach), or `loops` and `tokens` (a run),
    or several of them. `test_loops` and `tolerance` refer to the run. `model` may be omitted if
    only one model has laws.
    """
    models = fit.models if isinstance(fit, FitResult) else fit
    models = models if isinstance(models, Mapping) else read_fit(models)
    run = None if loops is None or tokens is None else (loops, tokens)
    for name, value, other in (("loops", loops, tokens), ("tokens", tokens, loops)):
        message = "loops and tokens describe a run together"
        require(value is None or other is not None, name, message, "Give both, or none.")
    require(
        not (flops is None and loss is None and run is None),
        "predict",
        "no question given",
        "Give `flops`, `loss`, or `loops` with `tokens`.",
    )
    for name, value in {"test_loops": test_loops, "tolerance": tolerance}.items():
        remedy = "Give `loops` and `tokens`."
        require(value is None or run is not None, name, "needs a run", remedy)
    laws = choose_model(models, model)
    return Prediction(
        model=laws.model,
        recommendation=None if flops is None else recommend(laws, flops),
        flops=None if loss is None else flops_needed(laws, loss),
        loss=None if run is None else loss_at(laws, *run, test_loops),
        saturation_loops=None
        if run is None or tolerance is None
        else saturation_loops(laws, *run, tolerance),
    )


def choose_model(models: Mapping[str, ModelLaws], name: str | None) -> ModelLaws:
    """The model of this name, or the only one with laws."""
    if name is not None:
        if name not in models:
            raise ConfigError(f"model: no {name!r} in the fit. {suggest(name, list(models))}")
        return models[name]
    with_laws = [model for model in models.values() if model.laws]
    if not with_laws:
        reasons = dict.fromkeys(r for model in models.values() for r in model.not_fitted.values())
        raise ConfigError(f"fit: it has no law of any model. {' '.join(reasons) or REMEDY}")
    if len(with_laws) > 1:
        listed = ", ".join(model.model for model in with_laws)
        raise ConfigError(f"model: the fit has laws for several models: {listed}. Name one.")
    return with_laws[0]


def recommend(model: ModelLaws, flops: float) -> Recommendation:
    """The best loops and tokens for a training budget."""
    require_range("flops", flops, above=0)
    law = model.law("training")
    best = optimum(law, model.cost, flops)
    whole, loss = _best_whole(law, model, flops, best.loops.value)
    parabolas = None
    if {"loops", "tokens"} <= set(model.power_laws):
        parabolas = PowerLawOptimum(
            *(_by_power_law(model, name, flops) for name in ("loops", "tokens"))
        )
    return Recommendation(
        flops=flops,
        loops=best.loops,
        tokens=best.tokens,
        loss=best.loss,
        whole_loops=whole,
        whole_tokens=flops / float(model.cost.flops_per_token(whole)),
        whole_loss=loss,
        by_parabolas=parabolas,
        notes=[
            *_extrapolations(model, flops=flops, mean_loops=best.loops.value),
            *_boundary_notes(best.loops.value),
        ],
    )


def _by_power_law(model: ModelLaws, name: str, flops: float) -> Estimate:
    law = model.power_laws[name]
    ends = interval(law.sample_optima(flops)) if law.samples else (None, None)
    return Estimate(float(law(flops)), *ends)


def loss_at(
    model: ModelLaws, loops: float, tokens: float, test_loops: float | None = None
) -> Answer:
    """The loss of a run: at T = mu by the training law, or at `test_loops` by the unified law.

    The training law is fitted to losses at T = mu alone, the unified law to those at all T, so at
    `test_loops` = mu the two differ by what the unified law misses there.
    """
    require_range("tokens", tokens, above=0)
    require_range("loops", loops, at_least=1)
    if test_loops is not None:
        require_range("test_loops", test_loops, at_least=1)
    result = model.law("training" if test_loops is None else "unified")
    at = model.cost.points_at(loops, tokens, test_loops)

    def loss(values: Values) -> np.ndarray:
        return np.atleast_2d(result.law.predict(values, at))[:, 0]

    asked = {"mean_loops": loops, "tokens": tokens}
    asked |= {} if test_loops is None else {"test_loops": test_loops}
    return Answer(estimate(result, loss), _extrapolations(model, **asked))


def saturation_loops(model: ModelLaws, loops: float, tokens: float, tolerance: float) -> Answer:
    """The T at which the loss is within a share `tolerance` of its limit for large T."""
    require_range("tolerance", tolerance, above=0)
    require_range("loops", loops, at_least=1)
    require_range("tokens", tokens, above=0)
    result = model.law("unified")
    at = model.cost.points_at(loops, tokens)

    def depth(values: Values) -> np.ndarray:
        floor = np.atleast_2d(TRAINING.predict(training_part(values), at))[:, 0]
        excess = np.atleast_1d(values["Z"]) / (tolerance * floor)
        return np.maximum(1.0, loops * np.log(excess) / np.atleast_1d(values["z"]))

    answer = estimate(result, depth)
    asked = {"mean_loops": loops, "tokens": tokens, "test_loops": answer.value}
    return Answer(answer, _extrapolations(model, **asked))


def flops_needed(model: ModelLaws, loss: float) -> Answer:
    """The fewest training FLOPs that reach a loss."""
    require_range("loss", loss, above=0)
    law, cost = model.law("training"), model.cost
    answer = estimate(law, lambda values: flops_for(values, cost, loss)[0])
    if not np.isfinite(answer.value):
        _, lowest = frontier(law.values, cost, 1e60)
        raise ConfigError(
            f"loss: {model.model} never reaches {loss:g}: with unlimited data and "
            f"{MAX_SEARCHED_LOOPS:g} loops its law gives {lowest[0]:.4f}. Give a higher loss, "
            "or fit a larger model."
        )
    loops = float(flops_for(law.values, cost, loss)[1][0])
    return Answer(answer, _extrapolations(model, flops=answer.value, mean_loops=loops))


def _best_whole(law: LawResult, model: ModelLaws, flops: float, loops: float) -> tuple[int, float]:
    """The best whole number of loops within two of the optimum, and its loss.

    An odd number costs one more loop with gradient, so the nearest is not always the best.
    """
    highest = min(math.ceil(loops) + 1, MAX_SEARCHED_LOOPS)
    near = np.arange(max(1, math.floor(loops) - 1), highest + 1)
    at = model.cost.points_at(near, flops / model.cost.flops_per_token(near))
    losses = TRAINING.predict(training_part(law.values), at)
    best = int(losses.argmin())
    return int(near[best]), float(losses[best])


def _extrapolations(model: ModelLaws, **asked: float) -> list[str]:
    """A note for every value outside the range of the fitted runs."""
    notes = []
    for name, value in asked.items():
        low, high = model.spans[name]
        if not low * 0.999 <= value <= high * 1.001:
            notes.append(
                f"{name} {value:.4g} is outside the runs ({low:.4g} to {high:.4g}): "
                "an extrapolation."
            )
    return notes


def _boundary_notes(loops: float) -> list[str]:
    if loops > 0.98 * MAX_SEARCHED_LOOPS:
        return [
            f"the law still decreases at {MAX_SEARCHED_LOOPS:g} loops: it has no optimum below."
        ]
    if loops < 1.005:
        return ["the law is lowest at 1 loop: this budget is too small for looping to help."]
    return []
