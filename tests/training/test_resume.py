"""Killed at any moment and resumed, a run is bit for bit the run that was never killed."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch

from parcae.runs import checkpoints
from parcae.training import trainer
from parcae.training.run import train
from training import runs

KILLS = 8
STEPS = 70


def go(recipe, out, resume, slow_checkpoints):
    torch.set_num_threads(1)
    trainer.peak_flops = lambda *_: 1e12
    if slow_checkpoints:  # so that kills fall into the middle of one
        plain = checkpoints.sha256

        def slow(path):
            time.sleep(0.05)
            return plain(path)

        checkpoints.sha256 = slow
    train(recipe, out, resume=resume)


def last_checkpoint(run):
    steps = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def wait_for_step(run, process, step):
    """Until the run that was just started has logged `step` again or for the first time."""
    before = run / "metrics.jsonl"
    stamp = before.stat().st_mtime_ns if before.exists() else 0
    while process.exitcode is None:
        if before.exists() and before.stat().st_mtime_ns != stamp:
            logged = before.read_text().rsplit("\n", 2)
            if len(logged) > 1 and logged[-2] and json.loads(logged[-2])["step"] >= step:
                return
        time.sleep(0.005)


@pytest.mark.slow
def test_killed_again_and_again_is_bit_identical(tmp_path):
    text = runs.write_text(tmp_path)
    recipe = runs.recipe(text, budget={"steps": STEPS})
    context = runs.clean_processes()
    whole = context.Process(target=go, args=(recipe, tmp_path / "whole", False, False))
    whole.start()
    whole.join()
    assert whole.exitcode == 0

    out, rng, inside = tmp_path / "killed", random.Random(0), 0
    for kill in range(KILLS):
        resume = (out / "recipe.toml").exists()
        process = context.Process(target=go, args=(recipe, out, resume, kill % 2 == 1))
        process.start()
        if kill == 0:
            time.sleep(rng.uniform(0.5, 1.5))  # perhaps before the first step
        else:
            wait_for_step(out, process, last_checkpoint(out) + rng.randint(1, 7))
            time.sleep(rng.uniform(0, 0.02))
        assert process.exitcode is None, "it ended before it could be killed"
        process.kill()
        process.join()
        inside += any((out / "checkpoints").glob(".step-*"))
    process = context.Process(target=go, args=(recipe, out, True, False))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert inside > 0, "no kill fell into the middle of a checkpoint"
    assert runs.curve(out) == runs.curve(tmp_path / "whole")
    for kind, keys in {"validation": ("losses",), "telemetry": ("state_norms",)}.items():
        assert runs.lines(out, kind, *keys) == runs.lines(tmp_path / "whole", kind, *keys)
    ours, theirs = runs.weights(out, STEPS), runs.weights(tmp_path / "whole", STEPS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
