"""Static steps, as accelerators run them, forced on a CPU: the same texts as plain decoding, no
host sync inside a step, and nothing left on the CPU when the model is elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch._dynamo.exc import FailOnRecompileLimitHit

from conftest import KINDS, NoHostSync, needs_compiler, randomised, tiny
from oracles import VOCABULARY, flips, model_of, true_logits
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError
from parcae.infer.layers import FoldedModel
from parcae.infer.network import TorchNetwork
from parcae.infer.sampling import (
    NonFiniteLogits,
    RowSampling,
    Sampling,
    counter_noise,
    noise_key,
    probabilities,
    row_probabilities,
    sample_rows,
)
from parcae.infer.static import DeviceRows, StaticDecoder, decode_step
from parcae.model import build
from reference import generate as plain

CPU = torch.device("cpu")
PROMPTS = [[i + 1, 2 * i + 1, 7][: 1 + i % 3] for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_greedy_text_is_that_of_the_model(kind):
    """Rows with different numbers of loops and lengths, of which some end while others continue."""
    model = model_of(kind)
    engine = Engine(model, backend="static", max_batch_size=5)
    options = [{"loops": 1 + i % 4, "max_new_tokens": 2 + 3 * i} for i in range(len(PROMPTS))]
    requests = [engine.request(p, **o) for p, o in zip(PROMPTS, options, strict=True)]
    for made, prompt, option in zip(engine.complete(requests), PROMPTS, options, strict=True):
        expected = plain(model, prompt, temperature=0, **option)
        assert flips(model, prompt, made.tokens, expected, option["loops"]) == 0
        assert made.loops == (option["loops"],) * len(expected)


def test_shapes_beyond_the_limit_of_compilations_run_without(monkeypatch):
    def too_many(*_):
        raise FailOnRecompileLimitHit("64 versions")

    model = model_of("parcae")
    engine = Engine(model, backend="static")
    assert engine.static is not None
    monkeypatch.setattr(engine.static, "_step", too_many)
    made = engine.generate([3, 5], max_new_tokens=4, loops=2)
    assert list(made.tokens) == plain(model, [3, 5], max_new_tokens=4, loops=2, temperature=0)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [64, 50])
def test_compiled_steps(vocab_size):
    """With vectors alone, and with a rest that the compiler's scalar code takes."""
    model = randomised(tiny(vocab_size=vocab_size, prelude_layers=0, coda_layers=0))
    options = {"max_new_tokens": 5, "loops": 1, "temperature": 0.8, "seed": 3}
    texts = [
        Engine(model, backend="static", compile=compile).generate([3, 5, 7], **options).tokens
        for compile in (False, True)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("policy", ["last:2", "first:2", "shared"])
def test_rows_that_loop_less_keep_their_slots(policy):
    model = model_of("parcae")
    options = [{"loops": loops, "max_new_tokens": 9} for loops in (5, 2, 3)]
    texts = []
    for backend in ("torch", "static"):
        engine = Engine(model, backend=backend, cache=policy)
        requests = [engine.request([i, 9], **o) for i, o in enumerate(options)]
        texts.append([made.tokens for made in engine.complete(requests)])
    assert texts[0] == texts[1]


SAMPLED = {"loops": 3, "max_new_tokens": 12, "temperature": 0.9, "seed": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.9, "repetition_penalty": 1.4}],
)
def test_a_seed_is_a_text_by_every_path(filters):
    """Static steps in company, passes with the host's sampler, and drafts."""
    engine = Engine(model_of("parcae"), backend="static", max_batch_size=3)
    options = {**SAMPLED, **filters}
    alone = [engine.generate(p, **options).tokens for p in PROMPTS[:3]]
    assert [m.tokens for m in engine.generate_all(PROMPTS[:3], **options)] == alone
    assert [engine.generate(p, logprobs=0, **options).tokens for p in PROMPTS[:3]] == alone
    assert engine.generate(PROMPTS[0], draft_loops=1, **options).tokens == alone[0]
    assert engine.generate(PROMPTS[0], **{**options, "seed": 5}).tokens != alone[0]


