"""Mixed depths: every row as if it were alone, and no row looped in vain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from conftest import KINDS, randomised
from parcae.model.depth import Depths

LENGTH = 7


def batch(config, rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, LENGTH)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    targets = torch.randint(config.vocab_size, shape, generator=generator)
    state = 0.3 * torch.randn(*shape, config.core_block.width, generator=generator)
    return tokens, targets, state


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((ours[name] - gradient).abs().max() / scale) < tolerance, name


def mean_of_rows(model, tokens, targets, state, depths):
    """Brute force: each row alone, the mean taken by hand."""
    losses = [
        model(
            tokens[i : i + 1],
            targets[i : i + 1],
            loops=Depths((depths.loops[i],), (depths.gradient_loops[i],)),
            state=state[i : i + 1],
        ).loss
        for i in range(len(tokens))
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_version_masked_to_the_maximum(kind):
    config = KINDS[kind]
    model = randomised(config)
    tokens, targets, state = batch(config, rows=5)
    depths = Depths.truncated([3, 1, 6, 2, 6], backprop_loops=2)
    loss = model(tokens, targets, loops=depths, state=state).loss
    oracle = reference.forward(model, tokens, targets, depths, state)
    assert abs(loss - oracle) < 2e-6
    assert_same_gradients(gradients(model, loss), gradients(model, oracle))
    logits = model(tokens, loops=depths, state=state).logits
    assert torch.allclose(logits, reference.forward(model, tokens, None, depths, state), atol=1e-5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    loops=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    backprop=st.integers(1, 5),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 3),
)
def test_equals_each_row_alone(loops, backprop, kind, seed):
    config = KINDS[kind]
    model = randomised(config)
    tokens, targets, state = batch(config, len(loops), seed)
    depths = Depths.truncated(loops, backprop)
    together = model(tokens, targets, loops=depths, state=state).loss
    apart = mean_of_rows(model, tokens, targets, state, depths)
    assert abs(together - apart) < 2e-6
    assert_same_gradients(gradients(model, together), gradients(model, apart))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(5)))
def test_order_and_neighbours_do_not_matter(order):
    config = KINDS["parcae"]
    model = randomised(config)
    tokens, _, state = batch(config, 5)
    loops = [4, 1, 7, 2, 3]
    with torch.no_grad():
        straight = model(tokens, loops=loops, state=state)
        pick = list(order)
        permuted = model(tokens[pick], loops=[loops[i] for i in pick], state=state[pick])
        without_neighbours = model(tokens[2:3], loops=7, state=state[2:3])
    assert torch.allclose(straight.logits[pick], permuted.logits, atol=1e-5)
    assert torch.allclose(straight.state[pick], permuted.state, atol=1e-5)
    assert torch.allclose(straight.logits[2:3], without_neighbours.logits, atol=1e-5)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_row_loops_executed_equal_row_loops_needed(with_gradient):
    config = KINDS["parcae"]
    model = randomised(config)
    tokens, targets, _ = batch(config, 6)
    loops = [5, 1, 9, 2, 2, 6]
    executed = []
    hook = model.loop.core.register_forward_pre_hook(lambda _, args: executed.append(len(args[0])))
    with torch.set_grad_enabled(with_gradient):
        model(tokens, targets, loops=loops, state="zero")
    hook.remove()
    assert sum(executed) / sum(loops) == 1.0
    assert len(executed) == 9  # with gradient: 7 passes without it, then 2 with it


@pytest.mark.slow
def test_every_sequence_gets_exactly_its_gradient_loops():
    """Perturb the core after m loops: the loss gradient must see the last k loops and no others.

    The gradient with truncation k equals that of a fresh run of k loops started from the state
    that the first T - k loops reach; and it differs from the runs with k - 1 and k + 1.
    """
    config = KINDS["parcae"]
    model = randomised(config)
    tokens, targets, state = batch(config, 4)
    loops, backprop = [1, 2, 5, 8], 3
    for row, total in enumerate(loops):
        one = (tokens[row : row + 1], targets[row : row + 1])
        expected = min(total, backprop)

        def restarted(carried, one=one, row=row, total=total):
            start = state[row : row + 1]
            if total > carried:
                with torch.no_grad():
                    start = model(one[0], loops=total - carried, state=start).state
            depths = Depths((carried,), (carried,))
            return gradients(model, model(*one, loops=depths, state=start).loss)

        full = model(*one, loops=Depths.truncated([total], backprop), state=state[row : row + 1])
        truncated = gradients(model, full.loss)
        assert_same_gradients(truncated, restarted(expected))
        for other in {expected - 1, expected + 1} & set(range(1, total + 1)):
            name = "loop.core.blocks.0.mlp.fc.weight"
            assert not torch.allclose(truncated[name], restarted(other)[name], rtol=1e-2)


def test_trajectory_follows_each_row_to_its_end():
    config = KINDS["parcae"]
    model = randomised(config)
    tokens, targets, state = batch(config, 3)
    loops = [2, 5, 1]
    out = model(tokens, loops=loops, state=state, trajectory=True)
    seen = out.trajectory
    assert seen.states.shape[0] == 6
    assert torch.equal(seen.states[0], state)
    for t in range(1, 6):
        with torch.no_grad():
            alone = [model(tokens[i : i + 1], loops=min(t, n), state=state[i : i + 1])
                     for i, n in enumerate(loops)]  # fmt: skip
        states = torch.cat([a.state for a in alone])
        assert torch.allclose(seen.states[t], states, atol=1e-5)
        assert torch.allclose(seen.logits[t - 1], torch.cat([a.logits for a in alone]), atol=1e-5)
        for i, n in enumerate(loops):
            moved = seen.residuals[t - 1, i]
            if t > n:
                assert moved.isnan().all()
            else:
                norm = (seen.states[t, i] - seen.states[t - 1, i]).norm(dim=-1)
                assert torch.allclose(moved, norm)
    assert torch.allclose(seen.states[-1], out.state, atol=1e-6)
    assert not seen.states.requires_grad
    with_targets = model(tokens, targets, loops=loops, state=state, trajectory=("residuals",))
    assert with_targets.trajectory.states is None
    assert with_targets.trajectory.residuals.shape == (5, 3, LENGTH)
    assert torch.allclose(with_targets.trajectory.residuals, seen.residuals, 1e-4, equal_nan=True)


def test_nothing_is_stashed_between_calls():
    config = KINDS["parcae"]
    model = randomised(config)
    before = set(dir(model)) | {f"{n}.{k}" for n, m in model.named_modules() for k in vars(m)}
    tokens, targets, _ = batch(config, 2)
    model(tokens, targets, loops=[1, 3], trajectory=True).loss.backward()
    after = set(dir(model)) | {f"{n}.{k}" for n, m in model.named_modules() for k in vars(m)}
    assert before == after


@pytest.mark.parametrize("loops", [1, 5])
def test_the_state_of_the_caller_is_left_alone(loops):
    config = KINDS["parcae"]
    model = randomised(config)
    tokens, targets, state = batch(config, 3)
    before = state.clone()
    model(tokens, targets, loops=loops, state=state).loss.backward()
    assert not state.requires_grad
    assert state.grad is None
    assert torch.equal(state, before)
    state.requires_grad_()  # a caller who asks for the gradient gets it
    model(tokens, targets, loops=Depths((2,) * 3, (2,) * 3), state=state).loss.backward()
    assert state.grad is not None
    assert state.grad.abs().sum() > 0
