"""Bad numbers: steps that are skipped, runs that give up and say why, spikes that are noticed."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

import parcae
from parcae import cli
from parcae.runs import list_checkpoints, read_result
from parcae.training import learner as learner_module
from parcae.training.distributed import Workers
from parcae.training.divergence import Guard, diagnose
from parcae.training.learner import Learner
from parcae.training.run import train
from parcae.training.schedule import schedule_factors
from parcae.training.trainer import Trainer
from training import runs


def poison(monkeypatch, steps, how):
    """Make the gradient, or the loss, of the given steps (counted from 0) NaN or infinite."""
    real = Learner._clip

    def clip(self):
        if self.step in steps:
            name, p = next((n, p) for n, p in self.model.named_parameters() if "q.weight" in n)
            assert p.grad is not None, name
            p.grad[0, 0] = how
        return real(self)

    monkeypatch.setattr(Learner, "_clip", clip)


def poison_loss(monkeypatch, steps):
    """A loss that is NaN makes every gradient NaN, as it would be."""
    real = learner_module.build

    def build(*arguments, **options):
        model = real(*arguments, **options)
        plain, calls = model.loss, iter(range(10**6))

        def loss(x, targets):
            value = plain(x, targets)
            bad = torch.is_grad_enabled() and next(calls) // 2 in steps  # two micro-batches a step
            return value * math.nan if bad else value

        model.loss = loss
        return model

    monkeypatch.setattr(learner_module, "build", build)


def watch(monkeypatch):
    """Weights and optimiser state after every step."""
    seen = []
    real = Trainer._train_step

    def one_step(self):
        real(self)
        tensors = {**self.learner.model.state_dict(), **self.learner.optimiser.tensors()}
        seen.append({name: tensor.detach().clone() for name, tensor in tensors.items()})

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    return seen


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", math.nan, math.inf])
def test_a_bad_step_is_skipped_and_nothing_else(how, text, tmp_path, monkeypatch):
    if how == "loss":
        poison_loss(monkeypatch, {2, 4})
    else:
        poison(monkeypatch, {2, 4}, how)
    seen = watch(monkeypatch)
    result = train(runs.recipe(text, budget={"steps": 6}), tmp_path / "run")
    assert result.status == "finished"
    assert result.skipped_steps == 2
    assert [same(seen[i], seen[i + 1]) for i in range(5)] == [False, True, False, True, False]
    assert all(tensor.isfinite().all() for tensor in seen[-1].values())
    skipped = runs.lines(tmp_path / "run", "train", "skipped", "tokens")
    assert skipped == [(s, s in (3, 5), s * 64) for s in range(1, 7)], "the data goes on"
    events = runs.lines(tmp_path / "run", "event", "what")
    assert events == [(3, "skipped"), (5, "skipped")]
    losses = dict(runs.lines(tmp_path / "run", "train", "loss"))
    assert (losses[3] is None) == (how == "loss"), "NaN is null in JSON"
    assert math.isfinite(result.train_loss)


@pytest.mark.slow
def test_a_skipped_step_resumes_to_the_same_bits(text, tmp_path, monkeypatch, one_thread):
    poison(monkeypatch, {2, 4}, math.nan)
    recipe = runs.recipe(text, budget={"steps": 9})
    train(recipe, tmp_path / "whole")
    stop_after(monkeypatch, 4)
    train(recipe, tmp_path / "run")
    monkeypatch.setattr(Trainer, "_train_step", REAL_ONE_STEP)
    result = train(recipe, tmp_path / "run", resume=True)
    assert result.skipped_steps == 2
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")


REAL_ONE_STEP = Trainer._train_step


def stop_after(monkeypatch, step):
    import signal

    def one_step(self):
        REAL_ONE_STEP(self)
        if self.learner.step == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", one_step)


@pytest.mark.slow
def test_persistent_ones_stop_the_run_and_keep_the_last_good_checkpoint(
    text, tmp_path, monkeypatch, capsys
):
    """Resumed, it goes on from the last good checkpoint: here the trouble is gone."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    changes = {"run": {"max_nonfinite_steps": 8}, "budget": {"steps": 20}}
    from parcae.recipe import write_toml
    from parcae.training.settings import recipe_to_dict

    recipe.write_text(write_toml(recipe_to_dict(runs.recipe(text, **changes))))
    with monkeypatch.context() as patched:
        poison(patched, set(range(7, 10**6)), math.nan)
        assert cli.main(["train", str(recipe), "--out", str(run)]) == 1
    assert "Traceback" not in capsys.readouterr().err
    result = read_result(run)
    assert result.status == "diverged"
    assert result.skipped_steps == 8
    assert result.steps == 15
    assert "learning rate" in result.diagnosis
    what = [line[1:] for line in runs.lines(run, "event", "what")]
    assert what == [("skipped",)] * 8 + [("diverged",)]
    # checkpoint_every is 3 and keep_last 2: what was skipped has not pushed out what was good.
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == ["step-00000005", "step-00000006"]
    model = parcae.load(run / "checkpoints" / "step-00000006")
    assert all(p.isfinite().all() for p in model.parameters())

    assert cli.main(["train", "--resume", str(run)]) == 0
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    steps = [line[0] for line in runs.lines(run, "train")]
    assert steps == list(range(1, 21)), "each step once, those that were skipped taken"


