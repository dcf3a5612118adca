"""Sequences computed together give the same results as each one alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parcae
from conftest import tiny
from evaluation_fixtures import score_all
from parcae.config import LoopConfig
from parcae.evaluation.prompts import Prompt, Span, cut_left
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.shared_prefix import PrefixGroup, batches, prefix_groups
from parcae.model import create
from parcae.model.injection import INJECTIONS
from test_registry import Gated

tokens = st.lists(st.integers(0, 95), min_size=2, max_size=14)


@st.composite
def prompts(draw) -> Prompt:
    shared = draw(tokens)
    tails = draw(
        st.lists(st.lists(st.integers(0, 95), min_size=1, max_size=9), min_size=1, max_size=4)
    )
    whole = [shared + tail for tail in tails]
    spans = [Span(draw(st.integers(1, len(one) - 1)), len(one)) for one in whole]
    return cut_left(whole, spans, draw(st.integers(8, 32)))


ARCHITECTURES = {
    "parcae": {},
    "grouped heads": {"kv_heads": 1},
    "transformer": {},
    "wide drive": {"injection": "gated"},
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INJECTIONS._registered, "gated", Gated)
        yield build(request.param)


def build(architecture):
    if architecture == "transformer":
        config = parcae.preset("transformer-1m", {"context_length": 32, "vocab_size": 96})
    else:
        config = tiny(loop=LoopConfig(mean_loops=3), **ARCHITECTURES[architecture])
    torch.manual_seed(1)
    made = create(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


class NoTokenizer:
    bos = 0
    sha256 = ""


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(several=st.lists(prompts(), min_size=1, max_size=5))
def test_bundles_equal_each_sequence_alone(model, several):
    looped = model.config.architecture != "transformer"
    depths = (1, 3) if looped else (1,)
    scorer = LoopedScorer(model, NoTokenizer(), depths, batch_tokens=90)  # type: ignore[arg-type]
    for prompt, answers in zip(several, score_all(scorer, several), strict=True):
        assert len(answers) == len(prompt.sequences)
        for sequence, span, answer in zip(prompt.sequences, prompt.spans, answers, strict=True):
            ids = torch.tensor([sequence])
            for place, depth in enumerate(depths):
                options = {"loops": depth, "state": "zero"} if looped else {}
                with torch.no_grad():
                    logits = model(ids, **options).logits[0, span.start - 1 : span.end - 1]
                nats = -logits.log_softmax(-1).gather(1, ids[0, span.start : span.end, None])[:, 0]
                assert torch.allclose(answer.nats[place].float(), nats, atol=2e-5)
                ranked = logits.topk(2).values
                clear = ranked[:, 0] - ranked[:, 1] > 1e-4
                assert (answer.likeliest[place] == logits.argmax(-1))[clear].all()


def test_shared_tokens_are_computed_once():
    shared = tuple(range(20))
    prompt = Prompt(
        ((*shared, 1, 2), (*shared, 3, 4, 5), (*shared, 1, 2)),
        (Span(20, 22), Span(20, 23), Span(20, 22)),
        (22, 23, 22),
    )
    ((held, branches),) = prefix_groups(prompt)
    assert held.shared == shared
    assert held.branches == ((1,), (3, 4))  # the last token of each is predicted, not read
    assert branches == [[0, 2], [1]]
    assert held.positions == [*range(20), 20, 20, 21]
    assert held.index(1, 21) == 22


def test_answers_of_one_token_cost_nothing_more():
    shared = tuple(range(10))
    prompt = Prompt(tuple((*shared, letter) for letter in range(4)), (Span(10, 11),) * 4, (11,) * 4)
    ((held, branches),) = prefix_groups(prompt)
    assert held == PrefixGroup(shared, ((),))
    assert branches == [[0, 1, 2, 3]]


def test_sequences_cut_at_different_positions_share_nothing():
    prompt = cut_left([[*range(30), 1], [*range(30), 1, 2]], [Span(30, 31), Span(30, 32)], 16)
    assert [held.size for held, _ in prefix_groups(prompt)] == [15, 15]


def test_batches_keep_their_size_and_every_prompt():
    costs = [5, 9, 3, 20, 1, 1, 7]
    found = list(batches(costs, 12))
    assert sorted(place for batch in found for place in batch) == list(range(7))
    assert found[0] == [3]
    assert all(sum(costs[p] for p in batch) <= 12 for batch in found[1:])


def test_a_drawn_state_does_not_depend_on_the_batch(small_model, small_tokenizer):
    drawn = LoopedScorer(small_model, small_tokenizer, [2], state="like-init")
    first, second = (
        Prompt(
            ((0, *small_tokenizer.encode(text)),),
            (Span(1, 3),),
            (1 + len(small_tokenizer.encode(text)),),
        )
        for text in ("the cat sat", "one dog run far")
    )
    together = drawn.score([first, second], [7, 8])
    alone = drawn.score([second], [8])
    assert torch.allclose(together[1][0].nats, alone[0][0].nats, atol=1e-5)
    other = drawn.score([second], [9])
    assert not torch.allclose(other[0][0].nats, alone[0][0].nats, atol=1e-4)
