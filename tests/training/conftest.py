"""Text to train on, made once, and runs that do not measure the machine first."""

from __future__ import annotations

import pytest
import torch

from parcae.training import trainer
from training import runs


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True, scope="module")  # also for fixtures of modules
def one_thread():
    """Bits are compared, and with other processes about one thread is faster than two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def unmeasured_machine(monkeypatch):
    monkeypatch.setattr(trainer, "peak_flops", lambda *_: 1e12)
