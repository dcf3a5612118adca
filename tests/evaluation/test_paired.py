"""Comparisons of two evaluations: statistics against scipy, the rest against brute force."""

from __future__ import annotations

import contextlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

import parcae
from evaluation_fixtures import SENTENCE, write_lines
from parcae import cli
from parcae.config import ConfigError, LoopConfig, ModelConfig
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.item_scores import Evaluation, Key, read_evaluation
from parcae.evaluation.metrics import ratio, standard_error
from parcae.evaluation.paired import (
    choose_loops,
    compare_at,
    compare_evaluations,
    only_in_one,
    scores_at,
    sign_test,
)
from parcae.evaluation.results import Samples
from parcae.files import FileError, write_json, write_sealed
from parcae.model import create
from parcae.model.store import save


def evaluation(folder: Path, records: list[dict], loops=(1, 4), suites=None, looped=True) -> Path:
    result = {"checkpoint": folder.name, "looped": looped, "loops": list(loops)}
    write_json(folder / "result.json", {**result, "context_length": 64, "suites": suites or {}})
    write_sealed(folder / "settings.json", {"loops": list(loops)})
    records = [{"loops": list(loops), **record} for record in records]
    write_lines(folder / "samples.jsonl", records)
    return folder


def question(index: int, *credit: float, task="copa", seed=1234, data="d0") -> dict:
    return {"task": task, "seed": seed, "index": index, "data": data, "credit": credit}


def window(index: int, document: int, nats: float, size: int, data="d0") -> dict:
    place = {"task": "val", "seed": None, "index": index, "data": data, "document": document}
    return {**place, "nats": [nats], "tokens": 3, "words": min(size, 1), "bytes": size}


def both(tmp_path: Path, of_a: list[dict], of_b: list[dict], **options):
    return (
        read_evaluation(evaluation(tmp_path / "a", of_a, **options)),
        read_evaluation(evaluation(tmp_path / "b", of_b, **options)),
    )


@pytest.mark.parametrize(
    "counts", [(0, 0), (1, 0), (0, 6), (3, 9), (50, 50), (400, 471), (0, 2000)]
)
def test_the_sign_test_is_that_of_scipy(counts):
    expected = stats.binomtest(counts[0], sum(counts)).pvalue if sum(counts) else 1.0
    assert sign_test(*counts) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_ratio_has_the_error_that_resampling_shows():
    chance = random.Random(5)
    sizes = [chance.randint(10, 3000) for _ in range(300)]
    values = [size * chance.gauss(0.02, 0.05) + chance.gauss(0, 10) for size in sizes]
    found, error = ratio(values, sizes)
    draws = []
    for _ in range(2000):
        rows = chance.choices(range(300), k=300)
        draws.append(sum(values[row] for row in rows) / sum(sizes[row] for row in rows))
    assert found == pytest.approx(sum(values) / sum(sizes))
    assert error == pytest.approx(torch.tensor(draws).std().item(), rel=0.1)
    assert ratio(values, [1] * 300)[1] == pytest.approx(standard_error(values))
    assert ratio([3.0], [2]) == (1.5, None)


def test_counts_and_differences_by_hand(tmp_path):
    """Both right, only A, only B twice, neither, and a tie of two alternatives."""
    of_a = [question(i, 0, c) for i, c in enumerate([1, 1, 0, 0, 0, 0.5])]
    of_b = [question(i, c, 0) for i, c in enumerate([1, 0, 1, 1, 0, 1])]
    found = compare_at(*both(tmp_path, of_a, of_b), (4, 1))["tasks"]["copa"]
    names = ("both_right", "only_a_right", "only_b_right", "neither_right")
    assert [found[name] for name in names] == [1, 1, 3, 1]
    assert found["accuracy"] == {"a": pytest.approx(2.5 / 6), "b": pytest.approx(4 / 6)}
    differences = [0, -1, 1, 1, 0, 0.5]
    assert found["difference"] == pytest.approx(1.5 / 6)
    assert found["standard_error"] == pytest.approx(stats.sem(differences))
    assert found["questions_better"] == {"a": 1, "b": 3}
    assert found["p"] == pytest.approx(stats.binomtest(1, 4).pvalue)


