"""The runs of a sweep, as a pure function of a recipe and a grid: FLOP budgets or numbers of tokens
by loops, learning rates, seeds, or any setting.

    runs = plan_sweep(tree, Grid(flops=(1e13, 2e13), mean_loops=(1, 2, 4)))

Tokens follow from the budget by `parcae.model.flops`; loops with gradient are ceil(mean_loops / 2)
unless the recipe sets them; `mean_loops` 1 is fixed depth. The name of a run follows from its
coordinates in the grid, so that a larger grid contains the same runs under the same names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parcae.config import ConfigError, ModelConfig, require
from parcae.console import format_flops
from parcae.model import flops as count
from parcae.presets import PRESETS
from parcae.recipe import merge
from parcae.schema import require_range
from parcae.training.schedule import flops_per_step, tokens_per_step, total_steps
from parcae.training.settings import KINDS_OF_BUDGET, Recipe, recipe_from_tree

ARGUMENTS = {
    "model.preset": "models",
    "model.loop.mean_loops": "mean_loops",
    "run.seed": "seeds",
    "run.validation_loops": "test_loops",
    **{f"budget.{kind}": "flops or tokens" for kind in KINDS_OF_BUDGET},
}
"""Settings that vary by an argument of their own."""
SHARED = ("data.sources", "data.weights", "data.tokenizer", "data.validation_fraction")
"""Settings that cannot vary, since data is prepared once for all runs."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of each axis. An empty axis keeps the recipe's value."""

    flops: tuple[float, ...] = ()
    """Training FLOPs of a run."""
    tokens: tuple[float, ...] = ()
    """Training tokens of a run, instead of `flops`."""
    mean_loops: tuple[float, ...] = ()
    """Mean loops in training; 1 is fixed depth."""
    models: tuple[str, ...] = ()
    """Presets; the other keys of the recipe's [model] apply to each."""
    learning_rates: tuple[float, ...] = ()
    """AdamW's; Muon's keeps its ratio to it."""
    seeds: tuple[int, ...] = ()
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of any other setting, by `table.key`."""
    test_loops: tuple[int, ...] = ()
    """Numbers of loops at which every run is validated; not an axis."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing varies."""
        axes = (self.flops, self.tokens, self.mean_loops, self.models)
        return not any((*axes, self.learning_rates, self.seeds, self.settings))

    def __post_init__(self) -> None:
        require(
            not (self.flops and self.tokens),
            "tokens",
            "a grid has FLOP budgets or numbers of tokens, not both",
            "Omit flops or tokens.",
        )
        for name in ("flops", "tokens", "learning_rates"):
            for value in getattr(self, name):
                require_range(name, value, above=0)
        for name in ("mean_loops", "test_loops"):
            for value in getattr(self, name):
                require_range(name, value, at_least=1)
        for key in self.settings:
            if key in ARGUMENTS:
                raise ConfigError(
                    f"settings.{key}: varies by an argument of its own. Use {ARGUMENTS[key]}."
                )
            require(
                key not in SHARED,
                f"settings.{key}",
                "all runs of a sweep share this setting",
                "Make a sweep for each value.",
            )


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the grid and its recipe."""

    name: str
    model: str
    """The name in the table of runs; models of different sizes have different names."""
    budget: float | None
    """Requested FLOPs; None where tokens or steps are given instead."""
    settings: Mapping[str, Any]
    """Its values of `Grid.settings`."""
    recipe: Recipe

    @property
    def mean_loops(self) -> float:
        return self.recipe.model.loop.mean_loops

    @property
    def parameters(self) -> int:
        return count.parameter_count(self.recipe.model)

    @property
    def effective_parameters(self) -> float:
        return count.effective_parameters(self.recipe.model)

    @property
    def steps(self) -> int:
        steps = total_steps(self.recipe)
        assert steps is not None, "the runs of a sweep have no time budget"
        return steps

    @property
    def tokens(self) -> int:
        return self.steps * tokens_per_step(self.recipe)

    @property
    def flops(self) -> float:
        return self.steps * flops_per_step(self.recipe)


def plan_sweep(tree: Mapping[str, Any], grid: Grid) -> tuple[PlannedRun, ...]:
    """One run for each point of the grid; `tree` holds the tables of a recipe."""
    _check_has_length(tree, grid)
    base = recipe_from_tree({**tree, "budget": tree.get("budget") or _first_budget(grid)})
    runs = [_planned(tree, base, grid, point) for point in _points(tree, base, grid)]
    unique = {run.name: run for run in runs}
    _check_names(runs)
    return tuple(unique.values())


@dataclass(frozen=True)
class _Point:
    model: str | None
    length: float | None
    loops: float | None
    learning_rate: float | None
    seed: int | None
    settings: Mapping[str, Any]


def _points(tree: Mapping[str, Any], base: Recipe, grid: Grid) -> Iterator[_Point]:
    if grid.models and "preset" not in tree["model"]:
        raise ConfigError(
            "models: the recipe's [model] names no preset, so there is nothing to replace. "
            "Name a preset in it, or make a sweep for each model."
        )
    combinations = [
        dict(zip(grid.settings, values, strict=True))
        for values in itertools.product(*grid.settings.values())
    ]
    for model in grid.models or (None,):
        loops = (1,) if _is_transformer(model) else grid.mean_loops or (None,)
        lengths = grid.flops or grid.tokens or (None,)
        rest = (grid.learning_rates or (None,), grid.seeds or (None,), combinations)
        for point in itertools.product(lengths, loops, *rest):
            yield _Point(model, *point)


def _is_transformer(model: str | None) -> bool:
    """Whether the preset has no loop, so that `loops` does not vary it."""
    return model is not None and model in PRESETS and PRESETS[model].architecture == "transformer"


def _planned(tree: Mapping[str, Any], base: Recipe, grid: Grid, point: _Point) -> PlannedRun:
    recipe = recipe_from_tree(_tree_at(tree, base, grid, point))
    loops = grid.test_loops or base.run.validation_loops or default_test_loops(grid, base)
    recipe = replace(recipe, run=replace(recipe.run, validation_loops=tuple(loops)))
    model = model_name(point.model or tree["model"].get("preset"), recipe.model)
    run = PlannedRun(
        name=_run_name(model, recipe, base, grid, point),
        model=model,
        budget=point.length if grid.flops else recipe.budget.flops,
        settings=point.settings,
        recipe=recipe,
    )
    _check_length(run)
    return run


def _tree_at(tree: Mapping[str, Any], base: Recipe, grid: Grid, point: _Point) -> Mapping[str, Any]:
    if point.model is not None:
        table = {**tree["model"], "preset": point.model}
        if _is_transformer(point.model):
            table.pop("loop", None)
        tree = {**tree, "model": table}
    changes: dict[str, Any] = {}
    for key, value in point.settings.items():
        changes = merge(changes, _nested(key, value))
    if point.loops is not None:
        changes = merge(changes, _nested("model.loop.mean_loops", point.loops))
    if point.seed is not None:
        changes = merge(changes, _nested("run.seed", point.seed))
    if point.learning_rate is not None:
        optimiser = base.optimiser
        ratio = optimiser.muon_lr / optimiser.lr if optimiser.lr else 1.0
        muon = float(f"{point.learning_rate * ratio:.12g}")
        rates = {"lr": point.learning_rate, "muon_lr": muon}
        changes = merge(changes, {"optimiser": rates})
    tree = merge(tree, changes)
    if point.length is not None:
        tree["budget"] = {"flops" if grid.flops else "tokens": point.length}
    return tree


def _nested(key: str, value: Any) -> dict[str, Any]:
    *tables, leaf = key.split(".")
    require(len(tables) > 0, f"settings.{key}", "is not a setting", "Write table.key.")
    tree: dict[str, Any] = {leaf: value}
    for table in reversed(tables):
        tree = {table: tree}
    return tree


def default_test_loops(grid: Grid, base: Recipe) -> tuple[int, ...]:
    """1, every mean of the grid, and 1.5 and 2 times the largest."""
    means = [max(1, round(loops)) for loops in grid.mean_loops or (base.model.loop.mean_loops,)]
    deepest = max(means)
    return tuple(sorted({1, *means, round(1.5 * deepest), 2 * deepest}))


def model_name(preset: str | None, config: ModelConfig) -> str:
    """The preset, if only its loops and context differ; otherwise its family and the size."""
    if preset is not None and preset in PRESETS:
        original = PRESETS[preset]
        if config == replace(original, loop=config.loop, context_length=config.context_length):
            return preset
    family = preset.rpartition("-")[0] if preset else config.architecture
    size = count.parameter_count(config)
    text = f"{size / 1e6:.4g}m" if size >= 1e6 else f"{size / 1e3:.4g}k"
    return f"{family}-{text}"


def _run_name(model: str, recipe: Recipe, base: Recipe, grid: Grid, point: _Point) -> str:
    parts = [model, f"mu{format_in_name(recipe.model.loop.mean_loops)}"]
    if point.length is not None:
        parts.append(f"{format_in_name(point.length)}-{'flops' if grid.flops else 'tokens'}")
    if recipe.optimiser.lr != base.optimiser.lr and point.learning_rate is not None:
        parts.append(f"lr{format_in_name(recipe.optimiser.lr)}")
    if recipe.run.seed != base.run.seed:
        parts.append(f"seed{recipe.run.seed}")
    parts += [
        f"{key.rpartition('.')[2]}={format_in_name(value)}" for key, value in point.settings.items()
    ]
    return "-".join(parts).replace("/", "_").replace(" ", "")


def format_in_name(value: Any) -> str:
    """`value` in a file name: 1.5e13, not 15000000000000.0 or 1.5e+13."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if abs(value) < 1e5:
        return f"{value:.10g}"
    digits, power = f"{value:.9e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _first_budget(grid: Grid) -> dict[str, float]:
    """The [budget] of the first run, where the recipe has none."""
    lengths = grid.flops or grid.tokens
    require(
        len(lengths) > 0,
        "budget",
        "neither the recipe nor the grid says how long a run is",
        "Give flops or tokens, or a [budget] table in the recipe.",
    )
    return {"flops" if grid.flops else "tokens": lengths[0]}


