"""Every recipe that is shipped is valid, and those of the paper are what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from parcae.presets import PRESETS, model_from_table
from parcae.recipe import read_toml
from parcae.training.schedule import tokens_per_step, total_steps
from parcae.training.settings import recipe_from_tree

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TRAINING = [path for path in RECIPES if "budget" in read_toml(path)]
PAPER = {"140m": (11.2e9, 8e-3), "370m": (29.6e9, 8e-3), "770m": (61.6e9, 6e-3)}
PAPER["1.3b"] = (104e9, 6e-3)
HOLDS = 80e9
"""Bytes of the devices that the large recipes are for."""


def load(name):
    path = Path(__file__).parents[2] / "recipes" / f"{name}.toml"
    return recipe_from_tree(read_toml(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    tree = read_toml(path)
    if path in TRAINING:
        recipe = recipe_from_tree(tree)
        assert recipe.data.global_batch % (recipe.data.micro_batch or 1) == 0
    else:
        model_from_table(tree["model"])
    if path.stem in PRESETS:
        assert tree["model"]["preset"] == path.stem


@pytest.mark.parametrize("family", ["parcae", "transformer"])
@pytest.mark.parametrize("size", PAPER)
def test_the_transformer_setup_of_the_paper(family, size):
    recipe = load(f"{family}-{size}")
    tokens, lr = PAPER[size]
    assert tokens_per_step(recipe) == 256 * 2048
    assert total_steps(recipe) == round(tokens / (256 * 2048))
    optimiser, schedule = recipe.optimiser, recipe.schedule
    assert (optimiser.kind, optimiser.lr, optimiser.muon_lr) == ("muon-adamw", lr, 8e-3)
    assert (optimiser.beta1, optimiser.beta2, optimiser.eps) == (0.8, 0.95, 1e-10)
    assert (optimiser.weight_decay, optimiser.muon_weight_decay, optimiser.grad_clip) == (0, 0.2, 1)
    assert (schedule.warmup_steps, schedule.cooldown_fraction) == (0, 0.5)
    assert schedule.cooldown_steps is None
    assert schedule.weight_decay_to_zero


@pytest.mark.parametrize("family", ["rdm", "parcae-rdm"])
@pytest.mark.parametrize(("size", "lr"), [("100m", 4e-4), ("350m", 2e-4)])
def test_the_rdm_setup_of_the_paper(family, size, lr):
    recipe = load(f"{family}-{size}")
    optimiser, schedule = recipe.optimiser, recipe.schedule
    assert (optimiser.kind, optimiser.lr) == ("adamw-atan2", lr)
    assert (optimiser.beta1, optimiser.beta2) == (0.9, 0.95)
    assert (optimiser.weight_decay, optimiser.grad_clip) == (4e-5, 1)
    assert (schedule.warmup_steps, schedule.cooldown_steps) == (4096, 4096)
    steps = total_steps(recipe)
    assert steps is not None
    assert steps > 2 * 4096


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((f"parcae-{size}", f"transformer-{size}") for size in (*PAPER, "3m")),
        *((f"parcae-rdm-{size}", f"rdm-{size}") for size in ("100m", "350m")),
        ("parcae-rdm-100m", "rdm-prenorm-100m"),
        ("parcae-rdm-1m", "rdm-prenorm-1m"),
        ("high-rate-parcae", "high-rate-rdm"),
    ],
)
def test_a_pair_differs_in_the_model_only(one, other):
    left, right = load(one), load(other)
    assert (left.optimiser, left.schedule, left.budget) == (
        right.optimiser,
        right.schedule,
        right.budget,
    )
    assert left.data.sources == right.data.sources
    assert tokens_per_step(left) == tokens_per_step(right)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in TRAINING if load(p.stem).run.device == "cuda"], ids=lambda path: path.stem
)
def test_the_large_ones_fit_their_devices(path):
    from parcae.training.plan import plan

    found = plan(load(path.stem), devices=8, device_flops="a100")
    assert found.tokens == pytest.approx(found.steps * found.tokens_per_step)
    assert found.memory.total < 0.75 * HOLDS  # the rest is CUDA's and the allocator's


def test_the_demo_is_the_same_model_on_a_busy_machine():
    """Its steps are given, and the clock only bounds them."""
    recipe = load("demo")
    assert total_steps(recipe) == 400
    assert recipe.budget.max_minutes is not None
