"""The call itself: what it accepts, what it refuses, and that it repeats."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcae
from conftest import KINDS, randomised, saved_bytes, tiny
from parcae.config import LoopConfig
from parcae.model.base import loss_chunk
from parcae.model.blocks import MLP, SquaredReluLinear
from parcae.model.initial_state import draw_state_rows
from parcae.rng import keyed_generator


@pytest.fixture(scope="module")
def model():
    return randomised(KINDS["parcae"]).eval()


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (torch.tensor([[1, 96]]), r"id 96 is outside the vocabulary of 96"),
        (torch.tensor([[1, -1]]), r"id -1 is outside"),
        (torch.zeros(2, 0, dtype=torch.long), "empty"),
        (torch.zeros(0, 2, dtype=torch.long), "empty"),
        (torch.zeros(1, 33, dtype=torch.long), "context_length is 32"),
        (torch.zeros(6, dtype=torch.long), r"not \[rows, positions\]"),
        (torch.zeros(1, 6), "integer tensor"),
        (torch.zeros(1, 6, dtype=torch.bool), "integer tensor"),
        ([[1, 2]], "integer tensor"),
    ],
)
def test_bad_tokens(model, tokens, error):
    with pytest.raises((ValueError, TypeError), match=error):
        model(tokens)


@pytest.mark.parametrize(
    ("targets", "error"),
    [
        (torch.zeros(2, 5, dtype=torch.long), "shaped like tokens"),
        (torch.zeros(2, 6), "shaped like tokens"),
        ([[1, 2]], "shaped like tokens"),
        (torch.zeros(2, 6, dtype=torch.bool), "shaped like tokens"),
        (torch.full((2, 6), 96), "id 96 is outside"),
        (torch.full((2, 6), -1), "id -1 is outside"),
    ],
)
def test_bad_targets(model, targets, error):
    with pytest.raises(ValueError, match=error):
        model(TOKENS, targets=targets)


def test_gradient_reaches_the_state_of_rows_without_no_grad_loops(model):
    """And a row's gradient does not depend on its neighbours: gradient_loops is 2 here."""
    state = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(0))

    def gradient(rows, depths):
        leaf = state[rows].clone().requires_grad_()
        model(TOKENS[rows], loops=depths, state=leaf).logits[0].sum().backward()
        return leaf.grad

    alone, together = gradient([0], [2]), gradient([0, 1], [2, 6])
    assert alone.abs().max() > 0
    assert torch.allclose(alone[0], together[0], atol=1e-5)
    assert not together[1].any()


def test_a_frozen_model_builds_no_graph():
    frozen = randomised(KINDS["parcae"]).requires_grad_(False)
    assert not frozen(TOKENS, loops=[2, 6], state="zero").logits.requires_grad


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"loops": 0}, "at least one"),
        ({"loops": [3, -1]}, "at least one"),
        ({"loops": "deep"}, "sample"),
        ({"state": torch.zeros(2, 6, 47)}, "floats shaped"),
        ({"state": torch.zeros(2, 6, 48, dtype=torch.long)}, "floats shaped"),
        ({"state": "random"}, "like-init"),
        ({"trajectory": ("losses",)}, "Known: states"),
    ],
)
def test_bad_settings(model, settings, error):
    with pytest.raises((ValueError, TypeError), match=error):
        model(TOKENS, **settings)


@pytest.mark.slow
def test_int32_tokens_and_ignored_targets(model):
    targets = TOKENS.clone()
    targets[0] = -100
    half = model(TOKENS.int(), targets=targets, loops=2, state="zero").loss
    second = model(TOKENS[1:], targets=TOKENS[1:], loops=2, state="zero").loss
    assert torch.allclose(half, second, atol=1e-6)


