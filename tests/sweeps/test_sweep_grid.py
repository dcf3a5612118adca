"""The plan of a sweep, against counting by hand; and what a user can get wrong in one."""

from __future__ import annotations

import math

import pytest

import parcae
from parcae.cli import main
from parcae.config import ConfigError
from parcae.model import create
from parcae.recipe import merge, write_toml
from parcae.sweeps.estimate import Estimate, estimate
from parcae.sweeps.folder import SweepFolder, sets_of
from parcae.sweeps.grid import Grid, plan_sweep
from parcae.sweeps.progress import note_on_depths, note_on_test_loops
from training.runs import TREE

RECIPE = merge(TREE, {"data": {"sources": ["builtin"]}})
PRESET = merge(RECIPE, {"model": {"loop": {"mean_loops": 4}}})
PRESET["model"] = {"preset": "parcae-1m", "vocab_size": 512, "context_length": 64}


def entries_multiplied(config, loops, gradient_loops):
    """2 FLOPs per matrix entry and use, three times that with a backward; counted on a model."""
    model = create(config)
    matrices = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not name.startswith(("embed", "value_tables"))
    }
    core = sum(size for name, size in matrices.items() if ".core.blocks." in name)
    rest = sum(matrices.values()) - core + config.vocab_size * config.width
    attention = 4 * config.context_length * config.width
    inside = 2 * core + attention * config.core_layers
    outside = 2 * rest + attention * (config.prelude_layers + config.coda_layers)
    return 3 * outside + (loops - gradient_loops) * inside + 3 * gradient_loops * inside


@pytest.mark.slow
def test_tokens_are_those_a_count_by_hand_gives():
    grid = Grid(flops=(2e9, 5e9), mean_loops=(1, 2, 3, 6))
    runs = plan_sweep(RECIPE, grid)
    assert [(r.budget, r.mean_loops) for r in runs] == [
        (budget, loops) for budget in grid.flops for loops in grid.mean_loops
    ]
    for run in runs:
        half = math.ceil(run.mean_loops / 2)
        assert run.recipe.model.loop.gradient_loops == half
        each = entries_multiplied(run.recipe.model, run.mean_loops, half)
        per_step = 4 * 16
        assert run.steps == round(run.budget / each / per_step)
        assert run.tokens == run.steps * per_step
        assert run.flops == pytest.approx(run.tokens * each)
        assert run.recipe.model.loop.is_fixed_depth == (run.mean_loops == 1)
        core = sum(
            p.numel()
            for name, p in create(run.recipe.model).named_parameters()
            if ".core.blocks." in name
        )
        assert run.effective_parameters == run.parameters + (run.mean_loops - 1) * core
        assert run.recipe.validation_loops == (1, 2, 3, 6, 9, 12)


def test_a_fixed_data_grid_with_rates_seeds_and_settings():
    grid = Grid(
        tokens=(6400,),
        mean_loops=(2, 4),
        learning_rates=(1e-3, 8e-3),
        seeds=(0, 1),
        settings={"optimiser.grad_clip": (0.5, 1.0)},
        test_loops=(1, 5),
    )
    runs = plan_sweep(merge(RECIPE, {"optimiser": {"muon_lr": 0.016}}), grid)
    assert len({run.name for run in runs}) == len(runs) == 16
    for run in runs:
        assert run.tokens == 6400
        assert run.recipe.optimiser.muon_lr == 2 * run.recipe.optimiser.lr
        assert set(run.recipe.validation_loops) == {1, 5, int(run.mean_loops)}
    found = {(r.mean_loops, r.recipe.optimiser.lr, r.recipe.run.seed) for r in runs}
    assert len(found) == 8
    assert {r.recipe.optimiser.grad_clip for r in runs} == {0.5, 1.0}


def test_a_transformer_among_looped_models_is_there_once():
    grid = Grid(flops=(1e10, 2e10), mean_loops=(1, 4), models=("parcae-1m", "transformer-1m"))
    runs = plan_sweep(PRESET, grid)
    names = [(r.model, r.mean_loops) for r in runs]
    assert names == 2 * [("parcae-254.7k", 1), ("parcae-254.7k", 4)] + 2 * [
        ("transformer-246.3k", 1)
    ]
    assert runs[-1].recipe.validation_loops == (1,)