@pytest.mark.slow
def test_rows_without_a_step_are_left_alone():
    """Their contents are reused later: neither free rows nor rows of other requests are written."""
    model = model_of("parcae")
    engine = Engine(model, backend="static", max_batch_size=4)
    first = engine.generate([5, 6, 7, 8], loops=3, max_new_tokens=4)
    other = engine.submit(engine.request([9, 9], loops=3, max_new_tokens=9, exit="budget:2"))
    engine.generate([1, 2], loops=4, max_new_tokens=12)
    again = engine.generate([5, 6, 7, 8, *first.tokens[:3], 1], loops=3, max_new_tokens=4)
    assert again.reused == 7
    expected = plain(
        model, [5, 6, 7, 8, *first.tokens[:3], 1], loops=3, max_new_tokens=4, temperature=0
    )
    assert list(again.tokens) == expected
    while other.finish is None:
        engine.step()
    alone = Engine(model).generate([9, 9], loops=3, max_new_tokens=9, exit="budget:2")
    assert other.completion().tokens == alone.tokens


def test_the_host_looks_at_tokens_every_eight_steps():
    engine = Engine(model_of("parcae"), backend="static")
    assert engine.static is not None
    steps, run = [], engine.static.run

    def recorded(by_row, count):
        steps.append(count)
        return run(by_row, count)

    engine.static.run = recorded  # type: ignore[method-assign]
    made = engine.generate([3, 4], loops=2, max_new_tokens=20)
    assert steps == [8, 8, 3]  # the first token comes from the prompt
    steps.clear()
    stop = made.tokens[12]
    cut = engine.generate([3, 4], loops=2, max_new_tokens=20, stop_tokens=[stop])
    assert cut.tokens == made.tokens[: made.tokens.index(stop)]
    assert cut.finish == "stop"
    long = engine.generate([5] * 30, loops=2, max_new_tokens=9)
    assert (long.finish, len(long.tokens)) == ("context", 3)


@pytest.mark.slow
def test_broken_weights_end_only_the_text_they_break():
    model = randomised(tiny(tied_embeddings=False))
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
    engine = Engine(model, backend="static")
    fine = plain(model, [1, 2], loops=2, max_new_tokens=12, temperature=0)
    assert 7 not in fine[:-1]
    broken = engine.submit(engine.request([1], loops=2, max_new_tokens=12))
    other = engine.submit(engine.request([1, 2], loops=2, max_new_tokens=12))
    engine.step()
    broken.tokens[-1] = 7
    while other.finish is None:
        engine.step()
    assert list(other.completion().tokens) == fine
    with pytest.raises(NonFiniteLogits):
        broken.completion()
    again = engine.generate_all([[1, 2], [2, 1]], loops=2, max_new_tokens=12)  # in the same rows
    assert list(again[0].tokens) == fine
    assert list(again[1].tokens) == plain(model, [2, 1], loops=2, max_new_tokens=12, temperature=0)


def step_of(model: FoldedModel, device: str, sampling: Sampling):
    """A step of four rows, one of them free, and its arguments."""
    cache = model.cache()
    cache.reserve(4, 32, 3)
    columns = ([5, 6, 7, 0], [3, 9, 0, 0], [9, 20, 9, 0], [3, 2, 3, 0])
    rows = DeviceRows(*(torch.tensor(column, device=device) for column in columns))
    settings = RowSampling.of(
        [(sampling, 1), (Sampling(), 2), None, None], VOCABULARY, rows[0].device
    )
    seen = torch.zeros(4, VOCABULARY, dtype=torch.bool, device=device)
    return TorchNetwork(model), cache, rows, settings, seen, 3, 32


ALL = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.2)


@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_a_step_reads_nothing_back(kind):
    model = FoldedModel.of(model_of(kind)).with_real_phases()
    arguments = step_of(model, "cpu", ALL)
    with NoHostSync("cpu") as mode:
        decode_step(*arguments)
    assert mode.calls > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_a_step_on_another_device_leaves_nothing_on_the_cpu(kind):
    """The meta device stands for an accelerator: it computes shapes, and refuses to be read."""
    model = FoldedModel.of(build(KINDS[kind]).bfloat16())
    assert model.device.type == "meta"
    arguments = step_of(model, "meta", ALL)
    assert arguments[1].core.dtype == torch.bfloat16
    with NoHostSync("meta"):
        tokens, positions, finite = decode_step(*arguments)
    assert (tokens.shape, positions.shape, finite.dtype) == ((4,), (4,), torch.bool)


