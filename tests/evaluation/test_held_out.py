"""The suite `val` on a run: the rows of its validation, at any depth, as resumable items."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from dataclasses import asdict, replace

import pytest

import parcae
from parcae import cli
from parcae.data.preparation import prepare
from parcae.data.shards import HEAD
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.loss import totals_by_loops
from parcae.evaluation.paired import compare_evaluations
from parcae.evaluation.run import _other_suites, default_folder, evaluate
from parcae.recipe import write_toml
from parcae.training import trainer
from parcae.training.corpora import open_corpora
from parcae.training.run import read_recipe, train
from training import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "peak_flops", lambda *_: 1e12)
        recipe = runs.recipe(runs.write_text(folder), budget={"steps": 2})
        train(recipe, folder / "run")
    return folder / "run"


def held_out(run, out, *words) -> dict:
    assert cli.main(["eval", str(run), "--suites", "val", "--out", str(out), *words]) == 0
    return json.loads((out / "result.json").read_text())["suites"]["val"]


@pytest.mark.slow
def test_a_run_has_the_loss_of_its_validation(run, tmp_path):
    told = json.loads((run / "result.json").read_text())["validation"]
    found = held_out(run, tmp_path, "--loops", ",".join(told))
    assert found["rows"] == 4
    for depth, want in told.items():
        assert found["by_loops"][depth]["loss"] == pytest.approx(want["loss"], abs=1e-5)


@pytest.mark.slow
def test_the_number_of_rows_is_that_read(run, tmp_path):
    """Not those that were asked for, of which there may be fewer."""
    assert held_out(run, tmp_path / "one", "--limit", "1")["rows"] == 1
    assert 4 < held_out(run, tmp_path / "all", "--limit", "100000")["rows"] < 1000


@pytest.mark.slow
def test_the_initial_state_can_be_drawn(run, tmp_path):
    zero = held_out(run, tmp_path / "zero", "--loops", "1")
    drawn = held_out(run, tmp_path / "drawn", "--loops", "1", "--state", "like-init")
    again = held_out(run, tmp_path / "again", "--loops", "1", "--state", "like-init")
    assert drawn["by_loops"] == again["by_loops"] != zero["by_loops"]


@pytest.mark.slow
def test_the_loss_is_that_of_the_rows_in_batches_of_eight(run):
    """Bit for bit: the sums of the batches are added in their order."""
    recipe = read_recipe(run)
    recipe = replace(recipe, run=replace(recipe.run, validation_rows=18))
    corpora = open_corpora(recipe, run)
    model = parcae.load(run)
    table = corpora.bytes_of_token()
    expected = totals_by_loops(model, corpora.validation(recipe, 8), (1, 3), table).finish()
    found = evaluate(run, loops=(1, 3), limit=18)
    assert found.suites["val"]["rows"] == 18
    assert [record["rows"] for record in found.records] == [8, 8, 2]
    for depth, loss in expected.items():
        assert found.suites["val"]["by_loops"][str(depth)] == asdict(loss)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["zero", "like-init"])
def test_an_interrupted_evaluation_resumes(run, tmp_path, state):
    """What is drawn depends on the row, not on the batches before it."""
    words = ("--loops", "1,2", "--limit", "18", "--state", state)
    complete = held_out(run, tmp_path / "complete", *words)
    shutil.copytree(tmp_path / "complete", tmp_path / "torn")
    samples = tmp_path / "torn/samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    samples.write_text(lines[1] + lines[2][:30])
    (tmp_path / "torn/result.json").unlink()
    assert held_out(run, tmp_path / "torn", *words) == complete
    assert samples.read_bytes() == (tmp_path / "complete/samples.jsonl").read_bytes()


@pytest.mark.slow
def test_another_limit_has_other_items(run, tmp_path):
    few = held_out(run, tmp_path, "--limit", "4", "--loops", "1")
    more = held_out(run, tmp_path, "--limit", "18", "--loops", "1")
    assert (few["rows"], more["rows"]) == (4, 18)
    assert held_out(run, tmp_path, "--limit", "4", "--loops", "1") == few


@pytest.mark.slow
def test_depths_of_a_run_are_compared(run, tmp_path):
    found = held_out(run, tmp_path, "--limit", "18", "--loops", "1,3")["by_loops"]
    (text,) = compare_evaluations(tmp_path, tmp_path, (1, 3)).table()
    assert (text["task"], text["metric"], text["items"]) == ("val", "nats per byte", 3)
    nats = {t: found[t]["bits_per_byte"] * math.log(2) for t in ("1", "3")}
    assert text["a"] == pytest.approx(nats["1"])
    assert text["difference"] == pytest.approx(nats["3"] - nats["1"])


def test_shards_with_another_tokenizer_are_refused(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    Tokenizer.train(["other words"] * 5, size=270).save(copy / "tokenizer.json")
    assert cli.main(["eval", str(copy), "--out", str(tmp_path / "out")]) == 2
    assert "its tokenizer is not that of" in capsys.readouterr().err


@pytest.mark.slow
def test_separated_texts_are_documents_of_their_own(run, tmp_path):
    """As if each were a record of its own, and never mixed with the file as one document."""
    stories = ["alpha beta gamma\n", "delta epsilon\n", "zeta eta theta alpha\n"]
    text, records = tmp_path / "stories.txt", tmp_path / "stories.jsonl"
    text.write_text("<|endoftext|>\n".join(stories))
    records.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    out, options = tmp_path / "out", ("--val-data", str(text), "--loops", "1")
    whole = held_out(run, out, *options)
    separated = held_out(run, out, *options, "--separator", "<|endoftext|>")
    expected = evaluate(run, val_data=records, loops=(1,)).suites["val"]
    assert separated["by_loops"] == expected["by_loops"]
    assert separated["by_loops"] != whole["by_loops"]
    starts = held_out(run, tmp_path / "starts", *options, "--document-start", "^(alpha|delta|zeta)")
    fields = tmp_path / "fields.jsonl"
    fields.write_text(records.read_text().replace('"text"', '"body"'))
    named = ("--val-data", str(fields), "--loops", "1", "--text-field", "body")
    assert held_out(run, tmp_path / "named", *named)["by_loops"] == expected["by_loops"]
    assert starts["document_start"] == "^(alpha|delta|zeta)"
    assert len({whole["sha256"], starts["fingerprint"], separated["fingerprint"]}) == 3
    (row,) = compare_evaluations(out, out, (1, 1)).table()
    assert row["items"] == 3


@pytest.mark.slow
def test_only_the_last_texts_of_a_folder_are_compared(run, tmp_path):
    """Rows of the run, then a file, then the rows again: never both."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("alpha beta gamma delta\n" * 9)
    rows = held_out(run, out, "--loops", "1")
    held_out(run, out, "--loops", "1", "--val-data", str(text))
    (row,) = compare_evaluations(out, out, (1, 1)).table()
    assert row["items"] == 1
    assert held_out(run, out, "--loops", "1") == rows
    (row,) = compare_evaluations(out, out, (1, 1)).table()
    nats = rows["by_loops"]["1"]["bits_per_byte"] * math.log(2)
    assert row["a"] == pytest.approx(nats)


