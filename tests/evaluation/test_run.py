"""`parcae.evaluate` and `parcae.compare` from Python: paths and models in memory, no files."""

from __future__ import annotations

import json

import pytest
import torch

import parcae
from parcae import evaluate
from parcae.cli import main
from parcae.config import ConfigError
from parcae.evaluation import tables
from parcae.evaluation.item_scores import read_evaluation
from parcae.evaluation.paired import compare_evaluations
from parcae.evaluation.results import parse_record
from parcae.evaluation.suites import SUITES
from parcae.files import FileError

OPTIONS = {"loops": (1, 2), "limit": 4, "seeds": (7, 8)}


@pytest.fixture(scope="module")
def result(small_model, small_tokenizer, task_folder):
    suites = ("core", "lambada", "wikitext")
    return parcae.evaluate(
        small_model, suites, tokenizer=small_tokenizer, task_data=task_folder, **OPTIONS
    )


@pytest.mark.slow
def test_a_model_in_memory_scores_like_its_folder(result, checkpoint, task_folder, tmp_path):
    suites = ["core", "lambada", "wikitext"]
    saved = parcae.evaluate(checkpoint, suites, task_data=task_folder, out=tmp_path, **OPTIONS)
    assert saved.suites == result.suites
    assert (result.folder, result.files()) == (None, [])
    names = ["result.json", "samples.jsonl", "scores.png"]
    assert [path.name for path in saved.files()] == names
    assert json.loads((tmp_path / "result.json").read_text()) == saved.to_json()
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [parse_record(line) for line in lines] == list(result.records)


def test_samples_are_sorted_and_verified_when_nothing_is_left_to_score(
    checkpoint, task_folder, tmp_path
):
    def evaluate():
        parcae.evaluate(checkpoint, "lambada", task_data=task_folder, out=tmp_path, limit=3)

    evaluate()
    path = tmp_path / "samples.jsonl"
    text = path.read_text()
    first, *rest = text.splitlines(keepends=True)
    path.write_text("".join([*rest, first]))  # as a process leaves it that is killed at the end
    evaluate()
    assert path.read_text() == text
    path.write_text(text.replace('"nats": [', '"nats": [1', 1))
    with pytest.raises(FileError, match=r"samples\.jsonl: line 1 is damaged"):
        evaluate()


def test_nothing_is_written_without_out(result, tmp_path, monkeypatch, checkpoint, task_folder):
    before = sorted(checkpoint.rglob("*"))
    monkeypatch.chdir(tmp_path)
    parcae.evaluate(checkpoint, "lambada", task_data=task_folder, limit=2)
    assert sorted(checkpoint.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_row_for_each_metric(result):
    rows = result.table()
    assert all(list(row) == ["suite", "task", "loops", "metric", "value"] for row in rows)
    by_key = {
        (row["suite"], row["task"], row["loops"], row["metric"]): row["value"] for row in rows
    }
    assert len(by_key) == len(rows)
    core = result.suites["core"]
    assert by_key["core", None, 2, "score"] == core["by_loops"]["2"]["score"]
    assert by_key["core", "copa", 1, "centred"] == core["tasks"]["copa"]["by_loops"]["1"]["centred"]
    wikitext = result.suites["wikitext"]["by_loops"]["2"]
    assert by_key["wikitext", None, 2, "bits_per_byte"] == wikitext["bits_per_byte"]
    assert {row["task"] for row in rows} == {
        None,
        "copa",
        "winograd",
        "bigbench_operators",
        "lambada_openai",
    }


def test_results_in_memory_are_compared(result):
    comparison = compare_evaluations(result, result, (1, 2))
    assert comparison.only_in_one == {}
    rows = {(row["task"], row["metric"]): row for row in comparison.table()}
    copa = rows["copa", "accuracy"]
    assert copa["a"] == result.suites["core"]["tasks"]["copa"]["by_loops"]["1"]["accuracy"]
    assert copa["difference"] == pytest.approx(copa["b"] - copa["a"])
    assert rows["wikitext", "nats per byte"]["p"] is None
    assert rows["lambada", "nats per word"]["items"] == 4
    assert len(compare_evaluations(result, result, "each").comparisons) == 2


def test_products_in_bfloat16_change_scores_slightly(small_model, small_tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 20)
    options = {"tokenizer": small_tokenizer, "val_data": text, "loops": 2, "out": tmp_path / "out"}

    def loss(precision):
        return parcae.evaluate(small_model, "val", precision=precision, **options).suites["val"][
            "by_loops"
        ]["2"]["loss"]

    exact = loss("float32")
    with pytest.raises(FileError, match="holds an evaluation with another model"):
        loss("bfloat16")  # which do not continue scores in float32
    options["overwrite"] = True
    rounded = loss("bfloat16")
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)
    with pytest.raises(ConfigError, match=r"^precision: 'float8'\. Known: float32, bfloat16\."):
        loss("float8")


