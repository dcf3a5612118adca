"""A request's text depends on nothing but itself: not on company, order, or what came before."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from conftest import KINDS, randomised
from oracles import VOCABULARY, flips, model_of, text_model, tokenizer
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError
from parcae.infer.engine import generate
from parcae.infer.sampling import NonFiniteLogits
from parcae.model.store import save
from parcae.runs import open_checkpoint
from reference import generate as plainly

SAMPLED = {"temperature": 1.0, "top_k": 40, "loops": 3, "max_new_tokens": 10}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of all lengths; some begin alike."""
    random = Random(seed)
    begin = [random.randrange(VOCABULARY) for _ in range(18)]
    made = []
    for _ in range(count):
        shared = begin[: random.choice([0, 0, 5, 17, 18])]
        made.append([*shared, *(random.randrange(VOCABULARY) for _ in range(random.randint(1, 6)))])
    return made


@pytest.mark.slow
def test_greedy_text_is_the_same_in_company_with_reuse_and_with_drafts():
    """200 prompts. Where the two best tokens are nearer than 1e-4 the texts may part; that is
    counted."""
    model, options = model_of("parcae"), {"loops": 3, "max_new_tokens": 5}
    given = prompts(200)
    alone = Engine(model, max_batch_size=1, reuse_prefixes=False)
    expected = [alone.generate(prompt, **options) for prompt in given]
    company = Engine(model, max_batch_size=7, reuse_prefixes=False).generate_all(given, **options)
    reused = Engine(model, max_batch_size=5).generate_all(given, **options)
    drafts = {"draft_loops": 1, "draft_tokens": 3}
    quick = Engine(model, max_batch_size=16).generate_all(given, **options, **drafts)
    assert sum(made.reused for made in company) == 0 < sum(made.reused for made in reused)
    for variant in (company, reused, quick):
        pairs = zip(given, expected, variant, strict=True)
        parted = [flips(model, prompt, a.tokens, b.tokens, 3) for prompt, a, b in pairs]
        assert sum(parted) <= 2
    for prompt, made in zip(given[:20], expected, strict=False):
        oracle = plainly(model, prompt, max_new_tokens=5, loops=3, temperature=0)
        assert flips(model, prompt, made.tokens, oracle, 3) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_seed_is_a_text(seed):
    """Alone, in a batch, streamed, with drafts, by the plain sampler, and cut short and resumed."""
    model = model_of("parcae")
    given = prompts(6, seed)
    expected = [Engine(model).generate(p, seed=seed, **SAMPLED).tokens for p in given]
    engine = Engine(model, max_batch_size=4)
    torch.rand(3)  # the global generator has no say
    together = engine.generate_all(given, seed=seed, **SAMPLED)
    assert [made.tokens for made in together] == expected
    for prompt, tokens in zip(given, expected, strict=True):
        pieces = engine.stream(prompt, seed=seed, **SAMPLED)
        assert tuple(piece.token for piece in pieces) == tokens
        assert engine.generate(prompt, seed=seed, draft_loops=1, **SAMPLED).tokens == tokens
        rest = engine.generate(
            [*prompt, *tokens[:4]], seed=seed, **{**SAMPLED, "max_new_tokens": 6}
        )
        assert rest.tokens == tokens[4:]
    options = {**SAMPLED, "seed": seed}
    assert tuple(plainly(model, given[0], **options)) == expected[0]
    assert tuple(generate(model, given[0], **options)) == expected[0]
    assert engine.generate(given[0], seed=seed + 9, **SAMPLED).tokens != expected[0]


def test_requests_of_all_sorts_share_a_batch():
    model = model_of("parcae")
    sorts = [
        {"loops": 1, "max_new_tokens": 3},
        {"loops": 6, "max_new_tokens": 12, "temperature": 1.3, "seed": 4},
        {"loops": 4, "exit": "state:0.3", "temperature": 0.7, "top_p": 0.8},
        {"loops": 2, "exit": "kl:0.1", "repetition_penalty": 1.5},
        {"loops": 3, "min_p": 0.1, "temperature": 1.0},
        {"loops": 5, "draft_loops": 2, "logprobs": 3},
    ] * 3
    sorts = [{"max_new_tokens": 5 + i % 4, **sort} for i, sort in enumerate(sorts)]
    given = prompts(len(sorts), seed=5)
    engine = Engine(model, max_batch_size=4)
    requests = [engine.request(p, **sort) for p, sort in zip(given, sorts, strict=True)]
    heard = []
    for made, prompt, sort in zip(
        engine.complete(requests, heard.append), given, sorts, strict=True
    ):
        alone = Engine(model).generate(prompt, **sort)
        assert (made.tokens, made.loops, made.finish) == (alone.tokens, alone.loops, alone.finish)
    assert sum(heard) == sum(sort["max_new_tokens"] for sort in sorts)
    assert engine.complete([]) == []