def test_a_model_keeps_its_name_only_while_it_keeps_its_size():
    tree = {**PRESET, "model": {"preset": "parcae-1m", "context_length": 64}}
    assert plan_sweep(tree, Grid(seeds=(0,)))[0].model == "parcae-1m"
    wide = plan_sweep(tree, Grid(settings={"model.width": (64, 128)}))
    assert wide[0].model == "parcae-1m"
    assert wide[1].model not in ("parcae-1m", wide[0].model)


@pytest.mark.slow
def test_the_estimate_follows_the_work_and_the_workers():
    tree = merge(RECIPE, {"run": {"validate_every": 0}})
    runs = plan_sweep(tree, Grid(flops=(1e12, 3e12), mean_loops=(2,)))
    guess = estimate(runs, threads=1, utilisation=0.5, device_flops=2e10)
    short, long = (guess.seconds[run.name] for run in runs)
    assert long - short == pytest.approx(200, rel=0.02)
    assert guess.wall_seconds(runs, 1) == short + long
    assert guess.wall_seconds(runs, 2) == long
    assert "50%" in guess.method
    assert Estimate({}, "").wall_seconds(runs, 1) is None


@pytest.mark.slow
def test_steps_are_tried_where_no_speed_is_given():
    runs = plan_sweep(RECIPE, Grid(flops=(1e10,), mean_loops=(1, 4)))
    guess = estimate(runs, threads=1)
    assert "measured" in guess.method
    assert all(5 < guess.seconds[run.name] < 600 for run in runs)


