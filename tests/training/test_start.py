"""A new run from existing weights: their model and tokenizer, a fresh optimiser, other data."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import parcae
from parcae import cli
from parcae.config import ConfigError
from parcae.data.shards import ShardedDocuments
from parcae.data.sources import SPLITS
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.loss import totals_by_loops
from parcae.files import FileError, sha256
from parcae.recipe import merge, write_toml
from parcae.training.corpora import open_corpora
from parcae.training.run import read_recipe
from parcae.training.settings import resolve_recipe
from parcae.training.trainer import Trainer
from training import runs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of three steps to start from."""
    folder = tmp_path_factory.mktemp("base")
    loop = {"curriculum": {"steps": 2}, "backprop_loops": 2}
    recipe = runs.recipe(runs.write_text(folder), model={"loop": loop}, budget={"steps": 3})
    return parcae.train(recipe, folder / "run").folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A recipe with other text, and without a model."""
    path = tmp_path_factory.mktemp("other") / "other.jsonl"
    lines = [{"text": f"{n} times {n} is {n * n}, " * (n % 5 + 1)} for n in range(50)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = runs.TREE["data"] | {"sources": [str(path)]}
    return {"data": data, "run": runs.TREE["run"] | {"keep_last": 9}, "budget": {"steps": 4}}


@pytest.fixture(scope="module")
def tuned(base, tables, tmp_path_factory):
    return parcae.train(tables, tmp_path_factory.mktemp("tuned") / "run", start_from=base)


@pytest.mark.slow
def test_step_0_has_the_weights_and_the_loss_of_the_source(base, tuned):
    """By the model itself, on the rows that the new run holds out."""
    before, first = runs.weights(base, 3), runs.weights(tuned.folder, 0)
    assert before.keys() == first.keys()
    assert all(torch.equal(before[name], first[name]) for name in before)
    recipe = read_recipe(tuned.folder)
    batches = open_corpora(recipe, tuned.folder).validation(recipe, 4)
    expected = totals_by_loops(parcae.load(base), batches, (1, 3, 6)).finish()
    (step, losses), *_ = runs.lines(tuned.folder, "validation", "losses")
    assert step == 0
    assert losses == {str(t): pytest.approx(loss.loss) for t, loss in expected.items()}


@pytest.mark.slow
def test_optimiser_schedule_and_data_are_new(base, tuned):
    assert tuned.steps == 4
    assert runs.lines(tuned.folder, "train", "lr")[0] == runs.lines(base, "train", "lr")[0]
    recipe = read_recipe(tuned.folder)
    assert recipe.model.loop.curriculum is None, "loops do not start from one again"
    assert recipe.model.loop.backprop_loops == 2
    own, its = (Tokenizer.load(run / "tokenizer.json") for run in (base, tuned.folder))
    assert own.sha256 == its.sha256


@pytest.mark.slow
def test_a_plan_counts_tokens_with_the_tokenizer_of_the_weights(base, tuned, tables):
    planned = parcae.plan(tables, device_flops=1e12, start={"checkpoint": str(base)})
    shards = tuned.folder / "data" / "0"
    exact = sum(ShardedDocuments.open(shards, split).lengths.sum() for split in SPLITS)
    exact *= 1 - tables["data"]["validation_fraction"]
    assert planned.data[0].tokens == pytest.approx(exact, rel=0.05)


@pytest.mark.slow
def test_the_source_is_recorded_and_shown(base, tuned, tables, capsys):
    start = read_recipe(tuned.folder).start
    checkpoint = base / "checkpoints" / "step-00000003"
    assert start.checkpoint == str(checkpoint)
    assert start.step == 3
    assert start.sha256 == sha256(checkpoint / "model.safetensors")
    assert f"starts from {checkpoint}" in parcae.write_report(tuned.folder).read_text()


@pytest.mark.slow
def test_a_killed_run_continues_after_its_source_is_gone(
    base, tuned, tables, tmp_path, monkeypatch
):
    """Also before its first step, bit for bit."""
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(base, source)

    class Killed(Exception):
        pass

    def killed(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", killed)
        with pytest.raises(Killed):
            parcae.train(tables, run, start_from=source)
    shutil.rmtree(source)
    result = parcae.train(run, resume=True)
    assert result.status == "finished"
    assert runs.curve(run) == runs.curve(tuned.folder)


@pytest.mark.slow
def test_a_model_folder_and_another_loop(base, tables, tmp_path):
    """The loop is the recipe's, as far as it says; a preset's shape must be that of the weights."""
    model, tokenizer, _ = parcae.open_checkpoint(base)
    folder = tmp_path / "model"
    parcae.save(model, folder)
    loop = {"model": {"context_length": 12, "loop": {"mean_loops": 5, "sampler": "fixed"}}}
    with pytest.raises(ConfigError, match=r"data\.tokenizer: missing, and there is none beside"):
        parcae.train(tables | loop, tmp_path / "run", start_from=folder)
    tokenizer.save(folder / "tokenizer.json")
    result = parcae.train(tables | loop, tmp_path / "run", start_from=folder)
    assert {depth for _, depth in runs.lines(result.folder, "train", "mean_depth")} == {5}
    assert result.model["context_length"] == 12
    assert result.model["loop"]["backprop_loops"] == 2
    assert read_recipe(result.folder).start.step is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"width": 64}, "model.width: 64, but the weights in {} have 32."),
        ({"vocab_size": 400}, "model.vocab_size: 400, but the weights in {} have 300."),
        ({"mlp_width": 64}, "model.mlp_width: 64, but the weights in {} have 128."),
        ({"preset": "parcae-1m"}, "model.vocab_size: 4096, but the weights in {} have 300."),
        ({"heads": 5}, "model.heads: 5, but the weights in {} have 2."),
        ({"wdith": 32}, "model.wdith: no such key. Did you mean width?"),
    ],
)
@pytest.mark.slow
def test_a_recipe_that_contradicts_the_weights(base, tables, table, message, tmp_path, capsys):
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(write_toml(tables | {"model": table}))
    assert cli.main(["train", str(recipe), "--start-from", str(base), "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert message.format(base / "checkpoints" / "step-00000003") in error
    assert error.count("\n") == 1
    assert not run.exists()


def test_a_recipe_that_says_the_same_as_the_weights(base, tables):
    recipe = resolve_recipe(
        merge(tables, {"model": merge(runs.TREE["model"], {"mlp_width": 128, "kv_heads": "none"})}),
        {"start": {"checkpoint": str(base)}},
    )
    assert recipe.model.loop.mean_loops == 3
    assert recipe.model.mlp_width is None


@pytest.mark.slow
def test_another_tokenizer_is_refused(base, tables, tmp_path):
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    own = Tokenizer.load(base / "tokenizer.json")
    same.write_text(json.dumps(json.loads(own.content), indent=1))
    Tokenizer.train(["another text " * 9], 290).save(other)
    for path, start in ((same, base), (other, base)):
        recipe = merge(tables, {"data": {"tokenizer": str(path)}, "budget": {"steps": 1}})
        if path == same:
            parcae.train(recipe, tmp_path / "run", start_from=start)
            continue
        with pytest.raises(ConfigError, match=r"other\.json has another tokenizer than the weight"):
            parcae.train(recipe, tmp_path / "refused", start_from=start)


def test_weights_that_changed_are_refused(base, tables, tmp_path, capsys):
    start = {"start": {"checkpoint": str(base), "sha256": "0" * 64}, "model": runs.TREE["model"]}
    with pytest.raises(ConfigError, match=r"start\.sha256: the weights in .* have the checksum"):
        parcae.train(tables | start, tmp_path / "run")
    with pytest.raises(FileError, match=r"no such folder\. Give a run, a checkpoint, or a model"):
        parcae.train(tables, tmp_path / "run", start_from=tmp_path / "none")
    with pytest.raises(ConfigError, match="Pass either start_from or resume"):
        parcae.train(base, resume=True, start_from=base)
    assert cli.main(["train", "--resume", str(base), "--start-from", str(base)]) == 2
    assert "--start-from: a resumed run continues from its own weights" in capsys.readouterr().err
