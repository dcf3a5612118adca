"""Weights on disk: round trips, and clear errors for what is broken."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import parcae
from conftest import KINDS, randomised
from parcae.config import ConfigError
from parcae.files import FileError
from parcae.model import store


@pytest.mark.parametrize("kind", [*KINDS, "transformer"])
def test_round_trip(kind, tmp_path):
    if kind == "transformer":
        model = parcae.create("transformer-1m", vocab_size=96)
    else:
        model = randomised(KINDS[kind])
    parcae.save(model, tmp_path)
    loaded = parcae.load(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.fixture
def folder(tmp_path):
    parcae.save(randomised(KINDS["parcae"]), tmp_path)
    return tmp_path


def test_truncated_weights(folder):
    path = folder / store.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileError, match="truncated"):
        parcae.load(folder)


def test_missing_and_left_over_and_misshapen_tensors(folder):
    path = folder / store.WEIGHTS_FILE
    weights = load_file(path)
    changed = {**weights, "stray": torch.zeros(1), "coda.norm.weight": torch.zeros(3)}
    del changed["coda.readout.weight"]
    save_file(changed, path)
    with pytest.raises(FileError) as error:
        parcae.load(folder)
    for part in ("missing coda.readout.weight", "unexpected stray", r"coda.norm.weight is [3]"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": "other"}, "neither a parcae checkpoint"),
        ({"version": 99}, "Update parcae"),
        ({"model": {"widht": 3}}, "Did you mean width"),
    ],
)
def test_wrong_headers(folder, change, error):
    path = folder / store.CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((FileError, ConfigError), match=error):
        parcae.load(folder)


def test_missing_files(tmp_path, folder):
    with pytest.raises(FileError, match="no such folder"):
        parcae.load(tmp_path / "nowhere")
    (folder / store.WEIGHTS_FILE).unlink()
    with pytest.raises(FileError, match="no such file"):
        parcae.load(folder)
    (folder / store.CONFIG_FILE).write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        parcae.load(folder)


def test_a_failed_write_keeps_the_old_checkpoint(folder, monkeypatch):
    before = (folder / store.WEIGHTS_FILE).read_bytes()

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full_disk)
    with pytest.raises(FileError, match="No space left"):
        parcae.save(randomised(KINDS["parcae"], seed=5), folder)
    assert (folder / store.WEIGHTS_FILE).read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == [store.CONFIG_FILE, store.WEIGHTS_FILE]
