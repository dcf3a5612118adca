"""The only count of parameters and FLOPs in the project.

Convention. FLOPs per token = 2 N per forward and 4 N more per backward, where N counts every
matrix entry that a token is multiplied with, as often as it is: the core once per loop, the
injection's B once per forward (it is hoisted out of the loop), W_1 of a concatenation once per
loop. A loop without gradient costs 2 N, a loop with gradient 6 N, which is the paper's
C = 2 N_1 + 6 N_2. Looked-up tables (token and value embeddings) are excluded, the unembedding is
included, tied or not. Norms, the diagonal decay and other vectors are excluded: they are below
0.1 % and no matrix product. Attention adds 4 * heads * head_dim * sequence length per layer and
forward, without a discount for causality, and three times that with a backward.

Budgets use the nominal mean_loops and gradient_loops; `executed` counts what a batch really ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from parcae.config import BlockShape, ModelConfig
from parcae.model import build
from parcae.model.blocks import GATE_CHANNELS
from parcae.model.depth import Depths
from parcae.model.init_weights import Unfilled
from parcae.model.injection import Injection, build_injection
from parcae.registry import INJECTIONS


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per token of one forward: of the parts that run once, and of each loop."""

    outside: float
    """Prelude, injection matrix, readout, coda and unembedding."""
    per_loop: float

    def forward(self, loops: float) -> float:
        return self.outside + loops * self.per_loop

    def training(self, loops: float, gradient_loops: float) -> float:
        """Forward and backward; the first loops - gradient_loops have no backward."""
        return 3 * self.outside + (loops + 2 * gradient_loops) * self.per_loop


@lru_cache
def token_flops(config: ModelConfig, length: int | None = None) -> TokenFlops:
    """The cost of a token in a sequence of `length`; the default is the context length."""
    length = length or config.context_length
    core = range(config.prelude_layers, config.prelude_layers + config.core_layers)
    looped = config.architecture == "looped"
    layers = {layer: _layer_flops(config, layer, length) for layer in range(config.layers)}
    per_loop = sum(layers[layer] for layer in core) if looped else 0
    once, each_loop = _injection_entries(config)
    readout = config.core_block.width * config.width if config.readout else 0
    head = config.vocab_size * config.width
    outside = sum(layers.values()) - per_loop + 2 * (once + readout + head)
    return TokenFlops(outside=outside, per_loop=per_loop + 2 * each_loop)


def training_flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """The nominal cost that budgets and scaling laws use."""
    loop = config.loop
    grad_loops = min(loop.gradient_loops, loop.mean_loops)
    if loop.sampler == "poisson-full":
        grad_loops = loop.mean_loops
    return token_flops(config, length).training(loop.mean_loops, grad_loops)


def executed_flops(config: ModelConfig, depths: Depths, length: int) -> float:
    """FLOPs of one training pass over a batch with these depths."""
    cost = token_flops(config, length)
    pairs = zip(depths.loops, depths.gradient_loops, strict=True)
    return length * sum(cost.training(loops, grad_loops) for loops, grad_loops in pairs)


@lru_cache
def parameter_count(config: ModelConfig) -> int:
    """Exact; a tied unembedding counts once."""
    return sum(p.numel() for p in build(config).parameters())


@lru_cache
def core_parameter_count(config: ModelConfig) -> int:
    """Parameters of the looped blocks alone."""
    model = build(config)
    return sum(p.numel() for name, p in model.named_parameters() if ".core.blocks." in name)


def effective_parameters(config: ModelConfig, loops: float | None = None) -> float:
    """N(mu) of the scaling laws: all parameters once, plus mu - 1 times the core's blocks."""
    loops = config.loop.mean_loops if loops is None else loops
    return parameter_count(config) + (loops - 1) * core_parameter_count(config)


def _layer_flops(config: ModelConfig, layer: int, length: int) -> int:
    shape = config.block_of_layer(layer)
    attention = 4 * shape.heads * shape.head_dim * length
    return 2 * _block_entries(config, shape, config.has_value_embedding(layer)) + attention


def _block_entries(config: ModelConfig, shape: BlockShape, gated: bool) -> int:
    attention = 2 * shape.width * (shape.width + shape.kv_width)
    mlp = (3 if config.mlp == "swiglu" else 2) * shape.width * shape.mlp_width
    gate = min(GATE_CHANNELS, shape.width) * shape.kv_heads if gated else 0
    return attention + mlp + gate


def _injection_entries(config: ModelConfig) -> tuple[int, int]:
    """Matrix entries of the injection: used once per forward, and once per loop."""
    if config.architecture == "transformer":
        return 0, 0
    with torch.device("meta"):
        return injection_of(config).matrix_entries()


def injection_of(config: ModelConfig) -> Injection:
    """The injection of a looped model, without memory for its weights."""
    with torch.device("meta"), Unfilled():
        return build_injection(config)


def _forget() -> None:
    """A name may stand for another injection now."""
    for function in (token_flops, parameter_count, core_parameter_count):
        function.cache_clear()


INJECTIONS.on_change.append(_forget)
