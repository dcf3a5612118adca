"""Runs as a whole: how long they are, and that what they report is true."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

import parcae
from conftest import needs_compiler
from parcae.model.flops import parameter_count, training_flops_per_token
from parcae.model.looped import LoopedModel
from parcae.report.runs import read_run
from parcae.runs import read_result
from parcae.training import distributed, trainer
from parcae.training.corpora import open_corpora
from parcae.training.learner import Learner
from parcae.training.log import Display
from parcae.training.run import read_recipe, train
from parcae.training.schedule import total_steps
from parcae.training.settings import recipe_from_tree, recipe_to_dict
from parcae.training.trainer import Trainer
from training import runs

QUIET = {"validate_every": 0, "telemetry_every": 0, "checkpoint_every": 0}

TRANSFORMER = {
    "architecture": "transformer",
    "injection": "none",
    "readout": False,
    "prelude_norm": False,
    "loop": {"mean_loops": 1},
}
KINDS = {
    "parcae": {},
    "parcae-wide-state": {"state_width": 48, "state_heads": 2},
    "rdm": {**runs.RDM, "norm": "residual"},
    "rdm-prenorm": runs.RDM,
    "addition": {**runs.RDM, "injection": "addition"},
    "transformer": TRANSFORMER,
}


@contextmanager
def interrupted_after(steps, monkeypatch):
    """SIGTERM when a run has taken so many steps."""
    real = Trainer._train_step

    def one_step(self):
        real(self)
        if self.learner.step == steps:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_step", one_step)
        yield


def with_budget(text, **budget):
    return recipe_from_tree({**recipe_to_dict(runs.recipe(text, run=QUIET)), "budget": budget})


def test_budgets_come_to_steps(text):
    """A step has 4 rows of 16 tokens."""
    model = runs.recipe(text).model
    parameters, flops = parameter_count(model), training_flops_per_token(model)
    assert total_steps(with_budget(text, steps=7)) == 7
    assert total_steps(with_budget(text, tokens=64 * 9 + 10)) == 9
    assert total_steps(with_budget(text, tokens=1)) == 1
    assert total_steps(with_budget(text, flops=64 * flops * 11.4)) == 11
    ratio = 64 * 13 / parameters
    assert total_steps(with_budget(text, tokens_per_parameter=ratio)) == 13
    assert total_steps(with_budget(text, minutes=1)) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "flops", "tokens_per_parameter"])
def test_a_budget_is_spent(kind, text, tmp_path):
    model = runs.recipe(text).model
    amount = {"tokens": 64 * 3, "flops": 64 * 3 * training_flops_per_token(model)}
    amount["tokens_per_parameter"] = 64 * 3 / parameter_count(model)
    result = train(with_budget(text, **{kind: amount[kind]}), tmp_path / "run")
    assert result.steps == 3
    spent = {**result.to_dict(), "tokens_per_parameter": result.tokens / result.parameters}
    assert spent[kind] == pytest.approx(amount[kind], rel=1e-9)
    assert result.executed_flops != result.flops, "depths were drawn"


def cools_down_with_the_clock(run, minutes):
    """Every rate is what the time behind it leaves of the cool-down, which is the last half."""
    lines = runs.lines(run, "train", "lr", "training_seconds")
    first = lines[0][1]["muon"]
    for (_, _, seconds), (_, rates, _) in pairwise(lines):
        left = 1 - seconds / (60 * minutes)
        assert 0 < rates["muon"] == pytest.approx(first * min(1.0, 2 * left))
    return lines[-1][1]["muon"] < first


@pytest.mark.slow
def test_a_run_by_the_clock(text, tmp_path):
    """It ends near its time, its schedule at zero, and is validated although nothing else is."""
    recipe = with_budget(text, minutes=2 / 60)
    started = time.perf_counter()
    result = train(recipe, tmp_path / "run")
    took = time.perf_counter() - started
    assert 2.0 <= result.seconds < 3.0
    assert result.seconds < took
    rates = [line[1]["muon"] for line in runs.lines(tmp_path / "run", "train", "lr")]
    assert len(rates) == result.steps
    assert rates[0] == recipe.optimiser.muon_lr
    assert sorted(rates, reverse=True) == rates
    assert cools_down_with_the_clock(tmp_path / "run", 2 / 60)
    assert set(result.validation) == {1, 3, 6}
    again = train(recipe, tmp_path / "run", resume=True)
    assert again.steps == result.steps, "its time is over"
    assert again.validation == result.validation


class FakeClock:
    """Stands for the module `time`: steps take one second, validations and telemetry eight."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for name, seconds in {"take_step": 1.0, "validate": 8.0, "measure_telemetry": 8.0}.items():
            monkeypatch.setattr(Learner, name, self.advanced(getattr(Learner, name), seconds))
        monkeypatch.setattr(trainer, "time", self)

    def advanced(self, function, seconds):
        def call(*arguments):
            self.now += seconds
            return function(*arguments)

        return call

    def perf_counter(self):
        return self.now


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"minutes": 40 / 60}, {"steps": 999, "max_minutes": 2 / 3}])
def test_the_schedule_of_a_run_by_the_clock_reaches_its_end(budget, text, tmp_path, monkeypatch):
    """Whatever time the validations take: four fifths of that of the steps here."""
    FakeClock(monkeypatch)
    recipe = with_budget(text, **budget)
    recipe = runs.changed(recipe, run={"validate_every": 10, "telemetry_every": 30})
    result = train(recipe, tmp_path / "run")
    assert (result.status, result.steps) == ("finished", 40)
    assert result.seconds == 40 + 8 * (4 + 2)  # telemetry also after the first step
    rates = [line[1]["muon"] for line in runs.lines(tmp_path / "run", "train", "lr")]
    left = [1 - step / 40 for step in range(40)]
    expected = [recipe.optimiser.muon_lr * min(1.0, 2 * share) for share in left]
    assert rates == pytest.approx(expected)