def test_a_sweep_grows_but_does_not_change(tmp_path):
    folder = SweepFolder(tmp_path)
    first = plan_sweep(RECIPE, Grid(flops=(1e10,), mean_loops=(2, 4)))
    folder.write_plan(folder.extended(first))
    assert [run.name for run in folder.read_plan()] == [run.name for run in first]
    assert folder.read_plan()[0].recipe == first[0].recipe

    more = plan_sweep(RECIPE, Grid(flops=(1e10, 2e10), mean_loops=(4, 8), seeds=(0, 1)))
    grown = folder.extended(more)
    assert [run.name for run in grown[:2]] == [run.name for run in first]
    assert len(grown) == 2 + 8 - 1
    assert grown[1].recipe.run.validation_loops == first[1].recipe.run.validation_loops

    clipped = merge(RECIPE, {"optimiser": {"grad_clip": 0.5}})
    for grid in (Grid(flops=(1e10,), mean_loops=(2,)), Grid(flops=(4e10,), mean_loops=(6,))):
        with pytest.raises(ConfigError, match=r"optimiser\.grad_clip: differs from the sweep"):
            folder.extended(plan_sweep(clipped, grid))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--flops", "1e3", "--mean-loops", "2"], "less than one step"),
        (["--tokens", "10", "--mean-loops", "2"], "less than one step"),
        (["--flops", "1e10", "--mean-loops", "0"], "mean_loops: 0 is out of range"),
        (["--flops", "1e10", "--test-loops", "0,1"], "test_loops: 0 is out of range"),
        (["--flops", "-1"], "flops: -1 is out of range"),
        (["--flops", "lots"], "--flops: 'lots' is not a number"),
        (
            ["--flops", "1e10", "--tokens", "1e5"],
            "tokens: a grid has FLOP budgets or",
        ),
        (
            ["--flops", "1e10", "--budget.steps", "3"],
            "budget.steps: flops already set",
        ),
        (["--flops", "1e10", "--optimiser.lrr", "1"], "optimiser.lrr: no such key"),
        (["--grid", "optimiser.lrr=1,2"], "Did you mean lr?"),
        (["--grid", "optimiser.lr"], "Write table.key=1,2"),
        (["--grid", "run.seed=1,2"], "Use seeds."),
        (["--grid", "data.sources=a,b"], "settings.data.sources: all runs of a sweep share"),
        (["--models", "parcae-1m"], "names no preset"),
        (["--seeds", "1.5"], "not a whole number"),
        (["--seeds", "1", "--budget.minutes", "2"], "budget.minutes"),
        (["--flops", "1e10", "--budget.max_minutes", "2"], "budget.max_minutes"),
        (["--flops", "1e10", "--workers", "0"], "workers: 0 is out of range"),
        (["--flops", "1e10", "--slurm.partitoin", "a", "--dry-run"], "Did you mean partition?"),
        ([], "nothing varies"),
    ],
)
def test_wrong_words_are_told_before_anything_runs(words, message, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(write_toml(RECIPE))
    assert main(["sweep", str(recipe), "--out", str(tmp_path / "sweep"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_recipe_that_comes_with_parcae_is_found_by_name(tmp_path):
    sweep = parcae.sweep(
        "smoke", tmp_path / "sweep", mean_loops=[1], dry_run=True, device_flops=1e12, verbose=False
    )
    assert [run.steps for run in sweep.runs] == [12]


def test_a_sweep_that_is_not_there_is_told(tmp_path, capsys):
    assert main(["sweep", str(tmp_path / "none")]) == 2
    assert "no such file. Give a recipe, or the folder of a sweep" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(write_toml(RECIPE))
    words = ["--flops", "1e10,2e10", "--mean-loops", "1,4", "--utilisation", "0.4", "--dry-run"]
    assert main(["sweep", str(recipe), "--out", str(tmp_path / "sweep"), *words]) == 0
    said = capsys.readouterr().out
    for name in ("effective", "tokens", "steps", "FLOPs", "duration", "mu4-2e10-flops", "to do"):
        assert name in said
    assert not (tmp_path / "sweep").exists()


def test_existing_runs_keep_their_test_loops_and_a_note_says_so(tmp_path):
    first = plan_sweep(RECIPE, Grid(tokens=(6400,), mean_loops=(2,)))
    larger = plan_sweep(RECIPE, Grid(tokens=(6400,), mean_loops=(2, 4)))
    folder = SweepFolder(tmp_path)
    folder.write_plan(folder.extended(first))
    assert note_on_test_loops(first, folder.extended(first)) is None
    note = note_on_test_loops(larger, folder.extended(larger))
    assert note is not None
    assert "Test loops 6, 8 are measured in new runs only" in note
    assert first[0].name in note


def test_fixed_depth_does_not_count_for_a_parabola():
    """1, 2, 4, 6 are four depths, of which three are looped."""
    note = note_on_depths(plan_sweep(RECIPE, Grid(flops=(2e9, 5e9), mean_loops=(1, 2, 4, 6))))
    assert "the most is 3. 1 is fixed depth" in note
    assert (
        note_on_depths(plan_sweep(RECIPE, Grid(flops=(2e9,), mean_loops=(1, 2, 3, 4, 6)))) is None
    )
    assert note_on_depths(plan_sweep(RECIPE, Grid(tokens=(6400,), mean_loops=(1, 2, 4, 6)))) is None


def test_the_plan_assigns_runs_to_sets():
    grid = plan_sweep(RECIPE, Grid(flops=(5e9,), mean_loops=(1, 2, 4, 6)))
    alone = plan_sweep(RECIPE, Grid(flops=(2e10,), mean_loops=(4,)))
    fixed = plan_sweep(RECIPE, Grid(tokens=(64000,), mean_loops=(2, 4, 6)))
    sets = sets_of([*grid, *alone, *fixed])
    assert [sets[run.name] for run in grid] == ["grid"] * 4
    assert [sets[run.name] for run in alone] == ["end-to-end"]
    assert [sets[run.name] for run in fixed] == ["curve"] * 3


def test_a_recipe_without_a_budget_suffices_where_the_grid_has_one():
    tree = {name: table for name, table in RECIPE.items() if name != "budget"}
    for grid in (Grid(flops=(2e9, 5e9), mean_loops=(2,)), Grid(tokens=(640, 1280))):
        assert plan_sweep(tree, grid) == plan_sweep(RECIPE, grid)
    with pytest.raises(ConfigError, match="budget: neither the recipe nor the grid"):
        plan_sweep(tree, Grid(mean_loops=(1, 2)))
