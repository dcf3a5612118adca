"""An injection from outside the package: radius, FLOPs, telemetry, checkpoint and decoding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parcae
from parcae.cli import main
from parcae.model import flops
from parcae.registry import IMPORT_VARIABLE, INJECTIONS, import_file
from parcae.sweeps.folder import SweepFolder
from parcae.sweeps.grid import PlannedRun
from parcae.training.optim import assign
from parcae.training.settings import recipe_from_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "new_injection.py"
SMOKE = str(ROOT / "recipes" / "smoke.toml")


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Nothing stays registered after these tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv(IMPORT_VARIABLE, "")
    patch.setattr(INJECTIONS, "_registered", {})
    patch.setattr("parcae.registry._imported", {})
    yield
    patch.undo()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotation")
    out, text = folder / "run", folder / "text.txt"
    text.write_text("".join(f"def add_{n}(a):\n    return a + {n}\n\n" for n in range(2000)))
    short = ["--budget.steps", "4", "--run.checkpoint_every", "4", "--run.telemetry_every", "2"]
    use = ["--import", str(EXAMPLE), "--model.injection", "rotation"]
    data = ["--data.sources", json.dumps([str(text)]), "--model.vocab_size", "320"]
    assert main(["train", SMOKE, "--out", str(out), *use, *short, *data]) == 0
    return out


@pytest.fixture(scope="module")
def trained(run):
    return parcae.open_checkpoint(run)


def in_new_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parcae", *map(str, arguments)]
    variables = {**os.environ, IMPORT_VARIABLE: "", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=variables)


@pytest.mark.slow
def test_its_spectral_radius_is_the_largest_decay(trained):
    injection = trained.model.loop.core.injection
    with torch.no_grad():
        largest = torch.exp(-torch.exp(injection.log_rate)).max().item()
    assert injection.spectral_radius() == pytest.approx(largest, rel=1e-5)
    assert torch.linalg.eigvals(injection.transition_matrix()).is_complex()
    assert injection.stability == "stable"


@pytest.mark.slow
def test_its_products_are_counted(trained):
    """As those of the diagonal injection: a matrix B once per forward."""
    config = trained.model.config
    diagonal = parcae.preset("parcae-1m", {"vocab_size": 320, "context_length": 64})
    assert flops.token_flops(config) == flops.token_flops(diagonal)
    assert flops.parameter_count(config) == flops.parameter_count(diagonal) - config.width


@pytest.mark.slow
def test_telemetry_measures_it(run, trained):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "spectral_radius" in line]
    assert [line["step"] for line in measured] == [1, 2, 4]
    for line in measured:
        assert 0 < line["spectral_radius"] < 1
        assert line["transition_norm"] == pytest.approx(line["spectral_radius"], rel=1e-4)
        assert line["input_norm"] > 0


def test_its_parameters_are_trained_by_adamw(trained):
    injection = trained.model.loop.core.injection
    assert injection.log_rate.any(), "still at its initial value, zero"
    names = {name for name, _ in assign(trained.model, "muon-adamw")["adamw"]}
    assert {f"loop.core.injection.{name}" for name in ("log_rate", "angle", "B")} <= names


def test_a_checkpoint_holds_only_its_name(run, trained, capsys, monkeypatch):
    config = (trained.folder / "config.json").read_text()
    assert json.loads(config)["model"]["injection"] == "rotation"
    assert "new_injection" not in config
    monkeypatch.setattr(INJECTIONS, "_registered", {})
    assert main(["generate", str(run), "def ", "--max-new-tokens", "4"]) == 2
    error = capsys.readouterr().err
    for part in (
        "config.json: model.injection: 'rotation' is not a known",
        f"The run was trained with --import {EXAMPLE}.",
    ):
        assert part in error


def test_the_run_records_its_file_and_imports_it_only_when_asked(run, capsys, monkeypatch):
    assert [e["message"] for e in parcae.runs.read_metrics(run)["event"]] == [str(EXAMPLE)]
    monkeypatch.setattr(INJECTIONS, "_registered", {})
    assert main(["train", "--resume", str(run)]) == 2
    assert f"The run was trained with --import {EXAMPLE}." in capsys.readouterr().err
    assert main(["train", SMOKE, "--out", str(run)]) == 2
    assert f"`parcae train --resume {run} --import {EXAMPLE}`" in capsys.readouterr().err
    assert main(["train", SMOKE, "--start-from", str(run), "--out", f"{run}-more"]) == 2
    assert f"The run was trained with --import {EXAMPLE}." in capsys.readouterr().err
    assert "rotation" not in INJECTIONS


def test_a_sweep_of_it_is_reported_without_its_file(run, tmp_path, capsys, monkeypatch):
    folder = SweepFolder(tmp_path)
    recipe = recipe_from_file(run / "recipe.toml")
    folder.write_plan([PlannedRun(name="a", model="b", budget=None, settings={}, recipe=recipe)])
    shutil.copytree(run, folder.run_folder("a"), ignore=shutil.ignore_patterns("data"))
    monkeypatch.setattr(INJECTIONS, "_registered", {})
    assert main(["report", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["sweep", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"parcae: {tmp_path}/sweep.json: a: model.injection: 'rotation' is not")
    assert error.endswith(f"The run was trained with --import {EXAMPLE}.\n")


@pytest.mark.slow
def test_compare_and_export_import_it(run, tmp_path):
    compared = in_new_process("compare", run, "--import", EXAMPLE)
    assert compared.returncode == 0, compared.stderr
    exported = in_new_process("export", run, tmp_path / "exported", "--import", EXAMPLE)
    assert "'rotation' is defined outside of parcae" in exported.stderr


@pytest.mark.slow
def test_other_processes_import_it(run):
    words = ("generate", run, "def ", "--max-new-tokens", 4)
    assert in_new_process(*words).returncode == 2
    assert in_new_process(*words, "--import", EXAMPLE).returncode == 0
    as_a_child = {IMPORT_VARIABLE: str(EXAMPLE)}
    assert in_new_process(*words, **as_a_child).returncode == 0


def test_it_decodes_what_a_whole_forward_predicts(trained):
    model, tokenizer = trained.model, trained.tokenizer
    ids = tokenizer.encode("def ")
    generated = parcae.generate(model, ids, max_new_tokens=8, temperature=0)
    tokens = list(ids)
    for _ in range(8):
        logits = model(torch.tensor([tokens]), loops=4, state="zero").logits
        tokens.append(int(logits[0, -1].argmax()))
    assert list(generated)[-8:] == tokens[-8:]


@pytest.mark.slow
def test_the_script(tmp_path):
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(tmp_path / "run"), "--steps", "4"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "FLOPs per token, spectral radius 0." in result.stdout
    assert "validation loss by loops: {1: " in result.stdout


@pytest.mark.slow
def test_a_sweep_trains_it(run, tmp_path):
    """In processes of their own, which import the file because the sweep did."""
    text = run.parent / "text.txt"
    data = ["--data.sources", json.dumps([str(text)]), "--model.vocab_size", "320"]
    use = ["--import", EXAMPLE, "--model.injection", "rotation"]
    short = ["--budget.steps", "2", "--run.validate_every", "0", "--run.telemetry_every", "0"]
    words = ["sweep", SMOKE, "--seeds", "1,2", "--out", tmp_path / "sweep"]
    result = in_new_process(*words, *use, *data, *short)
    assert result.returncode == 0, result.stdout + result.stderr
    results = sorted((tmp_path / "sweep").rglob("result.json"))
    models = [json.loads(path.read_text())["model"]["injection"] for path in results]
    assert models == ["rotation"] * 2


def test_workers_of_a_sweep_import_it(monkeypatch):
    from parcae.sweeps.launch import environments

    monkeypatch.setattr("parcae.registry._imported", {})
    monkeypatch.setenv(IMPORT_VARIABLE, "")
    import_file(EXAMPLE)
    assert all(own[IMPORT_VARIABLE] == str(EXAMPLE) for own in environments(2))
