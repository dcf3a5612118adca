"""What `benchmarks/soak.py` takes for growth."""

from __future__ import annotations

import pytest

from soak import judge


def samples(**changes):
    """An hour of a process at rest, with changes as functions of the sample's number."""
    usual = {"memory": lambda n: 10**9, "descriptors": lambda n: 20, "threads": lambda n: 4}
    usual |= {"checkpoints": lambda n: 4, "disk": lambda n: 4000}
    values = {**usual, **changes}
    return [
        {"seconds": 5.0 * n, "largest checkpoint": 1000, **{k: f(n) for k, f in values.items()}}
        for n in range(720)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"descriptors": lambda n: 20 + (n % 7 == 0) + 9 * (n == 700)},  # open for a moment
        {"memory": lambda n: 10**9 + 10**6 * (n % 11)},
        {"checkpoints": lambda n: 4 + (n % 3 == 0), "disk": lambda n: 4000 + 1000 * (n % 3 == 0)},
    ],
)
def test_what_comes_and_goes_is_no_growth(changes):
    assert judge(samples(**changes))["problems"] == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("memory", lambda n: 10**9 + 10**5 * n),
        ("descriptors", lambda n: 20 + n // 100),
        ("threads", lambda n: 4 + (n > 500)),
        ("checkpoints", lambda n: 4 + n // 300),
        ("disk", lambda n: 4000 + 10 * n),
    ],
)
def test_what_stays_is_growth(name, change):
    (problem,) = judge(samples(**{name: change}))["problems"]
    assert problem.startswith(f"{name} grew from ")


def test_clients_may_be_connected():
    taken = samples(descriptors=lambda n: 20 + 4 * (n > 500))
    assert judge(taken, connections=4)["problems"] == []
    assert judge(taken, connections=3)["problems"] == ["descriptors grew from 20 to 24"]


def test_a_soak_that_is_too_short_shows_nothing():
    assert judge(samples()[:3])["problems"] == ["too short to compare quarters"]
