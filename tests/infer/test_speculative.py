"""Speculation changes the time a text takes, and nothing of the text."""

from __future__ import annotations

from random import Random

import pytest
import torch

from oracles import VOCABULARY, chances_of, flips, model_of
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError

PROMPTS = [[Random(i).randrange(VOCABULARY) for _ in range(1 + i % 7)] for i in range(16)]


@pytest.mark.slow
@pytest.mark.parametrize(("draft_loops", "draft_tokens"), [(1, 1), (2, 4), (3, 7)])
@pytest.mark.parametrize("kind", ["parcae", "rdm", "parcae-no-prelude"])
def test_greedy_text_is_that_of_plain_decoding(kind, draft_loops, draft_tokens):
    model = model_of(kind)
    options = {"loops": 4, "max_new_tokens": 9}
    plain = Engine(model).generate_all(PROMPTS, **options)
    drafts = {"draft_loops": draft_loops, "draft_tokens": draft_tokens}
    quick = Engine(model).generate_all(PROMPTS, **options, **drafts)
    parted = 0
    for prompt, a, b in zip(PROMPTS, plain, quick, strict=True):
        parted += flips(model, prompt, a.tokens, b.tokens, 4)
        assert (b.finish, len(b.loops)) == (a.finish, 9)
        assert b.accepted <= b.drafted
    assert parted <= 1
    assert sum(made.accepted for made in quick) > 0
    assert sum(made.accepted for made in quick) < sum(made.drafted for made in quick)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_sampled_text_is_that_of_plain_decoding_token_for_token(seed):
    """So its distribution is too. Penalties look at drafted tokens like at any other."""
    engine = Engine(model_of("parcae"))
    options = {"loops": 4, "max_new_tokens": 12, "seed": seed, "logprobs": VOCABULARY}
    options |= {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}
    for prompt in PROMPTS[:6]:
        plain = engine.generate(prompt, **options)
        quick = engine.generate(prompt, **options, draft_loops=2, draft_tokens=3)
        assert quick.tokens == plain.tokens
        assert chances_of(quick).sub(chances_of(plain)).abs().max() < 1e-4
        assert quick.loops == plain.loops


def test_noise_of_its_own_for_each_token_makes_drafts_right():
    """A draft as deep as full depth less one loop agrees nearly always, also when sampling."""
    engine = Engine(model_of("parcae"))
    options = {"loops": 9, "max_new_tokens": 20, "temperature": 1.0, "draft_loops": 8}
    made = engine.generate_all(PROMPTS[:8], **options)
    assert sum(m.accepted for m in made) > 0.9 * sum(m.drafted for m in made)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_full_depth_sees_every_token_once(backend, monkeypatch):
    """A token that is drafted and accepted costs full depth as often as one that was not drafted,
    and a guess a shallow pass."""
    engine = Engine(model_of("parcae"), backend=backend)
    ran = {2: 0, 6: 0}

    for network in {engine.network, engine.network.drafter}:

        def counted(
            batch, cache, max_loops, *rest, network=network, forward=network.forward, **options
        ):
            assert network is (engine.network if max_loops[0] == 6 else engine.network.drafter)
            if not options:  # not the prompt
                ran[max_loops[0]] += len(batch)
            return forward(batch, cache, max_loops, *rest, **options)

        monkeypatch.setattr(network, "forward", counted)
    made = engine.generate([3, 4], max_new_tokens=17, loops=6, draft_loops=2, draft_tokens=4)
    # The prompt gives the first token.
    assert ran == {6: 16 + made.drafted - made.accepted, 2: made.drafted}


def test_drafts_in_8_bits_leave_nothing_behind():
    """What is in the cache after a draft was verified is what plain decoding leaves there."""
    model, prompt, options = model_of("parcae"), [9, 4, 71], {"loops": 4, "max_new_tokens": 20}
    kept = []
    for draft in ({}, {"draft_loops": 2, "draft_tokens": 3}):
        engine = Engine(model, max_batch_size=1)
        made = engine.generate(prompt, **options, **draft)
        text = len(prompt) + len(made.tokens) - 1
        kept.append([part[:, 0, :text] for part in (engine.cache.outer, engine.cache.core)])
    assert made.drafted > made.accepted > 0
    for plain, quick in zip(*kept, strict=True):
        torch.testing.assert_close(plain, quick, atol=1e-5, rtol=1e-5)


def test_what_a_draft_takes_in_memory_is_told():
    engine = Engine(model_of("parcae"))
    before = engine.network.weight_bytes
    engine.generate([1], loops=3, max_new_tokens=4)
    assert engine.network.weight_bytes == before
    engine.generate([1], loops=3, max_new_tokens=4, draft_loops=1)
    drafter = engine.network.drafter
    matrices = sum(t.nbytes for one in drafter.model.matrices for t in one.tensors)
    own = matrices if drafter is not engine.network else 0  # PyTorch drafts with the same matrices
    assert engine.network.weight_bytes == before + own
    small = Engine(model_of("parcae"), weight_dtype="int8").network
    assert small.drafter is small


def test_near_the_end_no_more_is_drafted_than_may_follow():
    model = model_of("parcae")
    made = Engine(model).generate([3, 4], max_new_tokens=2, loops=4, draft_loops=3, draft_tokens=8)
    assert made.drafted == 0
    long = Engine(model).generate(
        [3] * 30, max_new_tokens=50, loops=4, draft_loops=3, draft_tokens=8
    )
    assert (long.finish, len(long.tokens)) == ("context", 3)


def test_beside_requests_that_do_not_speculate():
    model = model_of("parcae")
    engine = Engine(model)
    plans = [{}, {"draft_loops": 2}, {"draft_loops": 1, "draft_tokens": 2}, {"exit": "kl:0.1"}]
    sampled = {"loops": 4, "max_new_tokens": 8, "temperature": 1.0}
    requests = [engine.request([9, i], **plan, **sampled) for i, plan in enumerate(plans)]
    together = engine.complete(requests)
    for i, (plan, made) in enumerate(zip(plans, together, strict=True)):
        alone = Engine(model).generate([9, i], **plan, **sampled)
        assert (alone.tokens, alone.loops) == (made.tokens, made.loops)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_loops": 4}, "draft_loops: 4 loops cannot draft for 4"),
        ({"draft_loops": -1}, "draft_loops: -1 is out of range"),
        ({"draft_loops": 1.5}, "draft_loops: 1.5 is not a whole number"),
        ({"draft_loops": 1, "draft_tokens": 0}, "draft_tokens: 0 is out of range"),
        ({"draft_loops": 1, "draft_tokens": 65}, "draft_tokens: 65 is out of range"),
        ({"draft_loops": 1, "exit": "kl:1"}, "speculation needs a fixed depth"),
    ],
)
def test_drafts_that_cannot_be(changes, message):
    engine = Engine(model_of("parcae"))
    with pytest.raises(ConfigError, match=message):
        engine.generate([1], loops=4, **changes)
    assert engine.cache.bytes == 0


def test_a_cache_that_shares_slots_cannot_draft():
    engine = Engine(model_of("parcae"), cache="last:3")
    with pytest.raises(ConfigError, match="cannot hold a draft too"):
        engine.generate([1], loops=4, draft_loops=1)
    assert len(engine.generate([1], loops=3, draft_loops=1, max_new_tokens=4).tokens) == 4
