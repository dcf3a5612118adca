"""Some tries of every fault on every command; `make test-faults` tries every event."""

from __future__ import annotations

import shutil
import sys

import pytest

from faults import page
from faults.client import open_server
from faults.commands import COMMANDS
from faults.kinds import FAULTS
from faults.trial import Trial

SAMPLE = 1
IN_PROCESSES_OF_THEIR_OWN = ("a rank dies",)
"""Tried by a test below, since a try takes long."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


@pytest.fixture(scope="session")
def server():
    with open_server() as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_faults(name, server):
    trial = Trial(server, COMMANDS[name], SAMPLE)
    kinds = [kind for kind in FAULTS.values() if kind.commands(trial.command)]
    tried = {
        kind.name: kind.run(trial, None)
        for kind in kinds
        if kind.name not in IN_PROCESSES_OF_THEIR_OWN
    }
    assert {fault: cell.failures for fault, cell in tried.items() if cell.failures} == {}
    assert all(cell.plain()["tried"] > 0 for cell in tried.values())


@pytest.mark.slow
def test_a_rank_dies_and_comes_back(server):
    trial = Trial(server, COMMANDS["train"], SAMPLE)
    assert FAULTS["a rank dies"].run(trial, None).failures == []


def test_the_page_has_the_recorded_counts():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.updated(text) == text
