"""`parcae demo`: train two small looped models and show what loops do to their answers and text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from parcae.report.loop_figure import Profile
    from parcae.runs import TrainResult
    from parcae.training.settings import Recipe

SHOWN_DEPTHS = (1, 2, 4, 8)
EXAMPLE_WALK = "4->1 0->7 3->0 7->4 1->2 2->5 5->6 6->3 2 > > > > > > >"
TASK, TASK_STEPS = "walks", 1200
Accuracy = Mapping[int, Mapping[int, float]]
"""The share of right answers by number of loops, then by steps of a walk."""
TRAIN_AGAIN = "`make demo AGAIN=1`, or `parcae demo --overwrite`, trains it again."


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train small looped models and show what loops do",
        epilog="Settings of recipes/demo.toml may be changed with --table.key VALUE.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="FOLDER",
        help="folder of the runs, the report and the figure (default: out/demo)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete existing runs and train again (default: continue them, or show them)",
    )
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.recipe import parse_flags
    from parcae.training.settings import resolve_recipe

    overrides = parse_flags(arguments.settings)
    recipe = resolve_recipe("demo", overrides)
    steps = min(TASK_STEPS, overrides.get("budget", {}).get("steps", TASK_STEPS))
    task_recipe = resolve_recipe("walks", {"budget": {"steps": steps}})
    from parcae.training.run import train  # the recipe's errors do not wait for torch

    folder, task_folder = arguments.out / "run", arguments.out / "walks"
    console.out.print(
        "A looped model applies the same layers to its activations several times: the same\n"
        "weights, more computation. This trains two small ones.\n"
    )
    console.out.print(
        "1. Walking. Given 2 -> 5, 5 -> 1, ... in random order, where is a walk from 2 after one,\n"
        "   two, ..., eight steps? Each depends on the one before. About two minutes.\n",
        highlight=False,
    )
    result = _train(task_recipe, task_folder, arguments.overwrite, train)
    if result.status == "finished":
        console.out.print(
            "\n2. Writing Python, after the source of Python's standard library. About three\n"
            "   minutes.\n"
        )
        result = _train(recipe, folder, arguments.overwrite, train)
    if result.status != "finished":
        return 0 if result.status == "interrupted" else 1
    from parcae.report.page import write_report

    accuracy = _answer(task_folder)
    profile, figure = _measure(recipe, folder, accuracy, arguments.out / "looping.png")
    report = write_report(folder, arguments.out / "report")
    _explain(result, profile, accuracy, figure, report, folder, task_folder)
    return 0


def _train(
    recipe: Recipe, folder: Path, again: bool, train: Callable[..., TrainResult]
) -> TrainResult:
    """A new run, a continued one, or the result of one that has finished."""
    import shutil

    from parcae import console
    from parcae.runs import read_result
    from parcae.runs.layout import RECIPE_FILE
    from parcae.training.run import read_recipe

    if again and (folder / RECIPE_FILE).exists():
        shutil.rmtree(folder)
    if not (folder / RECIPE_FILE).exists():
        return train(recipe, folder)
    result = read_result(folder)
    if result is not None and result.status == "finished":
        console.print_text(f"{folder} is a finished run; it is shown again. {TRAIN_AGAIN}\n")
        return result
    return train(read_recipe(folder), folder, resume=True)


def _answer(folder: Path) -> Accuracy:
    from parcae.data.synthetic import TASKS
    from parcae.evaluation.task_accuracy import accuracies
    from parcae.report.loop_figure import DEPTHS
    from parcae.runs import load

    return accuracies(load(folder), TASKS[TASK], DEPTHS)


def _measure(recipe: Recipe, folder: Path, accuracy: Accuracy, path: Path) -> tuple[Profile, Path]:
    from parcae.model.looped import LoopedModel
    from parcae.report.loop_figure import draw_figure, measure
    from parcae.runs import load
    from parcae.training.corpora import open_corpora

    batches = list(open_corpora(recipe, folder).validation(recipe, 16))
    profile = measure(cast(LoopedModel, load(folder)), batches)
    return profile, draw_figure(profile, recipe.model.loop.mean_loops, accuracy, path)


def _explain(
    result: TrainResult,
    profile: Profile,
    accuracy: Accuracy,
    figure: Path,
    report: Path,
    folder: Path,
    walks: Path,
) -> None:
    from rich.text import Text

    from parcae import console
    from parcae.experiments.walks import steps_solved

    lengths = list(accuracy[1])
    columns = ("loops T", *(console.format_items(count, "step") for count in lengths))
    depths = (1, 2, 3, 4, 6, 8, 16)
    rows = [(t, *(f"{accuracy[t][count]:.0%}" for count in lengths)) for t in depths]
    console.out.print(console.table("Walking: right answers", columns, rows))
    solved = ", ".join(str(steps_solved(accuracy[t].values())) for t in depths)
    console.out.print(
        f"With {', '.join(map(str, depths))} loops it solves walks of up to {solved} steps (95 % "
        "right).\nGuesses are right in up to half of the longer walks, as many come back to their "
        "start.\n",
        highlight=False,
    )
    rows = [
        (
            t,
            f"{profile.loss[t - 1]:.3f}",
            f"{profile.residual[t - 1]:.3g}",
            f"{profile.state_norm[t - 1]:.3g}",
        )
        for t in (*SHOWN_DEPTHS, 16)
    ]
    columns = ("loops T", "validation loss", "‖h_T − h_{T−1}‖", "‖h_T‖")
    console.out.print(
        console.table("Writing Python: the same weights at several depths", columns, rows)
    )
    if not profile.improves:
        steps = console.format_items(result.steps, "step")
        console.out.print(
            f"More loops do not lower the loss after only {steps}. "
            f"If the machine was busy: {TRAIN_AGAIN}\n",
            highlight=False,
            soft_wrap=True,
        )
    prompt = result.samples[0]["prompt"] if result.samples else ""
    for sample in result.samples:
        if sample["prompt"] == prompt and sample["depth"] in SHOWN_DEPTHS:
            loops = console.format_items(sample["depth"], "loop")
            console.out.print(Text(f"── {loops} " + "─" * 60, style="cyan"))
            console.out.print(Text(prompt, style="bold") + Text(sample["text"], style="default"))
    console.out.print(Text("─" * 70, style="cyan"))
    console.out.print(
        f"\nLook at   {report}  (open it in a browser: curves, loop by loop)\n"
        f"          {figure}  (depth is chosen when the model runs, not when it is built)\n"
        f"Try next  parcae generate {folder} 'import os' --exit kl:0.01  (each token loops as "
        "often as it needs; without a prompt, an interactive session)\n"
        f"          parcae depth {folder} 'def main():'  (what every loop does)\n"
        f"          parcae depth {walks} '{EXAMPLE_WALK}'  (the same for a walk)\n"
        f"          parcae serve {folder}  (an API and a page in the browser)\n"
        "          parcae train recipes/demo.toml --out runs/deeper --model.loop.mean_loops 10\n"
        "          parcae report runs/deeper " + str(folder) + "  (compare the two)\n"
        "          docs/tour.md, docs/training.md\n"
        "Again     make demo AGAIN=1",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
