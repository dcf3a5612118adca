"""The sizes at which experiments run: `micro` here, `paper` on a cluster, `toy` in tests.

An experiment asks a scale for a recipe and changes what it studies. The settings of the command
line lie between the two; one that an experiment sets itself is refused:

    scale.recipe(scale.text("parcae", model={"discretisation": "zoh"}), seed=0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parcae.config import ConfigError
from parcae.data.synthetic import PREFIX, TASKS
from parcae.recipe import find_recipe, flatten, merge, read_toml
from parcae.training.settings import Recipe, recipe_from_tree, with_flags

Tree = dict[str, Any]
ScaleName = Literal["micro", "paper", "toy"]
SCALES: tuple[ScaleName, ...] = ("micro", "paper", "toy")

TEST_LOOPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 64)
"""Loops at which every language model is validated when its training ends."""
WIDTHS = {"w64": 64, "w96": 96, "w128": 128}
HEAD_DIM = 32

OF_THE_LOOP = ("loop", "injection", "discretisation", "readout", "prelude_norm")
"""Settings of the command line that do not concern a Transformer."""

MICRO_TEXT: Tree = {
    "model": {"vocab_size": 512, "context_length": 64},
    "data": {"sources": ["text:expository"], "global_batch": 16, "micro_batch": 16},
    "budget": {"steps": 1000},
    "schedule": {"momentum_warmup_steps": 100},
    "run": {
        "device": "cpu",
        "validate_every": 0,
        "validation_loops": list(TEST_LOOPS),
        "validation_rows": 256,
        "telemetry_every": 50,
        "checkpoint_every": 100,
        "keep_last": 1,
        "keep_best": False,
    },
}
"""A million tokens of textbooks and encyclopedia leads for 0.2 million parameters."""

MICRO_RDM: Tree = {
    "optimiser": {"kind": "adamw-atan2", "lr": 2e-3, "beta1": 0.9, "weight_decay": 4e-5},
    "schedule": {"warmup_steps": 50},
}
"""What the RDM setup changes; the learning rate is larger than the paper's for larger models."""

MICRO_TASK: Tree = {
    "data": {"global_batch": 64, "micro_batch": 64},
    "budget": {"steps": 4000},
    "run": {"validation_loops": [1, 2, 4, 8, 16], "telemetry_every": 0},
}

PAPER: Tree = {"run": {"validation_loops": list(TEST_LOOPS)}}
"""What the experiments add to the recipes of the paper's models."""

TOY: Tree = {
    "model": {"vocab_size": 300, "context_length": 16},
    "data": {"sources": ["builtin"], "global_batch": 4, "micro_batch": 4},
    "budget": {"steps": 3},
    "run": {"validation_loops": [1, 2, 4, 8, 16], "validation_rows": 4, "telemetry_every": 1},
}


@dataclass(frozen=True)
class Scale:
    """The recipes of a scale, with settings of the command line over them."""

    name: ScaleName = "micro"
    seed_count: int = 3
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise ConfigError(f"scale: {self.name!r} is none of {', '.join(SCALES)}.")
        if self.seed_count < 1:
            raise ConfigError(f"seeds: {self.seed_count} is too few. Use 1 or more.")

    @property
    def seeds(self) -> range:
        return range(self.seed_count)

    @property
    def few_seeds(self) -> range:
        """Seeds of the experiments in which a spread matters less."""
        return self.seeds[:2]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Sizes of the Transformer setup, from small to large."""
        return ("140m", "370m", "770m", "1.3b") if self.name == "paper" else tuple(WIDTHS)

    @property
    def rdm_sizes(self) -> tuple[str, ...]:
        """Sizes of the RDM setup."""
        return ("100m", "350m") if self.name == "paper" else ("w64",)

    def text(self, family: str = "parcae", size: str | None = None, **changes: Any) -> Tree:
        """Tables for a language model of the Transformer setup, with `changes` over them."""
        size = size or self.sizes[0]
        if self.name == "paper":
            tree = merge(read_toml(find_recipe(f"{family}-{size}")), PAPER)
            return self._changed(tree, changes)
        return self._changed(merge(self._micro(), _model(family, WIDTHS[size])), changes)

    def rdm(self, family: str = "parcae-rdm", size: str | None = None, **changes: Any) -> Tree:
        """Tables for a model of the RDM setup: parcae-rdm, rdm or rdm-prenorm."""
        size = size or self.rdm_sizes[0]
        if self.name == "paper":
            tree = merge(read_toml(find_recipe(f"rdm-{size}")), PAPER)
            return self._changed(merge(tree, {"model": {"preset": f"{family}-{size}"}}), changes)
        model = _model(family, WIDTHS[size], mlp_width=7 * WIDTHS[size] // 2)
        return self._changed(merge(merge(self._micro(), MICRO_RDM), model), changes)

    def task(self, name: str, family: str = "parcae", **changes: Any) -> Tree:
        """Tables for a synthetic task; the same at every scale but `toy`."""
        task = TASKS[name]
        tree = merge(MICRO_TEXT, TOY if self.name == "toy" else MICRO_TASK)
        shape = {"vocab_size": task.vocab_size, "context_length": task.length}
        tree = merge(tree, _model(family, WIDTHS["w64"], **shape))
        return self._changed(merge(tree, {"data": {"sources": [f"task:{name}"]}}), changes)

    def recipe(self, tree: Tree, seed: int) -> Recipe:
        """The recipe of one run."""
        return recipe_from_tree(merge(tree, {"run": {"seed": seed}}))

    def _micro(self) -> Tree:
        return merge(MICRO_TEXT, TOY) if self.name == "toy" else MICRO_TEXT

    def _changed(self, base: Tree, changes: Tree) -> Tree:
        overrides = dict(self.overrides)
        if base["model"]["preset"].startswith("transformer") and "model" in overrides:
            table = overrides["model"].items()
            overrides["model"] = {k: v for k, v in table if k not in OF_THE_LOOP}
        if base["data"]["sources"][0].startswith(PREFIX) and "data" in overrides:
            table = overrides["data"].items()
            overrides["data"] = {k: v for k, v in table if k != "sources"}
        kind = base.get("optimiser", {}).get("kind", "muon-adamw")
        if kind != "muon-adamw" and "optimiser" in overrides:
            table = overrides["optimiser"].items()
            overrides["optimiser"] = {k: v for k, v in table if not k.startswith("muon_")}
        own = {*flatten(changes), "run.seed"}
        for key in flatten(overrides):
            if key in own or (key.startswith("budget.") and changes.get("budget")):
                raise ConfigError(
                    f"{key}: the experiment sets it itself. Omit it; `parcae sweep` trains other "
                    "values."
                )
        return with_flags(with_flags(base, overrides), changes)


def _model(family: str, width: int, **shape: int) -> Tree:
    heads = width // HEAD_DIM
    return {"model": {"preset": f"{family}-1m", "width": width, "heads": heads, **shape}}
