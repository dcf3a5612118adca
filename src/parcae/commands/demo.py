"""`parcae demo`: from nothing to a trained looped model, its report and its text, in minutes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.experiments.looping import Profile

SHOWN_DEPTHS = (1, 2, 4, 8)
ANEW = "`make demo AGAIN=1`, or `parcae demo --again`, trains again."


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small looped model on Python's own library and show what loops do",
        epilog="Settings of recipes/demo.toml may be changed with --table.key VALUE.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="FOLDER",
        help="folder of the run, the figure and the report (default: %(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="train again even if the folder holds a run"
    )
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.recipe import find_recipe, parse_flags
    from parcae.training.settings import recipe_from_file

    recipe = recipe_from_file(find_recipe("demo"), parse_flags(arguments.settings))
    folder = arguments.out / "run"
    console.out.print(
        "A looped model sends its activations through the same layers again and again.\n"
        "This trains a small one on the source of Python's standard library, then lets it predict\n"
        "and write with 1, 2, 4 and 8 loops: the same weights, more computation.\n"
    )
    result = _train(recipe, folder, arguments.again)
    if result["status"] != "finished":
        return 0 if result["status"] == "interrupted" else 1
    from parcae.report.page import write_report
    from parcae.report.runs import read_runs

    profile, picture = _measure(recipe, folder, arguments.out / "looping.png")
    report = write_report(read_runs([folder]), arguments.out / "report")
    _explain(result, profile, picture, report, folder)
    return 0


def _train(recipe: Any, folder: Path, again: bool) -> dict[str, Any]:
    """A new run; or on with one that was stopped; or what one that ended came to."""
    import shutil

    from parcae import console
    from parcae.runs import read_result
    from parcae.runs.layout import RECIPE_FILE
    from parcae.training.folder import read_recipe
    from parcae.training.trainer import train

    if again and (folder / RECIPE_FILE).exists():
        shutil.rmtree(folder)
    if not (folder / RECIPE_FILE).exists():
        return train(recipe, folder)
    result = read_result(folder)
    if result is not None and result["status"] == "finished":
        console.out.print(
            f"{folder} is a finished run; it is shown again. {ANEW}\n", soft_wrap=True
        )
        return result
    return train(read_recipe(folder), folder, resume=True)


def _measure(recipe: Any, folder: Path, path: Path) -> tuple[Profile, Path]:
    from typing import cast

    from parcae.experiments.looping import measure, picture
    from parcae.model.looped import LoopedModel
    from parcae.runs import load
    from parcae.training.corpora import open_corpora

    batches = list(open_corpora(recipe, folder).validation(recipe, 16))
    profile = measure(cast(LoopedModel, load(folder)), batches)
    return profile, picture(profile, recipe.model.loop.mean_loops, path)


def _explain(
    result: dict[str, Any], profile: Profile, picture: Path, report: Path, folder: Path
) -> None:
    from rich.text import Text

    from parcae import console

    rows = [
        (
            t,
            f"{profile.loss[t - 1]:.3f}",
            f"{profile.residual[t - 1]:.3g}",
            f"{profile.state_norm[t - 1]:.3g}",
        )
        for t in (*SHOWN_DEPTHS, 16)
    ]
    columns = ("loops T", "held-out loss", "‖h_T − h_{T−1}‖", "‖h_T‖")
    console.out.print(console.table("The same weights at several depths", columns, rows))
    if not profile.gains:
        console.out.print(
            f"Loops do not lower the loss yet: {result['steps']} steps are too few. If the machine "
            f"was busy: {ANEW}\n",
            highlight=False,
            soft_wrap=True,
        )
    prompt = result["samples"][0]["prompt"] if result["samples"] else ""
    for sample in result["samples"]:
        if sample["prompt"] == prompt and sample["depth"] in SHOWN_DEPTHS:
            loops = "1 loop" if sample["depth"] == 1 else f"{sample['depth']} loops"
            console.out.print(Text(f"── {loops} " + "─" * 60, style="cyan"))
            console.out.print(Text(prompt, style="bold") + Text(sample["text"], style="default"))
    console.out.print(Text("─" * 70, style="cyan"))
    console.out.print(
        f"\nLook at   {report}  (open it in a browser: curves, loop by loop)\n"
        f"          {picture}  (depth is chosen when the model runs, not when it is built)\n"
        f"Try next  parcae generate {folder} 'import os' --exit kl:0.01  (each token loops as it "
        "needs; without a text, a conversation)\n"
        f"          parcae depth {folder} 'def main():'  (what every loop does)\n"
        "          parcae train recipes/demo.toml --out runs/deeper --model.loop.mean_loops 10\n"
        "          parcae report runs/deeper " + str(folder) + "  (compare the two)\n"
        "          docs/tour.md, docs/training.md\n"
        "Anew      make demo AGAIN=1",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
