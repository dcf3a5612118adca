"""With checkpointed loops, memory is flat in the loops that carry gradient, and nothing else
changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import KINDS, randomised

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "activation_checkpointing.py"


def bytes_taken():
    """By (how, loops with gradient): the peak of a step above the memory before it."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK), "--memory", "--preset", "parcae-3m", "--rows", "8"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return {(how, loops): size for how, loops, size in json.loads(result.stdout)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_memory_is_flat_in_the_loops_that_carry_gradient():
    taken = bytes_taken()
    assert taken["checkpointed", 12] < 1.1 * taken["checkpointed", 4]
    assert taken["plain", 12] > 2 * taken["plain", 4]
    assert taken["checkpointed", 4] < 0.5 * taken["plain", 4]


def gradients(model, depths):
    tokens = torch.arange(4 * 32).reshape(4, 32) % 96
    output = model(tokens, tokens.roll(-1, 1), loops=depths, state="zero")
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return output.loss.detach(), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_bits(kind):
    model = randomised(KINDS[kind])
    loss, plain = gradients(model, [1, 6, 3, 6])
    model.activation_checkpointing()
    again, checkpointed = gradients(model, [1, 6, 3, 6])
    assert torch.equal(loss, again)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.slow
def test_gradients_are_the_same_compiled():
    """Traced and partitioned as for the default backend, which takes a minute to write code."""
    plain_model, model = randomised(KINDS["parcae"]), randomised(KINDS["parcae"])
    model.activation_checkpointing()
    for each in (plain_model, model):
        each.compile_layers(backend="aot_eager")
    loss, plain = gradients(plain_model, [1, 6, 3, 6])
    again, checkpointed = gradients(model, [1, 6, 3, 6])
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-6)
