"""With checkpointed loops, memory is flat in the loops that carry gradient, and nothing else
changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import KINDS, randomised

SCRIPT = """
import json
import torch
from parcae.model import create

def status(key):  # ru_maxrss would count the parent's memory from before the exec
    with open("/proc/self/status") as stream:
        return 1024 * next(int(line.split()[1]) for line in stream if line.startswith(key))

def taken(carried, checkpointed):
    loop = {"mean_loops": 12, "backprop_loops": carried, "sampler": "fixed"}
    model = create("parcae-3m", loop=loop)
    if checkpointed:
        model.checkpoint_loops()
    tokens = torch.zeros(16, 128, dtype=torch.long)
    model(tokens[:1], tokens[:1]).loss.backward()  # loads what is loaded late
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # the peak starts again from here
    before = status("VmRSS")
    model(tokens, tokens).loss.backward()
    return status("VmHWM") - before

print(json.dumps([[how, n, taken(n, how == "checkpointed")]
    for how in ("checkpointed", "plain") for n in (4, 12)]))
"""


def bytes_taken():
    """By (how, loops with gradient): the peak of a step above the memory before it."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
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
    model.checkpoint_loops()
    again, checkpointed = gradients(model, [1, 6, 3, 6])
    assert torch.equal(loss, again)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.slow
def test_gradients_are_the_same_compiled():
    """Traced and partitioned as for the default backend, which takes a minute to write code."""
    plain_model, model = randomised(KINDS["parcae"]), randomised(KINDS["parcae"])
    model.checkpoint_loops()
    for each in (plain_model, model):
        each.compile_layers(backend="aot_eager")
    loss, plain = gradients(plain_model, [1, 6, 3, 6])
    again, checkpointed = gradients(model, [1, 6, 3, 6])
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-6)
