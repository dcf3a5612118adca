"""The schedule: its shape by hand, its bounds for anything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.training.schedule import Factors, schedule_factors
from parcae.training.settings import OptimiserConfig, ScheduleConfig

OPTIMISER = OptimiserConfig()


def over_a_run(config: ScheduleConfig, steps: int) -> list[Factors]:
    return [schedule_factors(config, OPTIMISER, s, s / steps, steps) for s in range(steps)]


def test_the_papers_learning_rate_is_constant_and_then_falls_linearly_to_zero():
    rates = [f.lr for f in over_a_run(ScheduleConfig(), 8)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_warm_up_and_cool_down_in_steps():
    config = ScheduleConfig(warmup_steps=4, cooldown_steps=2)
    rates = [f.lr for f in over_a_run(config, 8)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.5])


def test_cool_down_in_steps_goes_before_the_fraction_and_needs_the_number_of_steps():
    config = ScheduleConfig(cooldown_fraction=1.0, cooldown_steps=0)
    assert {f.lr for f in over_a_run(config, 8)} == {1.0}
    with pytest.raises(ValueError, match="steps"):
        schedule_factors(config, OPTIMISER, 0, 0.0)


def test_by_the_clock_only_progress_counts():
    config = ScheduleConfig(cooldown_fraction=0.5)
    assert schedule_factors(config, OPTIMISER, 10_000, 0.75).lr == pytest.approx(0.5)


def test_momentum_rises_over_300_steps_and_weight_decay_falls_over_the_run():
    seen = over_a_run(ScheduleConfig(), 600)
    assert [seen[s].momentum for s in (0, 150, 300, 599)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert [seen[s].weight_decay for s in (0, 150, 300)] == pytest.approx([1, 0.75, 0.5])
    constant = over_a_run(ScheduleConfig(weight_decay_to_zero=False, momentum_warmup_steps=0), 9)
    assert {(f.momentum, f.weight_decay) for f in constant} == {(0.95, 1.0)}


schedules = st.builds(
    ScheduleConfig,
    warmup_steps=st.integers(0, 50),
    cooldown_fraction=st.floats(0, 1),
    cooldown_steps=st.none() | st.integers(0, 50),
    momentum_warmup_steps=st.integers(0, 50),
    weight_decay_to_zero=st.booleans(),
)


@settings(deadline=None)
@given(
    schedules,
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 200),
    st.floats(-0.5, 1.5),
    st.integers(1, 100),
)
def test_factors_stay_in_bounds_wherever_the_run_is(config, momentum, step, progress, steps):
    """Also beyond its end, where a run by the clock may find itself."""
    optimiser = OptimiserConfig(muon_momentum=momentum)
    found = schedule_factors(config, optimiser, step, progress, steps)
    assert 0 <= found.lr <= 1
    assert 0 <= found.weight_decay <= 1
    assert min(momentum, 0.85) <= found.momentum <= momentum


@settings(deadline=None)
@given(schedules, st.integers(1, 100))
def test_every_step_of_a_run_moves_and_the_rate_rises_only_in_the_warm_up(config, steps):
    rates = [f.lr for f in over_a_run(config, steps)]
    assert min(rates) > 0
    after = rates[config.warmup_steps :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
