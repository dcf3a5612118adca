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
LONG = {"sweep", "fit", "reproduce"}
OF_LONG = ("kill -9", "disk full", "flipped bit")
"""The faults that are tried here on the commands that take longest."""

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
    command = COMMANDS[name]
    trial = Trial(server, command, SAMPLE)
    tried = {
        kind.name: kind.run(trial, None)
        for kind in FAULTS.values()
        if kind.commands(command)
        and kind.name != "a rank dies"  # half a minute
        and (name not in LONG or kind.name in OF_LONG)
    }
    assert {fault: cell.failures for fault, cell in tried.items() if cell.failures} == {}
    assert all(cell.to_dict()["tried"] > 0 for cell in tried.values())


def test_the_page_has_the_recorded_counts():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.updated(text) == text
