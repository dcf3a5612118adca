"""Filters against sorting by hand; draws against the probabilities; noise by seed and position."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.infer.sampling import (
    NonFiniteLogits,
    Sampling,
    choose,
    draw_rows,
    noise,
    penalise,
    pick,
    probabilities,
)


def by_hand(logits: list[float], s: Sampling) -> list[float]:
    """Plain Python, one filter after the other."""
    if s.temperature == 0:
        best = logits.index(max(logits))
        return [float(i == best) for i in range(len(logits))]
    top = max(logits)
    weights = [math.exp((x - top) / s.temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if s.top_k is not None:
        kept = kept[: s.top_k]
    if s.top_p is not None:
        whole, mass, shortest = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if mass >= s.top_p:
                break
            shortest.append(i)
            mass += weights[i] / whole
        kept = shortest
    if s.min_p is not None:
        kept = [i for i in kept if weights[i] >= s.min_p * weights[kept[0]]]
    whole = sum(weights[i] for i in kept)
    return [weights[i] / whole if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 12),
    temperature=st.sampled_from([0, 0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.05, 0.95),
    min_p=st.none() | st.floats(0.01, 0.99),
)
def test_filters_equal_sorting_by_hand(seed, size, temperature, top_k, top_p, min_p):
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.tensor(by_hand(logits.double().tolist(), sampling), dtype=torch.float64)
    torch.testing.assert_close(probabilities(logits, sampling), expected, rtol=1e-9, atol=1e-12)


def test_rows_do_not_know_each_other():
    logits = torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(top_k=5, top_p=0.8, min_p=0.1)
    together = probabilities(logits, sampling)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(together[i, j], probabilities(logits[i, j], sampling))


def test_everything_open_is_softmax():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    wide = Sampling(temperature=1.0, top_k=99, top_p=1.0, min_p=0.0)
    torch.testing.assert_close(probabilities(logits, wide), logits.double().softmax(-1))


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = torch.tensor([1e4, 1e4 + 1, -1e4])
    chances = probabilities(logits, Sampling(temperature=1e-300))
    assert chances.tolist() == [0, 1, 0]


def test_a_forbidden_token_is_never_drawn():
    chances = probabilities(torch.tensor([0.0, -math.inf, 0.0]), Sampling())
    assert chances.tolist() == [0.5, 0, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 1, 7, 700, 999, 1000, 2000])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.3, 1.0])
def test_large_vocabularies_with_ties_equal_sorting_by_hand(top_k, top_p, min_p):
    """More tokens than are ranked at first, many of them equally likely."""
    for spread in (0.1, 4.0):  # nearly flat: top-p needs most tokens; steep: it needs few
        logits = torch.randint(0, 40, (1000,), generator=torch.Generator().manual_seed(2))
        logits = spread * logits.double() / 10
        sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
        expected = torch.tensor(by_hand(logits.tolist(), sampling), dtype=torch.float64)
        found = probabilities(logits, sampling)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=50), Sampling(top_p=0.9), Sampling(min_p=0.05), Sampling(top_p=0.9, min_p=0.0)],
)
def test_a_vocabulary_is_not_sorted(sampling, monkeypatch):
    logits = 5 * torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    sizes, sort = [], torch.Tensor.sort

    def counted(self, *arguments, **options):
        sizes.append(self.numel())
        return sort(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    assert (probabilities(logits, sampling) > 0).sum() < 600
    assert max(sizes) <= 600


def test_the_first_to_arrive_is_chosen():
    chances = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    times = torch.tensor([0.3, 0.0, 2.0, 0.6], dtype=torch.float64)  # arrivals 3, never, 3.3, 2
    assert int(choose(chances, times)) == 3
    times[0] = 0.1
    assert int(choose(chances, times)) == 0
    times[0] = 0.0
    assert int(choose(chances, times)) == 0
    together = choose(chances.expand(2, 4), torch.stack((times, times.flip(0))))
    assert together.tolist() == [0, 2]


def test_draws_follow_the_probabilities():
    chances = torch.tensor([0.05, 0.5, 0.0, 0.45], dtype=torch.float64)
    count = 4000
    drawn = torch.stack([choose(chances, noise(7, position, 4)) for position in range(count)])
    found = torch.bincount(drawn, minlength=4) / count
    assert found[2] == 0
    assert (found - chances).abs().max() < 4 * math.sqrt(0.25 / count)


def test_close_predictions_choose_alike():
    """Which is what noise of its own for each token is for."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(300, 500, generator=generator, dtype=torch.float64)
    moved = logits + 0.02 * torch.randn(300, 500, generator=generator, dtype=torch.float64)
    times = torch.stack([noise(0, position, 500) for position in range(300)])
    a, b = (choose(probabilities(each, Sampling()), times) for each in (logits, moved))
    assert (a == b).double().mean() > 0.95