def test_draws_of_one_question_are_not_independent(tmp_path):
    """Three seeds that agree say no more than one."""
    chance = random.Random(1)
    right = [(chance.randint(0, 1), chance.randint(0, 1)) for _ in range(40)]
    of_a, of_b = (
        [question(i, pair[side], seed=s) for i, pair in enumerate(right) for s in (1, 2, 3)]
        for side in (0, 1)
    )
    thrice = compare_at(*both(tmp_path / "3", of_a, of_b, loops=(1,)), (1, 1))["tasks"]["copa"]
    once = compare_at(*both(tmp_path / "1", of_a[::3], of_b[::3], loops=(1,)), (1, 1))["tasks"][
        "copa"
    ]
    assert (thrice["questions"], thrice["answers"], once["answers"]) == (40, 120, 40)
    for name in ("accuracy", "difference", "standard_error", "questions_better", "p"):
        assert thrice[name] == pytest.approx(once[name])
    assert thrice["only_a_right"] == 3 * once["only_a_right"]


def test_items_of_one_side_are_counted(tmp_path):
    of_a = [question(i, 1, 1) for i in range(5)] + [question(0, 1, 1, task="piqa")]
    of_b = [question(i, 1, 1) for i in range(3, 9)] + [question(4, 1, 1, data="other")]
    a, b = both(tmp_path, of_a, of_b)
    assert compare_at(a, b, (1, 1))["tasks"]["copa"]["questions"] == 2
    assert only_in_one(a, b) == {"copa": {"a": 3, "b": 5}, "piqa": {"a": 1, "b": 0}}
    assert only_in_one(a, a) == {}


def test_nothing_in_common_is_an_error(tmp_path):
    a, b = both(tmp_path, [question(0, 1, 1)], [question(0, 1, 1, task="piqa")])
    with pytest.raises(FileError, match=r"no item in common\. A has copa; B has piqa"):
        compare_at(a, b, (1, 1))
    a, b = both(tmp_path, [question(0, 1, 1)], [question(0, 1, 1, data="d1")])
    with pytest.raises(FileError, match=r"copa: the data or the seeds differ"):
        compare_at(a, b, (1, 1))


def test_only_complete_documents_count(tmp_path):
    """Of four documents the second lacks a window, the third its first, the last may lack some."""
    records = [window(0, 0, 1.0, 10), window(1, 0, 2.0, 0), window(2, 1, 4.0, 10)]
    records += [window(4, 1, 8.0, 0), window(6, 2, 16.0, 0), window(7, 3, 32.0, 10)]

    def read(scored: int) -> dict[int, list[float] | None]:
        suites = {"val": {"sha256": "d0", "scored": scored}}
        one = read_evaluation(evaluation(tmp_path / "one", records, (1,), suites))
        return {key.number: item.nats for key, item in one.items["val"].items()}

    assert read(9) == {0: [3.0]}
    assert read(8) == {0: [3.0], 3: [32.0]}