def test_progress_is_reported(small_model, small_tokenizer, task_folder):
    seen = []
    options = {"tokenizer": small_tokenizer, "task_data": task_folder, "progress": seen.append}
    parcae.evaluate(small_model, ["lambada", "core"], loops=1, seeds=(1, 2), **options)
    assert (seen[0].task, seen[0].loops) == ("", (1,))
    tasks = list(dict.fromkeys(progress.task for progress in seen[1:]))
    assert tasks[0] == "lambada"
    assert {"bigbench_operators, seed 1", "bigbench_operators, seed 2"} < set(tasks)
    last = {progress.task: progress for progress in seen[1:]}
    assert all(progress.items_done == progress.items for progress in last.values())
    assert seen[-1].tokens_done == pytest.approx(seen[-1].tokens, abs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suites": "cores"}, "Did you mean core"),
        ({"suites": ()}, ", ".join(SUITES)),
        ({"suites": "core"}, "`task_data`"),
        ({"val_data": "a.txt", "tokenizer": None}, "tokenizer: a model in memory needs one"),
        ({"best": True}, "a model in memory has no checkpoints"),
        ({"limit": 0}, "limit: 0 is out of range. It must be at least 1"),
        ({"baselines": "mine"}, "Known: nanochat, dclm"),
        ({}, "val: model is not a run"),
    ],
)
def test_mistakes(options, message, small_model, small_tokenizer):
    with pytest.raises(ConfigError) as caught:
        parcae.evaluate(small_model, **{"tokenizer": small_tokenizer, **options})
    assert message in str(caught.value)


def test_the_figure_states_the_number_of_items(small_model, small_tokenizer, task_folder):
    result = parcae.evaluate(
        small_model,
        ("core", "lambada"),
        loops=(1, 2),
        task_data=task_folder,
        limit=2,
        seeds=[1],
        tokenizer=small_tokenizer,
    )
    core, lambada = (panel[0] for panel in tables._panels(result))
    assert core == "CORE, 4 of 22 tasks\n8 items"
    assert lambada == "LAMBADA\n2 items"


def own_tasks(folder, extra=""):
    questions = [
        {
            "question": "the cat sat on a",
            "choices": ["mat", "dog run", "home"],
            "answer": "dog run",
        },
        {"question": "one dog", "choices": ["run far", "rain"], "answer": 1},
    ]
    path = folder / "pets.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions) + extra)
    return path


def test_own_questions_are_scored_at_all_depths(checkpoint, small_model, small_tokenizer, tmp_path):
    path = own_tasks(tmp_path)
    result = evaluate(checkpoint, tasks=path, loops=(1, 4), out=tmp_path / "out")
    assert list(result.suites) == ["own"]
    assert "<th>T=1</th><th>T=4</th>" in result._repr_html_()

    def nats(question, choice, loops):
        context = [small_tokenizer.bos, *small_tokenizer.encode(question)]
        answer = small_tokenizer.encode(f" {choice}")
        tokens = torch.tensor([context + answer])
        logits = small_model(tokens[:, :-1], loops=loops, state="zero").logits[0, -len(answer) :]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        return losses.item()

    for loops in (1, 4):
        right = [
            min(choices, key=lambda choice: nats(question, choice, loops)) == answer
            for question, choices, answer in (
                ("the cat sat on a", ("mat", "dog run", "home"), "dog run"),
                ("one dog", ("run far", "rain"), "rain"),
            )
        ]
        assert result.suites["own"]["by_loops"][str(loops)]["score"] == sum(right) / 2
    again = evaluate(checkpoint, tasks=path, loops=2, out=tmp_path / "out")
    assert again.loops == (1, 2, 4)
    path.write_text(path.read_text().splitlines()[0] + "\n")  # other data under the same name
    other = evaluate(checkpoint, tasks=[path], loops=2, out=tmp_path / "out")
    assert other.suites["own"]["tasks"]["pets"]["scored"] == 1
    assert len(read_evaluation(tmp_path / "out").items["own/pets"]) == 1
    comparison = parcae.compare(tmp_path / "out", result_of(checkpoint, path), loops=2)
    assert {row["task"] for row in comparison.differences()} == {"own/pets", "own"}
    assert comparison.table()[0]["own"] == other.suites["own"]["by_loops"]["2"]["score"]
    assert "Own tasks" in comparison.format("markdown")


def result_of(checkpoint, path):
    return evaluate(checkpoint, tasks=path, loops=2, out=path.parent / "second").folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not valid JSON"),
        ('{"question": "a", "choices": ["b", "c"]}', "line 3, field answer: missing"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "field choices: 1 entries"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "2 is not an index from 0 to 1"),
        ('{"question": "a", "choices": ["b", "c"], "answer": "d"}', "'d' is not exactly one of"),
        ('{"question": "a", "choices": ["b", "b"], "answer": "b"}', "'b' is not exactly one of"),
        (
            '{"question": 1, "choices": ["b", "c"], "answer": 0}',
            "field question: 1 is not a string",
        ),
    ],
)
def test_bad_lines_of_own_questions_are_named(line, message, checkpoint, tmp_path, capsys):
    path = own_tasks(tmp_path, line + "\n")
    assert main(["eval", str(checkpoint), "--tasks", str(path), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert f"{path}: line 3" in error
    assert message in error


def test_files_of_own_questions_must_exist_and_differ_in_name(checkpoint, tmp_path):
    path = own_tasks(tmp_path)
    with pytest.raises(FileError, match=r"no such file\. Give a file of questions"):
        evaluate(checkpoint, tasks=[path, tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match="two files are called 'pets'"):
        evaluate(checkpoint, tasks=[path, path])
    with pytest.raises(ConfigError, match="own needs files of questions"):
        evaluate(checkpoint, "own")
