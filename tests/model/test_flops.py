"""The one count, against PyTorch's own counter and the paper's tables."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import parcae
from conftest import KINDS, tiny
from parcae.config import LoopConfig
from parcae.model import build, create, flops
from parcae.model.depth import Depths

ROWS, LENGTH = 3, 8


class Counter(TorchDispatchMode):
    """Adds up PyTorch's own formulas; FlopCounterMode trips over views made without gradient."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def counted(model, run) -> int:
    """FLOPs that PyTorch counts; the CPU's fused attention would count as zero."""
    with sdpa_kernel(SDPBackend.MATH), Counter() as counter:
        run(model)
    return counter.total


@pytest.mark.slow
def test_our_adder_agrees_with_flop_counter_mode():
    config = KINDS["addition"]
    tokens, _ = batch(config)
    model = create(config)
    every_loop = Depths((3,) * ROWS, (3,) * ROWS)

    def run(model):
        model(tokens, loops=every_loop, state="zero").logits.sum().backward()

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as reference:
        run(model)
    assert counted(model, run) == reference.get_total_flops() > 0


def batch(config):
    return torch.randint(config.vocab_size, (2, ROWS, LENGTH))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loops", [1, 3])
def test_forward(kind, loops):
    config = KINDS[kind]
    tokens, _ = batch(config)

    def run(model):
        with torch.no_grad():
            model(tokens, loops=loops, state="zero")

    ours = ROWS * LENGTH * flops.token_flops(config, LENGTH).forward(loops)
    assert counted(create(config), run) == ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_pass_with_mixed_depths(kind):
    config = KINDS[kind]
    tokens, targets = batch(config)
    depths = Depths.truncated([1, 5, 2], backprop_loops=2)

    def run(model):
        logits = model(tokens, loops=depths, state="zero").logits
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    assert counted(create(config), run) == flops.executed_flops(config, depths, LENGTH)


def test_transformer():
    config = parcae.preset("transformer-1m", {"context_length": LENGTH, "vocab_size": 96})
    tokens, targets = batch(config)

    def run(model):
        logits = model(tokens).logits
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    assert counted(create(config), run) == ROWS * LENGTH * flops.training_flops_per_token(config)


def test_nominal_cost_is_the_papers_formula():
    config = parcae.preset("parcae-140m")
    blocks = 12 * 768**2
    gates = 32 * 6
    core = 2 * blocks + gates
    attention = 4 * 768 * 2048
    once = 4 * blocks + 2 * gates + 768**2 * 2 + 32_768 * 768  # prelude, coda, B, C, unembedding
    n1, n2 = 4 * core, 4 * core + once
    layers_free, layers_carried = 4 * 2, 4 * 2 + 4
    expected = 2 * n1 + 6 * n2 + attention * (layers_free + 3 * layers_carried)
    assert flops.training_flops_per_token(config) == expected


def test_backprop_beyond_the_mean_is_not_charged():
    deep = tiny(loop=LoopConfig(mean_loops=2, backprop_loops=8))
    full = tiny(loop=LoopConfig(mean_loops=2, sampler="poisson-full"))
    assert flops.training_flops_per_token(deep) == flops.training_flops_per_token(full)


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_counts(kind):
    config = KINDS[kind]
    model = create(config)
    assert flops.parameter_count(config) == sum(p.numel() for p in model.parameters())
    core = sum(p.numel() for p in model.loop.core.blocks.parameters())
    assert flops.core_parameter_count(config) == core
    total = flops.parameter_count(config)
    assert flops.effective_parameters(config, 1) == total
    assert flops.effective_parameters(config, 5) == total + 4 * core


@pytest.mark.parametrize(
    ("size", "law", "tokens", "predicted", "measured"),
    [
        ("140m", (2.662, 522733.307, 0.771, 25420.102, 0.525), 11.2e9, 2.976, 2.948),
        ("370m", (2.439, 832134.346, 0.775, 6386.865, 0.448), 29.6e9, 2.680, 2.673),
    ],
)
def test_effective_parameters_put_the_papers_law_near_its_models(
    size, law, tokens, predicted, measured
):
    E, X, x, Y, y = law
    n = flops.effective_parameters(parcae.preset(f"parcae-{size}"))
    loss = E + X * n**-x + Y * tokens**-y
    assert loss == pytest.approx(predicted, abs=1e-3)
    assert abs(loss / measured - 1) < 0.01


def test_counting_allocates_nothing():
    model = build(parcae.preset("parcae-1.3b"))
    assert all(p.is_meta for p in model.parameters())
