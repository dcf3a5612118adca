"""What a training run is: the tables of a recipe as frozen dataclasses, valid once they exist.

[model]      an architecture (see parcae.config), usually a preset and what differs from it
[data]       documents, tokenizer, batch
[optimiser]  Muon + AdamW, or the RDM recipe's AdamW
[schedule]   how learning rate, momentum and weight decay change over the run
[budget]     how long: exactly one of tokens, flops, tokens_per_parameter, steps, minutes
[run]        seed, device, checkpoints, what is measured and how often
[start]      existing weights to start from, instead of random ones
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from parcae.config import MAX_CONTEXT, MAX_LOOPS, ConfigError, ModelConfig
from parcae.data.sources import ReadOptions
from parcae.presets import model_from_table
from parcae.recipe import build, check_tables, flatten, from_file, merge, recipe_path, to_dict
from parcae.registry import OPTIMISERS
from parcae.schema import Described, Settings, describe, require, setting

MAX_ROWS = 1 << 22
TABLES = ("model", "data", "optimiser", "schedule", "budget", "run", "start")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings, table="data"):
    """Where rows come from: prepared shards, or documents tokenised into the run folder."""

    sources: tuple[str, ...] = setting(
        (),
        "files, folders, globs, `builtin`, folders made by `parcae data prepare`, or one "
        "`task:NAME` (required)",
    )
    separator: str | None = setting(
        None,
        "line that separates the documents of text files and is dropped, such as <|endoftext|> "
        "(unset: a file is one document)",
    )
    document_start: str | None = setting(
        None,
        "regular expression of the lines at which the documents of text files start "
        "(unset: a file is one document)",
    )
    text_field: str | None = setting(
        None, "JSON key or Parquet column that contains the text (unset: text)"
    )
    weights: tuple[float, ...] = setting((), "shares of the sources (unset: equal)", above=0)
    tokenizer: str | None = setting(
        None, "a tokenizer.json (unset: trained on the sources with the model's vocabulary size)"
    )
    validation_fraction: float = setting(
        0.005,
        "share of the documents held out of sources that are not prepared shards",
        at_least=0,
        below=1,
    )
    global_batch: int = setting(
        256,
        "rows of an optimiser step, over all devices and micro-batches",
        at_least=1,
        at_most=MAX_ROWS,
    )
    micro_batch: int | None = setting(
        None,
        "rows that a device processes at once (unset: by its memory, at most 8,192 tokens on a CPU "
        "and 65,536 on CUDA)",
        at_least=1,
        at_most=MAX_ROWS,
    )
    packing: Literal["best-fit", "concatenate"] = setting(
        "best-fit", "how documents fill rows: best-fit or concatenate"
    )
    split_long: bool = setting(
        True,
        "best-fit: cut documents longer than a row into several rows; false crops them, as the "
        "paper does",
    )
    prefetch: int = setting(
        2, "batches prepared ahead in the background; 0 for none", at_least=0, at_most=1024
    )
    verify: bool = setting(True, "check the checksums of all shards before the first step")

    def check(self) -> None:
        self.require(
            len(self.sources) > 0,
            "sources",
            "there is none",
            "Name files, folders of shards, or 'builtin'.",
        )
        self.require(
            not self.weights or len(self.weights) == len(self.sources),
            "weights",
            f"{len(self.weights)} weights for {len(self.sources)} sources",
            "Give one weight per source, or none.",
        )
        try:
            _ = self.read_options
        except ConfigError as error:
            raise ConfigError(f"data.{error}") from None

    @property
    def read_options(self) -> ReadOptions:
        """How files are cut into documents."""
        return ReadOptions(
            separator=self.separator,
            document_start=self.document_start,
            text_field="text" if self.text_field is None else self.text_field,
        )


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig(Settings, table="optimiser"):
    """`muon-adamw` is the paper's; `adamw` gives every parameter to AdamW; `adamw-atan2` is the
    RDM recipe's: no eps, update clipping."""

    kind: str = setting(
        "muon-adamw", "muon-adamw, adamw, adamw-atan2, or a registered one", names=OPTIMISERS
    )
    lr: float = setting(
        8e-3, "learning rate of AdamW and of registered optimisers", at_least=0, at_most=1e6
    )
    beta1: float = setting(0.8, "AdamW: decay of the mean of gradients", at_least=0, below=1)
    beta2: float = setting(0.95, "AdamW: decay of the mean of squares", at_least=0, below=1)
    eps: float = setting(1e-10, "AdamW: added to the denominator", at_least=0, at_most=1e6)
    weight_decay: float = setting(0.0, "AdamW: weight decay of matrices", at_least=0, at_most=1e6)
    muon_lr: float = setting(8e-3, "learning rate of Muon", at_least=0, at_most=1e6)
    muon_momentum: float = setting(0.95, "Muon: momentum after its warm-up", at_least=0, below=1)
    muon_beta2: float = setting(
        0.95, "Muon: decay of the variance that its update is divided by", at_least=0, below=1
    )
    muon_weight_decay: float = setting(
        0.2, "Muon: weight decay at the start", at_least=0, at_most=1e6
    )
    grad_clip: float = setting(1.0, "clip the norm of the gradient to this; 0: off", at_least=0)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Settings, table="schedule"):
    """Warm up, stay, cool down linearly to zero. Steps, where given, take precedence."""

    warmup_steps: int = setting(0, "steps over which learning rates rise from zero", at_least=0)
    cooldown_fraction: float = setting(
        0.5, "share of the run over which learning rates fall to zero", at_least=0, at_most=1
    )
    cooldown_steps: int | None = setting(
        None, "the same in steps (unset: cooldown_fraction)", at_least=0
    )
    momentum_warmup_steps: int = setting(
        300, "steps over which Muon's momentum rises from 0.85", at_least=0
    )
    weight_decay_to_zero: bool = setting(
        True, "let Muon's weight decay fall linearly to zero over the run"
    )


