"""Predictions over a cache against a forward without one: any cut, any batch, any depth."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import randomised, tiny
from oracles import ALL_KINDS, VOCABULARY, Oracle, check_against_oracle, model_of, true_logits
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError
from parcae.infer.batch import Batch, Span
from parcae.infer.network import Network, TorchNetwork, open_network
from parcae.model.injection import AdditionInjection, Injection
from parcae.registry import INJECTIONS

LONGEST = 12


def in_chunks(
    network: Network, policy: str, texts: list[list[int]], loops: list[int], random: Random
) -> list[Tensor]:
    """Logits [S, V] of every text, read side by side in passes that chance cuts."""
    cache = network.model.cache(policy)
    cache.reserve(1, 3, 1)  # grows while texts are in it
    done, found = [0] * len(texts), [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        open_ = [i for i, text in enumerate(texts) if done[i] < len(text)]
        going = random.sample(open_, random.randint(1, len(open_)))
        counts = [random.choice([1, random.randint(1, len(texts[i]) - done[i])]) for i in going]
        ends = [done[i] + count for i, count in zip(going, counts, strict=True)]
        cache.reserve(max(going) + 1, max(ends), max(loops[i] for i in going))
        spans = [Span(i, done[i], count) for i, count in zip(going, counts, strict=True)]
        ids = [token for span in spans for token in texts[span.row][span.first : span.end]]
        max_loops = [loops[i] for i in going]
        output = network.forward(Batch(spans, ids, cache.device), cache, max_loops)
        assert output.loops == max_loops
        logits = output.logits.split(counts)
        for i, count, some in zip(going, counts, logits, strict=True):
            found[i].append(some)
            done[i] += count
    return [torch.cat(pieces) for pieces in found]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(ALL_KINDS)),
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=4),
    loops=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    policy=st.sampled_from(["full", "last:6", "first:6", "last:9", "first:7"]),
    backend=st.sampled_from(["auto", "torch"]),
    seed=st.integers(0, 1 << 20),
)
@torch.no_grad()
def test_exact_caches_give_the_logits_of_a_forward(kind, lengths, loops, policy, backend, seed):
    model, random = model_of(kind), Random(seed)
    loops = [1] * 4 if kind == "transformer" else loops
    texts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    network = open_network(model, backend=backend)
    found = in_chunks(network, policy, texts, loops[: len(texts)], random)
    for text, depth, logits in zip(texts, loops, found, strict=False):
        expected = true_logits(model, text, depth)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_an_engine_predicts_what_a_forward_predicts(kind):
    """Tokens, chances and their sum, from the prompt to the end of the context."""
    model, loops = model_of(kind), 1 if kind == "transformer" else 3
    prompt = [7, 1, 80, 33]
    made = Engine(model).generate(prompt, max_new_tokens=99, loops=loops, logprobs=2)
    assert made.finish == "context"
    assert len(made.tokens) == model.config.context_length - len(prompt) + 1
    logits = true_logits(model, [*prompt, *made.tokens[:-1]], loops)[len(prompt) - 1 :]
    chances = logits.double().log_softmax(-1)
    assert made.logprobs is not None
    total = sum(entry.logprob for entry in made.logprobs)
    picked = chances[torch.arange(len(made.tokens)), torch.tensor(made.tokens)]
    assert total == pytest.approx(float(picked.sum()), abs=1e-3)
    for row, entry in zip(chances, made.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(2).values.tolist()
        assert [chance for _, chance in entry.alternatives] == pytest.approx(best, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["shared", "last:1", "last:2", "last:3", "first:1", "first:3"])
@pytest.mark.parametrize("kind", ["parcae", "parcae-grouped-heads", "rdm", "addition"])
def test_sharing_slots_equals_a_dictionary_of_slots(kind, policy):
    model = model_of(kind)
    engine = Engine(model, cache=policy)
    oracle = Oracle(model, loops=5, policy=policy)
    check_against_oracle(engine, [5, 17, 80, 2], oracle, max_new_tokens=5)


def test_the_oracle_of_sharing_is_the_model_where_nothing_is_shared():
    model, text = model_of("parcae-wide-state"), [3, 14, 15, 92, 65]
    oracle = Oracle(model, loops=3)
    found = [*oracle.prompt(text[:2]), *(oracle.decode(token) for token in text[2:])]
    torch.testing.assert_close(torch.stack(found), true_logits(model, text, 3), atol=1e-5, rtol=0)


def test_sharing_is_not_exact():
    """Or the tests above would show nothing."""
    model, text = model_of("parcae"), [3, 14, 15, 92, 65]
    oracle = Oracle(model, loops=4, policy="shared")
    oracle.prompt(text[:-1])
    assert (oracle.decode(text[-1]) - true_logits(model, text, 4)[-1]).abs().max() > 1e-3


def test_a_model_in_bfloat16_is_read_in_float32():
    model = randomised(tiny()).bfloat16()
    made = Engine(model).generate([1, 2, 3], max_new_tokens=3, loops=2, logprobs=1)
    upcast = randomised(tiny()).bfloat16().float()
    expected = true_logits(upcast, [1, 2, 3], 2)[-1].log_softmax(-1)
    assert made.logprobs is not None
    assert made.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)


def test_unknown_weights():
    with pytest.raises(ConfigError, match="weight_dtype: 'int4' is not an option"):
        Engine(model_of("parcae"), weight_dtype="int4")  # type: ignore[arg-type]


class GatedInjection(Injection):
    """Not linear in h, and with a drive wider than the state."""

    def __init__(self, config):
        super().__init__(config)
        self.W = nn.Parameter(torch.empty(2 * self.state_width, self.width))
        self.decay = nn.Parameter(torch.empty(self.state_width))

    def prepare(self, e):
        return self.decay.sigmoid(), F.linear(e, self.W)

    def mix(self, h, transition, drive):
        drive, gate = drive.chunk(2, dim=-1)
        return transition * h + gate.sigmoid() * drive.tanh()


class ShiftedAddition(AdditionInjection):
    """A subclass of a built-in injection is not the built-in one."""

    def mix(self, h, transition, drive):
        return h + 2 * drive


@pytest.fixture
def other_injections():
    before = dict(INJECTIONS._registered)
    INJECTIONS.register("gated-test", GatedInjection)
    INJECTIONS.register("shifted-test", ShiftedAddition)
    yield
    INJECTIONS._registered.clear()
    INJECTIONS._registered.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("injection", ["gated-test", "shifted-test"])
def test_other_injections_are_decoded_through_pytorch(other_injections, injection, monkeypatch):
    model = randomised(tiny(injection=injection)).eval().requires_grad_(False)
    engine = Engine(model)
    assert isinstance(engine.network, TorchNetwork)
    for options in ({}, {"exit": "kl:0.02"}, {"exit": "state:0.3"}):
        oracle = Oracle(model, 4, **options)
        check_against_oracle(engine, [5, 17, 80], oracle, max_new_tokens=6, **options)
    plain = engine.generate([9, 4], max_new_tokens=8, loops=4)
    assert engine.generate([9, 4], max_new_tokens=8, loops=4, draft_loops=1).tokens == plain.tokens
    size = sum(parameter.nbytes for parameter in model.loop.core.injection.parameters())
    matrices = sum(one.stored.nbytes for one in engine.network.model.matrices)
    tables = sum(table.nbytes for table in engine.network.model.value_tables.values())
    assert engine.network.weight_bytes == matrices + tables + size  # the head is the embedding
    small = Engine(
        randomised(tiny(injection=injection)).bfloat16(), weight_dtype="int8", backend="torch"
    )
    assert len(small.generate([9], loops=3, max_new_tokens=5).tokens) == 5
    monkeypatch.setattr("parcae.infer.network.available_kernels", lambda *_: object())
    with pytest.raises(ConfigError, match=f"C\\+\\+ does not have the injection '{injection}'"):
        Engine(model, backend="native")