def _check_has_length(tree: Mapping[str, Any], grid: Grid) -> None:
    budget = tree.get("budget", {})
    replaced = bool(grid.flops or grid.tokens)
    for name, remedy in (
        ("minutes", "Give flops or tokens, or a recipe with another budget."),
        ("max_minutes", "Unset `budget.max_minutes`."),
    ):
        value = budget.get(name) if isinstance(budget, Mapping) else None
        if value not in (None, "none") and not (name == "minutes" and replaced):
            problem = "the number of tokens of a run with a time limit cannot be planned"
            raise ConfigError(f"budget.{name}: {problem}. {remedy}")


def _check_length(run: PlannedRun) -> None:
    recipe = run.recipe
    budget, each = recipe.budget, tokens_per_step(recipe)
    smaller = f"or a data.global_batch below {recipe.data.global_batch}"
    if budget.flops is not None:
        least = flops_per_step(recipe)
        require(
            budget.flops >= least,
            "flops",
            f"{format_flops(budget.flops)} FLOPs are less than one step of {run.name} takes "
            f"({format_flops(least)})",
            f"Use a larger budget, {smaller}.",
        )
    if budget.tokens is not None:
        require(
            budget.tokens >= each,
            "tokens",
            f"{budget.tokens:g} are less than one step of {run.name} takes ({each:,})",
            f"Use more tokens, {smaller}.",
        )


def _check_names(runs: list[PlannedRun]) -> None:
    """Refuse two recipes with one name, and two sizes of a model with one name."""
    by_name: dict[str, PlannedRun] = {}
    sizes: dict[tuple[str, float], float] = {}
    for run in runs:
        other = by_name.setdefault(run.name, run)
        if other.recipe != run.recipe:
            raise ConfigError(f"{run.name}: two runs of the grid have this name. Make two sweeps.")
        size = sizes.setdefault((run.model, run.mean_loops), run.effective_parameters)
        if size != run.effective_parameters:
            raise ConfigError(
                f"{run.model}: two sizes of the grid round to this name. Make two sweeps."
            )
