"""A disk that changes a token: no run may learn from it."""

from __future__ import annotations

import json

import pytest

from parcae.config import ConfigError
from parcae.data.shards import HEAD, ShardedDocuments
from parcae.files import FileError
from parcae.training.run import train
from parcae.training.settings import Recipe
from training import runs


@pytest.fixture
def damaged(text, tmp_path):
    """A short run that was stopped, with one bit of its held-out tokens flipped since."""
    recipe = runs.recipe(text, budget={"steps": 2})
    train(recipe, tmp_path / "run")
    (shard,) = (tmp_path / "run" / "data" / "0").glob("validation-*.shard")
    content = bytearray(shard.read_bytes())
    content[len(HEAD) + 2] ^= 1
    shard.write_bytes(content)
    return recipe, tmp_path / "run", shard


def resume(recipe: Recipe, run) -> dict:
    return train(recipe, run, resume=True)


@pytest.mark.slow
def test_a_flipped_bit_is_found_before_the_first_step(damaged):
    recipe, run, shard = damaged
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(FileError, match=rf"{shard.name}: damaged \(wrong checksum\)\. Delete"):
        resume(recipe, run)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_who_trusts_the_disk_can_leave_it_out(damaged):
    recipe, run, _ = damaged
    assert resume(runs.changed(recipe, data={"verify": False}), run).status == "finished"


@pytest.mark.slow
def test_processes_share_the_reading(damaged):
    _, run, shard = damaged
    held_out = ShardedDocuments.open(run / "data" / "0", "validation")
    assert list(held_out.verify(rank=1, processes=2)) == []
    with pytest.raises(FileError, match=shard.name):
        list(held_out.verify(rank=0, processes=2))


@pytest.mark.slow
def test_another_tokenizer_is_found(text, tmp_path):
    """One of the same size: its text would be another, and it would be copied to checkpoints."""
    recipe, run = runs.recipe(text, budget={"steps": 1}), tmp_path / "run"
    train(recipe, run)
    path = run / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    a, b = list(vocabulary)[100:102]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(tree))
    with pytest.raises((ConfigError, FileError), match="tokenizer"):
        resume(recipe, run)
