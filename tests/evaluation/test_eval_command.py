"""`parcae eval` from checkpoint to result: killed, resumed, with missing and malformed data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation_fixtures import write_lines
from parcae import cli
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.paired import compare_evaluations
from parcae.evaluation.perplexity import Passages
from parcae.evaluation.results import Samples
from parcae.evaluation.run import score_job
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.tasks import read_items
from parcae.files import FileError

TASKS = {"copa", "winograd", "bigbench_operators", "lambada_openai"}


def evaluate(checkpoint: Path, tasks: Path, out: Path, *arguments: str) -> dict:
    code = cli.main(
        ["eval", str(checkpoint), "--task-data", str(tasks), "--out", str(out), *arguments]
    )
    assert code == 0
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_core_lambada_and_wikitext_at_several_depths(checkpoint, task_folder, tmp_path, capsys):
    result = evaluate(
        checkpoint,
        task_folder,
        tmp_path,
        "--suites",
        "core",
        "lambada,wikitext",
        "--loops",
        "1,2,4",
    )
    core = result["suites"]["core"]
    assert (core["tasks_scored"], core["tasks_wanted"]) == (4, 22)
    assert {name for name, task in core["tasks"].items() if task} == TASKS
    assert set(core["missing"]) == set(core["tasks"]) - TASKS
    assert list(core["by_loops"]) == ["1", "2", "4"]
    for depth, whole in core["by_loops"].items():
        scores = [core["tasks"][name]["by_loops"][depth]["centred"] for name in TASKS]
        assert whole["score"] == pytest.approx(sum(scores) / 4)
        assert set(whole["by_seed"]) == {"1234", "2345", "3456"}
    assert core["baselines"] == "nanochat"
    assert core["tasks"]["copa"]["scored"] == core["tasks"]["copa"]["items"] == 12
    assert result["suites"]["lambada"]["by_loops"]["4"]["perplexity"] > 1
    wikitext = result["suites"]["wikitext"]["by_loops"]["2"]
    assert wikitext["byte_perplexity"] == pytest.approx(2 ** wikitext["bits_per_byte"])
    assert (tmp_path / "scores.png").stat().st_size > 1000
    message = capsys.readouterr().out
    assert "CORE, 4 of 22 tasks" in message
    assert "missing" in message
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == TASKS | {"lambada", "wikitext"}
    shots = [row for row in rows if row["task"] == "bigbench_operators"]
    assert len(shots) == 3 * 14  # ten examples are drawn, so every seed is a measurement
    assert len([row for row in rows if row["task"] == "copa"]) == 12  # nothing is drawn: one


@pytest.mark.slow
def test_a_limit_is_recorded_and_scores_the_same_prompts(checkpoint, task_folder, tmp_path):
    arguments = ("--suites", "core", "--loops", "2")
    whole = evaluate(checkpoint, task_folder, tmp_path / "whole", *arguments)
    some = evaluate(checkpoint, task_folder, tmp_path / "some", *arguments, "--limit", "5")
    assert whole["suites"]["core"]["limit"] is None
    assert some["suites"]["core"]["limit"] == 5
    assert some["suites"]["core"]["tasks"]["copa"]["scored"] == 5

    def losses(folder: str) -> dict:
        lines = (tmp_path / folder / "samples.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        return {(r["task"], r["seed"], r["index"]): r["losses"] for r in rows}

    found, all_found = losses("some"), losses("whole")
    assert found.keys() < all_found.keys()
    for key, value in found.items():
        assert value[0] == pytest.approx(all_found[key][0], abs=1e-5)


@pytest.mark.slow
def test_the_other_baselines_are_named(checkpoint, task_folder, tmp_path):
    arguments = ("--suites", "core-extended", "--limit", "4", "--baselines", "dclm", "--loops", "1")
    result = evaluate(checkpoint, task_folder, tmp_path, *arguments)
    extended = result["suites"]["core-extended"]
    assert extended["baselines"] == "dclm"
    assert extended["tasks_wanted"] == 46


@pytest.mark.slow
def test_a_resumed_evaluation_equals_an_uninterrupted_one(checkpoint, task_folder, tmp_path):
    """Half of the lines, the last one incomplete: the second start computes the rest."""
    arguments = ("--suites", "core", "lambada", "--loops", "1,2")
    whole = evaluate(checkpoint, task_folder, tmp_path / "whole", *arguments)
    shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    torn = tmp_path / "torn/samples.jsonl"
    lines = torn.read_text().splitlines(keepends=True)
    torn.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:20])
    (tmp_path / "torn/result.json").unlink()
    again = evaluate(checkpoint, task_folder, tmp_path / "torn", *arguments)
    assert again["suites"] == whole["suites"]
    assert torn.read_bytes() == (tmp_path / "whole/samples.jsonl").read_bytes()


@pytest.mark.slow
def test_killed_evaluations_resume(checkpoint, task_folder, tmp_path):
    """In processes of its own each time: the number of threads decides the last bits."""
    arguments = ["--suites", "core", "lambada", "--loops", "1,2", "--batch-tokens", "40"]
    command = [sys.executable, "-m", "parcae", "eval", str(checkpoint), "--task-data"]
    command += [str(task_folder), *arguments, "--out"]

    def start(folder: str) -> subprocess.Popen:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, str(tmp_path / folder)], stdout=subprocess.DEVNULL, env=env
        )

    assert start("whole").wait(120) == 0
    samples = tmp_path / "killed/samples.jsonl"
    kills = 0
    for lines in (1, 30, 60):
        process = start("killed")
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if samples.exists() and samples.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
    assert kills >= 1
    assert start("killed").wait(120) == 0
    whole, again = (
        json.loads((tmp_path / folder / "result.json").read_text())["suites"]
        for folder in ("whole", "killed")
    )
    assert again == whole
    assert samples.read_bytes() == (tmp_path / "whole/samples.jsonl").read_bytes()


def test_results_of_another_model_are_not_mixed(checkpoint, task_folder, tmp_path, capsys):
    arguments = ["eval", str(checkpoint), "--task-data", str(task_folder), "--out", str(tmp_path)]
    arguments += ["--suites", "lambada"]
    assert cli.main([*arguments, "--loops", "1"]) == 0
    assert cli.main([*arguments, "--loops", "1", "--state", "like-init"]) == 2
    assert "other model, state" in capsys.readouterr().err
    assert cli.main([*arguments, "--loops", "2", "--overwrite"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["lambada", "wikitext", "core"])
def test_further_depths_are_added(suite, checkpoint, task_folder, tmp_path, monkeypatch):
    """One more depth computes that depth alone; the folder is that of one evaluation at all."""
    arguments = ["eval", str(checkpoint), "--task-data", str(task_folder), "--suites", suite]
    arguments += ["--limit", "3", "--seeds", "1"]
    assert cli.main([*arguments, "--loops", "1,2,4", "--out", str(tmp_path / "whole")]) == 0
    parts, depths = [*arguments, "--out", str(tmp_path / "parts")], set()
    assert cli.main([*parts, "--loops", "2"]) == 0
    inner = LoopedScorer.score

    def score(self, *given):
        depths.add(self.loops)
        return inner(self, *given)

    monkeypatch.setattr(LoopedScorer, "score", score)
    assert cli.main([*parts, "--loops", "1,4"]) == 0
    assert depths == {(1, 4)}
    assert cli.main([*parts, "--loops", "4"]) == 0  # nothing is left to score
    assert depths == {(1, 4)}
    whole, added = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")
    )
    assert added["loops"] == [1, 2, 4]
    assert _rounded(added["suites"]) == _rounded(whole["suites"])
    comparison = compare_evaluations(tmp_path / "whole", tmp_path / "parts", "each")
    for row in comparison.table():
        assert row["difference"] == pytest.approx(0, abs=1e-4)
    assert not comparison.only_in_one


def _rounded(tree):
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return round(tree, 3) if isinstance(tree, float) else tree


@pytest.mark.slow
def test_a_suite_at_further_depths_keeps_the_others(checkpoint, task_folder, tmp_path, capsys):
    arguments = ["eval", str(checkpoint), "--task-data", str(task_folder), "--out", str(tmp_path)]
    assert cli.main([*arguments, "--suites", "lambada", "--limit", "4", "--loops", "1,2"]) == 0
    assert cli.main([*arguments, "--suites", "core", "--limit", "4", "--loops", "3"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loops"] == [1, 2, 3]
    assert result["suites"].keys() == {"lambada", "core"}
    (at_two,) = compare_evaluations(tmp_path, tmp_path, 2).comparisons
    assert "lambada" in at_two["texts"]
    # a killed evaluation of more items and more depths is completed where something is missing
    assert cli.main([*arguments, "--suites", "lambada", "--limit", "6", "--loops", "2,3"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loops"] == [2, 3]
    assert result["suites"]["lambada"]["scored"] == 6
    assert {name: suite["limit"] for name, suite in result["suites"].items()} == {
        "lambada": 6,
        "core": 4,
    }
    assert "Limited to 6 items of each task of lambada." in capsys.readouterr().out


def test_a_changed_task_file_is_scored_again(scorer, tmp_path):
    passages = [("the cat", "sat"), ("one dog", "run")]
    path = tmp_path / "data.jsonl"
    path.write_text("first")
    samples = Samples(tmp_path, {"model": "m"})
    job = Passages("lambada", passages, DataFile(path, "test"))
    assert list(score_job(job, scorer, samples, range(2))) == [0, 2]
    assert not samples.missing(job, scorer.loops)
    path.write_text("second")
    changed = Passages("lambada", passages, DataFile(path, "test"))
    assert samples.missing(changed, scorer.loops) == {scorer.loops: {0, 1}}


def test_a_file_and_its_gz_are_the_same_data(tmp_path):
    rows = [{"query": "the cat"}]
    write_lines(tmp_path / "a.jsonl", rows)
    write_lines(tmp_path / "a.jsonl.gz", rows)
    plain, packed = (DataFile(tmp_path / name, "test") for name in ("a.jsonl", "a.jsonl.gz"))
    assert plain.sha256 == packed.sha256


@pytest.mark.slow
def test_unaligned_answers_are_in_the_result(checkpoint, task_folder, tmp_path, monkeypatch):
    arguments = ("--suites", "core", "--loops", "1", "--limit", "4")
    plain = evaluate(checkpoint, task_folder, tmp_path / "plain", *arguments)
    found = plain["suites"]["core"]["tasks"]["bigbench_operators"]
    assert "share_unaligned" not in found
    encode = LoopedScorer.encode

    def joining(self, text: str) -> list[int]:
        """The second token depends on how many there are."""
        tokens = encode(self, text)
        return [tokens[0], len(tokens) % 7, *tokens[2:]]

    monkeypatch.setattr(LoopedScorer, "encode", joining)
    joined = evaluate(checkpoint, task_folder, tmp_path / "joined", *arguments)
    found = joined["suites"]["core"]["tasks"]["bigbench_operators"]
    assert 0 < found["share_unaligned"] <= 1


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"query": "a", "choices": ["b", "c"]}', "gold"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "gold"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "choices"),
        ('{"query": "a", "choices": "bc", "gold": 0}', "choices"),
        ('{"query": 3, "choices": ["b", "c"], "gold": 0}', "query"),
        ('{"choices": ["b", "c"], "gold": 0}', "query"),
        ('["query"]', "object"),
        ('{"query": "a",', "JSON"),
        ("[" * 100_000, "JSON"),
        (b'{"query": "\xff", "choices": ["b", "c"], "gold": 0}', "UTF-8"),
        ('{"query": "\\ud800", "choices": ["b", "c"], "gold": 0}', "query"),
    ],
)
def test_malformed_lines_name_file_line_and_field(line, field, tmp_path):
    path = tmp_path / "task.jsonl"
    good = b'{"query": "a", "choices": ["b", "c"], "gold": 1}\n'
    path.write_bytes(good + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(FileError, match=field) as caught:
        read_items(path, "multiple_choice")
    assert f"{path}: line 3" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x1f\x8b\x08broken"])
def test_empty_and_truncated_files(content, tmp_path):
    path = tmp_path / ("task.jsonl.gz" if content.startswith(b"\x1f") else "task.jsonl")
    path.write_bytes(content)
    with pytest.raises(FileError, match=str(path)):
        read_items(path, "schema")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "cores"], "Did you mean core"),
        (["--suites", "core"], "--task-data"),
        (["--suites", "core", "--task-data", "/nowhere"], "no such folder"),
        (["--suites", "val"], "--val-data"),
        (["--suites", "lambada", "--loops", "1,x"], "--loops: 'x' is not a whole number"),
        (["--suites", "val", "--loops", "0"], "loops: 0"),
        (["--suites", "lambada", "--limit", "0"], "limit"),
        (["--suites", "val", "--batch-tokens", "0"], "batch_tokens"),
        (["--suites", "val", "--device", "nonsense"], "device: nonsense cannot be used"),
        (["--suites", "val", "--device", "cuda:77"], "device: cuda:77 cannot be used"),
        (["--suites", "val", "--context-length", "65"], "more than the model's 64"),
        (["--suites", "val", "--context-length", "1"], "context: 1 is out of range"),
    ],
)
def test_errors_in_arguments(arguments, message, checkpoint, task_folder, tmp_path, capsys):
    if "lambada" in arguments:
        arguments = [*arguments, "--task-data", str(task_folder)]
    assert cli.main(["eval", str(checkpoint), "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_held_out_texts_of_a_file(checkpoint, tmp_path):
    texts = tmp_path / "held.jsonl"
    texts.write_text('{"text": "the cat sat on a mat"}\n{"text": "one dog run far"}\n')
    arguments = ["eval", str(checkpoint), "--val-data", str(texts), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--loops", "1,4"]) == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    found = result["suites"]["val"]["by_loops"]
    assert found["1"]["bits_per_byte"] > 0
    assert found["1"] != found["4"]
