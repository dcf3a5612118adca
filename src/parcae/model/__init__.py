"""The models: what a looped model and its baselines are made of, and their weights on disk.

base             `LanguageModel`, the base class: embedding, head, loss
looped           prelude, loop, coda
transformer      the baseline without a loop
precision        products in bfloat16, everything else in float32
blocks           attention, rotary embedding, MLP, norms
injection        how e enters each loop
depth            samplers of the number of loops
init_weights     initial values of all weights
initial_state    the initial state of the loop
flops            parameters and FLOPs
store            model folders
release_format   checkpoints of the authors' reference release
hf_format        folders of transformers models
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from parcae.config import ModelConfig
    from parcae.model.base import LanguageModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Names the files of weights in their place, where transformers writes several."""
"""The files of a model folder; see `parcae.model.store`."""
SHARD_PATTERN = "shard-*.safetensors"
"""In the place of the one file of weights, where several processes wrote them."""


def build(config: ModelConfig) -> LanguageModel:
    """The model a configuration describes, without memory for its weights (on the meta device)."""
    import torch

    from parcae.model.init_weights import Unfilled
    from parcae.model.looped import LoopedModel
    from parcae.model.transformer import Transformer

    with torch.device("meta"), Unfilled():
        return Transformer(config) if config.architecture == "transformer" else LoopedModel(config)


def create(
    model: str | ModelConfig,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **overrides: Any,
) -> LanguageModel:
    """A new model by preset name or configuration; the same seed gives the same weights.

    `device`: auto, cpu, cuda, cuda:N or mps; one that is not available is a ConfigError.

    Keyword arguments change keys of a preset: `create("parcae-10m", context_length=256)`.
    """
    import torch

    from parcae.device import find_device
    from parcae.model.init_weights import init_weights
    from parcae.presets import preset
    from parcae.recipe import build as build_config
    from parcae.recipe import merge, to_dict

    if isinstance(model, str):
        config = preset(model, overrides)
    else:
        config = build_config(type(model), merge(to_dict(model), overrides))
    place = find_device(device)
    created = build(config).to_empty(device=place)
    init_weights(created, config, torch.Generator(place).manual_seed(seed))
    return created