@pytest.mark.slow
def test_the_training_loss_is_the_mean_of_the_last_steps(text, tmp_path):
    recipe, run = runs.recipe(text, budget={"steps": 25}, run=QUIET), tmp_path / "run"
    result = train(recipe, run)
    losses = [line[1] for line in runs.lines(run, "train", "loss")]
    assert result.train_loss == pytest.approx(sum(losses[-20:]) / 20, rel=1e-12)
    assert runs.lines(run, "train", "train_loss")[-1] == (25, result.train_loss)
    assert runs.lines(run, "train", "train_loss")[3][1] == pytest.approx(sum(losses[:4]) / 4)
    assert read_run(run).train_loss == result.train_loss
    (run / "result.json").unlink()
    assert read_run(run).train_loss == result.train_loss


@pytest.mark.parametrize(
    ("peak", "compiled", "said"),
    [(1e3, False, "A step takes about"), (1e12, True, "include compilation"), (1e12, False, None)],
)
def test_a_slow_first_step_is_announced(peak, compiled, said, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "peak_flops", lambda *_: peak)
    monkeypatch.setattr(LoopedModel, "compile_layers", lambda self: None)
    monkeypatch.setattr(trainer, "check_compiler", lambda *_: None)
    budget = {"steps": 1, "max_minutes": 1}
    recipe = runs.recipe(text, budget=budget, run={**QUIET, "compile": compiled})
    train(recipe, tmp_path / "run")
    out = capsys.readouterr().out
    notes = ("A step takes about", "include compilation")
    assert [note for note in notes if note in out] == ([said] if said else [])
    assert ("That is the whole budget" in out) == (said == "A step takes about")


@pytest.mark.slow
def test_a_limit_that_is_not_reached_changes_nothing(text, tmp_path):
    for name, budget in {
        "free": {"steps": 12},
        "bound": {"steps": 12, "max_minutes": 60},
    }.items():
        train(with_budget(text, **budget), tmp_path / name)
    assert runs.curve(tmp_path / "free") == runs.curve(tmp_path / "bound")
    assert runs.lines(tmp_path / "free", "train", "lr") == runs.lines(
        tmp_path / "bound", "train", "lr"
    )


