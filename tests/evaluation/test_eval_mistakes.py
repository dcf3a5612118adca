"""Errors of data, models and disks are one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evaluation_fixtures import WORDS, write_lines
from parcae import cli, console
from parcae.evaluation.core_suite import Questions
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.perplexity import read_wikitext
from parcae.evaluation.prompts import Prompt, Span
from parcae.evaluation.results import EvaluationResult, Samples
from parcae.evaluation.scorer import LoopedScorer, read_predictions
from parcae.evaluation.tables import published_scores, tables
from parcae.evaluation.tasks import read_items, tasks_named
from parcae.files import FileError
from parcae.infer.network import TorchNetwork
from parcae.infer.sampling import NonFiniteLogits
from parcae.model.store import save
from parcae.runs import load


def test_a_file_with_fewer_questions_than_examples_is_named(tmp_path):
    (task,) = tasks_named(["bigbench_operators"])
    path = tmp_path / "short.jsonl"
    write_lines(path, [{"context": word, "continuation": "x"} for word in WORDS[:10]])
    with pytest.raises(FileError, match=r"short.jsonl: 10 questions are too few"):
        Questions(task, DataFile(path, "test"))


@pytest.mark.parametrize("kind", ["multiple_choice", "schema"])
def test_half_of_a_surrogate_pair_is_an_error(kind, tmp_path):
    path = tmp_path / "task.jsonl"
    field = "choices" if kind == "multiple_choice" else "context_options"
    row = {"query": "a", "continuation": "a", field: ["b", "\ud800"], "gold": 0}
    path.write_text(json.dumps(row))
    with pytest.raises(FileError, match=f"line 1, field {field}: contains half of a surrogate"):
        read_items(path, kind)


def test_damaged_wikitext(tmp_path):
    path = tmp_path / "wiki.test.raw.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40)
    with pytest.raises(FileError, match="not a complete gzip file"):
        read_wikitext(path)


def test_a_file_without_text(checkpoint, tmp_path, capsys):
    path = tmp_path / "held.jsonl"
    path.write_text('{"text": ""}\n')
    arguments = ["eval", str(checkpoint), "--val-data", str(path), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "contains no text" in capsys.readouterr().err


def test_a_diverged_model_is_reported_with_its_loops(checkpoint, task_folder, tmp_path, capsys):
    model = load(checkpoint)
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    save(model, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    arguments = ["eval", str(tmp_path / "model"), "--suites", "lambada", "--loops", "2,3"]
    assert cli.main([*arguments, "--task-data", str(task_folder), "--out", str(tmp_path)]) == 2
    assert "at 2 loops, logits: not a number" in capsys.readouterr().err


@pytest.mark.slow
def test_divergence_at_one_depth_keeps_the_others(
    checkpoint, task_folder, tmp_path, monkeypatch, capsys
):
    def evaluate(loops: str, out: Path) -> dict:
        arguments = ["eval", str(checkpoint), "--suites", "core,zero-shot,lambada", "--limit", "3"]
        arguments += ["--task-data", str(task_folder), "--loops", loops, "--out", str(out)]
        assert cli.main(arguments) == 0
        return json.loads((out / "result.json").read_text())["suites"]

    sound = evaluate("2", tmp_path / "sound")
    run_loops = TorchNetwork.run_loops

    def overflows(network, h, drive, work, cache, loops):
        return run_loops(network, h, drive, work, cache, loops) * (torch.inf if 3 in loops else 1)

    monkeypatch.setattr(TorchNetwork, "run_loops", overflows)
    capsys.readouterr()
    found = evaluate("2,3", tmp_path / "lost")
    assert "the model diverged: T=3." in capsys.readouterr().out
    for suite, expected in sound.items():
        assert found[suite]["by_loops"]["2"] == expected["by_loops"]["2"]
        assert found[suite]["by_loops"]["3"] is None
        for task, held in found[suite].get("tasks", {}).items():
            if held is not None:
                assert held["by_loops"] == {**expected["tasks"][task]["by_loops"], "3": None}
    both = ["compare", str(tmp_path / "sound"), str(tmp_path / "lost")]
    assert cli.main([*both, "--loops", "2,2"]) == 0
    capsys.readouterr()
    assert cli.main([*both, "--loops", "2,3"]) == 0
    printed = capsys.readouterr()
    assert "a model diverged at this number" in printed.out + printed.err


def test_a_target_with_probability_zero_is_an_error():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    with pytest.raises(NonFiniteLogits, match="minus infinity"):
        read_predictions(lambda x: x, logits, torch.tensor([2]), 3)


def test_no_suite_and_a_seed_twice(checkpoint, task_folder, tmp_path, capsys):
    arguments = ["eval", str(checkpoint), "--task-data", str(task_folder), "--out", str(tmp_path)]
    assert cli.main([*arguments, "--suites", ","]) == 2
    assert "--suites: ',' is an empty list" in capsys.readouterr().err
    twice = ["--suites", "core", "--loops", "1", "--limit", "2", "--seeds", "7,7"]
    assert cli.main([*arguments, *twice]) == 0
    core = json.loads((tmp_path / "result.json").read_text())["suites"]["core"]
    assert core["seeds"] == [7]
    assert core["by_loops"]["1"]["deviation"] is None


@pytest.mark.slow
def test_again_drops_earlier_results(checkpoint, task_folder, tmp_path, monkeypatch):
    arguments = ["eval", str(checkpoint), "--task-data", str(task_folder), "--out", str(tmp_path)]
    arguments += ["--suites", "lambada", "--loops", "1,2"]
    assert cli.main(arguments) == 0
    assert (tmp_path / "scores.png").exists()
    monkeypatch.setattr(LoopedScorer, "score", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main([*arguments, "--overwrite"]) == 130
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "scores.png").exists()


def test_a_mistake_keeps_the_results_to_overwrite(checkpoint, task_folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["eval", str(checkpoint), "--out", str(out), "--loops", "1"]
    assert cli.main([*arguments, "--task-data", str(task_folder), "--suites", "lambada"]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    misspelt = ["--val-data", str(tmp_path / "txet.txt"), "--overwrite"]
    assert cli.main([*arguments, *misspelt]) == 2
    assert "txet.txt" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_a_full_disk(scorer, task_folder, tmp_path, monkeypatch):
    samples = Samples(tmp_path, {"model": "m"})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open", full)
    job = type("Job", (), {"name": "a", "seed": None, "fingerprint": "0" * 64})()
    with pytest.raises(FileError, match=r"No space left.*are kept; free some space"):
        samples.add(job, {0: {}}, (1,))


def test_answers_of_equal_tokens_share_the_credit_exactly(scorer):
    """Alternatives that are the same tokens are computed once, so they tie to the last bit."""
    tokens = (0, *scorer.encode("the cat sat on"))
    prompt = Prompt((tokens,) * 3, (Span(3, len(tokens)),) * 3, (len(tokens),) * 3)
    ((first, second, third),) = scorer.score([prompt])
    assert torch.equal(first.nats, second.nats)
    assert torch.equal(first.nats, third.nats)


def test_published_scores_are_centred_by_the_same_baselines(shared_data: Path):
    folder = shared_data / "data"
    theirs, anew = published_scores(folder), published_scores(folder, "dclm")
    assert list(theirs) == ["GPT-2", "GPT-2 medium", "GPT-2 large", "GPT-2 XL"]
    for name in theirs:
        assert anew[name]["arc_easy"] == pytest.approx(theirs[name]["arc_easy"], abs=2e-6)
        assert anew[name]["commonsense_qa"] < theirs[name]["commonsense_qa"]  # 40.3, not 20
        tasks = [score for task, score in anew[name].items() if task != "CORE"]
        assert anew[name]["CORE"] == pytest.approx(sum(tasks) / 22)
        assert anew[name]["CORE"] < theirs[name]["CORE"]


def test_unreadable_published_scores_are_omitted(tmp_path):
    path = tmp_path / "openai-community-gpt2.csv"
    path.write_bytes(b"Task,Accuracy,Centered\n\xff\xfe,x\nCORE,,0.25\n")
    assert published_scores(tmp_path) == {"GPT-2": {"CORE": 0.25}}


def test_a_mistyped_path_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert cli.main(["eval", "runs/smok"]) == 2
    assert "runs/smok: no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_without_samples_can_change(checkpoint, task_folder, tmp_path):
    """A folder with settings but without samples can be used at other numbers of loops."""
    Samples(tmp_path, {"loops": [1, 2, 4]})
    arguments = ["eval", str(checkpoint), "--suites", "lambada", "--limit", "2", "--loops", "1,2"]
    assert cli.main([*arguments, "--task-data", str(task_folder), "--out", str(tmp_path)]) == 0


def test_a_narrow_terminal_has_fewer_published_scores(monkeypatch):
    core = {"baselines": "nanochat", "seeds": [1], "tasks_scored": 0, "tasks_wanted": 1}
    core |= {"tasks": {"copa": None}, "by_loops": {"1": None}, "limit": None}
    result = EvaluationResult("model", True, (1,), "zero", 64, None, {"core": core}, 0.0)
    published = {"GPT-2": {"copa": 0.2}, "GPT-2 medium": {"copa": 0.3}}
    for width, columns in ((200, 6), (60, 5), (20, 4)):
        monkeypatch.setattr(console.out, "_width", width)
        monkeypatch.setattr(type(console.out), "is_terminal", True)
        (table,) = tables(result, published)
        assert len(table.columns) == columns
