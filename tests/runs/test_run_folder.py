"""The run folder: choosing, verifying and opening checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import fake_runs
import parcae
from conftest import KINDS, randomised, tiny
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, write_json, write_sealed
from parcae.model import CONFIG_FILE, WEIGHTS_FILE
from parcae.runs import (
    best_checkpoint,
    find_checkpoint,
    find_run,
    find_tokenizer,
    last_step,
    list_checkpoints,
    load,
    open_checkpoint,
    read_metrics,
    read_result,
    read_state,
    read_status,
    run_of,
    verify_checkpoint,
)
from parcae.runs.checkpoints import write_state
from parcae.runs.layout import (
    METRICS_FILE,
    RECIPE_FILE,
    RESULT_FILE,
    STATE_FILE,
    TOKENIZER_FILE,
    checkpoint_path,
)

TOKENIZER = Tokenizer.train(["price = value\n\tend of price\n" * 5], 300)


def write_checkpoint(run: Path, step: int, loss: float | None, seed: int | None = None) -> Path:
    folder = checkpoint_path(run, step)
    model = tiny(vocab_size=TOKENIZER.vocab_size)
    parcae.save(randomised(model, seed=step if seed is None else seed), folder)
    write_state(folder, step, {"validation_loss": loss})
    return folder


@pytest.fixture
def run(tmp_path):
    """Losses 3.0, 1.0, 1.0, 2.0 after 9, 100, 200 and 1000 steps, and what a kill leaves."""
    run = tmp_path / "run"
    for step, loss in ((9, 3.0), (100, 1.0), (200, 1.0), (1000, 2.0)):
        write_checkpoint(run, step, loss)
    TOKENIZER.save(run / TOKENIZER_FILE)
    for name in (".step-00002000", "step-3000-copy", "damaged-step-00004000"):
        (run / "checkpoints" / name).mkdir()
    return run


@pytest.mark.slow
def test_checkpoints_are_listed_by_step(run, tmp_path):
    assert [path.name for path in list_checkpoints(run)] == [
        "step-00000009",
        "step-00000100",
        "step-00000200",
        "step-00001000",
    ]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_run_stands_for_its_newest_checkpoint_or_its_best(run):
    newest = run / "checkpoints" / "step-00001000"
    for path in (run, run / "checkpoints", newest):
        assert find_checkpoint(path) == newest
    assert find_checkpoint(run, best=True).name == "step-00000100", "the earliest of equals"
    assert find_checkpoint(newest, best=True) == newest, "a checkpoint stands for itself"
    (run / "checkpoints" / "step-00000100" / STATE_FILE).write_text("{")
    assert find_checkpoint(run, best=True).name == "step-00000200", "no loss can be read"


def test_without_a_validation_the_best_is_the_newest(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, None)
    assert best_checkpoint(list_checkpoints(tmp_path)) is None
    assert find_checkpoint(tmp_path, best=True) == checkpoint_path(tmp_path, 2)


@pytest.mark.slow
def test_load_takes_a_run_and_a_checkpoint_and_a_model_folder(run, tmp_path):
    weights = {step: load(checkpoint_path(run, step)).embed.weight for step in (100, 1000)}
    assert not torch.equal(weights[100], weights[1000])
    assert torch.equal(parcae.load(run).embed.weight, weights[1000])
    assert torch.equal(parcae.load(run, best=True).embed.weight, weights[100])
    model = randomised(KINDS["parcae"])
    parcae.save(model, tmp_path / "model")
    assert torch.equal(parcae.load(tmp_path / "model").embed.weight, model.embed.weight)


def test_the_tokenizer_is_the_one_beside_the_weights_or_of_the_run(run):
    newest = find_checkpoint(run)
    assert find_tokenizer(newest).samefile(run)
    checkpoint = open_checkpoint(run)
    assert checkpoint.folder == newest
    assert checkpoint.tokenizer.sha256 == TOKENIZER.sha256
    other = Tokenizer.train(["another text " * 9], 290)
    other.save(newest / TOKENIZER_FILE)
    with pytest.raises(FileError, match="not a file of this checkpoint"):
        open_checkpoint(run)
    write_state(newest, 1000, {})
    assert open_checkpoint(run).tokenizer.sha256 == other.sha256
    assert open_checkpoint(run, tokenizer=run / TOKENIZER_FILE).tokenizer.sha256 == TOKENIZER.sha256


def test_the_run_of_a_path(run, tmp_path, monkeypatch):
    checkpoint = checkpoint_path(run, 9)
    assert run_of(checkpoint) == run_of(run / "checkpoints") == run
    assert run_of(run) is None, "without a recipe"
    (run / RECIPE_FILE).touch()
    assert run_of(run) == run
    assert run_of(tmp_path) is None
    monkeypatch.chdir(tmp_path)
    assert run_of("run/checkpoints/step-00000009") == Path("run")
    monkeypatch.chdir(run / "checkpoints")
    assert run_of("step-00000009").samefile(run)


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_seen_by_whatever_loads(run):
    newest = find_checkpoint(run)
    verify_checkpoint(newest)
    flip_last_bit(newest / WEIGHTS_FILE)
    for read in (parcae.load, parcae.open_checkpoint, verify_checkpoint):
        with pytest.raises(FileError, match=f"{WEIGHTS_FILE}: damaged, its checksum differs"):
            read(newest)


@pytest.mark.parametrize("name", [CONFIG_FILE, TOKENIZER_FILE, "optimiser/state.safetensors"])
def test_every_file_of_a_checkpoint_is_verified_on_every_load(run, name):
    newest = find_checkpoint(run)
    path = newest / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_bytes(b"12345678")
    write_state(newest, 1000, {})
    if name == CONFIG_FILE:  # valid, and another model
        content = path.read_text()
        assert "rope_theta" in content
        path.write_text(re.sub(r'("rope_theta": )[0-9.]+', r"\g<1>10000.0", content))
    else:
        flip_last_bit(path)
    for read in (parcae.load, parcae.open_checkpoint):
        for checkpoint in (run, newest):
            with pytest.raises(FileError, match="damaged, its checksum differs"):
                read(checkpoint)


@pytest.mark.parametrize("state", ["[]", "{}", '{"files": 3}', '{"files": null}'])
def test_a_state_without_checksums_is_refused(run, state):
    newest = find_checkpoint(run)
    (newest / STATE_FILE).write_text(state)
    with pytest.raises(FileError, match="not a training checkpoint"):
        parcae.load(newest)
    (newest / STATE_FILE).unlink()
    with pytest.raises(FileError, match=r"state\.json: missing"):
        parcae.load(newest)


def test_weights_that_were_added_are_refused(run):
    newest = find_checkpoint(run)
    shutil.copyfile(newest / WEIGHTS_FILE, newest / "shard-00001.safetensors")
    with pytest.raises(FileError, match="not a file of this checkpoint"):
        parcae.load(newest)


def test_a_result_of_an_earlier_step_is_none(tmp_path):
    write_json(tmp_path / RESULT_FILE, fake_runs.result(7))
    (tmp_path / METRICS_FILE).write_text('{"kind": "train", "step": 7}\n')
    assert read_result(tmp_path) is not None
    assert read_status(tmp_path) == "finished"
    (tmp_path / METRICS_FILE).write_text('{"kind": "train", "step": 8}\n')
    assert read_result(tmp_path) is None
    assert read_status(tmp_path) == "started"


def test_the_state_is_sealed(run):
    newest = find_checkpoint(run)
    state = read_state(newest)
    assert state["step"] == 1000
    write_json(newest / STATE_FILE, {**state, "step": 999})
    with pytest.raises(FileError, match=r"state\.json: damaged"):
        verify_checkpoint(newest)


def test_a_result_must_be_an_object(tmp_path):
    assert read_result(tmp_path) is None
    (tmp_path / RESULT_FILE).write_text("[1]")
    with pytest.raises(FileError, match="not by parcae"):
        read_result(tmp_path)


def test_a_changed_result_is_seen(tmp_path):
    write_sealed(tmp_path / RESULT_FILE, fake_runs.result(7, tokens=700))
    assert read_result(tmp_path).tokens == 700
    text = (tmp_path / RESULT_FILE).read_text()
    (tmp_path / RESULT_FILE).write_text(text.replace("700", "300"))
    with pytest.raises(FileError, match="changed since it was written"):
        read_result(tmp_path)


def test_the_last_step_of_a_log_that_is_being_written(tmp_path):
    assert last_step(tmp_path) == 0
    lines = [json.dumps({"kind": "train", "step": step}) for step in range(1, 9)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + '\n{"kind": "train", "st')
    assert last_step(tmp_path) == 8
    os.truncate(path, 0)
    assert last_step(tmp_path) == 0


def test_a_path_that_is_not_a_run(run, tmp_path):
    """One message for every command that needs a run, and for those that need a model."""
    collection = tmp_path / "collection"
    for name in "ba":
        (collection / name).mkdir(parents=True)
        (collection / name / RECIPE_FILE).touch()
    for path, problem in {
        tmp_path / "none": "no such folder",
        tmp_path: "not a run: recipe.toml is missing",
        checkpoint_path(run, 9): f"not a run, but a part of {run}",
        checkpoint_path(run, 9) / STATE_FILE: "a file, not a folder",
        collection: f"not a run, but a folder with runs such as {collection / 'a'}",
    }.items():
        with pytest.raises(FileError, match=re.escape(f"{path}: {problem}. Give a folder that")):
            find_run(path)
    with pytest.raises(FileError, match=r"recipe\.toml is missing\. Give a run, a checkpoint, or"):
        find_checkpoint(tmp_path)
    (tmp_path / RECIPE_FILE).touch()
    assert find_run(tmp_path) == tmp_path
    with pytest.raises(FileError, match="no checkpoint yet"):
        find_checkpoint(tmp_path)
    with pytest.raises(FileError, match="logged nothing yet"):
        read_metrics(tmp_path)
