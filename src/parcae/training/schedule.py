"""How long a run is, and how learning rate, momentum and weight decay change over it.

learning rate   |  warm-up   constant            linear to zero
                | /‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾\\___
momentum        | from 0.85 linearly to its value, then constant       (Muon)
weight decay    | linearly to zero over the whole run                  (Muon)
"""

from __future__ import annotations

from typing import NamedTuple

from parcae.model.flops import parameter_count, training_flops_per_token
from parcae.training.settings import OptimiserConfig, Recipe, ScheduleConfig

FIRST_MOMENTUM = 0.85
"""Muon's momentum in the first step, unless the momentum it warms up to is smaller."""


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens of an optimiser step, over all devices and micro-batches."""
    return recipe.data.global_batch * recipe.model.context_length


def flops_per_step(recipe: Recipe) -> float:
    """Nominal FLOPs of a step, as budgets and scaling laws count them; see `parcae.model.flops`."""
    return tokens_per_step(recipe) * training_flops_per_token(recipe.model)


def total_steps(recipe: Recipe) -> int | None:
    """The number of steps nearest to the budget; None for a budget in minutes."""
    budget = recipe.budget
    if budget.minutes is not None:
        return None
    if budget.steps is not None:
        return budget.steps
    if budget.flops is not None:
        return max(1, round(budget.flops / flops_per_step(recipe)))
    tokens = budget.tokens
    if tokens is None:
        assert budget.tokens_per_parameter is not None
        tokens = budget.tokens_per_parameter * parameter_count(recipe.model)
    return max(1, round(tokens / tokens_per_step(recipe)))


class Factors(NamedTuple):
    """The scheduled values of one optimiser step."""

    lr: float = 1.0
    """Multiplies every learning rate."""
    momentum: float = 0.95
    """Muon's momentum itself."""
    weight_decay: float = 1.0
    """Multiplies Muon's weight decay."""


def schedule_factors(
    config: ScheduleConfig,
    optimiser: OptimiserConfig,
    step: int,
    progress: float,
    steps: int | None = None,
) -> Factors:
    """The factors of step 0, 1, ...

    `progress`, from 0 to 1, is step / steps, or the time used over the time allowed. `steps` is
    needed only where the cool-down is given in steps.
    """
    left = 1.0 - _share(progress)
    return Factors(
        lr=min(_warmup(config, step), _cooldown(config, step, left, steps)),
        momentum=_momentum(config, optimiser.muon_momentum, step),
        weight_decay=left if config.weight_decay_to_zero else 1.0,
    )


def _share(x: float) -> float:
    return min(max(x, 0.0), 1.0)


def _warmup(config: ScheduleConfig, step: int) -> float:
    """(step + 1) / warmup_steps, so that the first step is not zero."""
    return _share((step + 1) / config.warmup_steps) if config.warmup_steps else 1.0


def _cooldown(config: ScheduleConfig, step: int, left: float, steps: int | None) -> float:
    """The rest of the run over the length of the cool-down, at most 1."""
    if config.cooldown_steps is not None:
        if steps is None:
            raise ValueError("steps: a cool-down given in steps needs the run's length in steps.")
        return _share((steps - step) / config.cooldown_steps) if config.cooldown_steps else 1.0
    return _share(left / config.cooldown_fraction) if config.cooldown_fraction else 1.0


def _momentum(config: ScheduleConfig, final: float, step: int) -> float:
    if step >= config.momentum_warmup_steps:
        return final
    first = min(FIRST_MOMENTUM, final)
    return first + (final - first) * _share(step / config.momentum_warmup_steps)