@pytest.mark.slow
def test_a_limit_ends_a_run_that_is_too_slow_with_its_schedule_at_zero(text, tmp_path, capsys):
    recipe = with_budget(text, steps=10**6, max_minutes=2 / 60)
    result = train(recipe, tmp_path / "run")
    assert result.status == "finished"
    assert 2.0 <= result.seconds < 3.0
    assert cools_down_with_the_clock(tmp_path / "run", 2 / 60)
    said = capsys.readouterr().out
    assert "1,000,000 steps" in said
    assert "at most 0.0333333 minutes" in said
    assert f"the limit, after {result.steps} of 1000000 steps" in said


@pytest.mark.slow
def test_accumulation_changes_nothing(text, tmp_path):
    curves = []
    for rows in (1, 2, 4):
        recipe = runs.recipe(text, data={"micro_batch": rows}, budget={"steps": 10}, run=QUIET)
        train(recipe, tmp_path / str(rows))
        curves.append(runs.lines(tmp_path / str(rows), "train", "loss", "executed_flops"))
    for other in curves[1:]:
        for (step, *mine), (same, *yours) in zip(other, curves[0], strict=True):
            assert step == same
            assert mine == pytest.approx(yours, rel=1e-5)


@pytest.mark.slow
def test_uneven_micro_batches_weigh_rows_alike(text, tmp_path):
    """Three rows and then one."""
    losses = []
    for rows in (3, 4):
        recipe = runs.recipe(text, data={"micro_batch": rows}, budget={"steps": 3}, run=QUIET)
        train(recipe, tmp_path / str(rows))
        losses.append([line[1] for line in runs.lines(tmp_path / str(rows), "train", "loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run with a checkpoint, a validation and telemetry at step 10."""
    folder = tmp_path_factory.mktemp("observed")
    text = runs.write_text(folder)
    recipe = runs.recipe(text, budget={"steps": 10}, model={"core_layers": 2})
    trainer_peak, trainer.peak_flops = trainer.peak_flops, lambda *_: None
    try:
        result = train(recipe, folder / "run")
    finally:
        trainer.peak_flops = trainer_peak
    model = parcae.load(folder / "run" / "checkpoints" / "step-00000010")
    return recipe, folder / "run", model, result


@pytest.mark.slow
@torch.no_grad()
def test_validation_is_what_the_checkpoint_gives(observed):
    recipe, run, model, result = observed
    batches = list(open_corpora(recipe, run).validation(recipe, 3))
    assert sum(len(batch.inputs) for batch in batches) == 4
    told = dict(runs.lines(run, "validation", "losses"))[10]
    assert set(told) == {"1", "3", "6"}
    for depth, loss in told.items():
        sums = [
            model(inputs, targets, loops=int(depth), state="zero").loss.item() * targets.numel()
            for inputs, targets in batches
        ]
        expected = sum(sums) / sum(targets.numel() for _, targets in batches)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert result.validation[int(depth)]["loss"] == loss


@pytest.mark.slow
@torch.no_grad()
def test_telemetry_is_what_the_public_forward_shows(observed):
    recipe, run, model, _ = observed
    (told,) = [
        line
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "telemetry" and line["step"] == 10
    ]
    tokens = next(iter(open_corpora(recipe, run).validation(recipe, 4))).inputs
    seen = {"prelude": [], "loop": []}
    core, prelude = model.loop.core, model.prelude
    model.embed.register_forward_hook(lambda _m, _i, out: seen["prelude"].append(mean_norm(out)))
    for block in prelude.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen["prelude"].append(mean_norm(out)))
    prelude.norm.register_forward_hook(lambda _m, _i, out: seen["prelude"].append(mean_norm(out)))
    core.blocks[0].register_forward_pre_hook(lambda _m, i: seen["loop"].append(mean_norm(i[0])))
    for block in core.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen["loop"].append(mean_norm(out)))
    output = model(tokens, loops=3, state="zero", trajectory=True)

    near = {"rel": 1e-5}
    states = output.trajectory.states
    assert told["depth"] == 3
    assert told["state_norms"] == pytest.approx([mean_norm(h) for h in states[1:]], **near)
    assert told["state_norm"] == told["state_norms"][-1]
    residuals = output.trajectory.residuals.mean(dim=(1, 2)).tolist()
    assert told["residuals"] == pytest.approx(residuals, **near)
    assert told["residual"] == told["residuals"][-1]
    assert told["prelude_norms"] == pytest.approx(seen["prelude"], **near)
    assert len(told["first_loop_norms"]) == 3
    assert told["first_loop_norms"] == pytest.approx(seen["loop"][:3], **near)

    a, b = core.injection.transition_matrix(), core.injection.input_matrix()
    radius = torch.linalg.eigvals(a).abs().max().item()
    assert told["spectral_radius"] == pytest.approx(radius, **near)
    assert told["transition_norm"] == pytest.approx(torch.linalg.svdvals(a)[0].item(), **near)
    assert told["input_norm"] == pytest.approx(torch.linalg.svdvals(b)[0].item(), **near)
    c = model.coda.readout.weight
    assert told["readout_norm"] == pytest.approx(torch.linalg.svdvals(c)[0].item(), **near)
    expansion = mean_norm(output.state @ c.T) / mean_norm(output.state)
    assert told["readout_expansion"] == pytest.approx(expansion, **near)


def mean_norm(x):
    return x.square().sum(-1).sqrt().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_resumes(kind, text, tmp_path, monkeypatch, one_thread):
    recipe = runs.recipe(text, model=KINDS[kind], budget={"steps": 8})
    if kind.startswith("rdm"):
        optimiser = {"kind": "adamw-atan2", "lr": 3e-3, "weight_decay": 4e-5}
        recipe = runs.changed(recipe, optimiser=optimiser)
    result = train(recipe, tmp_path / "whole")
    losses = [line[1] for line in runs.lines(tmp_path / "whole", "train", "loss")]
    assert losses[-1] < losses[0] - 0.1
    depths = {1} if kind == "transformer" else {1, 3, 6}
    assert set(result.validation) == depths
    looks = runs.lines(tmp_path / "whole", "telemetry")
    assert len(looks) == (0 if kind == "transformer" else 2)

    with interrupted_after(5, monkeypatch):
        assert train(recipe, tmp_path / "run").status == "interrupted"
    train(recipe, tmp_path / "run", resume=True)
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")


@pytest.mark.slow
def test_bfloat16_on_the_cpu(text, tmp_path):
    losses = {}
    for precision in ("float32", "bfloat16"):
        recipe = runs.recipe(text, run={"precision": precision}, budget={"steps": 6})
        result = train(recipe, tmp_path / precision)
        assert result.status == "finished"
        losses[precision] = [x[1] for x in runs.lines(tmp_path / precision, "train", "loss")]
        stored = runs.weights(tmp_path / precision, 6)
        assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.slow
def test_a_run_keeps_the_precision_it_began_with(text, tmp_path, monkeypatch, capsys, one_thread):
    """Bit for bit, also on a CPU where it would have begun with another."""
    recipe, run = runs.recipe(text, budget={"steps": 8}), tmp_path / "run"
    monkeypatch.setattr(distributed, "BFLOAT16_WIDTH", 1)
    monkeypatch.setattr(distributed, "multiplies_bfloat16", lambda: True)
    train(recipe, tmp_path / "whole")
    assert "run.precision: auto; bfloat16" in capsys.readouterr().out
    with interrupted_after(5, monkeypatch):
        assert train(recipe, run).status == "interrupted"
    monkeypatch.setattr(distributed, "multiplies_bfloat16", lambda: False)
    train(recipe, run, resume=True)
    assert "cpu in bfloat16" in capsys.readouterr().out
    assert read_recipe(run).run.precision == "bfloat16"
    assert runs.curve(run) == runs.curve(tmp_path / "whole")
    train(recipe, tmp_path / "without")
    assert read_recipe(tmp_path / "without").run.precision == "float32"
    assert runs.curve(tmp_path / "without") != runs.curve(run)


@pytest.mark.slow
def test_loops_can_be_computed_again(text, tmp_path, one_thread):
    curves = []
    for again in (False, True):
        settings = {**QUIET, "activation_checkpointing": again}
        train(runs.recipe(text, budget={"steps": 4}, run=settings), tmp_path / str(again))
        curves.append(runs.lines(tmp_path / str(again), "train", "loss"))
    assert curves[0] == curves[1]


def test_the_display_takes_what_comes(capsys):
    display = Display(is_first=True)
    numbers = {"loss": float("nan"), "gradient_norm": float("inf"), "mean_depth": 1.0}
    display.update(1, 0.0, 0.0, {**numbers, "tokens_per_second": 10.0, "peak_fraction": None})
    display.print("into runs/[bold]x[/italic] :smile:")
    said = capsys.readouterr().out
    assert "loss nan  |g| inf" in said
    assert "into runs/[bold]x[/italic] :smile:" in said


def test_a_quiet_run_prints_nothing_and_logs_all(text, tmp_path, capfd, caplog):
    caplog.set_level("INFO", logger="parcae")
    result = train(runs.recipe(text, budget={"steps": 1}), tmp_path / "run", verbose=False)
    assert capfd.readouterr() == ("", "")
    assert {record.name for record in caplog.records} == {"parcae.training"}
    assert "step 1  100%" in caplog.text
    assert "Finished in" in caplog.text
    shown = result._repr_html_()
    assert "finished, 1 steps" in shown
    assert f"<td>{result.losses[1]:.4g}</td>" in shown


@pytest.mark.slow
def test_a_model_that_blows_up_when_it_is_sampled_has_a_result_all_the_same(
    text, tmp_path, monkeypatch
):
    from parcae.infer import sampling

    real = sampling.draw_rows
    calls = iter(range(1000))

    def draw_rows(logits, samplings, noises):
        return real(logits * float("nan") if next(calls) >= 3 else logits, samplings, noises)

    monkeypatch.setattr(sampling, "draw_rows", draw_rows)
    settings = {**QUIET, "sample_prompts": ["alpha"], "sample_tokens": 1}
    result = train(runs.recipe(text, budget={"steps": 1}, run=settings), tmp_path / "run")
    assert [sample["depth"] for sample in result.samples] == [1, 2, 3]
    assert read_result(tmp_path / "run") == result


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_prompt_over_the_context_is_sampled_from_its_end(text, tmp_path, monkeypatch, precision):
    """Also under autocast, and by the layers that other devices have."""
    monkeypatch.setattr("parcae.infer.network.available_kernels", lambda *_: None)
    settings = {**QUIET, "sample_prompts": ["alpha " * 200], "sample_tokens": 1}
    settings["precision"] = precision
    result = train(runs.recipe(text, budget={"steps": 1}, run=settings), tmp_path / "run")
    assert result.samples


def whole_and_killed(recipe, whole, run):
    torch.set_num_threads(2)
    train(recipe, whole)
    real = Trainer._train_step

    def one_step(self):
        real(self)
        if self.learner.step == 5:
            self.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._train_step = one_step
    train(recipe, run)


def resumed(recipe, run):
    torch.set_num_threads(2)
    train(recipe, run, resume=True)


@pytest.mark.slow
@needs_compiler
def test_compiled_killed_and_resumed_is_bit_identical(text, tmp_path):
    """With two threads, whose sums compiled code orders as it likes unless it is told. One depth,
    all with gradient: fewer graphs to compile."""
    loop = {"sampler": "fixed", "mean_loops": 2, "backprop_loops": 2}
    recipe = runs.recipe(
        text,
        model={"prelude_layers": 0, "coda_layers": 0, "loop": loop},
        data={"validation_fraction": 0.0},
        budget={"steps": 8},
        run={"compile": True, "telemetry_every": 0},
    )
    whole, run, context = tmp_path / "whole", tmp_path / "run", runs.clean_processes()
    for function, arguments, code in [(whole_and_killed, (whole, run), -9), (resumed, (run,), 0)]:
        process = context.Process(target=function, args=(recipe, *arguments))
        process.start()
        process.join(timeout=280)
        assert process.exitcode == code
    assert len(runs.curve(run)) == 8
    assert runs.curve(run) == runs.curve(whole)
    ours, theirs = runs.weights(run, 8), runs.weights(whole, 8)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