@pytest.mark.slow
@pytest.mark.parametrize("telemetry", [0, 5])
def test_the_diagnosis_names_the_spectral_radius(telemetry, text, tmp_path, monkeypatch):
    real = Workers.initialise

    def initialise(*arguments):
        model = real(*arguments)
        with torch.no_grad():
            model.loop.core.injection.W.mul_(8)
        return model

    monkeypatch.setattr(Workers, "initialise", initialise)
    poison(monkeypatch, set(range(100)), math.nan)
    recipe = runs.recipe(
        text, model=runs.RDM, run={"max_nonfinite_steps": 3, "telemetry_every": telemetry}
    )
    result = train(recipe, tmp_path / "run")
    assert result.status == "diverged"
    assert "spectral radius" in result.diagnosis
    assert "linear part expands" in result.diagnosis
    assert not list((tmp_path / "run" / "checkpoints").glob("*")), "nothing good to keep"


@pytest.mark.slow
def test_weights_that_blew_up_are_diagnosed_too(text, tmp_path, monkeypatch):
    """Linear algebra refuses such matrices; the diagnosis must not."""

    def one_step(self):
        REAL_ONE_STEP(self)
        if self.learner.step == 7:
            with torch.no_grad():
                self.learner.model.loop.core.injection.B.fill_(math.inf)
                self.learner.model.loop.core.injection.log_A.fill_(math.nan)

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    recipe = runs.recipe(text, run={"max_nonfinite_steps": 4, "telemetry_every": 1})
    result = train(recipe, tmp_path / "run")
    assert result.status == "diverged"
    assert "the loop has diverged" in result.diagnosis
    kept = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert all(p.isfinite().all() for p in parcae.load(kept).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 20])
def test_weights_that_are_not_finite_are_not_saved(steps, text, tmp_path, monkeypatch):
    """The loss and gradient of each step are finite; its update is not. With 4 steps the run ends
    before the guard gives up."""

    def too_large(*arguments):
        return schedule_factors(*arguments)._replace(lr=1e40)

    monkeypatch.setattr("parcae.training.learner.schedule_factors", too_large)
    recipe = runs.recipe(
        text,
        run={"checkpoint_every": 1, "max_nonfinite_steps": 6, "telemetry_every": 0},
        budget={"steps": steps},
    )
    run = tmp_path / "run"
    result = train(recipe, run)
    assert result.status == "diverged"
    assert [line for line in runs.lines(run, "event", "what") if line[1] == "not saved"]
    for checkpoint in list_checkpoints(run):
        assert all(p.isfinite().all() for p in parcae.load(checkpoint).parameters())


def seen(radius=0.7, norm=3.0, first=2.0):
    return {"spectral_radius": radius, "state_norm": norm, "state_norms": [first, norm]}


LR = {"muon": 8e-3}


