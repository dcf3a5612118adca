"""`parcae.compare`: any number of runs and evaluations in one table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import fake_runs as fakes
import parcae
from parcae.cli import main
from parcae.config import ConfigError
from parcae.files import FileError, write_json, write_sealed
from parcae.recipe import write_toml


def evaluate(folder: Path, right: list[int], checkpoint: str = "step-00000060") -> Path:
    """An evaluation at T = 1 and T = 8 with as many questions as `right` has entries."""
    tasks = {"copa": {"baseline": 50.0}}
    accuracy = 100 * sum(right) / len(right)
    score = {"score": (accuracy - 50) / 50}
    suites = {"core": {"tasks": tasks, "by_loops": {"1": score, "8": score}}}
    result = {"checkpoint": checkpoint, "looped": True, "loops": [1, 8], "context_length": 64}
    write_json(folder / "result.json", {**result, "suites": suites})
    write_sealed(folder / "settings.json", {"loops": [1, 8]})
    records = [
        {"task": "copa", "seed": 1, "index": i, "data": "d", "loops": [1, 8], "credit": [x, x]}
        for i, x in enumerate(right)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "samples.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two evaluated runs, one that was not evaluated, and an evaluation of a model elsewhere."""
    root = tmp_path_factory.mktemp("runs")
    runs = [fakes.looped_run(root / name) for name in ("a", "b")]
    evaluate(runs[0] / "evaluation", [1, 1, 0, 1, 0, 1])
    evaluate(runs[1] / "evaluation", [1, 0, 0, 1, 0, 0])
    runs.append(fakes.transformer_run(root / "baseline <b>"))
    return [*runs, evaluate(root / "elsewhere", [1, 1, 1, 1, 0, 1])]


def test_one_row_per_run_with_what_is_known(folders):
    comparison = parcae.compare(*folders)
    rows = comparison.table()
    assert [row["run"] for row in rows] == ["a", "b", "baseline <b>", "elsewhere"]
    assert [row["loops"] for row in rows] == [8, 8, 1, 8]
    result = json.loads((folders[0] / "result.json").read_text())
    assert rows[0]["loss"] == result["validation"]["8"]["loss"]
    assert rows[0]["tokens"] == result["tokens"]
    assert rows[3]["loss"] is rows[3]["tokens"] is rows[2]["core"] is None
    assert [row["core"] for row in rows] == pytest.approx([1 / 3, -1 / 3, None, 2 / 3])
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert rows[0]["core_error"] == pytest.approx(2 * (4 / 6 * 2 / 6 / 5) ** 0.5)


def test_evaluated_runs_are_compared_with_the_first(folders):
    comparison = parcae.compare(*folders)
    found = {(row["run"], row["task"]): row["difference"] for row in comparison.differences()}
    assert found["b", "copa"] == pytest.approx(-2 / 6)
    assert found["elsewhere", "copa"] == pytest.approx(1 / 6)
    assert comparison.notes == []


def test_text_formats_have_the_same_values(folders):
    comparison = parcae.compare(*folders)
    rows = list(csv.DictReader(io.StringIO(comparison.format("csv"))))
    assert [float(row["loss"] or "nan") for row in rows][:3] == [
        row["loss"] for row in comparison.table()[:3]
    ]
    markdown, latex = comparison.format("markdown"), comparison.format("latex")
    assert "baseline &lt;b>" in markdown
    assert r"baseline \textless{}b\textgreater{}" in latex
    assert "**0.7** ± 0.3" in markdown
    assert r"\textbf{0.7} $\pm$ 0.3" in latex
    assert markdown.count("\n") == 2 + 4


def test_an_evaluation_is_compared_at_the_mean_loops_of_its_training(folders, tmp_path):
    folder = evaluate(tmp_path / "scores", [1, 1, 0, 1, 0, 1])
    result = json.loads((folder / "result.json").read_text())
    write_json(folder / "result.json", {**result, "mean_loops": 1})
    comparison = parcae.compare(folder, folders[3])
    assert [row["loops"] for row in comparison.table()] == [1, 8]
    assert comparison.differences()[0]["loops_a"] == 1


