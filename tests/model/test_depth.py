"""Samplers against scipy, draws keyed by row, and what callers may pass as depths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from parcae.config import Curriculum, LoopConfig
from parcae.model.depth import Depths, Schedule, as_depths, sample, sample_rows
from parcae.rng import keyed_generator

DRAWS = 40_000


def draws(loop: LoopConfig, seed: int = 0) -> Depths:
    return sample(loop, DRAWS, torch.Generator().manual_seed(seed))


def assert_distribution(values, pmf, top: int) -> None:
    """Chi-square against a probability mass function; the tail is one bin."""
    values = np.asarray(values)
    observed = np.append(np.bincount(values, minlength=top)[:top], (values >= top).sum())
    expected = np.array([pmf(i) for i in range(top)])
    expected = np.append(expected, 1 - expected.sum()) * len(values)
    keep = expected > 5
    observed = np.append(observed[keep], observed[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def clamped_poisson(mean):
    law = stats.poisson(mean)
    return lambda i: 0.0 if i == 0 else law.pmf(0) + law.pmf(1) if i == 1 else law.pmf(i)


@pytest.mark.parametrize("mean", [2, 4, 8, 12.5])
def test_poisson(mean):
    loop = LoopConfig(mean_loops=mean)
    depths = draws(loop)
    assert_distribution(depths.loops, clamped_poisson(mean), top=40)
    exact_mean = mean + stats.poisson(mean).pmf(0)  # clamping moves the zeros to one
    assert np.mean(depths.loops) == pytest.approx(exact_mean, abs=4 * (mean / DRAWS) ** 0.5)
    second = mean + mean**2 + stats.poisson(mean).pmf(0)
    assert np.var(depths.loops) == pytest.approx(second - exact_mean**2, rel=0.05)
    k = loop.gradient_loops
    assert depths.gradient_loops == tuple(min(t, k) for t in depths.loops)


def test_clamped_mean_at_two_is_the_papers():
    assert np.mean(draws(LoopConfig(mean_loops=2)).loops) == pytest.approx(2.135, abs=0.03)


def test_full_backpropagation():
    depths = draws(LoopConfig(mean_loops=8, sampler="poisson-full"))
    assert_distribution(depths.loops, clamped_poisson(8), top=30)
    assert depths.gradient_loops == depths.loops


def test_poisson_fill_is_a_shifted_poisson():
    depths = draws(LoopConfig(mean_loops=8, backprop_loops=5, sampler="poisson-fill"))
    assert_distribution(depths.no_grad_loops, stats.poisson(3).pmf, top=20)
    assert set(depths.gradient_loops) == {5}
    equal = draws(LoopConfig(mean_loops=8, backprop_loops=8, sampler="poisson-fill"))
    assert set(equal.loops) == {8}


@pytest.mark.parametrize(("mean", "mean_depth"), [(8, 11.9), (16, 24.0)])
def test_release_per_batch_adds_the_loops_with_gradient(mean, mean_depth):
    loop = LoopConfig(mean_loops=mean, sampler="release-per-batch")
    depths = draws(loop)
    assert_distribution(depths.no_grad_loops, clamped_poisson(mean), top=40)
    limit = loop.gradient_loops
    assert depths.gradient_loops == tuple(min(n, limit) for n in depths.no_grad_loops)
    assert min(depths.loops) >= 2
    counts = np.arange(200)
    probabilities = stats.poisson(mean).pmf(counts)
    clamped = counts.clip(min=1)
    exact = (probabilities * (clamped + clamped.clip(max=limit))).sum()
    assert round(exact, 1) == mean_depth
    assert np.mean(depths.loops) == pytest.approx(exact, abs=0.15)


def test_lognormal_fill():
    depths = draws(LoopConfig(mean_loops=12, backprop_loops=4, sampler="lognormal-fill"))
    no_grad = np.array(depths.no_grad_loops) - 1
    nodes = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    rates = np.exp(np.log(8) - 0.125 + 0.5 * nodes)
    assert_distribution(no_grad, lambda i: stats.poisson(rates).pmf(i).mean(), top=40)
    assert no_grad.mean() == pytest.approx(8, rel=0.03)
    assert no_grad.var() == pytest.approx(8 + 64 * (np.exp(0.25) - 1), rel=0.08)
    assert set(depths.gradient_loops) == {4}


def test_fixed_and_mean_one():
    assert set(draws(LoopConfig(mean_loops=6, sampler="fixed")).loops) == {6}
    for sampler in ("poisson", "poisson-fill", "fixed", "poisson-full", "lognormal-fill"):
        assert set(draws(LoopConfig(mean_loops=1, sampler=sampler)).loops) == {1}


def test_micro_batch_draws_share_one_depth():
    loop = LoopConfig(mean_loops=8, draw_per="micro-batch")
    assert len({*sample(loop, 32, torch.Generator().manual_seed(3)).loops}) == 1
    assert len({*sample_rows(loop, 0, 5, range(32)).loops}) == 1
    firsts = [sample_rows(loop, 0, step, range(4)).loops[0] for step in range(50)]
    assert len({*firsts}) > 3


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(0, 2**40), st.integers(0, 10**6), st.data())
def test_rows_draw_the_same_whoever_holds_them(world, seed, step, data):
    loop = LoopConfig(mean_loops=8)
    rows = range(data.draw(st.integers(world, 20)))
    alone = sample_rows(loop, seed, step, rows)
    for rank in range(world):
        mine = rows[rank::world]
        theirs = sample_rows(loop, seed, step, mine)
        assert theirs.loops == tuple(alone.loops[i] for i in mine)


@pytest.mark.slow
def test_draws_by_row_follow_the_same_law_and_change_with_every_key():
    loop = LoopConfig(mean_loops=8)
    by_row = [sample_rows(loop, 0, step, range(64)).loops for step in range(150)]
    assert_distribution(np.concatenate(by_row), clamped_poisson(8), top=30)
    keys = [(s, t, r, p) for s in range(3) for t in range(3) for r in range(3) for p in "ab"]
    first = {torch.rand(1, generator=keyed_generator(*key)).item() for key in keys}
    assert len(first) == len(keys)


@pytest.mark.parametrize("kind", ["linear", "1-sqrt"])
def test_curriculum_moves_the_mean(kind):
    loop = LoopConfig(mean_loops=8, curriculum=Curriculum(kind=kind, steps=100))
    means = [loop.mean_at(step) for step in range(0, 150, 5)]
    assert means[0] == 1
    assert means == sorted(means)
    assert means[20:] == [8] * 10
    middle = {"linear": 4.0, "1-sqrt": 8 * (1 - 0.5**0.5)}[kind]
    assert loop.mean_at(50) == pytest.approx(middle)
    late = sample(loop, DRAWS, torch.Generator().manual_seed(0), step=50)
    assert np.mean(late.loops) == pytest.approx(middle, rel=0.06)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 10))
def test_schedule_runs_every_row_exactly_as_often_as_it_wants(loops, backprop):
    schedule = Schedule.of(Depths.truncated(loops, backprop))
    got = dict.fromkeys(range(len(loops)), 0)
    for active in (*schedule.no_grad_rows, *schedule.grad_rows):
        for place in range(active):
            got[schedule.order[place]] += 1
    assert [got[row] for row in range(len(loops))] == loops
    both = sum(schedule.no_grad_rows) + sum(schedule.grad_rows)
    assert sum(schedule.all_loops) == both == sum(loops)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, "at least one"),
        (-3, "at least one"),
        ([2, 0], "at least one"),
        ([1, 2, 3], "3 given for 2"),
        (2.5, "number of loops"),
        ("8", "number of loops"),
        ([1.5, 2], "not a whole number"),
        (True, "number of loops"),
        (torch.tensor([1.0, 2.0]), "whole numbers"),
        (torch.tensor([[1, 2]]), "one per sequence"),
        (None, "number of loops"),
    ],
)
def test_depths_that_cannot_be_meant_are_errors(value, error):
    with pytest.raises((ValueError, TypeError), match=error):
        as_depths(value, 2, LoopConfig())


@pytest.mark.parametrize("value", [5, [5, 5], (5, 5), torch.tensor([5, 5]), torch.tensor(5)])
def test_depths_in_every_accepted_form(value):
    depths = as_depths(value, 2, LoopConfig(mean_loops=8))
    assert depths == Depths((5, 5), (4, 4))
    for numpys in (np.int64(5), np.array([5, 5])):
        assert as_depths(numpys, 2, LoopConfig()) == depths