@pytest.mark.parametrize(
    ("now", "before", "word"),
    [
        (None, None, "The model has no loop"),
        (seen(radius=1.2), seen(), "linear part expands: spectral radius 1.200"),
        (seen(norm=5e3), seen(), "state norm grew from 3 to 5e+03"),
        (seen(norm=5e3), None, "state norm grew from 2 to 5e+03"),
        (seen(norm=5e3), seen(norm=None), "state norm grew"),
        (seen(norm=None), seen(), "not finite at full depth"),
        (seen(radius=None), seen(), "not finite at full depth"),
        (seen(), seen(), "lower the learning rate"),
        (seen(), None, "lower the learning rate"),
        (seen(radius=1.0), seen(), "lower the learning rate"),
        ({"state_norm": 5e3, "state_norms": [2.0, 5e3]}, None, "A, which depends on the input, or"),
        ({"state_norm": 3.0, "state_norms": [2.0, 3.0]}, None, "stable (state norm 3)"),
    ],
)
def test_diagnoses(now, before, word):
    assert word in diagnose(now, before, LR)
    assert "muon 0.008" in diagnose(now, before, LR), "the rates are always told"


def falling(rng, steps, noise=0.1):
    """A loss curve as they are: a power law, with noise."""
    step = np.arange(steps)
    return 2.0 + 9 * (step + 1.0) ** -0.4 + rng.normal(0, noise, steps)


def test_no_false_alarm_on_a_falling_noisy_curve():
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        guard = Guard(20)
        alarms += sum(
            guard.record(x, 1.0) == "spike" for x in falling(rng, 1500, rng.uniform(0.02, 0.3))
        )
    assert alarms == 0, f"{alarms} in 60,000 steps"


@pytest.mark.slow
@pytest.mark.parametrize(("deviations", "found"), [(3, 0.0), (9, 0.95), (20, 1.0), (100, 1.0)])
def test_spikes_are_found_by_their_size(deviations, found):
    """Small ones are left alone, large ones found; those beyond nine deviations nearly always."""
    places, hits = [600, 800, 801, 1100, 1400], 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        losses = falling(rng, 1500)
        losses[places] += deviations * 0.1
        guard = Guard(20)
        spikes = [i for i, x in enumerate(losses) if guard.record(x, 1.0) == "spike"]
        assert set(spikes) <= set(places)
        assert guard.spikes == len(spikes)
        hits += len(spikes)
    share = hits / (40 * len(places))
    assert share >= found if found else share <= 0.02, share


def test_a_loss_that_stays_up_is_not_a_spike_for_ever():
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(3, 0.1, 300), rng.normal(8, 0.1, 300)])
    guard = Guard(20)
    spikes = [i for i, x in enumerate(losses) if guard.record(x, 1.0) == "spike"]
    assert 300 in spikes
    assert 5 <= len(spikes) < 60
    assert max(spikes) < 400


@pytest.mark.slow
def test_a_spike_in_a_run_is_logged(text, tmp_path, monkeypatch):
    real = Workers.gather
    steps = itertools.count(1)

    def gather(self, local):
        numbers = real(self, local)
        if len(local) == 4 and next(steps) == 60:
            numbers[:, 0] = 30.0  # the loss
        return numbers

    monkeypatch.setattr(Workers, "gather", gather)
    quiet = {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 0}
    recipe = runs.recipe(text, budget={"steps": 62}, run=quiet)
    result = train(recipe, tmp_path / "run")
    assert result.spikes == 1
    ((step, what, message),) = runs.lines(tmp_path / "run", "event", "what", "message")
    assert (step, what) == (60, "spike")
    assert "30.000" in message


def test_the_guard_comes_back_from_a_checkpoint():
    guard, again = Guard(5), Guard(7)
    for x in np.random.default_rng(0).normal(3, 0.1, 70).tolist():
        guard.record(x, 1.0)
    assert guard.record(math.nan, 1.0) == "skip"
    again.restore(json.loads(json.dumps(guard.state())))
    assert again.state() == guard.state()
    assert again.max_nonfinite_steps == 7
    assert [guard.record(9.0, 1.0), guard.spikes] == [again.record(9.0, 1.0), again.spikes]