def test_a_stream_goes_on_while_others_are_served():
    engine = Engine(model_of("parcae"), max_batch_size=2)
    expected = engine.generate([1, 2], **SAMPLED)
    stream = engine.stream([1, 2], **SAMPLED)
    first = next(stream)
    others = engine.generate_all([[3], [4, 5], [6]], **SAMPLED)
    assert [len(made.tokens) for made in others] == [10] * 3
    rest = list(stream)
    assert (first.token, *(piece.token for piece in rest)) == expected.tokens
    assert rest[-1].completion is not None
    assert rest[-1].completion.tokens == expected.tokens


def is_idle(engine: Engine) -> bool:
    return engine.rows.free == engine.cache.rows and not engine._running and not engine._waiting


def test_a_stream_that_is_closed_gives_its_row_back():
    engine = Engine(model_of("parcae"), max_batch_size=1)
    expected = engine.generate([1, 2, 3], **SAMPLED)
    for taken in (0, 1, 4):
        stream = engine.stream([1, 2, 3], **SAMPLED)
        for _ in range(taken):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert is_idle(engine)
        assert engine.generate([1, 2, 3], **SAMPLED).tokens == expected.tokens


def test_cancelling_what_waits_and_what_runs():
    engine = Engine(model_of("parcae"), max_batch_size=1)
    running, waiting, last = (engine.submit(engine.request([i], **SAMPLED)) for i in (1, 2, 3))
    engine.step()
    engine.cancel(running, waiting)
    while not last.finish:
        engine.step()
    assert (running.finish, running.generated, waiting.generated) == ("cancelled", 1, 0)
    assert last.completion().tokens == Engine(model_of("parcae")).generate([3], **SAMPLED).tokens
    engine.cancel(last)
    assert is_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["prompt", "later"])
def test_after_a_failure_the_engine_works_and_reuses_nothing_wrong(when):
    model = randomised(KINDS["parcae"])
    engine = Engine(model, backend="torch")
    other = engine.stream([8, 9], **SAMPLED)
    begun = [next(other).token]
    read, calls = engine.network.run_coda, 0

    def broken(*arguments):
        nonlocal calls
        calls += 1
        x = read(*arguments)
        if calls == (1 if when == "prompt" else 6):
            x[-1] = math.nan  # that of the newer text
        return x

    engine.network.run_coda = broken  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogits, match="not a number"):
        engine.generate([1, 2, 3, 4], **SAMPLED)
    engine.network.run_coda = read  # type: ignore[method-assign]
    begun += [piece.token for piece in other]
    assert is_idle(engine)
    fresh = Engine(randomised(KINDS["parcae"]), reuse_prefixes=False)
    assert tuple(begun) == fresh.generate([8, 9], **SAMPLED).tokens
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4, 5]):
        assert engine.generate(prompt, **SAMPLED).tokens == fresh.generate(prompt, **SAMPLED).tokens


def test_broken_weights_are_said_to_be_broken():
    model = randomised(KINDS["parcae"])
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    engine = Engine(model)
    for options in ({}, {"temperature": 1.0}, {"exit": "kl:0.1"}, {"draft_loops": 1}):
        with pytest.raises(NonFiniteLogits, match="weights are broken"):
            engine.generate([1, 2], loops=3, **options)
        assert is_idle(engine)


def test_generate_gives_text_for_text_and_ids_for_ids(tmp_path):
    model = text_model()
    save(model, tmp_path)
    tokenizer().save(tmp_path / "tokenizer.json")
    options = {"max_new_tokens": 12, "loops": 2, "seed": 4, "temperature": 1.5}
    expected = Engine(model, tokenizer()).generate("import ", **options)
    assert generate(tmp_path, "import ", **options) == expected.text
    checkpoint = open_checkpoint(tmp_path)
    assert generate(checkpoint, "import ", **options) == expected.text
    ids = [tokenizer().bos, *tokenizer().encode("import ")]
    stop = [tokenizer().bos]
    for source in (str(tmp_path), checkpoint, model):
        assert generate(source, ids, stop_tokens=stop, **options) == list(expected.tokens)
    assert generate(model, ids, max_new_tokens=5) == generate(
        model, ids, max_new_tokens=5, temperature=0.8
    )
    with pytest.raises(ConfigError, match="text needs a tokenizer"):
        generate(model, "import ")