def test_loss_is_the_cross_entropy_of_the_logits(model):
    tokens = torch.randint(96, (40, 30))
    targets = torch.randint(96, (40, 30))  # more positions than one chunk of the loss
    with torch.no_grad():
        logits = model(tokens, loops=2, state="zero").logits
        loss = model(tokens, targets=targets, loops=2, state="zero").loss
    oracle = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(loss, oracle, atol=1e-6)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(("vocabulary", "positions"), [(1, 512), (32_768, 128), (10**6, 64)])
def test_a_large_vocabulary_makes_the_chunks_of_the_loss_shorter(vocabulary, positions):
    assert loss_chunk(vocabulary) == positions


@pytest.mark.parametrize("frozen", [None, "x", "weight"])
def test_the_squared_relu_keeps_one_tensor_and_gives_the_same_gradients(frozen):
    x = torch.randn(3, 5, 64, requires_grad=frozen != "x")
    weight = torch.randn(16, 64, requires_grad=frozen != "weight")
    ours, kept = saved_bytes(lambda: SquaredReluLinear.apply(x, weight))
    plain, kept_by_plain = saved_bytes(lambda: F.linear(0.5 * x.relu().square(), weight))
    assert torch.equal(ours, plain)
    if frozen is None:
        assert kept == x.nbytes + weight.nbytes < kept_by_plain
    inputs = [each for each in (x, weight) if each.requires_grad]
    gradient = torch.randn_like(ours)
    for got, expected in zip(
        torch.autograd.grad(ours, inputs, gradient),
        torch.autograd.grad(plain, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_squared_relu_has_second_derivatives():
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(SquaredReluLinear.apply, (x, weight))


def test_a_changed_or_observed_projection_of_an_mlp_is_called():
    """Adapters replace it, hooks observe it; both must have an effect."""
    mlp = MLP(tiny(), tiny().core_block)
    x = torch.randn(2, 3, 48)
    expected, seen = mlp(x), []
    with mlp.proj.register_forward_hook(lambda module, inputs, output: seen.append(output)):
        torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(seen, [expected])
    mlp.proj = nn.Sequential(mlp.proj, nn.Tanh())
    torch.testing.assert_close(mlp(x), expected.tanh())


def test_zero_state_and_seeded_state_repeat(model):
    def seeded(seed):
        return model(TOKENS, loops=3, generator=torch.Generator().manual_seed(seed)).logits

    with torch.no_grad():
        assert torch.equal(seeded(1), seeded(1))
        assert not torch.equal(seeded(1), seeded(2))
        zero = [model(TOKENS, loops=3, state="zero").logits for _ in range(2)]
        assert torch.equal(*zero)
        given = torch.zeros(2, 6, 48)
        assert torch.equal(zero[0], model(TOKENS, loops=3, state=given).logits)


def test_like_init_is_a_truncated_normal(model):
    state = model(
        torch.zeros(8, 32, dtype=torch.long),
        loops=1,
        state="like-init",
        generator=torch.Generator().manual_seed(0),
        trajectory=("states",),
    ).trajectory.states[0]
    std = (2 / (5 * 48)) ** 0.5
    assert state.abs().max() <= 3 * std
    assert state.std().item() == pytest.approx(0.9866 * std, rel=0.02)  # the cut takes a little


def test_sampled_depths_come_from_the_generator(model):
    tokens = TOKENS.repeat(20, 1)

    def drawn(seed):
        return model(tokens, loops="sample", generator=torch.Generator().manual_seed(seed)).depths

    with torch.no_grad():
        assert drawn(0) == drawn(0)
        assert drawn(0) != drawn(1)
        assert len({*drawn(0).loops}) > 2


def test_default_depth_is_the_mean_in_training(model):
    with torch.no_grad():
        assert model(TOKENS).depths.loops == (4, 4)


def test_states_by_row_do_not_depend_on_who_holds_the_row():
    config = KINDS["parcae"]
    alone = draw_state_rows(config, seed=3, step=9, rows=range(6), length=5)
    for world in (2, 3):
        for rank in range(world):
            mine = draw_state_rows(config, 3, 9, range(rank, 6, world), 5)
            assert torch.equal(mine, alone[rank::world])
    assert not torch.equal(alone[0], alone[1])
    other_step = draw_state_rows(config, 3, 10, [0], 5)
    assert not torch.equal(alone[:1], other_step)
    zero = draw_state_rows(tiny(loop=LoopConfig(state_init="zero")), 3, 9, range(2), 5)
    assert not zero.any()


@pytest.mark.parametrize(("length", "width"), [(1, 2), (3, 6), (7, 48), (128, 128), (33, 50)])
def test_states_are_the_numbers_of_torchs_truncated_normal(length, width):
    config = tiny(width=width, heads=1, mlp_width=4, state_heads=1)
    std = math.sqrt(2 / (5 * width))
    for step in range(20):
        states = draw_state_rows(config, 3, step, range(4), length)
        for row, state in enumerate(states):
            expected = torch.empty(length, width)
            generator = keyed_generator(3, step, row, "state")
            nn.init.trunc_normal_(expected, std=std, a=-3 * std, b=3 * std, generator=generator)
            assert torch.equal(state, expected)


@pytest.mark.slow
def test_wide_state_and_any_placement_of_the_loop():
    for changes in (
        {"state_width": 64, "state_heads": 4},
        {"state_width": 32, "state_heads": 2, "state_mlp_width": 40},
        {"prelude_layers": 0, "core_layers": 4, "coda_layers": 0},
        {"prelude_layers": 3, "core_layers": 1, "coda_layers": 0},
        {"tied_embeddings": False},
    ):
        model = parcae.create(tiny(**changes))
        out = model(TOKENS, loops=[1, 4], state="zero")
        assert out.logits.shape == (2, 6, 96)
        assert out.state.shape[-1] == model.config.core_block.width
        out.logits.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_transformer_has_no_depth():
    model = parcae.create("transformer-1m", vocab_size=96)
    for depths in (None, 1, [1, 1], "sample", torch.tensor([1, 1]), parcae.Depths((1, 1), (1, 1))):
        assert model(TOKENS, loops=depths).logits.shape == (2, 6, 96)
    with pytest.raises(ValueError, match="no loop"):
        model(TOKENS, loops=4)


def test_bfloat16_weights_run():
    model = randomised(KINDS["parcae"]).bfloat16()
    logits = model(TOKENS, loops=[1, 3], state="zero").logits
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    loss = model(TOKENS, targets=TOKENS, loops=[1, 3], state="zero").loss
    assert loss.dtype == torch.float32
    oracle = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
    assert abs(loss - oracle) < 0.02  # the logits come from products in bfloat16
    loss.backward()


def test_loss_keeps_its_precision_under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(TOKENS, loops=2, state="zero").logits
        loss = model(TOKENS, targets=TOKENS, loops=2, state="zero").loss
    oracle = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
    assert logits.dtype == loss.dtype == torch.float32
    assert abs(loss - oracle) < 0.02  # the logits come from products in bfloat16


@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_a_model_in_float64_computes_in_float64(kind):
    """Differences of the loss over 2e-6 show its slope, which rounding to float32 would hide."""
    model = randomised(KINDS[kind])
    exact = copy.deepcopy(model).double()
    tokens = torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(0))
    seen, expected = model(tokens, state="zero").logits, exact(tokens, state="zero").logits
    assert (seen.dtype, expected.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(seen.double(), expected, rtol=1e-3, atol=1e-4)
    exact(tokens, tokens, loops=2, state="zero").loss.backward()
    names = [name for name, p in exact.named_parameters() if p.grad is not None]
    for name in [n for n in names if n.endswith(("log_A", "norm.weight", "embed.weight", "W"))]:
        parameter = exact.get_parameter(name)
        slope = parameter.grad.sum().item()
        with torch.no_grad():
            losses = []
            for sign in (1, -2):
                parameter += sign * 1e-6
                losses.append(exact(tokens, tokens, loops=2, state="zero").loss.item())
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7), name
        with torch.no_grad():
            parameter += 1e-6