@pytest.mark.slow
def test_suites_are_added_to_a_folder(run, tmp_path):
    """An earlier suite stays in the result, and its last document in comparisons."""
    text, tasks, out = tmp_path / "text.txt", tmp_path / "tasks", tmp_path / "out"
    text.write_text("alpha beta gamma\n=\ndelta epsilon\n=\nzeta eta theta alpha\n")
    lambada = tasks / "language_understanding/lambada_openai.jsonl"
    lambada.parent.mkdir(parents=True)
    lambada.write_text(json.dumps({"context": "alpha beta", "continuation": "gamma"}) + "\n")
    words = ("--loops", "1,2", "--val-data", str(text), "--separator", "=")
    before = held_out(run, out, *words)
    options = ["--suites", "lambada", "--task-data", str(tasks), "--loops", "3", "--out", str(out)]
    assert cli.main(["eval", str(run), *options]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["suites"].keys() == {"val", "lambada"}
    assert result["suites"]["val"] == before
    assert result["loops"] == [1, 2, 3]
    damaged = {**result, "suites": {**result["suites"], "val": {"by_loops": {"1": 3}}}}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/result.json").write_text(json.dumps(damaged))
    assert _other_suites(tmp_path / "other", ["lambada"]) == {}
    assert _other_suites(out, ["lambada"]).keys() == {"val"}
    rows = compare_evaluations(out, out, (1, 1)).table()
    assert [(row["task"], row["items"]) for row in rows if row["metric"] != "accuracy"] == [
        ("val", 3)
    ]


@pytest.mark.slow
def test_moved_shards_are_named_and_others_refused(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    moved = shutil.move(copy / "data" / "0", tmp_path / "moved")
    assert cli.main(["eval", str(copy), "--loops", "1"]) == 2
    message = capsys.readouterr().err
    assert f"write its new path into data.sources of {copy / 'recipe.toml'}" in message
    recipe = tomllib.loads((copy / "recipe.toml").read_text())
    recipe["data"]["sources"] = [str(moved)]
    (copy / "recipe.toml").write_text(write_toml(recipe))
    assert cli.main(["eval", str(copy), "--loops", "1"]) == 0
    other = tmp_path / "other.txt"
    other.write_text("other words\n\n" * 99)
    prepare([other], copy / "tokenizer.json", tmp_path / "other", validation=[other])
    recipe["data"]["sources"] = [str(tmp_path / "other")]
    (copy / "recipe.toml").write_text(write_toml(recipe))
    capsys.readouterr()
    assert cli.main(["eval", str(copy), "--loops", "1"]) == 2
    assert "are not those of the run" in capsys.readouterr().err


def test_a_misspelt_separator_is_named(run, tmp_path, capsys):
    text = tmp_path / "stories.txt"
    text.write_text("alpha beta\n<|endoftext|>\ngamma\n")
    options = ("--val-data", str(text), "--loops", "1", "--separator")
    held_out(run, tmp_path / "one", *options, "<|endoftex|>")
    assert "'<|endoftex|>' splits the file nowhere. Is it misspelt?" in capsys.readouterr().out
    held_out(run, tmp_path / "two", *options, "<|endoftext|>")
    printed = " ".join(capsys.readouterr().out.split())
    assert "stories.txt, 2 documents" in printed
    assert "splits the file nowhere" not in printed


def test_a_separator_needs_a_file_of_texts(run, capsys):
    assert cli.main(["eval", str(run), "--separator", "<|endoftext|>"]) == 2
    assert "Give it with --val-data" in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_rows_and_settings_do_not_change_the_loss(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    before = held_out(copy, tmp_path / "before", "--loops", "1")
    recipe = (copy / "recipe.toml").read_text()
    changed = recipe.replace("validation_rows = 4", "validation_rows = 5")
    assert changed != recipe
    (copy / "recipe.toml").write_text(changed)
    assert held_out(copy, tmp_path / "after", "--loops", "1")["by_loops"] == before["by_loops"]
    (shard,) = (copy / "data" / "0").glob("validation-*.shard")
    content = bytearray(shard.read_bytes())
    content[len(HEAD) + 2] ^= 1
    shard.write_bytes(content)
    assert cli.main(["eval", str(copy), "--out", str(tmp_path / "damaged")]) == 2
    assert "damaged (wrong checksum)" in capsys.readouterr().err


def test_results_of_a_run_are_in_its_folder(tmp_path):
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "checkpoints"):
        assert default_folder(path) == tmp_path / "evaluation"
    step = tmp_path / "checkpoints/step-00000002"
    assert default_folder(step) == step / "evaluation"
