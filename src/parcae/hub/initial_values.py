"""Initial values of weights in transformers; those of `parcae.create`.

transformers asks for them module by module, without the surroundings of a module. So a module notes
its role and the width of its layer when it is built.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from parcae.model.injection import Injection

if TYPE_CHECKING:
    from parcae.hub.configuration_parcae import ParcaeConfig


def projection(
    channels_in: int, channels_out: int, layer_width: int, role: str = "projection"
) -> nn.Linear:
    """A linear layer. Roles: "projection", "out" (it adds to the residual stream), "gate"."""
    linear = nn.Linear(channels_in, channels_out, bias=False)
    set_role(linear, role, layer_width)
    return linear


def set_role(module: nn.Module, role: str, layer_width: int | None = None) -> None:
    module.role = role  # type: ignore[assignment]
    if layer_width is not None:
        module.layer_width = layer_width  # type: ignore[assignment]


@torch.no_grad()
def init_module(module: nn.Module, config: ParcaeConfig) -> None:
    """Fill the parameters that belong to this module itself."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return  # nothing to fill
    width = cast(int, getattr(module, "layer_width", config.hidden_size))
    role = cast(str, getattr(module, "role", "projection"))
    std = math.sqrt(2 / (5 * width))
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, Injection):
        module.init_weights(std, None)  # pyright: ignore[reportArgumentType]
    elif isinstance(module, nn.Embedding):
        _init_embedding(module, role, std, config)
    elif isinstance(module, nn.Linear):
        _init_linear(module, role, std, config)


def _init_embedding(module: nn.Embedding, role: str, std: float, config: ParcaeConfig) -> None:
    if role == "value":
        nn.init.normal_(module.weight)
    elif config.init == "scaled-zero":
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    else:
        nn.init.normal_(module.weight, std=std)


def _init_linear(module: nn.Linear, role: str, std: float, config: ParcaeConfig) -> None:
    scaled_zero = config.init == "scaled-zero"
    if role == "gate" or (role == "out" and scaled_zero):
        nn.init.zeros_(module.weight)
    elif role == "out":
        once = config.num_prelude_layers + config.num_coda_layers
        depth = once + config.num_core_layers * config.mean_loops
        nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth))
    elif scaled_zero:
        nn.init.orthogonal_(module.weight, gain=std * math.sqrt(max(module.weight.shape)))
    else:
        nn.init.normal_(module.weight, std=std)
