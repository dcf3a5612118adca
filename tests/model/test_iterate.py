"""Looking at a model loop by loop: the same states as forwards at every depth."""

from __future__ import annotations

import itertools

import pytest
import torch

from conftest import KINDS, randomised


def some_tokens(config, rows: int = 3, length: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (rows, length), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["zero", "like-init"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_a_forward(kind, state):
    model = randomised(KINDS[kind])
    tokens = some_tokens(model.config)
    noise = torch.Generator().manual_seed(5)
    seen = list(itertools.islice(model.iterate(tokens, state, noise), 6))
    assert len(seen) == 6
    assert not any(h.requires_grad for h in seen)
    for t, h in enumerate(seen, 1):
        same = torch.Generator().manual_seed(5)
        expected = model(tokens, loops=t, state=state, generator=same).state
        torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-6)


def test_prelude_runs_once_and_only_what_is_taken_is_computed():
    model = randomised(KINDS["parcae"])
    calls = {"prelude": 0, "core": 0, "coda": 0}
    for name, part in (
        ("prelude", model.prelude),
        ("core", model.loop.core),
        ("coda", model.coda),
    ):
        part.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    read = list(model.readings(some_tokens(model.config), (5, 2), "zero"))
    assert [depth for depth, _ in read] == [2, 5]
    assert calls == {"prelude": 1, "core": 5, "coda": 2}


def test_a_caller_keeps_its_own_gradient_mode_between_states():
    model = randomised(KINDS["parcae"])
    states = model.iterate(some_tokens(model.config), "zero")
    next(states)
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_readings_are_what_the_head_reads(kind):
    model = randomised(KINDS[kind])
    tokens = some_tokens(model.config)
    for depth, x in model.readings(tokens, (1, 3), "zero"):
        expected = model(tokens, loops=depth, state="zero").logits
        torch.testing.assert_close(model.logits(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loops", [[0], [-1], [1.5], [True]])
def test_impossible_loops(loops):
    model = randomised(KINDS["parcae"])
    with pytest.raises((TypeError, ValueError), match="loops"):
        list(model.readings(some_tokens(model.config), loops, "zero"))


def test_wrong_tokens_are_refused_at_once():
    model = randomised(KINDS["parcae"])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.iterate(torch.tensor([[96]]))
