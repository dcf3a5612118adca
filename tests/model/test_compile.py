"""torch.compile on a block, on the loop and on the whole model: same numbers, few compilations."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import KINDS, needs_compiler, randomised, saved_bytes, tiny
from parcae.model.blocks import MLP
from parcae.model.depth import Depths

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


def run(model, loops, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(loops), 7)
    tokens, targets = torch.randint(96, (2, *shape), generator=generator)
    state = torch.randn(*shape, model.config.core_block.width, generator=generator)
    model.zero_grad()
    depths = Depths.truncated(loops, 2)
    loss = model(tokens, targets, loops=depths, state=state).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same(ours, theirs):
    assert torch.allclose(ours[0], theirs[0], atol=1e-5)
    for name, gradient in theirs[1].items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((ours[1][name] - gradient).abs().max() / scale) < 1e-4, name


FALLING = [*range(2, 17), 17]
"""Sixteen rows that end one after the other: the core sees every size from 16 down to 2."""


@needs_compiler
def test_compiled_layers_give_the_same_numbers():
    """Without blocks in prelude and coda, which would take the compiler half a minute more."""
    config = tiny(prelude_layers=0, core_layers=1, coda_layers=0)
    eager, compiled = randomised(config), randomised(config)
    compiled.compile_layers()
    assert_same(run(compiled, FALLING), run(eager, FALLING))
    assert compilations() <= 5  # core without and with gradient, for one row; prelude; coda


def test_loop_compiles_once_for_every_batch_size():
    """Traced as for the default backend, which takes a minute to write code for all of this."""
    config = tiny(prelude_layers=1, core_layers=1, coda_layers=1)
    eager, compiled = randomised(config), randomised(config)
    compiled.compile_layers(backend="aot_eager")
    assert_same(run(compiled, FALLING), run(eager, FALLING))
    after_first = compilations()
    assert after_first <= 5  # prelude, coda, core without and with gradient, core for one row
    # Another batch size makes prelude and coda dynamic too, once; a single row is its own case.
    assert_same(run(compiled, [5, 3, 9], seed=1), run(eager, [5, 3, 9], seed=1))
    settled = compilations()
    assert settled <= after_first + 3
    for loops in ([4] * 11, [2, 2, 7, 7, 9, 3], [3] * 5, [*range(2, 9)]):
        assert_same(run(compiled, loops, seed=2), run(eager, loops, seed=2))
    assert compilations() == settled


def test_a_block_alone_compiles():
    model = randomised(KINDS["parcae"])
    block = model.loop.core.blocks[1]
    compiled = torch.compile(block, dynamic=True, backend="aot_eager")
    rope = model.rope(7, 16)
    for rows in (6, 5, 4, 3, 2):
        x = torch.randn(rows, 7, 48)
        value = torch.randn(rows, 7, 48) if block.attn.gate is not None else None
        assert torch.allclose(compiled(x, rope, value), block(x, rope, value), atol=1e-5)
    assert compilations() <= 2


@needs_compiler
def test_a_compiled_mlp_keeps_no_more_than_an_eager_one():
    """The compiler chooses what to keep for the backward: neither relu(x) nor its square."""
    mlp = MLP(tiny(), tiny().core_block)
    x = torch.randn(8, 32, 48, requires_grad=True)
    hidden = 8 * 32 * mlp.fc.weight.shape[0] * 4
    least = x.nbytes + hidden + mlp.fc.weight.nbytes + mlp.proj.weight.nbytes
    for forward in (mlp, torch.compile(mlp)):
        assert saved_bytes(partial(forward, x))[1] == least


def test_the_whole_model_wrapped_gives_the_same_numbers():
    """Captured but not compiled, which would take a minute; the layers are compiled above."""
    config = tiny(prelude_layers=1, core_layers=1, coda_layers=1)
    wrapped = torch.compile(randomised(config), dynamic=True, backend="eager")
    eager = randomised(config)
    tokens = torch.randint(96, (4, 7))
    with torch.no_grad():
        ours = wrapped(tokens, loops=[3, 1, 2, 3], state="zero").logits
        theirs = eager(tokens, loops=[3, 1, 2, 3], state="zero").logits
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_whole_model_wrapped_compiles_its_layers_once_for_every_depth():
    config = tiny(prelude_layers=1, core_layers=1, coda_layers=1)
    wrapped, eager = torch.compile(randomised(config), backend="aot_eager"), randomised(config)
    tokens = torch.randint(96, (4, 7))

    def difference(loops: int) -> float:
        with torch.no_grad():
            ours = wrapped(tokens, loops=loops, state="zero").logits
            return float((ours - eager(tokens, loops=loops, state="zero").logits).abs().max())

    assert difference(2) < 1e-5
    first = compilations()
    for loops in (3, 8, 40):
        assert difference(loops) < 1e-5
    assert compilations() == first


def test_compile_compiles_the_layers():
    model = randomised(tiny())
    model.compile(backend="eager")
    assert model.loop.core.is_compiled
    assert model._compiled_call_impl is None
