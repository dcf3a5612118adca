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


def go(recipe, out, resume, held=None):
    """One that is to be killed does not end: it waits before its last step or, if the folder `held`
    exists, inside a checkpoint, for which it removes the folder."""
    torch.set_num_threads(1)
    trainer.peak_flops = lambda *_: 1e12
    if held is not None:
        take_step, sha256 = trainer.Trainer._train_step, checkpoints.sha256

        def step(self):
            if self.learner.step == STEPS - 1:
                time.sleep(600)
            take_step(self)

        def checksum(path):
            if held.exists() and path.is_relative_to(out) and ".step-" in str(path):
                held.rmdir()
                time.sleep(600)
            return sha256(path)

        trainer.Trainer._train_step, checkpoints.sha256 = step, checksum
    train(recipe, out, resume=resume)


def last_checkpoint(run):
    steps = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def logged(run, step):
    """A function that says whether the run that was just started has logged `step`, again or for
    the first time."""
    path = run / "metrics.jsonl"
    stamp = path.stat().st_mtime_ns if path.exists() else 0

    def has_logged():
        if not path.exists() or path.stat().st_mtime_ns == stamp:
            return False
        lines = path.read_text().rsplit("\n", 2)
        return len(lines) > 1 and bool(lines[-2]) and json.loads(lines[-2])["step"] >= step

    return has_logged


@pytest.mark.slow
def test_killed_again_and_again_is_bit_identical(tmp_path):
    text = runs.write_text(tmp_path)
    recipe = runs.recipe(text, budget={"steps": STEPS})
    context = runs.clean_processes()
    whole = context.Process(target=go, args=(recipe, tmp_path / "whole", False))
    whole.start()
    whole.join()
    assert whole.exitcode == 0

    out, held, rng = tmp_path / "killed", tmp_path / "held", random.Random(0)
    for kill in range(KILLS):
        resume = (out / "recipe.toml").exists()
        happened = logged(out, last_checkpoint(out) + rng.randint(1, 7))
        if kill % 2:
            held.mkdir()
            happened = lambda: not held.exists()  # noqa: E731
        process = context.Process(target=go, args=(recipe, out, resume, held))
        process.start()
        while kill and not happened():
            assert process.exitcode is None, "it ended before it could be killed"
            time.sleep(0.005)
        # The first perhaps before its first step.
        time.sleep(rng.uniform(0, 0.02) if kill else rng.uniform(0.5, 1.5))
        process.kill()
        process.join()
    process = context.Process(target=go, args=(recipe, out, True))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert runs.curve(out) == runs.curve(tmp_path / "whole")
    for kind, keys in {"validation": ("losses",), "telemetry": ("state_norms",)}.items():
        assert runs.lines(out, kind, *keys) == runs.lines(tmp_path / "whole", kind, *keys)
    ours, theirs = runs.weights(out, STEPS), runs.weights(tmp_path / "whole", STEPS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
