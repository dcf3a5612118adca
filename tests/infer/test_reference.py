"""Decoding without a cache: greedy by hand, seeds, stops, a context that slides."""

from __future__ import annotations

import pytest
import torch

from conftest import KINDS, randomised, tiny
from oracles import model_of
from parcae.config import ConfigError
from parcae.infer.engine import Engine
from reference import generate

PROMPT = [5, 17, 80]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loops", [None, 1, 6])
def test_greedy_is_the_argmax_of_a_forward(kind, loops):
    model = randomised(KINDS[kind])
    tokens = list(PROMPT)
    for _ in range(5):
        logits = model(torch.tensor([tokens]), loops=loops or 4, state="zero").logits
        tokens.append(int(logits[0, -1].argmax()))
    made = generate(model, PROMPT, max_new_tokens=5, loops=loops, temperature=0)
    assert made == tokens[3:]


def test_a_transformer_generates_too():
    model = model_of("transformer")
    expected = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert generate(model, PROMPT, max_new_tokens=1, temperature=0) == [expected]
    with pytest.raises(ValueError, match="no loop"):
        generate(model, PROMPT, max_new_tokens=1, loops=2)


@pytest.mark.slow
def test_a_seed_is_a_text_and_noise_belongs_to_the_position():
    model = randomised(KINDS["parcae"])
    text = generate(model, PROMPT, max_new_tokens=12, seed=3)
    torch.rand(7)  # the global generator has no say
    assert generate(model, PROMPT, max_new_tokens=12, seed=3) == text
    assert generate(model, PROMPT, max_new_tokens=12, seed=4) != text
    longer = PROMPT + text[:5]
    assert generate(model, longer, max_new_tokens=7, seed=3) == text[5:]


def test_stops_before_a_stop_token():
    model = randomised(KINDS["parcae"])
    text = generate(model, PROMPT, max_new_tokens=12, seed=3)
    end = text[4]
    assert (
        generate(model, PROMPT, max_new_tokens=12, seed=3, stop_tokens={end})
        == text[: text.index(end)]
    )


def test_a_full_context_ends_the_text_as_in_the_engine():
    model = randomised(tiny(context_length=6))
    tokens = list(range(10, 15))
    for _ in range(2):  # the last token is predicted from a full context
        window = torch.tensor([tokens])
        tokens.append(int(model(window, loops=2, state="zero").logits[0, -1].argmax()))
    assert generate(model, range(10, 15), max_new_tokens=5, loops=2, temperature=0) == tokens[5:]
    engine = Engine(model)
    completion = engine.generate(range(10, 15), max_new_tokens=5, loops=2, temperature=0)
    assert (list(completion.tokens), completion.finish) == (tokens[5:], "context")
    for call in (generate, engine.generate):
        with pytest.raises(ConfigError, match="context holds 6"):
            call(model, range(40), max_new_tokens=1) if call is generate else call(range(40))


@pytest.mark.slow
def test_top_k_of_one_is_greedy():
    model = randomised(KINDS["parcae"])
    greedy = generate(model, PROMPT, max_new_tokens=6, temperature=0)
    assert generate(model, PROMPT, max_new_tokens=6, top_k=1, seed=9) == greedy
    assert generate(model, PROMPT, max_new_tokens=6, top_p=1e-9, seed=9) == greedy
    assert generate(model, PROMPT, max_new_tokens=6, min_p=1.0, seed=9) == greedy


@pytest.mark.slow
def test_a_penalty_looks_at_prompt_and_text():
    model = randomised(KINDS["parcae"])
    tokens = list(PROMPT)
    for _ in range(8):
        logits = model(torch.tensor([tokens]), loops=4, state="zero").logits[0, -1]
        for token in set(tokens):
            logits[token] *= 0.25 if logits[token] > 0 else 4.0
        tokens.append(int(logits.argmax()))
    made = generate(model, PROMPT, max_new_tokens=8, temperature=0, repetition_penalty=4.0)
    assert made == tokens[3:]
    assert made != generate(model, PROMPT, max_new_tokens=8, temperature=0)


def test_leaves_no_gradient_behind():
    model = randomised(KINDS["parcae"]).train()
    generate(model, PROMPT, max_new_tokens=2)
    assert model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt: it is empty"),
        ({"prompt": [96]}, "outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"prompt": [1.5]}, "1.5 is not an id"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"loops": 0}, "loops"),
    ],
)
def test_mistakes(changes, message):
    settings = {"prompt": PROMPT, "max_new_tokens": 3, **changes}
    prompt = settings.pop("prompt")
    with pytest.raises((ConfigError, ValueError), match=message):
        generate(randomised(KINDS["parcae"]), prompt, **settings)