def test_loops_can_be_chosen(folders):
    assert [row["loops"] for row in parcae.compare(*folders[:2], loops=(1, 8)).table()] == [1, 8]
    each = parcae.compare(*folders[:2], loops="each")
    assert [row["loops"] for row in each.table()] == [1, 2, 4, 8, 16] * 2
    assert {(row["loops_a"], row["loops_b"]) for row in each.differences()} == {(1, 1), (8, 8)}
    at_four = parcae.compare(*folders[:2], loops=4)
    assert at_four.pairs == []
    assert "not compared item by item with a" in at_four.notes[0]
    with pytest.raises(ConfigError, match="baseline <b> was not scored at 8, but at 1"):
        parcae.compare(*folders[:3], loops=8)
    with pytest.raises(ConfigError, match=r"loops: \(1, 2, 3\) for 2 runs"):
        parcae.compare(*folders[:2], loops=(1, 2, 3))


def test_a_loss_at_other_loops_is_named(tmp_path):
    run = fakes.looped_run(tmp_path / "run")
    evaluate(run / "evaluation", [1, 0])
    (run / "result.json").unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for values in (line.get("losses", {}), line.get("bits_per_byte", {})):
            values.pop("8", None)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    comparison = parcae.compare(run)
    assert "loss" not in comparison.table()[0]
    unfinished, note = comparison.notes
    assert "run has not finished (no result yet): its values are those of step 60." in unfinished
    assert "run was validated in training at T = 1, 2, 4, 16, not at 8" in note
    assert parcae.compare(run, loops="each").notes == [unfinished]


def test_scores_of_an_older_checkpoint_are_named(tmp_path):
    run = fakes.looped_run(tmp_path / "run")
    evaluate(run / "evaluation", [1, 0], "run/checkpoints/step-00000030")
    (run / "checkpoints/step-00000060").mkdir(parents=True)
    (note,) = parcae.compare(run).notes
    assert "run was evaluated at step 30; its newest checkpoint is of step 60" in note


def test_folders_that_cannot_be_compared(tmp_path):
    with pytest.raises(FileError, match="no such folder"):
        parcae.compare(tmp_path / "nowhere")
    with pytest.raises(FileError, match=r"missing\. Give the folder of a run or an evaluation"):
        parcae.compare(tmp_path)
    with pytest.raises(ConfigError, match="none is given"):
        parcae.compare()


@pytest.mark.slow
def test_the_command(folders, capsys):
    arguments = ["compare", *map(str, folders)]
    assert main([*arguments, "--format", "latex"]) == 0
    assert capsys.readouterr().out == parcae.compare(*folders).format("latex")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Difference from the first evaluated run" in shown
    assert "-33.3 ± 21.1" in shown
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pairs"]) == 2
    assert main([*arguments, "--loops", "many"]) == 2
    assert "loops: 'many' is not" in capsys.readouterr().err


@pytest.mark.slow
def test_losses_of_different_held_out_rows_are_named(tmp_path, capsys):
    runs = [fakes.looped_run(tmp_path / name) for name in ("a", "b", "c")]
    for run, documents in zip(runs, ("1", "1", "2"), strict=True):
        state = {"sources": [{"train": "0", "validation": documents}]}
        write_json(run / "checkpoints" / "step-00000060" / "state.json", state)
    assert parcae.compare(*runs[:2]).notes == []
    (note,) = parcae.compare(*runs).notes
    assert "a and c were validated on different rows" in note
    assert "--val-data" in note
    assert "**" in parcae.compare(*runs[:2]).format("markdown")
    assert "**" not in parcae.compare(*runs).format("markdown")
    for arguments in (runs[:2], runs):
        assert main(["compare", *map(str, arguments), "--format", "latex"]) == 0
        assert ("different rows" in capsys.readouterr().err) == (arguments is runs)
    page = parcae.write_report(runs, tmp_path / "report").read_text()
    assert "a and c were validated on different rows" in page
    page = parcae.write_report(runs[:2], tmp_path / "report").read_text()
    assert "validated on different rows" not in page
    recipe = (runs[1] / "recipe.toml").read_text()
    longer = recipe.replace("context_length = ", "context_length = 1")
    assert longer != recipe
    (runs[1] / "recipe.toml").write_text(longer)
    assert len(parcae.compare(*runs[:2]).notes) == 1


