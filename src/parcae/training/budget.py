"""How long a run is: one of five budgets as optimiser steps, and what they come to."""

from __future__ import annotations

from parcae.model.flops import parameter_count, training_flops_per_token
from parcae.training.settings import Recipe


def tokens_per_step(recipe: Recipe) -> int:
    return recipe.data.global_batch * recipe.model.context_length


def flops_per_step(recipe: Recipe) -> float:
    """Nominal, as budgets and scaling laws count; see `parcae.model.flops`."""
    return tokens_per_step(recipe) * training_flops_per_token(recipe.model)


def total_steps(recipe: Recipe) -> int | None:
    """The steps that come nearest to the budget; None where the clock decides."""
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
