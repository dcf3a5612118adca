"""`parcae train`: from a recipe to a run's folder, or on with a run that was stopped."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe, or resume a run",
        epilog="A setting of the recipe is changed with --table.key VALUE, such as "
        "--budget.steps 100. On several devices: "
        "torchrun --nproc-per-node 8 -m parcae train RECIPE.toml --out RUN",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE.toml", help="recipe of a new run; none with --resume"
    )
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="folder of the run (default: runs/<recipe's name>)"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue this run from its newest checkpoint"
    )
    parser.set_defaults(run=run, takes_settings=True, lists_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import require
    from parcae.recipe import parse_flags
    from parcae.training.folder import read_recipe
    from parcae.training.settings import recipe_from_file

    source, resumed = arguments.recipe, arguments.resume
    either = "Give a recipe to start a run, or --resume RUN to go on with one."
    given = [one for one in (source, resumed) if one is not None]
    require(len(given) > 0, "train", "there is nothing to train", either)
    require(
        len(given) < 2,
        "train",
        f"not both {source} and --resume {resumed}, which follows the recipe in its folder",
        either,
    )
    flags = parse_flags(arguments.settings)
    if resumed is not None:
        remedy = "Leave --out away."
        require(arguments.out is None, "--out", "a resumed run stays in its folder", remedy)
        out, recipe = resumed, read_recipe(resumed, flags)
    else:
        out = arguments.out or Path("runs") / Path(source).stem
        recipe = recipe_from_file(source, flags)

    from parcae.training.trainer import train  # after the recipe, whose errors need not wait for it

    result = train(recipe, out, resume=resumed is not None)
    return 1 if result["status"] == "diverged" else 0
