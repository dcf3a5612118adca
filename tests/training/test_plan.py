"""The estimates of `parcae.plan` against what runs really need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parcae.cli import main
from parcae.machine import StopSignals
from parcae.recipe import merge, read_toml
from parcae.training import distributed, memory_estimate, trainer
from parcae.training.distributed import compute_dtype
from parcae.training.memory_estimate import (
    MicroBatch,
    checkpoint_bytes,
    choose_micro_batch,
    estimate_memory,
)
from parcae.training.plan import peak_flops, plan
from parcae.training.run import read_recipe, train
from parcae.training.settings import recipe_from_tree, recipe_to_dict
from training import runs

UNSET = {"sources": ["x"], "global_batch": 12}
ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "recipes" / "smoke.toml")


def recipe(**changes):
    return recipe_from_tree(merge(read_toml(SMOKE), changes))


@pytest.mark.slow
def test_numbers_of_a_small_run():
    found = plan(recipe(run={"device": "cpu"}), device_flops=1e9, utilisation=0.5)
    assert found.parameters == 254_720
    assert (found.steps, found.tokens_per_step, found.tokens) == (12, 8 * 64, 12 * 8 * 64)
    assert found.flops == pytest.approx(found.tokens * found.flops_per_token)
    assert found.hours == pytest.approx(found.flops / 0.5e9 / 3600)
    assert (found.micro_batch, found.micro_batches) == (4, 2)
    assert found.memory.weights == found.memory.gradients == 4 * found.parameters
    assert found.precision == "float32"


@pytest.mark.parametrize(("width", "has_it"), [(128, True), (128, False), (64, True)])
def test_auto_is_bfloat16_where_it_pays(width, has_it, monkeypatch):
    monkeypatch.setattr(distributed, "multiplies_bfloat16", lambda: has_it)
    wide = recipe(model={"width": width})
    expected = torch.bfloat16 if has_it and width == 128 else torch.float32
    assert compute_dtype(wide, torch.device("cpu")) == expected
    assert compute_dtype(wide, torch.device("cuda")) == torch.bfloat16
    exact = recipe(model={"width": width}, run={"precision": "float32"})
    assert compute_dtype(exact, torch.device("cpu")) == torch.float32


@pytest.mark.slow
def test_as_json(capsys):
    assert main(["plan", SMOKE, "--json", "--device-flops", "h100", "--budget.steps", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 7
    assert found["device_flops"] == 989e12
    assert (found["device"], found["precision"]) == ("cuda", "bfloat16")
    parts = {key: value for key, value in found["memory"].items() if key != "total"}
    parts["activations"] = max(parts.pop("optimiser_step"), parts["activations"])
    assert found["memory"]["total"] == sum(parts.values())


@pytest.mark.slow
def test_what_the_clock_decides_is_unknown(capsys):
    arguments = ["plan", SMOKE, "--budget.steps", "none", "--budget.minutes", "90"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    unknown = ("steps", "tokens", "flops", "tokens_per_parameter")
    assert [found[key] for key in unknown] == [None] * 4
    assert found["hours"] == 1.5
    assert main(arguments) == 0
    assert "unknown: the budget is in minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(ROOT / "recipes" / "small.toml")], "data: a recipe for training needs this table"),
        ([SMOKE, "--data.micro_bach", "3"], "Did you mean micro_batch"),
        ([SMOKE, "--devices", "3"], "cannot be split evenly over 3 devices"),
        ([SMOKE, "--devices", "0"], "at least 1"),
        ([SMOKE, "--utilisation", "40"], "above 0 and at most 1"),
        ([SMOKE, "--device-flops", "abacus"], "h100, a100"),
        ([SMOKE, "--device-flops", "-1"], "device_flops"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_show_takes_a_recipe_for_training(capsys):
    assert main(["show", SMOKE]) == 0
    assert "254,720" in capsys.readouterr().out


@pytest.mark.slow
def test_shards_shrink_what_is_sharded():
    wide = {"model": {"preset": "parcae-30m"}, "run": {"parallel": "fsdp"}}
    alone, split = (estimate_memory(recipe(**wide), torch.float32, 4, 1, devices=n) for n in (1, 8))
    assert split.optimiser < alone.optimiser / 7
    assert split.weights < 1.7 * alone.weights  # one eighth, and what is gathered
    copies = estimate_memory(recipe(model=wide["model"]), torch.float32, 4, 1, devices=8)
    assert copies == alone
    accumulating = estimate_memory(recipe(**wide), torch.float32, 4, 2, devices=8)
    assert accumulating.gradients > alone.gradients > split.gradients


@pytest.mark.slow
def test_activations_grow_with_rows_and_shrink_with_checkpointing():
    base = {"model": {"preset": "parcae-3m", "loop": {"mean_loops": 8}}}
    four, eight = (estimate_memory(recipe(**base), torch.float32, n, 1).activations for n in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.1)
    lean = estimate_memory(
        recipe(**base, run={"activation_checkpointing": True}), torch.float32, 4, 1
    )
    assert lean.activations < 0.7 * four
    half = estimate_memory(recipe(**base), torch.bfloat16, 4, 1)
    assert half.activations < 0.9 * four


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_chosen(monkeypatch):
    unset = recipe_from_tree({**recipe_to_dict(recipe()), "data": UNSET})
    estimates = {n: estimate_memory(unset, torch.float32, n, 2).total for n in (1, 2, 3, 4, 6, 12)}
    assert sorted(estimates.values()) == list(estimates.values())
    for fitting in (1, 2, 4, 6):  # above 512 tokens the loss is computed in chunks
        monkeypatch.setattr(memory_estimate, "available_memory", lambda _: 4 * estimates[fitting])  # noqa: B023
        assert choose_micro_batch(unset, torch.device("cpu")).rows == fitting
    monkeypatch.setattr(memory_estimate, "available_memory", lambda _: 8 * estimates[3])
    assert choose_micro_batch(unset, torch.device("cpu"), 2, on_this_machine=2).rows == 3
    monkeypatch.setattr(memory_estimate, "available_memory", lambda _: estimates[1])
    rows, reason = choose_micro_batch(unset, torch.device("cpu"))
    assert rows == 1
    assert "exceeds 25% of the" in reason


def test_a_micro_batch_has_no_more_tokens_than_are_fast(monkeypatch):
    """Nothing is traced where memory is plenty."""
    monkeypatch.setattr(memory_estimate, "estimate_memory", None)
    monkeypatch.setattr(memory_estimate, "available_memory", lambda _: 1e12)
    tree = {"model": {"preset": "parcae-1m"}, "data": {"sources": ["x"]}, "budget": {"steps": 1}}
    assert choose_micro_batch(recipe_from_tree(tree), torch.device("cpu")).rows == 16  # 8,192 / 512
    small = merge(tree, {"data": {"global_batch": 15}})
    assert choose_micro_batch(recipe_from_tree(small), torch.device("cpu")).rows == 15
    odd = merge(tree, {"data": {"global_batch": 34}})
    assert choose_micro_batch(recipe_from_tree(odd), torch.device("cpu")).rows == 12  # 12, 12, 10
    prime = merge(tree, {"data": {"global_batch": 17}})
    assert choose_micro_batch(recipe_from_tree(prime), torch.device("cpu")).rows == 9  # and 8
    per_batch = merge(tree, {"model": {"loop": {"draw_per": "micro-batch"}}})
    assert choose_micro_batch(recipe_from_tree(per_batch), torch.device("cpu")).rows == 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("parcae-1m", torch.float32),
        ("parcae-1m", torch.bfloat16),
        ("rdm-3m", torch.float32),
        ("transformer-3m", torch.float32),
    ],
)
def test_the_rough_bound_is_above_the_estimate(preset, dtype):
    tree = {"model": {"preset": preset}, "data": {"sources": ["x"]}, "budget": {"steps": 1}}
    wide = recipe_from_tree(merge(tree, {"model": {"context_length": 128}}))
    for rows in (1, 8):
        traced = estimate_memory(wide, dtype, rows, 2).total
        assert traced < memory_estimate._rough_bytes(wide, dtype, rows) < 6 * traced


class AskedAtOnce(StopSignals):
    def __enter__(self):
        self.asked = True
        return self


@pytest.mark.slow
def test_a_chosen_micro_batch_is_recorded_and_kept(text, tmp_path, monkeypatch, capsys):
    """Bit for bit: other micro-batches add their gradients in another order."""
    tree = recipe_to_dict(runs.recipe(text, budget={"steps": 6}, run={"checkpoint_every": 3}))
    del tree["data"]["micro_batch"]
    unset, run = recipe_from_tree(tree), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "choose_micro_batch", lambda *_: MicroBatch(2, "for a test"))
        patched.setattr(trainer, "StopSignals", AskedAtOnce)
        assert train(unset, run).status == "interrupted"
    assert "data.micro_batch: unset; 2 rows (for a test)." in capsys.readouterr().out
    assert read_recipe(run).data.micro_batch == 2
    monkeypatch.setattr(trainer, "choose_micro_batch", None)
    train(unset, run, resume=True)
    train(runs.changed(unset, data={"micro_batch": 2}), tmp_path / "whole")
    assert runs.curve(run) == runs.curve(tmp_path / "whole")


@pytest.mark.slow
def test_checkpoint_on_disk(tmp_path):
    small = runs.recipe(runs.write_text(tmp_path), budget={"steps": 1})
    train(small, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    files = [folder / "model.safetensors", folder / "optimiser" / "state.safetensors"]
    headers = sum(int.from_bytes(f.read_bytes()[:8], "little") + 8 for f in files)
    assert checkpoint_bytes(small) == sum(f.stat().st_size for f in files) - headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rows", "checkpointed"),
    [("parcae-10m", 3, False), ("parcae-3m", 16, True), ("rdm-3m", 4, False)],
)
def test_a_real_step_takes_what_the_plan_says(preset, rows, checkpointed):
    """Freed memory is handed back here (see MALLOC_MMAP_THRESHOLD_ in mallopt(3)), so that the
    process holds its tensors and not the allocator's leftovers, too."""
    script = Path(__file__).with_name("peak_memory.py")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    arguments = [preset, str(rows), str(int(checkpointed))]
    result = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    measured, planned = json.loads(result.stdout)
    assert planned > 300e6
    assert planned == pytest.approx(measured, rel=0.2)


