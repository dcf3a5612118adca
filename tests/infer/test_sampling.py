"""Filters against sorting by hand; draws against the probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.infer.sampling import Sampling, choose, probabilities


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
    wide = Sampling(top_k=99, top_p=1.0, min_p=0.0)
    torch.testing.assert_close(probabilities(logits, wide), logits.double().softmax(-1))


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = torch.tensor([1e4, 1e4 + 1, -1e4])
    chances = probabilities(logits, Sampling(temperature=1e-300))
    assert chances.tolist() == [0, 1, 0]


def test_a_forbidden_token_is_never_drawn():
    chances = probabilities(torch.tensor([0.0, -math.inf, 0.0]), Sampling())
    assert chances.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 0.999999, 1.0])
def test_choice_is_the_inverse_of_the_running_sum(noise):
    chances = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0], dtype=torch.float64)
    mass, expected = 0.0, 4
    for i, chance in enumerate(chances.tolist()):
        mass += chance
        if noise < mass:
            expected = i
            break
    assert int(choose(chances, torch.tensor(noise, dtype=torch.float64))) == expected


def test_draws_follow_the_probabilities():
    chances = torch.tensor([0.05, 0.5, 0.0, 0.45], dtype=torch.float64)
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = choose(chances.expand(1000, 4), noise)
    assert torch.bincount(drawn, minlength=4).tolist() == [50, 500, 0, 450]


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
    ],
)
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_logits_that_are_not_numbers():
    with pytest.raises(ValueError, match="not a number"):
        probabilities(torch.tensor([0.0, math.nan]), Sampling())
