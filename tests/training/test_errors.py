"""What a user can get wrong, at the command line: one line that helps, exit code 2, no damage."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from parcae import cli
from parcae.files import lock_folder
from parcae.recipe import merge, parse_flags, write_toml
from parcae.training.run import train
from parcae.training.settings import recipe_to_dict, with_flags
from parcae.training.trainer import Trainer
from training import runs


@pytest.fixture
def write(tmp_path, text):
    """Write a recipe with changes and return its path."""

    def write(**changes):
        tree = merge(merge(runs.TREE, {"data": {"sources": [str(text)]}}), changes)
        path = tmp_path / "recipe.toml"
        path.write_text(write_toml(tree))
        return path

    return write


@pytest.fixture
def fails(capsys):
    """Run the command, which must end in one helpful line, and return that."""

    def fails(*words):
        capsys.readouterr()
        code = cli.main(["train", *map(str, words)])
        error = capsys.readouterr().err
        assert code == 2, error
        assert error.startswith("parcae: "), error
        assert error.count("\n") == 1, error
        assert "Traceback" not in error
        return error

    return fails


WRONG = [
    ({"run": {"sede": 1}}, "run.sede: no such key. Did you mean seed?"),
    ({"budget": {"step": 5}}, "budget.step: no such key. Did you mean steps?"),
    ({"rum": {"seed": 1}}, "rum: no such table. Did you mean run?"),
    ({"model": {"loop": {"mean_lops": 3}}}, "model.loop.mean_lops: no such key"),
    ({"budget": {"tokens": 1e6}}, "budget: tokens and steps given. Give exactly one"),
    ({"budget": {"steps": -5}}, "budget.steps: -5 is out of range. It must be above 0."),
    ({"budget": {"steps": 2.5}}, "budget.steps: expected a whole number"),
    ({"budget": {"max_minutes": 0}}, "budget.max_minutes: 0 is out of range"),
    (
        {"data": {"global_batch": 0}},
        "data.global_batch: 0 is out of range. It must be at least 1 and at most 4,194,304.",
    ),
    ({"data": {"weights": [-1.0]}}, "data.weights: -1.0 is out of range. It must be above 0."),
    ({"data": {"weights": [1.0, 2.0]}}, "data.weights: 2 weights for 1 sources"),
    ({"data": {"validation_fraction": 1.0}}, "data.validation_fraction: 1.0 is out of range"),
    ({"data": {"sources": []}}, "data.sources: there is none"),
    ({"optimiser": {"lr": -1e-3}}, "optimiser.lr: -0.001 is out of range"),
    ({"optimiser": {"lr": float("nan")}}, "optimiser.lr: nan is out of range"),
    ({"optimiser": {"muon_lr": float("inf")}}, "optimiser.muon_lr: inf is out of range"),
    ({"optimiser": {"muon_lr": 1e308}}, "optimiser.muon_lr: 1e+308 is out of range"),
    ({"optimiser": {"beta1": 1.0}}, "optimiser.beta1: 1.0 is out of range"),
    (
        {"optimiser": {"kind": "adam-w"}},
        "optimiser.kind: 'adam-w' is not a known optimiser. Did you mean adamw?",
    ),
    ({"schedule": {"cooldown_fraction": 2.0}}, "schedule.cooldown_fraction: 2.0 is out of range"),
    ({"run": {"validation_loops": [0]}}, "run.validation_loops: 0 is out of range"),
    (
        {"run": {"trackers": ["wandbee"]}},
        "run.trackers: 'wandbee' is not an option. Did you mean wandb?",
    ),
    ({"run": {"seed": 1 << 63}}, "run.seed: 9223372036854775808 is out of range"),
    ({"run": {"device": "tpu"}}, "run.device: 'tpu' is not an option"),
    ({"model": {"heads": 5}}, "model.heads: 5 heads do not divide width 32"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_recipes(changes, message, write, fails, tmp_path):
    recipe = write(**changes)
    assert f"{recipe}: {message}" in fails(recipe, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_how_a_list_is_written(write, fails, text, tmp_path):
    """What the error says, works."""
    error = fails(write(), "--data.sources", text, "--out", tmp_path / "run")
    flag = re.search(r"--data\.sources '(.*)'\.", error)
    assert flag, error
    assert parse_flags(["--data.sources", flag[1]]) == {"data": {"sources": [str(text)]}}


@pytest.mark.parametrize("budget", [{"minutes": float("nan")}, {"flops": float("inf")}])
def test_budgets_that_are_no_numbers(budget, write, fails, tmp_path, text):
    recipe = tmp_path / "recipe.toml"
    tree = {**merge(runs.TREE, {"data": {"sources": [str(text)]}}), "budget": budget}
    recipe.write_text(write_toml(tree))
    assert f"budget.{next(iter(budget))}" in fails(recipe, "--out", tmp_path / "run")


@pytest.mark.parametrize("budget", [{"minutes": 1}, {"steps": 9, "max_minutes": 1}])
def test_a_cool_down_in_steps_by_the_clock(budget, fails, tmp_path, text):
    recipe = tmp_path / "recipe.toml"
    tree = {**merge(runs.TREE, {"data": {"sources": [str(text)]}}), "budget": budget}
    recipe.write_text(write_toml({**tree, "schedule": {"cooldown_steps": 10}}))
    assert "schedule.cooldown_steps" in fails(recipe)


def test_a_limit_beside_a_time(write, fails):
    """A budget on the command line replaces the recipe's; a limit alone is laid over it."""
    flags = ["--budget.minutes", "1", "--budget.max_minutes", "2"]
    assert "budget.max_minutes: minutes = 1 limits the run already" in fails(write(), *flags)
    with_limit = with_flags({"budget": {"steps": 3}}, {"budget": {"max_minutes": 2}})
    assert with_limit == {"budget": {"steps": 3, "max_minutes": 2}}
    replaced = with_flags(with_limit, {"budget": {"tokens": 9}})
    assert replaced == {"budget": {"tokens": 9}}


