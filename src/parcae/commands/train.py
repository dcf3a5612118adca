"""`parcae train`: from a recipe to a run's folder, or on with a run that was stopped."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe, or resume a run",
        epilog="Settings may be changed with --table.key VALUE, e.g. --budget.steps 100. "
        "Several devices: torchrun --nproc-per-node 8 -m parcae train RECIPE.toml --out RUN",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.toml")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="folder of the run (default: runs/<recipe's name>)"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import ConfigError
    from parcae.recipe import parse_flags, read_toml
    from parcae.train.folder import read_recipe
    from parcae.train.settings import plain_recipe, recipe_from_tree, with_flags
    from parcae.train.trainer import train

    flags = parse_flags(arguments.settings)
    if (arguments.recipe is None) == (arguments.resume is None):
        raise ConfigError("train: give a recipe to start a run, or --resume RUN to go on with one.")
    if arguments.resume is not None:
        out = arguments.resume
        if arguments.out is not None:
            raise ConfigError("--out: a resumed run stays in its folder. Leave --out away.")
        tree = plain_recipe(read_recipe(out))
    else:
        out = arguments.out or Path("runs") / Path(arguments.recipe).stem
        tree = read_toml(arguments.recipe)
    recipe = recipe_from_tree(with_flags(tree, flags))
    result = train(recipe, out, resume=arguments.resume is not None)
    return 1 if result["status"] == "diverged" else 0
