"""Reads and writes the format of transformers: what `parcae export` writes.

The tensors are ours, under the names of `hub/modeling_parcae.py`, except that the rows of q and k
are in the order in which they are rotated there: the first halves of all pairs, then the second.
No module of transformers is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parcae.config import ConfigError, ModelConfig, require
from parcae.files import FileError
from parcae.recipe import build as build_config

MODEL_TYPE = "parcae"
INJECTIONS = ("diagonal", "concatenation", "addition", "none")
SAMPLERS = (
    "poisson",
    "poisson-full",
    "poisson-fill",
    "lognormal-fill",
    "fixed",
    "release-per-batch",
)

_CONFIG = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "prelude_layers": "num_prelude_layers",
    "core_layers": "num_core_layers",
    "coda_layers": "num_coda_layers",
    "state_width": "state_size",
    "state_heads": "state_num_attention_heads",
    "state_kv_heads": "state_num_key_value_heads",
    "state_mlp_width": "state_intermediate_size",
    "injection": "injection",
    "discretisation": "discretisation",
    "readout": "readout",
    "prelude_norm": "prelude_norm",
    "mlp": "mlp",
    "norm": "norm",
    "norm_eps": "rms_norm_eps",
    "qk_norm": "qk_norm",
    "value_layers": "value_layers",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "init": "init",
}
_LOOP = ("mean_loops", "backprop_loops", "sampler", "draw_per", "state_init")
"""Settings of the loop, under the same names in both."""

_BLOCK = {
    "norm_attn": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.gate": "self_attn.value_gate",
    "norm_mlp": "post_attention_layernorm",
    "mlp.fc": "mlp.fc",
    "mlp.proj": "mlp.proj",
    "norm_after_attn": "norm_after_attn",
    "norm_after_mlp": "norm_after_mlp",
}
_STACK = {
    "prelude.blocks": "model.prelude.layers",
    "loop.core.blocks": "model.core.layers",
    "coda.blocks": "model.coda.layers",
    "blocks": "model.prelude.layers",
}
_SINGLE = {
    "embed.weight": "model.embed_tokens.weight",
    "prelude.norm.weight": "model.prelude.norm.weight",
    "coda.readout.weight": "model.readout.weight",
    "coda.norm.weight": "model.norm.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_FROM_BLOCK = {theirs: ours for ours, theirs in _BLOCK.items()}


def is_hf(header: Any) -> bool:
    return isinstance(header, dict) and header.get("model_type") == MODEL_TYPE


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The settings of `hub.ParcaeConfig` for a configuration."""
    for key, name, known in (
        ("model.injection", config.injection, INJECTIONS),
        ("model.loop.sampler", config.loop.sampler, SAMPLERS),
    ):
        require(
            name in known,
            key,
            f"{name!r} is defined outside of parcae",
            f"Models with one of {', '.join(known)} can be exported.",
        )
    looped = config.architecture == "looped"
    block, core = config.block, config.core_block
    settings = {theirs: getattr(config, ours) for ours, theirs in _CONFIG.items()}
    settings |= {name: getattr(config.loop, name) for name in _LOOP}
    settings |= {
        "num_key_value_heads": block.kv_heads,
        "intermediate_size": block.mlp_width,
        "state_size": core.width,
        "state_num_attention_heads": core.heads,
        "state_num_key_value_heads": core.kv_heads,
        "state_intermediate_size": core.mlp_width,
        "value_layers": [i for i in range(config.layers) if config.has_value_embedding(i)],
        "num_loops": config.loop.nominal_loops,
        "backprop_loops": config.loop.gradient_loops,
    }
    if not looped:  # all layers in one stack
        settings |= {"num_prelude_layers": config.layers, "num_core_layers": 0}
        settings |= {"num_coda_layers": 0}
    return settings


def from_hf_config(header: Mapping[str, Any]) -> ModelConfig:
    """The configuration that config.json describes; keys it omits have their defaults."""
    settings = {ours: header[theirs] for ours, theirs in _CONFIG.items() if theirs in header}
    settings["loop"] = {name: header[name] for name in _LOOP if name in header}
    settings["value_embeddings"] = header.get("value_layers") != []
    if header.get("num_core_layers") == 0:
        settings["architecture"] = "transformer"
        for name in ("state_width", "state_heads", "state_kv_heads", "state_mlp_width"):
            settings.pop(name, None)
    return build_config(ModelConfig, settings)


def read_hf(folder: Path, header: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and weights of an exported folder, under the names of this package."""
    from parcae.model import CONFIG_FILE, WEIGHTS_FILE
    from parcae.model.store import read_weights

    try:
        config = from_hf_config(header)
    except (ConfigError, TypeError) as error:
        raise FileError(f"{folder / CONFIG_FILE}: {error}") from None
    weights = read_weights(folder / WEIGHTS_FILE)
    try:
        return config, from_hf_weights(weights, config)
    except RuntimeError as error:  # the rows of q or k are no whole heads
        raise FileError(f"{folder}: the weights do not fit the configuration: {error}.") from None


def to_hf_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by the names of `ParcaeForCausalLM`."""
    converted = {}
    for name, tensor in weights.items():
        if name.endswith((".attn.q.weight", ".attn.k.weight")):
            tensor = _halves_first(tensor, _head_dim(name, config))
        converted[_their_name(name)] = tensor.contiguous()
    return converted


def from_hf_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by the names of this package; unknown names are kept and refused when assigned."""
    looped = config.architecture == "looped"
    converted = {}
    for theirs, tensor in weights.items():
        name = _our_name(theirs, looped)
        if name.endswith((".attn.q.weight", ".attn.k.weight")):
            tensor = _pairs_together(tensor, _head_dim(name, config))
        if name == "head.weight" and config.tied_embeddings:
            embedding = weights.get("model.embed_tokens.weight")
            if embedding is not None and torch.equal(tensor, embedding):
                continue
        converted[name] = tensor.contiguous()
    return converted


def _their_name(name: str) -> str:
    if name in _SINGLE:
        return _SINGLE[name]
    if name.startswith("value_tables."):
        return name.replace("value_tables.", "model.value_embeddings.", 1)
    if name.startswith("loop.core.injection."):
        return name.replace("loop.core.", "model.core.", 1)
    match = re.fullmatch(r"(.*blocks)\.(\d+)\.(.+)\.weight", name)
    assert match is not None, name
    return f"{_STACK[match[1]]}.{match[2]}.{_BLOCK[match[3]]}.weight"


def _our_name(name: str, looped: bool) -> str:
    for ours, theirs in _SINGLE.items():
        if name == theirs and (theirs != "model.norm.weight" or (ours == "norm.weight") != looped):
            return ours
    if name.startswith("model.value_embeddings."):
        return name.replace("model.value_embeddings.", "value_tables.", 1)
    if name.startswith("model.core.injection."):
        return name.replace("model.core.", "loop.core.", 1)
    match = re.fullmatch(r"model\.(prelude|core|coda)\.layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[3] not in _FROM_BLOCK:
        return name
    stack = {"prelude": "prelude.blocks", "core": "loop.core.blocks", "coda": "coda.blocks"}
    ours = stack[match[1]] if looped else "blocks"
    return f"{ours}.{match[2]}.{_FROM_BLOCK[match[3]]}.weight"


def _head_dim(name: str, config: ModelConfig) -> int:
    return (config.core_block if name.startswith("loop.") else config.block).head_dim


def _halves_first(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (0, 1, 2, 3, ...) of every head as (0, 2, ..., 1, 3, ...)."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape_as(weight)


def _pairs_together(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `_halves_first`."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape_as(weight)
