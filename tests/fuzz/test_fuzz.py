"""Some cases of every reader; `make fuzz` runs 100,000."""

from __future__ import annotations

import sys

import pytest

from fuzz.campaign import fuzz
from fuzz.targets import TARGETS

CASES = 25
FAST = {target.name for target in TARGETS if target.weight >= 0.5}
"""A reader that takes long has a small share of a campaign."""


@pytest.mark.skipif(sys.platform == "win32", reason="needs an alarm and limits of memory")
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.name, marks=[] if target.name in FAST else pytest.mark.slow)
        for target in TARGETS
    ],
)
def test_only_documented_errors(target):
    assert fuzz([target], CASES, seed=1)[target.name] == []
