"""What may change when a run is resumed: paths of its data, and how its steps are computed."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import torch

import parcae
from parcae import cli
from parcae.config import ConfigError
from parcae.data.preparation import prepare
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError
from parcae.recipe import write_toml
from parcae.runs import list_checkpoints, read_state
from parcae.runs.checkpoints import write_state
from parcae.training.corpora import check_same_data, open_corpora
from parcae.training.learner import Learner
from parcae.training.run import read_recipe
from parcae.training.settings import recipe_to_dict
from parcae.training.trainer import Trainer
from training import runs

STEPS, KILLED = 6, 4


class Killed(Exception):
    pass


def train_until(step, recipe, out):
    """A run that ends without a word after a step; its last checkpoint is one before that."""
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer._train_step

        def one_step(self):
            real(self)
            if self.learner.step == step:
                raise Killed

        patch.setattr(Trainer, "_train_step", one_step)
        with pytest.raises(Killed):
            parcae.train(recipe, out)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    text = runs.write_text(folder)
    tokenizer = Tokenizer.train([text.read_text()], 300)
    prepare([text], tokenizer, folder / "shards", validation_fraction=0.2)
    return folder / "shards"


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """A run on prepared shards that was never stopped."""
    recipe = runs.recipe(shards, budget={"steps": STEPS})
    return parcae.train(recipe, tmp_path_factory.mktemp("whole") / "run").folder


@pytest.fixture(scope="module")
def killed_once(shards, tmp_path_factory):
    """The same run, killed in its middle."""
    run = tmp_path_factory.mktemp("killed") / "run"
    train_until(KILLED, runs.recipe(shards, budget={"steps": STEPS}), run)
    return run


@pytest.fixture
def killed(killed_once, tmp_path):
    return shutil.copytree(killed_once, tmp_path / "run")


def edit_recipe(folder, changes):
    tree = recipe_to_dict(runs.changed(read_recipe(folder), **changes))
    (folder / "recipe.toml").write_text("# edited\n" + write_toml(tree))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flag", "edited recipe"])
def test_data_that_was_moved(how, killed, whole, shards, tmp_path, capsys, request):
    run, after = killed, tmp_path / "elsewhere"
    shards.rename(after)
    request.addfinalizer(lambda: after.rename(shards))
    assert cli.main(["train", "--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert f"{shards}: no such file" in error
    assert "If it was moved, give its new path with --data.sources." in error
    if how == "flag":
        flags = ["--data.sources", json.dumps([str(after)])]
    else:
        edit_recipe(run, {"data": {"sources": [str(after)]}})
        flags = []
    assert cli.main(["train", "--resume", str(run), *flags]) == 0
    assert runs.curve(run) == runs.curve(whole)
    assert read_recipe(run).data.sources == (str(after),)


@pytest.mark.slow
def test_another_number_of_threads_is_announced(killed, monkeypatch, capsys):
    (checkpoint,) = list_checkpoints(killed)[-1:]
    threads = torch.get_num_threads()
    assert read_state(checkpoint)["threads"] == threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    parcae.train(killed, resume=True)
    assert f"The run had {threads} threads and now has {threads + 1}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "1"},
        {"recent_losses": ["1"]},
        {"best_loss": []},
        {"validation": {"3": {"loss": "1", "perplexity": 2.0, "bits_per_byte": None}}},
        {"guard": {}},
        {"validation": {"2": {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": None}}},
        {"sources": [3]},
    ],
)
def test_a_state_of_wrong_types(change, killed):
    (checkpoint,) = list_checkpoints(killed)[-1:]
    state = {**read_state(checkpoint), **change}
    step = state.pop("step")
    for name in ("format", "files", "sha256"):
        del state[name]
    (checkpoint / "state.json").unlink()
    write_state(checkpoint, step, state)
    with pytest.raises(FileError, match="a value is missing or wrong") as error:
        parcae.train(killed, resume=True)
    assert "state.json" in str(error.value)


@pytest.mark.slow
def test_other_data_is_refused(killed, shards, tmp_path):
    run, other = killed, tmp_path / "other"
    text = runs.write_text(tmp_path, documents=50)
    prepare([text], Tokenizer.load(shards), other, validation_fraction=0.2)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"data\.sources: the train documents in .*other are"):
        parcae.train(run, resume=True, data={"sources": [str(other)]})
    with pytest.raises(ConfigError, match=r"data\.sources: the train documents in .*data/0 are"):
        parcae.train(run, resume=True, data={"sources": [str(text)]})  # tokenised, then refused
    with pytest.raises(ConfigError, match=r"data\.sources: 2 given, but the run in .* has 1"):
        parcae.train(run, resume=True, data={"sources": [str(shards), str(shards)]})
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_other_held_out_documents_are_refused(killed):
    corpora = open_corpora(read_recipe(killed), killed)
    used = corpora.fingerprints()
    check_same_data(corpora, used, killed)
    with pytest.raises(ConfigError, match=r"data\.sources: the validation documents in"):
        check_same_data(corpora, [used[0] | {"validation": "0" * 64}], killed)


@pytest.mark.slow
def test_text_that_was_moved(tmp_path):
    """The run has its tokens, so it needs the text no more; other text is refused."""
    text, run = runs.write_text(tmp_path), tmp_path / "run"
    train_until(KILLED, runs.recipe(text, budget={"steps": STEPS}), run)
    moved = text.rename(tmp_path / "moved.jsonl")
    text.write_text('{"text": "something else"}\n')
    with pytest.raises(ConfigError, match=r"data\.sources: .*text2\.jsonl has other contents than"):
        shutil.copy(text, tmp_path / "text2.jsonl")
        parcae.train(run, resume=True, data={"sources": [str(tmp_path / "text2.jsonl")]})
    result = parcae.train(run, resume=True, data={"sources": [str(moved)]})
    assert result.status == "finished"
    assert read_recipe(run).data.sources == (str(moved),)


@pytest.mark.slow
def test_a_tokenizer_that_was_moved(killed, shards, tmp_path):
    run = killed
    copy, other = tmp_path / "copy.json", tmp_path / "other.json"
    shutil.copy(shards / "tokenizer.json", copy)
    Tokenizer.train(["another text " * 9], 290).save(other)
    with pytest.raises(ConfigError, match=r"other\.json is not the tokenizer of the run"):
        parcae.train(run, resume=True, data={"tokenizer": str(other)})
    with pytest.raises(FileError, match="no such tokenizer"):
        parcae.train(run, resume=True, data={"tokenizer": str(tmp_path / "none.json")})
    assert parcae.train(run, resume=True, data={"tokenizer": str(copy)}).status == "finished"


@pytest.mark.parametrize("how", ["flag", "edited recipe"])
def test_what_changes_the_learning_is_refused_with_both_values(how, killed, tmp_path):
    run, kept = killed, (killed / "recipe.toml").read_bytes()
    for changes, message in (
        ({"optimiser": {"lr": 0.5}}, "optimiser.lr: 0.5, but the run in {} has 0.008, which chang"),
        ({"data": {"global_batch": 8}}, "data.global_batch: 8, but the run in {} has 4, which"),
        ({"model": {"loop": {"mean_loops": 4}}}, "model.loop.mean_loops: 4, but the run in {} has"),
        ({"run": {"validation_rows": 3}}, "run.validation_rows: 3, but the run in {} has 4"),
        ({"data": {"weights": [2.0]}}, "data.weights: [2.0], but the run in {} has []"),
    ):
        if how == "edited recipe":
            edit_recipe(run, changes)
        with pytest.raises(ConfigError) as caught:
            parcae.train(run, resume=True, **(changes if how == "flag" else {}))
        assert message.format(run) in str(caught.value)
        assert f"parcae train {run}/recipe.toml --start-from {run} --" in str(caught.value)
        (run / "recipe.toml").write_bytes(kept)


@pytest.mark.slow
def test_settings_of_the_run_may_change(killed):
    changes = {"keep_last": 9, "checkpoint_every": 2, "telemetry_every": 0, "validate_every": 4}
    assert parcae.train(killed, resume=True, run=changes).status == "finished"
    assert [step for step, _ in runs.lines(killed, "validation", "losses")] == [4, 6]
    assert [int(path.name[5:]) for path in list_checkpoints(killed)] == [3, 4, 6]


class Rows:
    """Records the rows and the depths of every step, in the order of the global batch."""

    def __init__(self):
        self.steps = {}

    def record(self, patch):
        real = Learner.take_step

        def take_step(learner, progress):
            step, drawn = learner.step, []
            draw = learner.model.draw

            def recorded(seed, step, rows, length):
                result = draw(seed, step, rows, length)
                drawn.extend(zip(rows, result["loops"].loops, strict=True))
                return result

            batches = []
            loader = learner.loader
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(learner.model, "draw", recorded)
                inner.setattr(learner, "loader", Recorded(loader, batches))
                measured = real(learner, progress)
            self.steps[step] = (batches[0].inputs.tolist(), drawn)
            return measured

        patch.setattr(Learner, "take_step", take_step)


class Recorded:
    def __init__(self, loader, batches):
        self.loader, self.batches = loader, batches

    def __next__(self):
        self.batches.append(next(self.loader))
        return self.batches[-1]


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_another_micro_batch_reads_the_same_rows_at_the_same_depths(
    micro_batch, shards, tmp_path, float64, monkeypatch
):
    recipe = runs.recipe(shards, budget={"steps": STEPS})
    seen = {}
    for name in ("whole", "changed"):
        rows = Rows()
        with monkeypatch.context() as patch:
            rows.record(patch)
            if name == "whole":
                parcae.train(recipe, tmp_path / name)
            else:
                train_until(KILLED, recipe, tmp_path / name)
                parcae.train(tmp_path / name, resume=True, data={"micro_batch": micro_batch})
        seen[name] = rows.steps
    assert len(seen["whole"]) == STEPS
    assert seen["changed"] == seen["whole"]
    theirs, ours = (runs.lines(tmp_path / n, "train", "loss", "gradient_norm") for n in seen)
    assert ours == [(step, *(pytest.approx(x, rel=1e-9) for x in both)) for step, *both in theirs]


def test_a_depth_per_micro_batch_needs_the_same_micro_batches(shards, tmp_path):
    run = tmp_path / "run"
    loop = {"draw_per": "micro-batch"}
    train_until(KILLED, runs.recipe(shards, model={"loop": loop}, budget={"steps": STEPS}), run)
    with pytest.raises(
        ConfigError, match=r"data\.micro_batch: 1, but the run in .* has 2, on whic"
    ):
        parcae.train(run, resume=True, data={"micro_batch": 1})


CONSTANT = {"cooldown_fraction": 0.0, "weight_decay_to_zero": False}


@pytest.mark.slow
def test_a_finished_run_at_a_constant_rate_is_extended(shards, tmp_path):
    """Bit for bit to the run that had the longer budget from the start."""
    short, long = (
        runs.recipe(shards, schedule=CONSTANT, budget={"steps": steps}) for steps in (4, 6)
    )
    parcae.train(short, tmp_path / "short")
    extended = parcae.train(tmp_path / "short", resume=True, budget={"steps": 6})
    whole = parcae.train(long, tmp_path / "long")
    assert (extended.status, extended.steps) == ("finished", 6)
    assert runs.curve(extended.folder) == runs.curve(whole.folder)
    assert extended.losses == whole.losses
    assert read_recipe(extended.folder).budget.steps == 6
    for budget in ({"steps": 8, "max_minutes": 1}, {"minutes": 1}):
        with pytest.raises(ConfigError, match="learning rates or weight decays so far depend"):
            parcae.train(extended.folder, resume=True, budget=budget)


@pytest.mark.slow
def test_a_new_budget_must_give_the_same_steps_so_far(shards, tmp_path):
    cooling = {"cooldown_steps": 2, "weight_decay_to_zero": False}
    recipe, run = runs.recipe(shards, schedule=cooling, budget={"steps": 6}), tmp_path / "run"
    train_until(KILLED, recipe, run)  # its last checkpoint, at step 3, is before the cool-down
    with pytest.raises(ConfigError, match="learning rates or weight decays so far depend"):
        parcae.train(run, resume=True, budget={"steps": 3})
    assert parcae.train(run, resume=True, budget={"steps": 8}).steps == 8
    with pytest.raises(ConfigError, match="learning rates or weight decays so far depend") as error:
        parcae.train(run, resume=True, budget={"steps": 10})
    command = str(error.value).partition("weights: ")[2].rstrip(".")
    words = shlex.split(command.replace("NEW", str(tmp_path / "next")))
    assert words[:2] == ["parcae", "train"]
    assert cli.main(words[1:]) == 0
    assert parcae.runs.read_result(tmp_path / "next").steps == 10
