"""What the machine can do: never less than what it was seen doing."""

from __future__ import annotations

import pytest
import torch

from parcae.training.peak import SHARE_OF_TIME, Peak, find_peak
from parcae.training.trainer import train
from training import runs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_above_the_peak_raises_it():
    """It was measured while the machine was busy."""
    peak = Peak(100.0)
    assert [peak.share(rate) for rate in (50.0, 200.0, 50.0)] == [0.5, 1.0, 0.25]
    assert peak.flops == 200.0


def test_an_unknown_peak_has_no_share():
    assert Peak(None, lambda: 1.0).share(50.0) is None


def test_a_peak_that_was_measured_too_low_is_found_out():
    clock = Clock()
    seen = iter([80.0, 400.0, 90.0])

    def measure() -> float:
        clock.now += 1.0  # it takes a second
        return next(seen)

    peak = Peak(100.0, measure, clock)
    assert peak.share(50.0) == 0.5, "no time has passed that a share could be spent of"
    shares = []
    for _ in range(3):
        clock.now += 1.0 / SHARE_OF_TIME
        shares.append(peak.share(50.0))
    assert shares == [0.5, 50 / 400, 50 / 400]
    assert next(seen, None) is None


def test_little_time_goes_into_measuring_again():
    clock = Clock()
    count = 0

    def measure() -> float:
        nonlocal count
        count += 1
        clock.now += 0.02
        return 1.0

    peak = Peak(1.0, measure, clock)
    for _ in range(10_000):
        clock.now += 0.1
        peak.share(0.5)
    assert 1 < count <= SHARE_OF_TIME * clock.now / 0.02 + 1


def test_a_cpu_is_measured():
    found = find_peak(torch.device("cpu"))
    assert found.flops is not None
    assert found.flops > 1e8
    assert find_peak(torch.device("meta")).flops is None


@pytest.mark.slow
def test_no_step_of_a_run_is_above_the_peak(text, tmp_path, monkeypatch):
    monkeypatch.setattr("parcae.training.trainer.find_peak", lambda *_: Peak(1.0))
    train(runs.recipe(text, budget={"steps": 8}), tmp_path / "run")
    shares = [line[1] for line in runs.lines(tmp_path / "run", "train", "peak_fraction")]
    assert len(shares) == 8
    assert max(shares) == 1.0
    assert min(shares) > 0