KINDS_OF_BUDGET = ("tokens", "flops", "tokens_per_parameter", "steps", "minutes")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Settings, table="budget"):
    """How long to train: exactly one of the first five."""

    tokens: float | None = setting(None, "tokens to train on", above=0)
    flops: float | None = setting(None, "training FLOPs to spend", above=0)
    tokens_per_parameter: float | None = setting(None, "tokens per parameter", above=0)
    steps: int | None = setting(None, "optimiser steps", above=0)
    minutes: float | None = setting(
        None,
        "minutes of training steps, without validation and checkpoints; such a run does not resume "
        "bit for bit",
        above=0,
    )
    max_minutes: float | None = setting(
        None,
        "also stop after this many minutes of training steps; the learning rate still reaches zero",
        above=0,
    )

    def check(self) -> None:
        given = [name for name in KINDS_OF_BUDGET if getattr(self, name) is not None]
        require(
            len(given) == 1,
            "budget",
            f"{' and '.join(given) or 'nothing'} given",
            f"Give exactly one of {', '.join(KINDS_OF_BUDGET)}.",
        )
        self.require(
            self.minutes is None or self.max_minutes is None,
            "max_minutes",
            f"minutes = {self.minutes} limits the run already",
            "Give one of the two.",
        )

    @property
    def clock_minutes(self) -> float | None:
        """Minutes after which the clock ends the run; None where it never does."""
        return self.max_minutes if self.minutes is None else self.minutes


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, table="run"):
    """Seed, device, and what is measured, kept and shown."""

    seed: int = setting(
        0, "seed of weights, order of documents and depths", at_least=0, below=1 << 63
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = setting("auto", "auto, cuda, mps or cpu")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "auto (bfloat16 on CUDA and on CPUs with instructions for it, float32 elsewhere), "
        "float32 or bfloat16",
    )
    compile: bool = setting(False, "compile the layers with torch.compile")
    activation_checkpointing: bool = setting(
        False, "recompute each loop in the backward pass: less memory, slower"
    )
    deterministic: bool = setting(True, "use deterministic algorithms")
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "several processes: ddp (whole copies of the model) or fsdp (shards)"
    )

    validate_every: int = setting(
        250, "steps between validations; 0 for only at the end", at_least=0
    )
    validation_loops: tuple[int, ...] = setting(
        (),
        "loops to validate at (unset: 1, half the mean, the mean, twice the mean)",
        at_least=1,
        at_most=MAX_LOOPS,
    )
    validation_rows: int = setting(256, "rows to validate on", at_least=1, at_most=MAX_ROWS)
    telemetry_every: int = setting(
        50, "steps between measurements of the loop's state and matrices; 0 for never", at_least=0
    )
    telemetry_rows: int = setting(
        4, "rows to measure the loop's state on", at_least=1, at_most=MAX_ROWS
    )
    checkpoint_every: int = setting(
        500, "steps between checkpoints; 0 for only at the end", at_least=0
    )
    keep_last: int = setting(2, "newest checkpoints to keep", at_least=1)
    keep_best: bool = setting(True, "also keep the checkpoint with the lowest validation loss")
    sample_prompts: tuple[str, ...] = setting(
        (), "prompts to continue at several depths when the run ends, for the report"
    )
    sample_tokens: int = setting(
        64, "tokens of such a continuation", at_least=1, at_most=MAX_CONTEXT
    )
    max_nonfinite_steps: int = setting(
        20,
        "consecutive steps with a NaN or infinite loss or gradient until a run is stopped",
        at_least=1,
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = setting(
        (),
        "experiment trackers in addition to metrics.jsonl: tensorboard, wandb, trackio",
    )


@dataclass(frozen=True, kw_only=True)
class StartConfig(Settings, table="start"):
    """Existing weights for a new run, whose optimiser, schedule and data are its own."""

    checkpoint: str | None = setting(
        None, "a run, checkpoint or model folder to start from (unset: random weights)"
    )
    step: int | None = setting(
        None, "step of that checkpoint (unset: the run records it)", at_least=0
    )
    sha256: str | None = setting(
        None, "checksum of its weights; others are refused (unset: the run records it)"
    )

    def check(self) -> None:
        self.require(
            self.checkpoint is not None or (self.step, self.sha256) == (None, None),
            "checkpoint",
            "missing beside its step or checksum",
            "Name the weights to start from, or omit the table.",
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Everything that decides a run."""

    model: ModelConfig
    data: DataConfig
    budget: BudgetConfig
    optimiser: OptimiserConfig = setting(OptimiserConfig, "the optimiser")
    schedule: ScheduleConfig = setting(ScheduleConfig, "learning rates over the run")
    run: RunConfig = setting(RunConfig, "seed, device, measurements")
    start: StartConfig = setting(StartConfig, "existing weights to start from")

    def check(self) -> None:
        require(
            self.schedule.cooldown_steps is None or self.budget.clock_minutes is None,
            "schedule.cooldown_steps",
            "cannot be used with a time limit: the number of steps is unknown",
            "Use cooldown_fraction.",
        )

    @property
    def validation_loops(self) -> tuple[int, ...]:
        """Numbers of loops to validate at, in order; always with the one the model is used at."""
        loop = self.model.loop
        nominal = loop.nominal_loops
        if self.model.architecture == "transformer":
            return (1,)
        chosen = self.run.validation_loops or (1, max(1, nominal // 2), 2 * nominal)
        return tuple(sorted({*chosen, nominal}))


PARTS = (DataConfig, OptimiserConfig, ScheduleConfig, BudgetConfig, RunConfig, StartConfig)
"""The tables beside [model], which may start from a preset."""


def all_settings() -> Iterator[Described]:
    """Every setting of a recipe, table by table."""
    text = "preset to start from; other keys override it; `parcae presets` lists them"
    yield Described(ModelConfig, "preset", None, text)
    for part in (ModelConfig, *PARTS):
        yield from describe(part)


def recipe_from_tree(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from merged tables; see `parcae.recipe` for reading and merging them."""
    check_tables(tree, TABLES)
    _check_places(tree)
    start = build(StartConfig, tree.get("start", {}))
    from_weights = start.checkpoint is not None and start.sha256 is None
    for name in ("data", "budget") if from_weights else ("model", "data", "budget"):
        if name not in tree:
            remedy = "Add it." if name != "model" else "Add it, or give weights with `start_from`."
            raise ConfigError(f"{name}: a recipe for training needs this table. {remedy}")
    parts = {part.table: build(part, tree[part.table]) for part in PARTS if part.table in tree}
    if from_weights:
        from parcae.training.start import model_from_weights

        model = model_from_weights(tree.get("model", {}), str(start.checkpoint))
    else:
        model = model_from_table(tree["model"])
    return Recipe(model=model, **parts)  # pyright: ignore[reportArgumentType]


def _check_places(tree: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a setting that stands in the wrong table, and name the right one."""
    known = [(entry.table.table, entry.name) for entry in all_settings()]
    tables = {table for table, _ in known}
    for key in flatten(tree):
        table, _, name = key.rpartition(".")
        if table in tables and (table, name) not in known:
            others = sorted((other for other, same in known if same == name), key=len)
            own = [same for other, same in known if other == table]
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
            if others and not near:
                raise ConfigError(f"{key}: no such key. Did you mean {others[0]}.{name}?")


def with_flags(tree: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with the settings of a command line. A budget there replaces the recipe's, whatever
    its kind, since a run has one; a time limit alone is added to it. Other weights to start from
    replace the recipe's likewise."""
    replacing = {"budget": KINDS_OF_BUDGET, "start": ("checkpoint",)}
    replaced = {
        name: table
        for name, keys in replacing.items()
        if isinstance(table := flags.get(name), Mapping) and any(key in table for key in keys)
    }
    return {**merge(tree, flags), **replaced}


def recipe_from_file(path: str | Path, flags: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe's file with flags over it."""
    return from_file(path, dict(flags or {}), lambda *both: recipe_from_tree(with_flags(*both)))


def resolve_recipe(
    source: str | Path | Mapping[str, Any] | Recipe, overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe from a file, the name of one that comes with parcae, tables, or a Recipe itself.

    `overrides` are tables over it: `{"budget": {"steps": 100}}`.
    """
    overrides = overrides or {}
    if isinstance(source, Recipe):
        if not overrides:
            return source
        source = recipe_to_dict(source)
    if isinstance(source, Mapping):
        return recipe_from_tree(with_flags(source, overrides))
    return recipe_from_file(recipe_path(source), overrides)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same with absolute paths, so that it can be resumed from any folder."""
    data = recipe.data
    sources = tuple(
        s if s == "builtin" or s.startswith("task:") else os.path.abspath(s) for s in data.sources
    )
    tokenizer = None if data.tokenizer is None else os.path.abspath(data.tokenizer)
    start, weights = recipe.start, recipe.start.checkpoint
    if weights is not None:
        start = replace(start, checkpoint=os.path.abspath(weights))
    return replace(recipe, data=replace(data, sources=sources, tokenizer=tokenizer), start=start)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The tree that `recipe_from_tree` reads back."""
    return to_dict(recipe)