@pytest.mark.slow
def test_a_plan_takes_tables_and_overrides_and_gives_rows():
    found = plan(read_toml(SMOKE), device_flops=1e9, run={"device": "cpu"}, budget={"steps": 7})
    rows = {row["quantity"]: row["value"] for row in found.table()}
    assert rows["steps"] == found.steps == 7
    assert rows["memory_total"] == found.memory.total
    assert plan("smoke", device_flops=1e9, run={"device": "cpu"}, budget={"steps": 7}) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_a_cpu_is_measured_and_others_are_known_or_not(dtype):
    found = peak_flops(torch.device("cpu"), dtype)
    assert found is not None
    assert found > 1e8
    assert peak_flops(torch.device("meta")) is None


@pytest.mark.slow
def test_no_step_of_a_run_is_above_the_peak(text, tmp_path, monkeypatch):
    """A peak that was measured while the machine was busy is raised by faster steps."""
    monkeypatch.setattr("parcae.training.trainer.peak_flops", lambda *_: 1.0)
    train(runs.recipe(text, budget={"steps": 8}), tmp_path / "run")
    shares = [line[1] for line in runs.lines(tmp_path / "run", "train", "peak_fraction")]
    assert len(shares) == 8
    assert max(shares) == 1.0
    assert min(shares) > 0
