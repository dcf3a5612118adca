"""Initial values of all weights.

`scaled-zero` (the Transformer setup), with std = sqrt(2 / 5d) for a block of width d:
    projections orthogonal with gain std * sqrt(max(rows, columns)); embeddings truncated normal;
    attention-out and MLP-out zero, so that every block starts as the identity;
    value embeddings N(0, 1), their gates zero, so that every gate starts open at 1.
`scaled` (the RDM setup): everything N(0, 2 / 5d), out-projections divided by sqrt(2 * depth),
    depth counted with the core unrolled to its mean.

An injection sets its own (`Injection.init_weights`), the same in both. The initial state of
the loop is in `parcae.model.initial_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parcae.config import ModelConfig
from parcae.model.blocks import Block
from parcae.model.injection import Injection


class Unfilled(TorchFunctionMode):
    """Skip PyTorch's own initial values of modules created in this context.

    They would be overwritten, and on the meta device computing them imports the compiler, which
    takes longer than everything else."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


LINEAR_LAYERS = ("coda.readout", "head")
"""Those outside of blocks."""


def projection_std(width: int) -> float:
    return math.sqrt(2 / (5 * width))


@torch.no_grad()
def init_weights(
    model: nn.Module,
    config: ModelConfig,
    generator: torch.Generator,
    whole: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Set every parameter; one that no rule covers is an error, not left as it was.

    `whole(module)` is the context in which the parameters of a module that is set are whole
    tensors. Modules are set one after the other, so that sharded models need memory for one.
    """
    initialised: set[Tensor] = set()
    for name, module in model.named_modules():
        covered: list[nn.Parameter] = []
        if isinstance(module, Block):
            covered = [p for p in module.parameters() if p.ndim == 2]
        elif isinstance(module, nn.RMSNorm | Injection | nn.Embedding) or name in LINEAR_LAYERS:
            covered = list(module.parameters())
        if covered:
            with whole(module):
                _init_module(name, module, config, generator)
        initialised.update(covered)
    missed = [name for name, p in model.named_parameters() if p not in initialised]
    if missed:
        raise RuntimeError(f"no initial value is defined for {', '.join(missed)}")


def _init_module(
    name: str, module: nn.Module, config: ModelConfig, generator: torch.Generator
) -> None:
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, Block):
        _init_block(module, config, generator)
    elif isinstance(module, Injection):
        module.init_weights(projection_std(config.width), generator)
    elif isinstance(module, nn.Embedding):
        is_value_table = name.startswith("value_tables")
        std = 1.0 if is_value_table else projection_std(config.width)
        _init_embedding(module.weight, std, config, generator, truncated=not is_value_table)
    elif isinstance(module, nn.Linear):
        _init_projection(module.weight, config.width, config, generator)


def _init_block(block: Block, config: ModelConfig, generator: torch.Generator) -> None:
    attn, mlp, width = block.attn, block.mlp, block.attn.shape.width
    for projection in (attn.q, attn.k, attn.v, mlp.fc):
        _init_projection(projection.weight, width, config, generator)
    for out in (attn.out, mlp.proj):
        if config.init == "scaled-zero":
            nn.init.zeros_(out.weight)
        else:
            once = config.prelude_layers + config.coda_layers
            depth = once + config.core_layers * config.loop.mean_loops
            std = projection_std(width) / math.sqrt(2 * depth)
            nn.init.normal_(out.weight, std=std, generator=generator)
    if attn.gate is not None:
        nn.init.zeros_(attn.gate.weight)


def _init_projection(
    weight: Tensor, width: int, config: ModelConfig, generator: torch.Generator
) -> None:
    std = projection_std(width)
    if config.init == "scaled-zero":
        gain = std * math.sqrt(max(weight.shape))
        nn.init.orthogonal_(weight, gain=gain, generator=generator)
    else:
        nn.init.normal_(weight, std=std, generator=generator)


def _init_embedding(
    weight: Tensor, std: float, config: ModelConfig, generator: torch.Generator, truncated: bool
) -> None:
    if truncated and config.init == "scaled-zero":
        nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
    else:
        nn.init.normal_(weight, std=std, generator=generator)
