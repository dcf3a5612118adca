"""What a training run is: the tables of a recipe as frozen dataclasses, valid once they exist.

[model]      an architecture (see parcae.config), usually a preset and what differs from it
[data]       documents, tokenizer, batch
[optimiser]  Muon + AdamW, or the RDM recipe's AdamW
[schedule]   how learning rate, momentum and weight decay change over the run
[budget]     how long: exactly one of tokens, flops, tokens_per_parameter, steps, minutes
[run]        seed, device, checkpoints, what is measured and how often
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from parcae.config import ConfigError, ModelConfig, check_positive, check_types, require
from parcae.presets import model_from_table
from parcae.recipe import build, check_tables, from_file, merge, plain

TABLES = ("model", "data", "optimiser", "schedule", "budget", "run")


def _not_negative(owner: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        fits = 0 <= value < float("inf")
        require(fits, f"{prefix}{name}", f"{value} is out of range", "Use 0 or more.")


def _share(owner: object, prefix: str, *names: str, below_one: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        fits = 0 <= value < 1 if below_one else 0 <= value <= 1
        remedy = "Use 0 or more and less than 1." if below_one else "Use a number from 0 to 1."
        require(fits, f"{prefix}{name}", f"{value} is out of range", remedy)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where rows come from: prepared shards, or documents tokenised into memory."""

    sources: tuple[str, ...] = ()
    """`builtin`, files, folders or globs, or folders made by `parcae data prepare`."""
    weights: tuple[float, ...] = ()
    """Shares of the sources; equal if left out."""
    tokenizer: str | None = None
    """A tokenizer.json; trained on the sources, at the model's vocabulary size, if left out."""
    validation_fraction: float = 0.005
    """Share of the documents to hold out of sources that are not prepared shards."""
    global_batch: int = 256
    """Rows of an optimiser step, over all devices and micro-batches."""
    micro_batch: int | None = None
    """Rows that go through a device at once; all of a device's share if left out."""
    packing: Literal["best-fit", "concatenate"] = "best-fit"
    split_long: bool = False
    prefetch: int = 2
    verify: bool = True
    """Check the sums of all shards before the first step: what a disk has changed since would be
    trained on."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        check_positive(self, "data.", "global_batch", "micro_batch")
        _not_negative(self, "data.", "prefetch")
        _share(self, "data.", "validation_fraction", below_one=True)
        require(
            len(self.sources) > 0,
            "data.sources",
            "there is none",
            "Name files, folders of shards, or 'builtin'.",
        )
        require(
            not self.weights or len(self.weights) == len(self.sources),
            "data.weights",
            f"{len(self.weights)} weights for {len(self.sources)} sources",
            "Give one for each, or none.",
        )
        for weight in self.weights:
            remedy = "Leave the source out, or give it a share."
            fits = 0 < weight < float("inf")
            require(fits, "data.weights", f"{weight} is not a positive number", remedy)


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """`muon-adamw` is the paper's; `adamw` gives every parameter to AdamW; `adamw-atan2` is the
    RDM recipe's: no eps, update clipping."""

    kind: Literal["muon-adamw", "adamw", "adamw-atan2"] = "muon-adamw"
    lr: float = 8e-3
    """Of AdamW."""
    beta1: float = 0.8
    beta2: float = 0.95
    eps: float = 1e-10
    weight_decay: float = 0.0
    muon_lr: float = 8e-3
    muon_momentum: float = 0.95
    muon_beta2: float = 0.95
    """Of the variance that Muon's update is divided by."""
    muon_weight_decay: float = 0.2
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""

    def __post_init__(self) -> None:
        check_types(self, "optimiser.")
        _not_negative(self, "optimiser.", "lr", "muon_lr", "eps", "clip")
        _not_negative(self, "optimiser.", "weight_decay", "muon_weight_decay")
        _share(self, "optimiser.", "beta1", "beta2", "muon_momentum", "muon_beta2", below_one=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm up, stay, cool down linearly to zero. Steps, where given, go before fractions."""

    warmup_steps: int = 0
    cooldown_fraction: float = 0.5
    cooldown_steps: int | None = None
    momentum_warmup_steps: int = 300
    """Muon's momentum rises from 0.85 over so many steps."""
    weight_decay_to_zero: bool = True
    """Muon's weight decay falls linearly to zero over the run."""

    def __post_init__(self) -> None:
        check_types(self, "schedule.")
        _not_negative(self, "schedule.", "warmup_steps", "momentum_warmup_steps")
        if self.cooldown_steps is not None:
            _not_negative(self, "schedule.", "cooldown_steps")
        _share(self, "schedule.", "cooldown_fraction")


KINDS_OF_BUDGET = ("tokens", "flops", "tokens_per_parameter", "steps", "minutes")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """How long to train: exactly one of the first five."""

    tokens: float | None = None
    flops: float | None = None
    tokens_per_parameter: float | None = None
    steps: int | None = None
    minutes: float | None = None
    """By the clock; such a run is the only kind that does not resume bit for bit."""
    at_most_minutes: float | None = None
    """A limit for a machine slower than was thought. Schedules follow the clock once it is ahead
    of the steps, so that a run it cuts short has cooled down; until then it changes nothing."""

    def __post_init__(self) -> None:
        check_types(self, "budget.")
        given = [name for name in KINDS_OF_BUDGET if getattr(self, name) is not None]
        require(
            len(given) == 1,
            "budget",
            f"{' and '.join(given) or 'nothing'} given",
            f"Give exactly one of {', '.join(KINDS_OF_BUDGET)}.",
        )
        for name in (given[0], "at_most_minutes"):
            value = getattr(self, name)
            fits = value is None or 0 < value < float("inf")
            require(fits, f"budget.{name}", f"{value} is not positive", "Use more.")
        require(
            self.minutes is None or self.at_most_minutes is None,
            "budget.at_most_minutes",
            f"the run has {self.minutes} minutes anyway",
            "Give one of the two.",
        )

    @property
    def clock_minutes(self) -> float | None:
        """When the clock ends the run, whatever else does; None where it never does."""
        return self.at_most_minutes if self.minutes is None else self.minutes


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, device, and what is measured, kept and shown."""

    seed: int = 0
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 autocast on CUDA, float32 elsewhere."""
    compile: bool = False
    checkpoint_loops: bool = False
    """Keep only the state of every loop and compute the rest again in the backward: memory that
    hardly grows with the loops that carry gradient, for about a third more time in the loop."""
    deterministic: bool = True
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes do; one process ignores it."""

    validate_every: int = 250
    """Steps between validations; the end of a run is always validated. 0: only there."""
    validation_depths: tuple[int, ...] = ()
    """Loops to validate at; 1, half the mean, the mean and twice the mean if left out."""
    validation_rows: int = 256
    telemetry_every: int = 50
    """Steps between looks at the loop's state and matrices. 0: never."""
    telemetry_rows: int = 4
    checkpoint_every: int = 500
    """0: only at the end."""
    keep_last: int = 2
    keep_best: bool = True
    sample_prompts: tuple[str, ...] = ()
    """Continued at several depths when the run ends, for the report."""
    sample_tokens: int = 64
    bad_steps_in_a_row: int = 20
    """Steps with a loss or gradient that is not finite after which the run gives up."""
    sinks: tuple[str, ...] = ()
    """Also log to: `tensorboard`, `wandb`, `trackio`. metrics.jsonl is always written."""

    def __post_init__(self) -> None:
        check_types(self, "run.")
        _not_negative(self, "run.", "seed", "validate_every", "telemetry_every", "checkpoint_every")
        remedy = "Use less than 2**63."
        require(self.seed < 1 << 63, "run.seed", f"{self.seed} is out of range", remedy)
        check_positive(self, "run.", "validation_rows", "telemetry_rows", "keep_last")
        check_positive(self, "run.", "sample_tokens", "bad_steps_in_a_row")
        for depth in self.validation_depths:
            remedy = "Every depth needs at least one loop."
            require(depth >= 1, "run.validation_depths", f"{depth} is not positive", remedy)
        known = ("tensorboard", "wandb", "trackio")
        for sink in self.sinks:
            require(
                sink in known, "run.sinks", f"there is no {sink!r}", f"Known: {', '.join(known)}."
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelConfig
    data: DataConfig
    budget: BudgetConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require(
            self.schedule.cooldown_steps is None or self.budget.clock_minutes is None,
            "schedule.cooldown_steps",
            "a run that the clock may end does not know its steps",
            "Use cooldown_fraction.",
        )

    @property
    def validation_depths(self) -> tuple[int, ...]:
        """Depths to validate at, in order; always with the one the model is used at."""
        loop = self.model.loop
        nominal = loop.nominal_loops
        if self.model.architecture == "transformer":
            return (1,)
        chosen = self.run.validation_depths or (1, max(1, nominal // 2), 2 * nominal)
        return tuple(sorted({*chosen, nominal}))


def recipe_from_tree(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from merged tables; see `parcae.recipe` for reading and merging them."""
    check_tables(tree, TABLES)
    for name in ("model", "data", "budget"):
        if name not in tree:
            raise ConfigError(f"{name}: a recipe for training needs this table.")
    others = {
        "data": DataConfig,
        "optimiser": OptimiserConfig,
        "schedule": ScheduleConfig,
        "budget": BudgetConfig,
        "run": RunConfig,
    }
    parts = {name: build(cls, tree[name], name) for name, cls in others.items() if name in tree}
    return Recipe(model=model_from_table(tree["model"]), **parts)  # pyright: ignore[reportArgumentType]


def with_flags(tree: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags over a recipe. A budget on the command line replaces the recipe's, whatever its kind:
    there is only one. A limit alone is laid over it."""
    budget = flags.get("budget")
    replaced = isinstance(budget, Mapping) and any(name in KINDS_OF_BUDGET for name in budget)
    return {**merge(tree, flags), **({"budget": budget} if replaced else {})}


def recipe_from_file(path: str | Path, flags: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe's file with flags over it."""
    return from_file(path, dict(flags or {}), lambda *both: recipe_from_tree(with_flags(*both)))


def located(recipe: Recipe) -> Recipe:
    """The same with absolute paths, so that it can be resumed from any folder."""
    data = recipe.data
    sources = tuple(s if s == "builtin" else os.path.abspath(s) for s in data.sources)
    tokenizer = None if data.tokenizer is None else os.path.abspath(data.tokenizer)
    return replace(recipe, data=replace(data, sources=sources, tokenizer=tokenizer))


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """The tree that `recipe_from_tree` reads back."""
    return plain(recipe)