def test_a_stream_takes_a_request():
    engine = Engine(model_of("parcae"))
    request = engine.request([1, 2], **SAMPLED)
    assert [p.token for p in engine.stream(request)] == list(engine.complete([request])[0].tokens)


def test_how_a_text_ends():
    engine = Engine(text_model(), tokenizer())
    assert engine.generate("a", max_new_tokens=2, loops=1).finish == "length"
    whole = engine.generate([5] * 60, max_new_tokens=9, loops=1, stop_tokens=())
    assert (whole.finish, len(whole.tokens)) == ("context", 5)
    assert engine.generate([5] * 64, max_new_tokens=1, loops=1, stop_tokens=()).finish == "length"
    stop = engine.generate([5] * 60, max_new_tokens=9, loops=1, stop_tokens=whole.tokens[:1])
    assert (stop.finish, stop.tokens, stop.loops, stop.text) == ("stop", (), (), "")


def test_logprobs_on_request():
    engine = Engine(model_of("parcae"))
    options = {"max_new_tokens": 4, "loops": 2, "temperature": 1.5, "seed": 3}
    assert engine.generate([1], **options).logprobs is None
    bare = engine.generate([1], logprobs=0, **options).logprobs
    some = engine.generate([1], logprobs=5, **options).logprobs
    assert bare is not None
    assert some is not None
    assert [entry.alternatives for entry in bare] == [()] * 4
    for a, b in zip(bare, some, strict=True):
        assert (a.token, a.logprob) == (b.token, b.logprob)
        chances = [chance for _, chance in b.alternatives]
        assert len(chances) == 5
        assert chances == sorted(chances, reverse=True)
        assert b.logprob <= chances[0]


WRONG = [
    ({"prompt": []}, "prompt: it is empty"),
    ({"prompt": [96]}, "outside the vocabulary"),
    ({"prompt": [-1]}, "outside the vocabulary"),
    ({"prompt": [1.5]}, "prompt: 1.5 is not an id"),
    ({"prompt": [1] * 33}, "33 tokens, but the model's context holds 32"),
    ({"prompt": "text"}, "text needs a tokenizer"),
    ({"stop": "x"}, "strings need a tokenizer"),
    *[({"loops": loops}, "loops: ") for loops in (0, -1, 10**9, True, 2.5, "8", math.nan)],
    *[({"max_new_tokens": n}, "max_new_tokens: ") for n in (0, -1, 2.5, True, math.inf)],
    *[({"temperature": t}, "temperature: ") for t in (math.nan, -1, math.inf)],
    *[({"top_k": k}, "top_k: ") for k in (0, -1, 1.5, True)],
    *[({"top_p": p}, "top_p: ") for p in (0.0, 1.1, math.nan)],
    *[({"min_p": p}, "min_p: ") for p in (-0.1, 1.1, math.nan)],
    *[({"repetition_penalty": p}, "repetition_penalty: ") for p in (0, -1, math.nan)],
    *[({"logprobs": n}, "logprobs: ") for n in (-1, 97, True, 1.5)],
    ({"seed": 1.5}, "seed: "),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_mistakes_are_told_before_anything_is_allocated(changes, message):
    engine = Engine(model_of("parcae"))
    settings = {"prompt": [1, 2], **changes}
    prompt = settings.pop("prompt")
    for way in (engine.generate, engine.stream, engine.request):
        with pytest.raises(ConfigError, match=message):
            way(prompt, **settings)
    assert engine.cache.bytes == 0


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string(stop):
    engine = Engine(text_model(), tokenizer())
    with pytest.raises(ConfigError, match="stop: a stop string is empty"):
        engine.generate("a", stop=stop)
    assert engine.cache.bytes == 0


@pytest.mark.parametrize("rows", [0, -1, True, 2.5])
def test_impossible_rows(rows):
    with pytest.raises(ConfigError, match="max_batch_size: "):
        Engine(model_of("parcae"), max_batch_size=rows)


def test_a_transformer_has_no_loop():
    engine = Engine(model_of("transformer"))
    for changes in ({"loops": 2}, {"exit": "kl:1"}):
        with pytest.raises(ConfigError, match="a Transformer has no loop"):
            engine.generate([1], **changes)
    assert len(engine.generate_all(prompts(5), max_new_tokens=4)) == 5