def test_noise_belongs_to_seed_and_position():
    assert torch.equal(noise(1, 2, 50), noise(1, 2, 50))
    others = [noise(seed, position, 50) for seed, position in ((2, 1), (1, 3), (12, 0), (-1, 2))]
    assert not any(torch.equal(noise(1, 2, 50), other) for other in others)
    assert noise(1, 2, 50).min() >= 0
    assert noise(1, 2, 50).dtype == torch.float64


def test_seen_tokens_are_penalised_once():
    logits = torch.tensor([2.0, -2.0, 0.0, 3.0, -math.inf])
    lowered = penalise(logits, [0, 1, 1, 2, 4, 0], Sampling(repetition_penalty=2.0))
    assert lowered.tolist() == [1.0, -4.0, 0.0, 3.0, -math.inf]
    assert logits[0] == 2.0
    assert penalise(logits, [0], Sampling()) is logits
    assert penalise(logits, [], Sampling(repetition_penalty=2.0)) is logits


def test_pick_is_penalty_then_filters_then_race():
    logits = torch.randn(60, generator=torch.Generator().manual_seed(5))
    seen = [int(logits.argmax()), 4]
    sampling = Sampling(temperature=0.7, top_k=9, repetition_penalty=3.0)
    for position in range(20):
        chances = probabilities(penalise(logits, seen, sampling), sampling)
        expected = int((noise(3, position, 60) / chances).argmin())
        assert pick(logits, sampling, 3, position, seen) == expected
    greedy = Sampling(temperature=0, repetition_penalty=3.0)
    assert pick(logits, greedy, 0, 0, seen) == int(penalise(logits, seen, greedy).argmax())
    assert pick(logits, greedy, 0, 0, seen) != seen[0]


@pytest.mark.parametrize("size", [60, 40_000])
def test_rows_drawn_together_are_those_drawn_alone(size):
    """Also where a part of the rows is drawn at a time, and one row is broken."""
    options = ({}, {"temperature": 0.3}, {"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.2, "top_k": 30})
    samplings = [Sampling(**options[n % len(options)]) for n in range(12)]
    logits = 3 * torch.randn(12, size, generator=torch.Generator().manual_seed(8))
    logits[7, 3], logits[9] = math.nan, -math.inf
    noises = [noise(seed, 40, size) for seed in range(12)]
    drawn = draw_rows(logits, samplings, noises)
    assert (drawn[7], drawn[9]) == (None, None)
    for row, token in enumerate(drawn):
        if token is not None:
            assert token == pick(logits[row], samplings[row], row, 40, [])
    assert len(set(drawn)) > 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
    ],
)
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "broken", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [math.nan, math.inf]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(broken, temperature):
    sampling = Sampling(temperature=temperature)
    with pytest.raises(NonFiniteLogits, match="not a number"):
        probabilities(torch.tensor(broken), sampling)
    with pytest.raises(ValueError, match="not a number"):
        pick(torch.tensor(broken), sampling, 0, 0, [])


def test_every_entry_point_has_one_default_temperature():
    import reference
    from parcae.commands.generate import OPTIONS
    from parcae.infer import TEMPERATURE
    from parcae.infer.engine import Engine

    signatures = (inspect.signature(call) for call in (Engine.request, reference.generate))
    defaults = {signature.parameters["temperature"].default for signature in signatures}
    defaults |= {option.default for option in OPTIONS if option.name == "temperature"}
    assert defaults | {Sampling().temperature} == {TEMPERATURE}
