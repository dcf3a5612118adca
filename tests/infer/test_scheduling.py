"""What a server needs of `submit`, `step` and `cancel`: prompts in chunks, admission by memory,
errors that stay with their request."""

from __future__ import annotations

import pytest

from oracles import VOCABULARY, model_of
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError
from parcae.infer import cache as cache_module
from reference import generate as plain

LONG = [(5 * i + 2) % VOCABULARY for i in range(24)]
OPTIONS = {"loops": 3, "max_new_tokens": 6}


def pass_sizes(engine: Engine) -> list[int]:
    """The numbers of tokens of the engine's passes, recorded from now on."""
    sizes, forward = [], engine.network.forward

    def recorded(batch, *rest, **options):
        sizes.append(len(batch))
        return forward(batch, *rest, **options)

    engine.network.forward = recorded  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_prompt_read_in_chunks_gives_the_same_text(backend):
    model = model_of("parcae")
    engine = Engine(model, backend=backend, prefill_tokens=7)
    sizes = pass_sizes(engine)
    expected = plain(model, LONG, temperature=0, **OPTIONS)
    assert list(engine.generate(LONG, **OPTIONS).tokens) == expected
    assert sizes == [7, 7, 7, 3, 1, 1, 1, 1, 1]


def test_texts_continue_while_a_long_prompt_is_read():
    model = model_of("parcae")
    engine = Engine(model, prefill_tokens=5)
    short = engine.submit(engine.request([1, 2], **OPTIONS))
    engine.step()
    long, other = (engine.submit(engine.request(p, **OPTIONS)) for p in (LONG, [9, 8, 7]))
    generated = []
    while short.finish is None:
        engine.step()
        generated.append((short.generated, long.generated, other.generated))
    assert generated == [(2, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), (6, 1, 0)]
    while other.finish is None or long.finish is None:
        engine.step()
    for sequence in (short, long, other):
        prompt = list(sequence.request.prompt)
        expected = plain(model, prompt, temperature=0, **OPTIONS)
        assert list(sequence.completion().tokens) == expected


def test_a_chunked_prompt_is_a_prefix_for_others():
    engine = Engine(model_of("parcae"), prefill_tokens=7, max_batch_size=4)
    sizes = pass_sizes(engine)
    prompts = [[*LONG, i] for i in range(3)]
    made = engine.generate_all(prompts, loops=3, max_new_tokens=1)
    assert sum(sizes) == len(LONG) + 3
    fresh = Engine(model_of("parcae"), reuse_prefixes=False)
    assert [m.tokens for m in made] == [
        fresh.generate(p, loops=3, max_new_tokens=1).tokens for p in prompts
    ]


def test_prompts_are_not_split_where_loops_share_slots():
    engine = Engine(model_of("parcae"), cache="shared", prefill_tokens=7)
    sizes = pass_sizes(engine)
    made = engine.generate(LONG, **OPTIONS)
    assert sizes[0] == len(LONG)
    assert made == Engine(model_of("parcae"), cache="shared").generate(LONG, **OPTIONS)


def test_a_request_waits_for_the_memory_that_others_use():
    """Its rows are larger than what is left, but it would fit alone."""
    model = model_of("parcae")
    per_row = Engine(model).cache.bytes_per_token(6) * 32
    engine = Engine(model, max_cache_bytes=per_row, max_batch_size=4)
    small = [engine.submit(engine.request([1, i], max_new_tokens=4, loops=2)) for i in (2, 3)]
    large = engine.submit(engine.request([3, 4], max_new_tokens=4, loops=6))
    later = engine.submit(engine.request([5, 6], max_new_tokens=2, loops=1))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 2)
    while later.finish is None:
        engine.step()
        assert engine.cache.bytes <= per_row
    for sequence in (*small, large, later):
        request = sequence.request
        expected = plain(
            model,
            list(request.prompt),
            max_new_tokens=request.max_new_tokens,
            loops=request.plan.loops,
            temperature=0,
        )
        assert list(sequence.completion().tokens) == expected
    with pytest.raises(ConfigError, match="cache: 1 rows x 32 tokens at 7 loops need"):
        engine.submit(engine.request([1], loops=7))
    assert (engine.running, engine.waiting) == (0, 0)


def test_a_request_whose_memory_is_gone_fails_alone(monkeypatch):
    model = model_of("parcae")
    engine = Engine(model, max_cache_bytes=Engine(model).cache.bytes_per_token(6) * 32)
    small = [engine.submit(engine.request([1, i], max_new_tokens=2, loops=2)) for i in (2, 3)]
    large = engine.submit(engine.request([3, 4], max_new_tokens=2, loops=6))
    monkeypatch.setattr(cache_module, "available_memory", lambda device: 0)
    for _ in range(3):
        engine.step()
    assert [len(sequence.completion().tokens) for sequence in small] == [2, 2]
    with pytest.raises(ConfigError, match="cache: "):
        large.completion()


def test_an_error_ends_the_requests_of_its_pass_only():
    model = model_of("parcae")
    engine = Engine(model)
    first = engine.submit(engine.request([1, 2], **OPTIONS))
    engine.step()
    forward = engine.network.forward

    def broken(batch, *rest, **options):
        if len(batch) > 1:
            raise RuntimeError("out of memory")
        return forward(batch, *rest, **options)

    engine.network.forward = broken  # type: ignore[method-assign]
    second = engine.submit(engine.request([3, 4, 5], **OPTIONS))
    engine.step()
    assert second.finish == "error"
    with pytest.raises(RuntimeError, match="out of memory"):
        second.completion()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([3, 4, 5], **OPTIONS)
    while first.finish is None:
        engine.step()
    assert list(first.completion().tokens) == plain(model, [1, 2], temperature=0, **OPTIONS)
    engine.network.forward = forward  # type: ignore[method-assign]
    expected = plain(model, [3, 4, 5], temperature=0, **OPTIONS)
    assert list(engine.generate([3, 4, 5], **OPTIONS).tokens) == expected


def test_a_cancelled_request_keeps_the_text_so_far():
    engine = Engine(model_of("parcae"), prefill_tokens=5)
    running, reading = (engine.submit(engine.request(p, **OPTIONS)) for p in ([1, 2], LONG))
    engine.step()
    engine.step()
    engine.cancel(running, reading)
    assert (engine.running, engine.waiting) == (0, 0)
    done = running.completion()
    assert (done.finish, len(done.tokens)) == ("cancelled", 2)
    assert reading.completion().tokens == ()
    made = engine.generate(LONG, **OPTIONS)
    assert 0 < made.reused < len(LONG)
    assert list(made.tokens) == plain(model_of("parcae"), LONG, temperature=0, **OPTIONS)


@pytest.mark.parametrize("option", ["prefill_tokens", "max_cache_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_limits(option, value):
    with pytest.raises(ConfigError, match=f"{option}: "):
        Engine(model_of("parcae"), **{option: value})
