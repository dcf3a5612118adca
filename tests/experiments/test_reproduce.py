"""The framework of experiments: shared runs, settings that rerun what they change, the page."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path

import pytest

import parcae
from parcae.cli import main
from parcae.config import ConfigError
from parcae.experiments import reproduce as module
from parcae.experiments.experiment import FORMAT, Experiment, Run, loss_at, training_record
from parcae.experiments.page import judge
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, lower
from parcae.files import FileError, write_json
from parcae.training.settings import recipe_from_file, recipe_from_tree


class Loops(Experiment):
    """Two kinds of runs of a task, with one and with four loops."""

    name, title, in_paper, paper = "loops", "Loops", "nowhere", "Nothing."
    loops = (1, 4)

    def runs(self, scale):
        for seed in scale.seeds:
            for loops in self.loops:
                tree = scale.task("pointers", model={"loop": {"mean_loops": loops}})
                yield Run(scale.recipe(tree, seed), {"loops": loops, "seed": seed})

    def claims(self, results):
        few, many = (results.loss(n, loops=n) for n in (1, 4))
        return [Claim("More loops are better", lower(many, few))]

    def draw(self, results, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a figure")
        return path


class MoreLoops(Loops):
    name, title, loops = "more-loops", "More loops", (4, 8)


@pytest.fixture
def trained(monkeypatch):
    """Runs train in this process; the list has the keys of those that were trained."""
    keys = []

    def run(self, requests, observer, stop):
        for request in requests:
            observer.started(request, 1)
            parcae.train(recipe_from_file(request.recipe), request.run)
            keys.append(request.name)
            observer.ended(request, None)

    monkeypatch.setattr("parcae.experiments.store.LocalWorkers.run", run)
    catalogue = {"loops": Loops(), "more-loops": MoreLoops()}
    monkeypatch.setattr(module, "CATALOGUE", catalogue)
    return keys


def reproduce(names, out, **options):
    return parcae.reproduce(names, scale="toy", seeds=1, out=out, **options)


@pytest.mark.slow
def test_runs_are_shared_and_a_setting_reruns_only_what_it_changes(trained, tmp_path):
    first = reproduce("loops", tmp_path)
    assert len(trained) == 2
    assert [row["verdict"] for row in first.table()] == ["toy scale: no verdict"]
    reproduce(["loops", "more-loops"], tmp_path)
    assert len(trained) == 3  # four loops are there already
    reproduce("all", tmp_path)
    assert len(trained) == 3
    with pytest.raises(
        ConfigError, match=r"loops: model\.loop\.mean_loops: the experiment sets it"
    ):
        reproduce("all", tmp_path, overrides={"model": {"loop": {"mean_loops": 2}}})
    reproduce("loops", tmp_path, overrides={"optimiser": {"lr": 1e-3}})
    assert len(trained) == 5
    assert len(set(trained)) == 5


@pytest.mark.slow
def test_results_of_other_settings_stay_in_the_file_and_out_of_the_page(trained, tmp_path):
    results = tmp_path / "results"
    first = reproduce("loops", tmp_path / "runs", results=results)
    before = json.loads((results / "loops.json").read_text())["runs"]
    changed = {"optimiser": {"lr": 1e-3}}
    second = reproduce("loops", tmp_path / "runs", results=results, overrides=changed)
    after = json.loads((results / "loops.json").read_text())["runs"]
    assert [row for row in after if row in before] == before
    assert len(after) == 2 * len(before)
    assert len(second.results["loops"].rows) == len(before)
    again = reproduce("loops", tmp_path / "none", results=results, redraw=True)
    assert again.results["loops"].rows == first.results["loops"].rows
    assert len(trained) == 4


@pytest.mark.slow
def test_redrawing_needs_only_the_results(trained, tmp_path):
    first = reproduce("loops", tmp_path / "runs", results=tmp_path / "results")
    page = tmp_path / "docs" / "page.md"
    again = reproduce(
        "all", tmp_path / "none", results=tmp_path / "results", page=page, redraw=True
    )
    assert len(trained) == 2
    assert again.table()[0] == first.table()[0]
    text = page.read_text()
    assert "| [loops](#loops) | More loops are better |" in text
    assert "![Loops](page/loops.png)" in text
    assert "**1 of 2 experiments have runs (1 complete).**" in text
    assert "`more-loops`, nowhere. Not run yet; `parcae reproduce more-loops --dry-run`" in text
    assert (tmp_path / "docs" / "page" / "loops.png").exists()


@pytest.mark.slow
def test_runs_that_are_measured_are_not_trained_on_another_machine(trained, tmp_path):
    results = tmp_path / "results"
    reproduce("loops", tmp_path / "here", results=results)
    reproduce(["loops", "more-loops"], tmp_path / "there", results=results)
    assert len(trained) == 3  # four loops are measured for the other experiment
    rows = [json.loads((results / f"{name}.json").read_text())["runs"] for name in module.CATALOGUE]
    assert rows[0][1] == rows[1][0]
    reproduce("all", tmp_path / "elsewhere", results=results)
    assert len(trained) == 3


@pytest.mark.slow
def test_other_measurements_need_the_run_itself(trained, tmp_path, monkeypatch):
    def measure(self, run, store):
        return {**training_record(store.folder(run)), "more": 1}

    monkeypatch.setattr(MoreLoops, "measure", measure)
    reproduce("loops", tmp_path / "here", results=tmp_path / "results")
    reproduce("more-loops", tmp_path / "there", results=tmp_path / "results")
    assert len(trained) == 4


@pytest.mark.slow
def test_an_interrupted_run_counts_only_when_it_has_ended(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "has_ended", lambda self, run: False)
    result = reproduce("loops", tmp_path)
    assert result.results["loops"].rows == []
    assert {row["verdict"] for row in result.table()} == {"not run yet"}


@pytest.mark.slow
def test_results_have_a_line_per_run_and_their_cost(trained, tmp_path):
    reproduce("loops", tmp_path)
    lines = (tmp_path / "results" / "loops.json").read_text().splitlines()
    assert len(lines) == 4
    tree = json.loads("\n".join(lines))
    assert tree["planned"] == 2
    assert {row["loops"] for row in tree["runs"]} == {1, 4}
    assert all(row["core_minutes"] > 0 and row["losses"]["4"] > 0 for row in tree["runs"][1:])


@pytest.mark.slow
def test_selected_runs_leave_the_claims_incomplete(trained, tmp_path):
    select = {"loops": 4}
    assert [row["runs"] for row in module.costs("all", scale="toy", select=select)] == [3, 0]
    partial = reproduce("loops", tmp_path, select=select)
    assert len(trained) == 1
    assert partial.results["loops"].values("loops") == [4]
    verdicts = [
        judge(module.CATALOGUE["loops"], partial.results["loops"], scale)[0].verdict
        for scale in ("micro", "toy")
    ]
    assert verdicts == ["incomplete", "toy scale: no verdict"]
    whole = reproduce("loops", tmp_path)
    assert len(trained) == 2
    assert (
        judge(module.CATALOGUE["loops"], whole.results["loops"], "micro")[0].verdict != "incomplete"
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lr-robustness", {"budget": {"steps": 60}}),
        ("lr-robustness", {"optimiser": {"lr": 1e-3}}),
        ("isoflop", {"budget": {"max_minutes": 1}}),
        ("reasoning", {"run": {"seed": 3}}),
    ],
)
def test_what_an_experiment_sets_itself_cannot_be_changed(name, changes):
    with pytest.raises(ConfigError, match=f"{name}: .*: the experiment sets it itself"):
        module.costs(name, overrides=changes)


def test_costs_follow_the_scale_and_the_settings():
    (micro,) = module.costs("rdm-comparison")
    (shorter,) = module.costs("rdm-comparison", overrides={"budget": {"steps": 500}})
    assert micro["flops"] == 2 * shorter["flops"]
    assert micro["core_hours"] > micro["gpu_hours"] == 0
    (paper,) = module.costs("rdm-comparison", scale="paper")
    assert paper["gpu_hours"] > paper["core_hours"] == 0
    rows = {row["experiment"]: row for row in module.costs()}
    assert rows["per-sequence"]["runs"] == 0  # shared with the ablation ladder


def test_tasks_keep_their_source_where_texts_are_replaced():
    scale = Scale("micro", overrides={"data": {"sources": ["builtin"]}})
    assert scale.task("pointers")["data"]["sources"] == ["task:pointers"]
    assert scale.text()["data"]["sources"] == ["builtin"]


def test_the_key_follows_what_is_learned():
    scale = Scale("toy")

    def key(seed=0, **changes):
        return Run(scale.recipe(scale.task("pointers", **changes), seed), {}).key

    assert key() == key(run={"checkpoint_every": 7}, data={"prefetch": 0})
    assert key() == Run(scale.recipe(scale.task("pointers"), 0), {"label": "other"}).key
    others = [key(seed=1), key(budget={"steps": 9}), key(model={"width": 32})]
    others.append(Run(scale.recipe(scale.task("pointers-large"), 0), {}).key)
    assert len({key(), *others}) == 5
    assert key() == key(optimiser={"grad_clip": 1.0})  # the default


def test_the_defaults_that_keys_rely_on():
    """Keys have only settings that differ from their defaults. If this fails because a default
    changed, raise FORMAT: results of the old default do not count any more. Then, or if a setting
    was added whose default changes nothing, replace the number."""
    recipe = recipe_from_tree(
        {"model": {"preset": "parcae-1m"}, "budget": {"steps": 1}, "data": {"sources": ["x"]}}
    )
    tables = {
        name: type(getattr(recipe, name)) for name in ("data", "optimiser", "schedule", "run")
    }
    defaults = {
        name: {f.name: repr(f.default) for f in fields(table)} for name, table in tables.items()
    }
    digest = hashlib.sha256(json.dumps(defaults, sort_keys=True).encode()).hexdigest()[:8]
    assert (FORMAT, digest) == (2, "c02373b8")


def test_settings_of_muon_change_no_run_without_it():
    changed = Scale("micro", overrides={"optimiser": {"muon_lr": 1e-3, "muon_momentum": 0.5}})
    assert changed.rdm() == Scale("micro").rdm()
    assert changed.text()["optimiser"]["muon_lr"] == 1e-3


def test_scales_give_the_sizes_of_the_paper():
    scale = Scale("paper")
    assert scale.recipe(scale.text("parcae", "140m"), 0).model.width == 768
    assert scale.recipe(scale.rdm("rdm", "100m"), 0).optimiser.kind == "adamw-atan2"
    tree = Scale("micro", overrides={"budget": {"tokens": 1e6}}).text()
    assert Scale("micro").recipe(tree, 0).budget.steps is None


@pytest.mark.slow
def test_records_of_a_run(tmp_path):
    scale = Scale("toy")
    parcae.train(scale.recipe(scale.task("pointers"), 0), tmp_path)
    record = training_record(tmp_path)
    assert record["status"] == "finished"
    assert record["training"]["step"] == [1, 2, 3]
    assert 0 < record["telemetry"]["spectral_radius"][-1] < 1
    assert loss_at(record, 4) == record["losses"]["4"]
    assert loss_at({"losses": {}}, 4) == float("inf")
    assert loss_at({"losses": {"1": 2.0}}, 8) == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lops"], "lops: no such experiment."),
        (["reasoning", "--scale", "huge"], "'huge' is not an option."),
        (["reasoning", "--model.widht", "3"], "Did you mean width"),
        (["lr-robustness", "--select", "lr=0.5"], "no run with lr=0.5. It has: lr=0.001 | 0.002"),
        (["lr-robustness", "--select", "rate=1"], "; model=Parcae | RDM, residual norm | RDM, pre"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_texts_must_be_there(tmp_path, monkeypatch):
    monkeypatch.delenv("PARCAE_TEST_DATA", raising=False)
    scale = Scale("micro")
    run = Run(scale.recipe(scale.text(), 0), {})
    with pytest.raises(ConfigError, match="Give --texts"):
        Store(tmp_path).train([run], 1, lambda run: None)
    with pytest.raises(parcae.FileError, match="no such file"):
        Store(tmp_path, Path(tmp_path)).train([run], 1, lambda run: None)


def test_an_experiment_on_texts_alone_needs_them(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PARCAE_TEST_DATA", raising=False)
    assert main(["reproduce", "tokenizer", "--scale", "toy", "--out", str(tmp_path)]) == 0
    assert "tokenizer needs the folder of texts" in capsys.readouterr().out
    page = (tmp_path / "reproduction.md").read_text()
    assert "0.2 million" not in page
    with pytest.raises(FileError, match="nowhere: no such folder"):
        parcae.reproduce("tokenizer", out=tmp_path, texts=tmp_path / "nowhere")


def test_the_list(capsys):
    assert main(["reproduce", "list"]) == 0
    assert "reasoning" in capsys.readouterr().out
    dry_run = ["reproduce", "lr-robustness", "--select", "lr=0.064", "--seeds", "1", "--dry-run"]
    assert main([*dry_run, "--texts", "builtin"]) == 0
    assert "4.03e12" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_train_a_task_and_a_text(tmp_path):
    scale = Scale("toy")
    runs = [Run(scale.recipe(tree, 0), {}) for tree in (scale.task("pointers"), scale.text())]
    store, ended = Store(tmp_path), []
    assert not store.train(runs, 2, lambda run: ended.append(run.key))
    assert {run.key for run in runs} == set(ended)
    assert all(store.has_ended(run) for run in runs)
    assert store.train(runs, 2, lambda run: ended.append(run.key)) is False
    assert len(ended) == 2


def test_a_run_that_fails_is_told_by_the_exit_code(trained, tmp_path, monkeypatch, capsys):
    def fail(self, requests, observer, stop):
        for request in requests:
            observer.ended(request, "No space left on device")

    monkeypatch.setattr("parcae.experiments.store.LocalWorkers.run", fail)
    command = ["reproduce", "loops", "--scale", "toy", "--seeds", "1", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tree: tree.pop("runs"), r"loops\.json: a value is missing or wrong \(no 'runs'\)"),
        (lambda tree: tree["runs"][0].pop("key"), r"loops\.json: a value is missing"),
        (lambda tree: tree["runs"][0].update(core_minutes="1"), r"loops\.json: a value is missing"),
        (lambda tree: tree.update(planned=None), r"loops\.json: a value is missing"),
        (lambda tree: tree["runs"][0].pop("losses"), "the results of loops: a value is missing"),
    ],
)
def test_results_that_were_edited(change, problem, trained, tmp_path):
    rows = [{"key": "a", "core_minutes": 1, "loops": 1, "seed": 0, "losses": {"1": 3.0}}]
    tree = {"experiment": "loops", "planned": 1, "runs": rows}
    change(tree)
    write_json(tmp_path / "results" / "loops.json", tree)
    with pytest.raises(FileError, match=problem):
        reproduce("more-loops", tmp_path, redraw=True)


def test_a_recipe_that_was_changed_is_written_again(tmp_path):
    """A run has the name of its recipe, and would be taken for it."""
    store, run = Store(tmp_path), next(Loops().runs(Scale("toy", 1, {})))
    store._prepare([run])
    path = tmp_path / "recipes" / f"{run.key}.toml"
    text = path.read_text()
    path.write_text(text.replace("mean_loops = 1", "mean_loops = 3"))
    assert path.read_text() != text
    store._prepare([run])
    assert path.read_text() == text


@pytest.mark.parametrize(("given", "trained"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_results_are_in_float32_unless_the_recipe_says_otherwise(given, trained, tmp_path):
    """On every CPU; the key of a run does not say so."""
    changes = {"run": {"device": "cpu", "precision": given}}
    store, run = Store(tmp_path), next(Loops().runs(Scale("toy", 1, changes)))
    store._prepare([run])
    text = (tmp_path / "recipes" / f"{run.key}.toml").read_text()
    assert f'precision = "{trained}"' in text


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', '{"a": {"1-2": []}}'])
def test_processor_times_that_were_edited(content, tmp_path):
    (tmp_path / "cpu.json").write_text(content)
    with pytest.raises(FileError, match=r"cpu\.json: a value is missing or wrong"):
        Store(tmp_path).record_cpu({})


def test_notes_of_other_bytes(trained, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.md").write_bytes(b"caf\xe9")
    with pytest.raises(FileError, match=r"notes\.md: not UTF-8"):
        reproduce("loops", tmp_path, redraw=True)


def test_at_least_one_seed():
    with pytest.raises(ConfigError, match="seeds: 0 is too few"):
        Scale(seed_count=0)