def test_what_to_train(fails, tmp_path, write):
    assert "Give a recipe" in fails()
    assert "no such recipe" in fails(tmp_path / "none.toml")
    error = fails(write(), "--resume", tmp_path)
    assert "a resumed run has its own recipe" in error
    assert "Give a recipe" in error
    assert "Omit --out" in fails("--resume", tmp_path, "--out", tmp_path)
    (tmp_path / "bad.toml").write_text("[model\n")
    assert "not valid TOML" in fails(tmp_path / "bad.toml")


@pytest.mark.slow
def test_missing_data_can_be_put_right_in_the_same_folder(write, fails, text, tmp_path):
    """A folder that holds no step of training is not a run that blocks the way."""
    run = tmp_path / "run"
    sources = {"sources": [str(tmp_path / "none.jsonl")]}
    assert "none.jsonl: no such file" in fails(write(data=sources), "--out", run)
    assert not (run / "recipe.toml").exists()  # nothing that looks like a run
    recipe = write(budget={"steps": 2}, model={"vocab_size": 310})
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0


@pytest.mark.slow
def test_what_another_attempt_prepared_is_not_used(write, fails, text, tmp_path):
    """The first attempt trains a tokenizer of 300 entries and fails later."""
    run = tmp_path / "run"
    too_long = {"model": {"context_length": 100_000}}
    assert "less than one row" in fails(write(**too_long), "--out", run)
    assert (run / "tokenizer.json").exists()
    recipe = write(budget={"steps": 2}, model={"vocab_size": 280})
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    vocabulary = json.loads((run / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) <= 280


def test_a_tokenizer_larger_than_the_model(write, fails, text, tmp_path):
    file = tmp_path / "tokenizer.json"
    made = cli.main(["tokenizer", "train", str(text), "--size", "290", "--out", str(file)])
    assert made == 0
    recipe = write(data={"tokenizer": str(file)}, model={"vocab_size": 270})
    error = fails(recipe, "--out", tmp_path / "run")
    assert "data.tokenizer: 290 entries do not fit model.vocab_size 270" in error
    assert "model.vocab_size = 290" in error
    assert "none.json: no such tokenizer" in fails(
        write(data={"tokenizer": str(tmp_path / "none.json")}), "--out", tmp_path / "run"
    )


@pytest.mark.slow
def test_shards_prepared_with_another_tokenizer(write, fails, text, tmp_path):
    for size in (280, 290):
        folder = tmp_path / str(size)
        tokenizer = str(folder / "tokenizer.json")
        words = ["tokenizer", "train", str(text), "--size", str(size), "--out", tokenizer]
        assert cli.main(words) == 0
        words = ["data", "prepare", str(text), "--tokenizer", tokenizer]
        assert cli.main([*words, "--out", str(folder / "shards")]) == 0
    shards, other = tmp_path / "280" / "shards", tmp_path / "290" / "tokenizer.json"
    data = {"sources": [str(shards)], "tokenizer": str(other)}
    error = fails(write(data=data), "--out", tmp_path / "run")
    assert f"data.tokenizer: {shards} was prepared with another tokenizer" in error
    both = {"sources": [str(shards), str(tmp_path / "290" / "shards")]}
    assert "was prepared with another tokenizer" in fails(
        write(data=both), "--out", tmp_path / "run"
    )
    recipe = write(data={"sources": [str(shards)]}, budget={"steps": 2})
    assert cli.main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 0


def test_a_corpus_too_small_for_a_row(write, fails, tmp_path):
    (tmp_path / "tiny.jsonl").write_text('{"text": "few words"}\n')
    data = {"sources": [str(tmp_path / "tiny.jsonl")], "validation_fraction": 0.0}
    error = fails(write(data=data), "--out", tmp_path / "run")
    assert "1 document with 3 tokens, less than one row of 17" in error


@pytest.mark.slow
@pytest.mark.parametrize("documents", [0, 1])
def test_without_enough_held_out_documents_a_run_works(documents, tmp_path, text, capsys):
    """None at all, or too few tokens for a single row: nothing fails in the middle of a run."""
    fraction = 0.0
    if documents:
        short = [{"text": f"word {i}"} for i in range(400)]
        text = tmp_path / "short.jsonl"
        text.write_text("".join(json.dumps(document) + "\n" for document in short))
        fraction = 0.004
    data = {"validation_fraction": fraction}
    recipe = runs.recipe(text, data=data, budget={"steps": 6})
    result = train(recipe, tmp_path / "run")
    held_out = json.loads((tmp_path / "run" / "data" / "0" / "manifest.json").read_text())
    tokens = held_out["totals"]["validation"]["tokens"]
    assert (0 < tokens < 17) if documents else tokens == 0
    assert result.status == "finished"
    assert result.validation == {}
    assert runs.lines(tmp_path / "run", "validation") == []
    assert len(runs.lines(tmp_path / "run", "telemetry", "state_norm")) == 2
    assert "there is no validation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_that_holds_a_run(write, fails, tmp_path):
    recipe, run = write(budget={"steps": 3}), tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    error = fails(recipe, "--out", run)
    assert f"exists and holds a run. Continue it with `parcae train --resume {run}`" in error
    error = fails("--resume", run, "--optimiser.lr", "0.1")
    assert error.startswith(f"parcae: optimiser.lr: 0.1, but the run in {run} has 0.008")
    assert "budget.steps: 9, but the run" in fails("--resume", run, "--budget.steps", "9")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert cli.main(["train", "--resume", str(run), "--run.keep_last", "5"]) == 0


def test_nothing_to_resume(fails, tmp_path):
    assert "not a run: recipe.toml is missing" in fails("--resume", tmp_path)
    assert "none: no such folder" in fails("--resume", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_second_process_on_the_same_folder(write, fails, tmp_path):
    recipe, run = write(budget={"steps": 3}), tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with lock_folder(run):
        assert f"another process ({os.getpid()}) is using it" in fails("--resume", run)
        assert "is using it" in fails(recipe, "--out", run)
        assert {p for p in run.rglob("*") if p.is_file()} == set(before)
    assert cli.main(["train", "--resume", str(run)]) == 0


def test_a_folder_that_is_a_file(write, fails, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "not a folder" in fails(write(), "--out", tmp_path / "file")
    assert "Not a directory" in fails(write(), "--out", tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_folder(write, fails, tmp_path):
    """The kernel's own tables cannot be written even by root."""
    error = fails(write(), "--out", "/proc/self/run")
    assert "/proc/self/run: could not be written" in error
    assert "Choose another folder" in error


@pytest.mark.slow
def test_a_run_on_a_disk_that_became_read_only(write, fails, tmp_path):
    recipe, run = write(budget={"steps": 3}), tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    mounts = (["mount", "--bind", str(run), str(run)], ["mount", "-o", "remount,ro,bind", str(run)])
    for number, words in enumerate(mounts):
        done = subprocess.run(words, capture_output=True)
        if done.returncode:
            if number:
                subprocess.run(["umount", str(run)], check=True)
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        assert "could not be written (Read-only file system)" in fails("--resume", run)
        assert "could not be written (Read-only file system)" in fails(recipe, "--out", run)
    finally:
        subprocess.run(["umount", str(run)], check=True)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_an_error_inside_a_run_is_not_blamed_on_its_folder(text, tmp_path, monkeypatch):
    def one_step(self):
        raise PermissionError(13, "Permission denied", "/somewhere/else")

    monkeypatch.setattr(Trainer, "_train_step", one_step)
    with pytest.raises(PermissionError, match="somewhere"):
        train(runs.recipe(text), tmp_path / "run")


@pytest.mark.slow
def test_the_source_may_go_once_a_run_has_trained(write, text, tmp_path):
    source, run = tmp_path / "mine.jsonl", tmp_path / "run"
    source.write_bytes(text.read_bytes())
    recipe = write(data={"sources": [str(source)]}, budget={"steps": 4})
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    source.unlink()
    assert cli.main(["train", "--resume", str(run)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[], [""], ["alpha", ""]])
def test_empty_prompts(prompts, text, tmp_path):
    settings = {"sample_prompts": prompts, "sample_tokens": 3}
    result = train(runs.recipe(text, budget={"steps": 2}, run=settings), tmp_path / "run")
    drawn = [(sample["prompt"], sample["depth"]) for sample in result.samples]
    assert drawn == [(prompt, depth) for prompt in prompts for depth in (1, 2, 3, 4, 8)]
    assert all(isinstance(sample["text"], str) for sample in result.samples)


def test_processes_that_were_started_without_torchrun(write, fails, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert "MASTER_ADDR, MASTER_PORT is not set" in fails(write(), "--out", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_single_process_of_torchrun_is_one_process(parallel, text, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    recipe = runs.recipe(text, budget={"steps": 2}, run={"parallel": parallel})
    assert train(recipe, tmp_path / "run").processes == 1


def command(words, rank, size, port, log):
    """The command as one process of several, its standard error in a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with log.open("w") as sys.stderr:
        sys.exit(cli.main(["train", *words]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"data": {"global_batch": 3, "micro_batch": 1}}, ["cannot be divided evenly among 2"] * 2),
        ({"data": {"sources": ["none.txt"]}}, ["none.txt: no such file", "another process"]),
    ],
)
def test_two_processes_end_together(changes, messages, write, tmp_path):
    """None waits for one that has given up, and nobody shows a traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(write(**changes)), "--out", str(tmp_path / "run")]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    context = runs.clean_processes()
    workers = [
        context.Process(target=command, args=(words, rank, 2, port, logs[rank]))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker, log, message in zip(workers, logs, messages, strict=True):
        worker.join(timeout=60)
        assert worker.exitcode == 2, log.read_text()
        assert message in log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_the_recipe_of_a_run_reads_back(text, tmp_path):
    recipe = runs.recipe(text, budget={"steps": 2}, run={"precision": "float32"})
    train(recipe, tmp_path / "run")
    from parcae.training.run import read_recipe

    assert recipe_to_dict(read_recipe(tmp_path / "run")) == recipe_to_dict(recipe)


def test_a_folder_with_files_of_others_is_refused_and_left_alone(write, fails, tmp_path):
    mine = tmp_path / "mine"
    (mine / "data").mkdir(parents=True)
    (mine / "data" / "text.jsonl").write_text("{}")
    (mine / "recipe.toml").write_text("# my own\n")
    before = {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    assert "is not a run folder" in fails(write(), "--out", mine)
    assert before.items() <= {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}.items()


@pytest.mark.slow
def test_a_run_goes_on_from_another_folder(text, tmp_path, monkeypatch):
    """Paths of the recipe are relative to where it was started."""
    monkeypatch.chdir(text.parent)
    recipe = runs.recipe(text, budget={"steps": 4}, data={"sources": [text.name]})
    train(recipe, tmp_path / "run")
    monkeypatch.chdir("/")
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_a_warm_up_beyond_the_run_is_said(tmp_path, text, capsys):
    recipe = runs.recipe(text, budget={"steps": 2}, schedule={"warmup_steps": 1000})
    train(recipe, tmp_path / "run")
    assert "1,000 steps are more than the run has" in capsys.readouterr().out