def test_loops_to_compare_at(tmp_path):
    def having(loops: tuple[int, ...], looped: bool = True) -> Evaluation:
        return Evaluation(str(tmp_path), "", looped, loops, 64, {"copa": {}}, {})

    a, b = having((1, 8, 4)), having((2, 4, 1))
    assert choose_loops(a, b, None) == [(8, 4)]
    trained_at_four = replace(a, mean_loops=4)
    assert choose_loops(trained_at_four, replace(b, mean_loops=3), None) == [(4, 4)]
    assert choose_loops(a, b, (8, 2)) == [(8, 2)]
    assert choose_loops(a, b, 4) == [(4, 4)]
    assert choose_loops(a, b, "each") == [(1, 1), (4, 4)]
    assert choose_loops(having((1,), False), b, "each") == [(1, 2), (1, 4), (1, 1)]
    with pytest.raises(ConfigError, match="loops: B was not scored at 8, but at 2, 4, 1"):
        choose_loops(a, b, 8)
    with pytest.raises(ConfigError, match="is not 8"):
        choose_loops(a, b, (1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scored at no common number"):
        choose_loops(a, having((2,)), "each")


def test_folders_that_are_not_evaluations(tmp_path):
    with pytest.raises(FileError, match=r"result\.json: no such file.*`parcae eval`"):
        read_evaluation(tmp_path)
    folder = evaluation(tmp_path / "a", [question(0, 1, 1)])
    assert read_evaluation(folder).items["copa"][Key("d0", 1234, 0)].credit == [1, 1]
    run = tmp_path / "run"  # which has a result.json of its own
    evaluation(run / "evaluation", [question(0, 1, 1)])
    (run / "result.json").write_text("{}")
    assert read_evaluation(run).name == str(run / "evaluation")
    write_sealed(folder / "settings.json", {"loops": [1, 2]})
    with pytest.raises(FileError, match="are of two evaluations"):
        read_evaluation(folder)
    for damaged in ({"task": "copa"}, question(0, 1), {"task": "copa", "document": 3}):
        with pytest.raises(FileError, match=r"result\.json or samples\.jsonl is damaged"):
            read_evaluation(evaluation(tmp_path / "b", [damaged]))
    (folder / "result.json").write_text("[]")
    with pytest.raises(FileError, match=r"result\.json or samples\.jsonl is damaged"):
        read_evaluation(folder)


@pytest.mark.parametrize(
    "line",
    [
        '{"task": ' + "[" * 100_000,
        '{"task": [], "seed": 1, "data": "d", "index": 0, "loops": [1, 4], "credit": [1, 1]}',
        '{"task": "a", "seed": 1, "data": "d", "index": 1e999, "loops": [1, 4], "credit": [1, 1]}',
        '{"task": "a", "seed": 1, "data": "d", "index": 0, "loops": [1e999], "credit": [1]}',
        '{"task": "a", "seed": "1", "data": "d", "index": 0, "loops": [1, 4], "credit": [1, 1]}',
    ],
)
def test_samples_that_are_not(line, tmp_path):
    folder = evaluation(tmp_path, [question(0, 1, 1)])
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(FileError, match=r"samples\.jsonl: line 2 is damaged"):
        Samples(folder, {"loops": [1, 4]})
    with contextlib.suppress(FileError):  # a comparison may have a use for some of them
        read_evaluation(folder)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory) -> Path:
    """Another model, tokenizer and context length: texts fall into other windows."""
    tokenizer = Tokenizer.train([SENTENCE] * 50, size=290)
    torch.manual_seed(8)
    loop = LoopConfig(mean_loops=2)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        context_length=40,
        width=32,
        heads=2,
        prelude_layers=1,
        core_layers=1,
        coda_layers=1,
        loop=loop,
    )
    model = create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("other")
    save(model.eval(), folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.slow
def test_the_command_agrees_with_the_results(
    checkpoint, other_checkpoint, task_folder, tmp_path, capsys
):
    results = []
    for name, model, loops in (("a", checkpoint, "1,2,4"), ("b", other_checkpoint, "4,1")):
        arguments = ["eval", str(model), "--suites", "core,lambada,wikitext", "--loops", loops]
        out = tmp_path / name / "evaluation"
        assert cli.main([*arguments, "--task-data", str(task_folder), "--out", str(out)]) == 0
        results.append(json.loads((out / "result.json").read_text())["suites"])
    capsys.readouterr()
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b/evaluation")]
    assert cli.main([*arguments, "--loops", "2,1", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)["pairs"]
    assert printed["only_in_one"] == {}
    (found,) = printed["comparisons"]
    assert found["loops"] == {"a": 2, "b": 1}
    for side, suites, t in zip("ab", results, "21", strict=True):
        scored = {name: task for name, task in suites["core"]["tasks"].items() if task}
        scored["lambada"] = suites["lambada"]
        assert found["tasks"].keys() == scored.keys()
        for name, task in scored.items():
            accuracy = found["tasks"][name]["accuracy"][side]
            assert accuracy == pytest.approx(task["by_loops"][t]["accuracy"])
        nats = {name: text["nats"][side] for name, text in found["texts"].items()}
        bits = suites["wikitext"]["by_loops"][t]["bits_per_byte"]
        assert nats["wikitext"] == pytest.approx(bits * math.log(2))
        perplexity = suites["lambada"]["by_loops"][t]["perplexity"]
        assert nats["lambada"] == pytest.approx(math.log(perplexity))
    assert found["texts"]["wikitext"]["items"] == 2
    assert found["tasks"]["bigbench_operators"]["answers"] == 14 * 3

    assert cli.main([*arguments, "--loops", "each"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{letter}, T={t}" in shown for letter in "AB" for t in (1, 4))
    assert "T=2" not in shown
    assert "14 × 3" in shown
    assert "64 and 40 tokens" in shown
    assert "nats per byte" in shown


@pytest.mark.slow
def test_scores_have_the_error_of_their_items(tmp_path):
    """CORE by hand; perplexity against many evaluations of other texts."""
    tasks = {"copa": {"baseline": 50.0}, "piqa": {"baseline": 0.0}, "missing": None}
    core = {"tasks": tasks, "by_loops": {"1": {"score": 0.4}, "4": None}}
    records = [question(i, i % 2, 1, task=t) for t in ("copa", "piqa") for i in range(8)]
    one = read_evaluation(evaluation(tmp_path / "a", records, suites={"core": core}))
    error = stats.sem([i % 2 for i in range(8)])
    assert scores_at(one, 1) == {"core": (0.4, pytest.approx((4 * error**2 + error**2) ** 0.5 / 2))}
    assert scores_at(one, 4) == {}

    def score(seed: int) -> tuple[float, float]:
        chance = random.Random(seed)
        sizes = [chance.randint(20, 400) for _ in range(80)]
        nats = [size * chance.gauss(2.0, 0.3) for size in sizes]
        perplexity = math.exp(sum(nats) / sum(sizes))
        suites = {
            "val": {"scored": 80, "sha256": "d0", "by_loops": {"1": {"perplexity": perplexity}}}
        }
        texts = [window(i, i, n, s) for i, (n, s) in enumerate(zip(nats, sizes, strict=True))]
        read = read_evaluation(evaluation(tmp_path / "v", texts, (1,), suites))
        return scores_at(read, 1)["val"]

    drawn = [score(seed) for seed in range(200)]
    spread = torch.tensor([value for value, _ in drawn]).std().item()
    assert stats.trim_mean([error for _, error in drawn], 0.1) == pytest.approx(spread, rel=0.15)


@pytest.mark.slow
def test_items_of_one_side_are_printed(checkpoint, task_folder, tmp_path, capsys):
    for name, arguments in (("a", ["lambada,wikitext"]), ("b", ["lambada", "--limit", "4"])):
        out = ["--out", str(tmp_path / name), "--task-data", str(task_folder), "--loops", "1"]
        assert cli.main(["eval", str(checkpoint), *out, "--suites", *arguments]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert "Items that only A has, not compared: lambada (6), wikitext (2)." in shown
    assert "only B has" not in shown
    assert "+0.0 ± 0.0" in shown
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--loops", "2"]) == 2
    assert "loops: a was not scored at 2, but at 1" in capsys.readouterr().err


def test_tasks_that_were_not_scored_at_a_depth_are_named(tmp_path, capsys):
    """Of an evaluation in several parts, each at other numbers of loops."""
    of_a = [question(i, 1, 0) for i in range(4)]
    partial = {**question(0, 1, task="piqa"), "loops": [1]}
    for name in "ab":
        evaluation(tmp_path / name, [*of_a, partial])
    comparison = compare_evaluations(tmp_path / "a", tmp_path / "b")
    (entry,) = comparison.comparisons
    assert list(entry["tasks"]) == ["copa"]
    assert "scored at 4 loops" in entry["left_out"]["piqa"]
    (entry,) = compare_evaluations(tmp_path / "a", tmp_path / "b", 1).comparisons
    assert list(entry["tasks"]) == ["copa", "piqa"]
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "Not compared: piqa" in capsys.readouterr().out


def test_the_means_of_suites_are_compared(tmp_path, capsys):
    tasks = {"copa": {"baseline": 50.0}, "piqa": {"baseline": 0.0}, "missing": None}
    suites = {"core": {"baselines": "nanochat", "tasks": tasks, "by_loops": {}}}
    of_a = [question(i, i % 2, task=task) for task in ("copa", "piqa") for i in range(8)]
    of_b = [question(i, i % 4 > 0, task=task) for task in ("copa", "piqa") for i in range(8)]
    a, b = both(tmp_path, of_a, of_b, loops=(1,), suites=suites)
    (core,) = compare_at(a, b, (1, 1))["suites"].values()
    assert core["score"] == {
        "a": pytest.approx((0 + 0.5) / 2),
        "b": pytest.approx((0.5 + 0.75) / 2),
    }
    assert core["difference"] == pytest.approx(0.375)
    differences = [(i % 4 > 0) - (i % 2) for i in range(8)]
    error = standard_error(differences)
    assert core["standard_error"] == pytest.approx((4 * error**2 + error**2) ** 0.5 / 2)
    assert (core["tasks"], core["tasks_wanted"]) == (2, 3)
    rows = parcae.compare(tmp_path / "a", tmp_path / "b").differences()
    assert [row["task"] for row in rows] == ["copa", "piqa", "core"]
    assert {row["run"] for row in rows} == {"b"}
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "2 of 3" in capsys.readouterr().out
