"""What a run uses of its data: what packing drops, and the epochs of the budget."""

from __future__ import annotations

import json

import numpy as np
import pytest

from parcae import cli
from parcae.data.tokenizer_training import train_tokenizer
from parcae.training.corpora import open_corpora, prepare_corpora
from parcae.training.data_use import planned_use, use_of_loader
from parcae.training.plan import plan
from parcae.training.run import train
from parcae.training.settings import DataConfig
from training import runs

DOCUMENTS = 40
LONG = 200
"""Words of a document, many times the 16 tokens of a row."""


def write_long(folder):
    rng = np.random.default_rng(0)
    text = folder / "long.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    texts = (" ".join(rng.choice(words, LONG)) for _ in range(DOCUMENTS))
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return text


def prepared_use(recipe, out):
    out.mkdir()
    prepare_corpora(recipe, out, lambda _: None)
    loader = open_corpora(recipe, out).loader(recipe)
    (use,) = use_of_loader(recipe, loader)
    return use, loader


def test_documents_are_split_by_default():
    assert DataConfig(sources=("builtin",)).split_long


def test_documents_are_counted_before_they_are_split(tmp_path):
    recipe = runs.recipe(write_long(tmp_path), budget={"steps": 40})
    use, loader = prepared_use(recipe, tmp_path / "run")
    assert 0 < use.documents <= DOCUMENTS < loader.plans[0].documents
    assert f"in {use.documents:.0f} documents;" in use.describe()
    (planned,) = planned_use(recipe)
    fraction = recipe.data.validation_fraction
    assert planned.documents == pytest.approx(DOCUMENTS * (1 - fraction))


def test_epochs_are_those_the_loader_counts(tmp_path):
    """The loader itself is in the epoch that the statement predicts."""
    recipe = runs.recipe(write_long(tmp_path), data={"split_long": False}, budget={"steps": 40})
    use, loader = prepared_use(recipe, tmp_path / "run")
    assert use.cropped_share > 0.9
    loader.skip(40)
    (position,) = loader.position.sources
    assert use.epochs is not None
    assert int(use.epochs) in (position.epoch, position.epoch + 1)
    rows = 40 * recipe.data.global_batch
    assert use.epochs == pytest.approx(rows / loader.plans[0].block(0, 0).rows)


@pytest.mark.slow
def test_cropping_is_warned_of_with_the_remedy(tmp_path, capsys):
    recipe = runs.recipe(write_long(tmp_path), data={"split_long": False}, budget={"steps": 1})
    train(recipe, tmp_path / "run")
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "packing drops 9" in printed
    assert "the budget is" in printed
    assert "data.split_long = true" in printed
    train(runs.changed(recipe, data={"split_long": True}), tmp_path / "split")
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "the budget is" in printed
    assert "Warning" not in printed


@pytest.mark.slow
def test_a_plan_estimates_what_is_not_tokenised(tmp_path):
    recipe = runs.recipe(write_long(tmp_path), data={"split_long": False}, budget={"steps": 40})
    exact, _ = prepared_use(recipe, tmp_path / "run")
    planned = plan(recipe, device_flops=1e12)
    assert planned.data is not None
    (use,) = planned.data
    assert use.estimated
    assert use.dropped_share == pytest.approx(exact.dropped_share, abs=0.05)
    assert {"quantity": "data_0_epochs", "value": use.epochs} in planned.table()


@pytest.mark.slow
def test_a_plan_says_why_the_data_is_unknown(tmp_path, capsys):
    text, missing = write_long(tmp_path), tmp_path / "missing"
    arguments = ["plan", "smoke", "--device-flops", "1e12", "--data.sources"]
    for settings, reason in (
        ([f'["{missing}"]'], f"{missing}: no such file"),
        ([f'["{text}"]', "--data.text_field", "body"], "'body'"),
    ):
        assert cli.main([*arguments, *settings]) == 0
        assert reason in capsys.readouterr().err
    tokenizer, path = train_tokenizer([str(text)], 300), tmp_path / "tokenizer.json"
    tokenizer.save(path)
    model = {"vocab_size": tokenizer.vocab_size - 1}
    small = plan(runs.recipe(text, model=model, data={"tokenizer": str(path)}))
    assert f"do not fit model.vocab_size {tokenizer.vocab_size - 1}" in str(small.data_problem)
    recipe = runs.recipe(missing)
    planned = plan(recipe, device_flops=1e12)
    assert planned.data is None
    assert f"{missing}: no such file" in str(planned.data_problem)


@pytest.mark.slow
def test_the_command_prints_epochs_and_warns(tmp_path, capsys):
    text = write_long(tmp_path)
    arguments = ["plan", "smoke", "--data.sources", f'["{text}"]', "--data.split_long", "false"]
    assert cli.main([*arguments, "--device-flops", "1e12"]) == 0
    printed = capsys.readouterr()
    assert "dropped by packing" in printed.out
    assert "epochs" in printed.out
    assert "data.split_long = true" in printed.err
