"""Runs that start from existing weights: the model they give a recipe, and reading them.

A preset in the recipe is compared with the weights; what it says of the loop and the context does
not count, only what the recipe itself says. A curriculum of the loops is not continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from parcae.config import ConfigError, ModelConfig, require
from parcae.files import FileError
from parcae.presets import preset
from parcae.recipe import build, merge, to_dict
from parcae.runs import find_checkpoint, load, weights_checksum
from parcae.runs.layout import is_checkpoint_path, step_of
from parcae.runs.records import naming_imports

if TYPE_CHECKING:
    from parcae.model.base import LanguageModel
    from parcae.training.distributed import Workers
    from parcae.training.settings import Recipe, StartConfig

MAY_DIFFER = ("loop", "context_length", "init")
"""Keys of [model] that change neither the names nor the shapes of weights."""


def model_from_weights(table: Mapping[str, Any], path: str) -> ModelConfig:
    """The `[model]` table of a recipe that starts from the weights in `path`.

    What the table does not say is as in the weights; a shape that it says must be theirs.
    """
    from parcae.model.store import read_config

    folder = find_checkpoint(path)
    with naming_imports(folder):
        config = read_config(folder)
    stated = {key: value for key, value in table.items() if key != "preset"}
    tree = to_dict(config)
    tree["loop"].pop("curriculum", None)
    shape = _shape(config)
    expected = stated
    if "preset" in table:
        expected = _shape(preset(str(table["preset"]), stated))
    for key, value in expected.items():
        value = tuple(value) if isinstance(value, list) else value
        if key in shape and key not in MAY_DIFFER and value not in (shape[key], "none"):
            raise ConfigError(
                f"model.{key}: {value}, but the weights in {folder} have {shape[key]}. "
                "Omit the setting, or train without these weights."
            )
    free = {key: value for key, value in stated.items() if key in MAY_DIFFER or key not in shape}
    return build(ModelConfig, merge(tree, free))


def _shape(config: ModelConfig) -> dict[str, Any]:
    """All settings, with the values of those that follow from others where they are not set."""
    core = config.core_block
    derived = {
        "kv_heads": config.block.kv_heads,
        "mlp_width": config.block.mlp_width,
        "state_width": core.width,
        "state_heads": core.heads,
        "state_kv_heads": core.kv_heads,
        "state_mlp_width": core.mlp_width,
        "value_layers": tuple(n for n in range(config.layers) if config.has_value_embedding(n)),
    }
    return {field.name: getattr(config, field.name) for field in fields(config)} | derived


def with_recorded_start(recipe: Recipe) -> Recipe:
    """The recipe with the folder, step and checksum of the weights it starts from."""
    if recipe.start.checkpoint is None:
        return recipe
    folder = find_checkpoint(recipe.start.checkpoint).absolute()
    step = step_of(folder) if is_checkpoint_path(folder) else None
    checksum = weights_checksum(folder)
    _check(recipe.start, checksum)
    return replace(
        recipe,
        start=replace(recipe.start, checkpoint=str(folder), step=step, sha256=checksum),
    )


def read_start(model: LanguageModel, start: StartConfig, workers: Workers) -> None:
    """Read the weights on the first process, and give them to all: whole, or each its shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from parcae.model.store import check_weights

    wanted = model.state_dict()
    weights, failure = {}, None
    if workers.is_first and start.checkpoint is not None:
        try:
            folder = find_checkpoint(start.checkpoint)
            _check(start, weights_checksum(folder))
            weights = load(folder).state_dict()
            check_weights(wanted, weights, folder)
            weights = {name: x.to(wanted[name].dtype) for name, x in weights.items()}
        except (ConfigError, FileError) as error:
            failure = error
    workers.raise_together(failure)
    several = workers.size > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    set_model_state_dict(model, weights, options=options)


def _check(start: StartConfig, checksum: str) -> None:
    require(
        start.sha256 in (None, checksum),
        "start.sha256",
        f"the weights in {start.checkpoint} have the checksum {checksum[:12]}..., not "
        f"{str(start.sha256)[:12]}...",
        "Give the weights that were meant, or remove start.sha256 to use these.",
    )