@pytest.fixture(scope="module")
def seeded(tmp_path_factory) -> dict[str, Any]:
    """Losses at T = 8 of two recipes with three seeds each, whose runs are in `folder`."""
    root = tmp_path_factory.mktemp("seeded")
    losses = {"a": [3.0, 3.1, 3.3], "b": [3.2, 3.25, 3.6]}
    for name, values in losses.items():
        for seed, loss in enumerate(values):
            folder = fakes.looped_run(root / f"{name}-{seed}")
            changes = {"run": {"seed": seed}, "optimiser": {"lr": 0.01 if name == "a" else 0.02}}
            (folder / "recipe.toml").write_text(write_toml(fakes.recipe(**changes)))
            result = json.loads((folder / "result.json").read_text())
            result["validation"]["8"]["loss"] = loss
            write_sealed(folder / "result.json", result)
    return {"folder": root, **losses}


def test_means_and_paired_differences_over_seeds(seeded):
    """Against scipy, which computes the interval and the p of paired values in another way."""
    comparison = parcae.compare(*sorted(seeded["folder"].iterdir()))
    a, b = (row for row in comparison.seeds if row["metric"] == "loss")
    for row, losses in ((a, seeded["a"]), (b, seeded["b"])):
        test = stats.ttest_1samp(losses, 0).confidence_interval(0.95)
        assert row["seeds"] == 3
        assert row["mean"] - row["mean_error"] == pytest.approx(test.low)
        assert row["mean"] + row["mean_error"] == pytest.approx(test.high)
    test = stats.ttest_rel(seeded["b"], seeded["a"])
    assert b["p"] == pytest.approx(test.pvalue)
    assert b["difference"] + b["difference_error"] == pytest.approx(test.confidence_interval().high)
    assert (a["runs"], b["runs"], b["pairs"]) == ("a-0 and 2 more", "b-0 and 2 more", 3)
    assert a["difference"] is None


def test_one_run_of_each_recipe_has_no_seeds(seeded):
    folder = seeded["folder"]
    assert parcae.compare(folder / "a-0", folder / "b-0").seeds == []
    rows = parcae.compare(folder / "a-0", folder / "a-1", folder / "b-1").seeds
    (b,) = (row for row in rows if row["runs"] == "b-1" and row["metric"] == "loss")
    assert (b["pairs"], b["mean_error"], b["difference_error"]) == (1, None, None)
    assert b["difference"] == pytest.approx(3.25 - 3.1)


def test_every_number_of_loops_is_paired_with_itself(seeded):
    rows = parcae.compare(*sorted(seeded["folder"].iterdir()), loops="each").seeds
    by_loops = {(r["runs"], r["loops"]): r for r in rows if r["metric"] == "loss"}
    assert by_loops["b-0 and 2 more", 8]["difference"] == pytest.approx(0.65 / 3)
    assert by_loops["b-0 and 2 more", 1]["difference"] == 0


def test_the_seeds_are_printed_and_reported(seeded, tmp_path, capsys):
    folders = sorted(map(str, seeded["folder"].iterdir()))
    assert main(["compare", *folders]) == 0
    printed = capsys.readouterr().out
    assert "3.133 ± 0.379" in printed
    assert "bits per byte" in printed
    assert "bits_per_byte" not in printed
    page = parcae.write_report(folders[:2], tmp_path).read_text()
    assert "<h2>Over seeds</h2>" in page
    assert "<h2>Over seeds</h2>" not in parcae.write_report(folders[0], tmp_path).read_text()
