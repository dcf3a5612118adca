"""Some cases of every reader; `make fuzz` runs 100,000."""

from __future__ import annotations

import sys

import pytest

from fuzz.campaign import fuzz
from fuzz.targets import TARGETS

CASES = 25


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs an alarm and limits of memory")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_only_documented_errors(target):
    assert fuzz([target], CASES, seed=1)[target.name] == []