@pytest.mark.slow
@needs_compiler
def test_a_step_compiles_as_one_graph():
    model = model_of("parcae")
    engine = Engine(model, backend="static", max_batch_size=2, compile=True)
    assert isinstance(engine.network, TorchNetwork)
    engine.static = StaticDecoder(engine.network, engine.cache, compile=True, backend="eager")
    for options in ({"loops": 2}, {"loops": 1, "temperature": 0.9, "top_p": 0.9}):
        expected = Engine(model, backend="static").generate([1, 2], max_new_tokens=6, **options)
        assert engine.generate([1, 2], max_new_tokens=6, **options).tokens == expected.tokens
    assert (engine.cache.rows, engine.cache.capacity) == (2, 32)  # it never moves


def test_only_static_layers_are_compiled():
    with pytest.raises(ConfigError, match="compile: not with backend 'torch'"):
        Engine(model_of("parcae"), backend="torch", compile=True)


def test_the_model_s_own_type():
    """In bfloat16, 8 bits of mantissa: the likeliest token of a prompt by some margin stays."""
    model = randomised(tiny()).bfloat16()
    folded = FoldedModel.of(model, dtype=torch.bfloat16)
    cache = folded.cache()
    assert cache.dtype == torch.bfloat16
    assert cache.bytes_per_token(3) == folded.layout.bytes_per_token(cache.policy, 3, 2)
    engine = Engine(model, backend="static")
    engine.network = TorchNetwork(folded)
    engine.cache = cache
    engine.rows.cache = cache
    engine.static = StaticDecoder(engine.network, cache)
    made = engine.generate([1, 2, 3], loops=2, max_new_tokens=6)
    logits = true_logits(randomised(tiny()).bfloat16().float(), [1, 2, 3, *made.tokens[:-1]], 2)[2:]
    chosen = logits.gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 0.1 * logits.std()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.7, top_k=7),
        Sampling(top_p=0.6),
        Sampling(min_p=0.1, temperature=2.0),
        Sampling(top_k=40, top_p=0.9, min_p=0.02),
        Sampling(top_k=1),
    ],
)
def test_probabilities_of_rows_are_those_of_one(sampling):
    """Float32 beside float64: errors of some units of 2^-24 for each of the sums over V tokens."""
    logits = 3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    rows = RowSampling.of([(sampling, 0)] * 5 + [(Sampling(top_k=3), 0)], 500, CPU)
    found = row_probabilities(logits, rows)
    expected = probabilities(logits[:5], sampling)
    torch.testing.assert_close(found[:5].double(), expected, rtol=1e-4, atol=1e-7)
    assert ((found[:5] > 0) == (expected > 0)).all()
    assert int((found[5] > 0).sum()) == 3


def test_noise_of_a_counter_is_exponential_and_its_own():
    keys = torch.tensor([noise_key(seed) for seed in (0, 1, -5, 10**30)])
    positions = torch.tensor([0, 1, 2, 3])
    sample = counter_noise(keys, positions, 20_000)
    for row in sample:
        assert stats.kstest(row.numpy(), "expon").pvalue > 1e-3
    correlations = torch.corrcoef(sample) - torch.eye(4)
    assert correlations.abs().max() < 5 / math.sqrt(20_000)
    neighbours = torch.corrcoef(torch.stack((sample[0, 1:], sample[0, :-1])))[0, 1]
    assert abs(float(neighbours)) < 5 / math.sqrt(20_000)
    assert torch.equal(counter_noise(keys[2:3], positions[2:3], 50)[0], sample[2, :50])
    assert sample.min() > 0
    assert sample.isfinite().all()


def test_draws_of_rows_follow_the_probabilities():
    count = 20_000
    logits = torch.tensor([0.1, 1.5, -math.inf, 1.2, -4.0]).expand(count, 5)
    sampling = RowSampling.of([(Sampling(temperature=1.0), 3)] * count, 5, CPU)
    drawn = sample_rows(logits, sampling, torch.arange(count))
    counts = torch.bincount(drawn, minlength=5)
    expected = logits[0].double().softmax(-1) * count
    assert counts[2] == 0
    kept = expected > 0
    assert stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 1e-3
