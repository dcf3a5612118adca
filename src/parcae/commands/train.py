"""`parcae train`: train a model from a recipe, from existing weights too, or resume a run."""

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
        "recipe",
        nargs="?",
        metavar="RECIPE.toml",
        help="recipe of a new run: a file, or the name of one that comes with parcae",
    )
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="run folder (default: runs/<name of the recipe>)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the run in this folder from its newest checkpoint (default: a new run)",
    )
    parser.add_argument(
        "--start-from",
        dest="start_from",
        metavar="CHECKPOINT",
        help="start from the weights of a run, checkpoint or model folder, with a new optimiser, "
        "schedule and data (default: random weights)",
    )
    parser.set_defaults(run=run, takes_settings=True, lists_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import ConfigError, require
    from parcae.recipe import merge, parse_flags
    from parcae.training.run import default_folder, read_recipe, train
    from parcae.training.settings import resolve_recipe

    source: str | None = arguments.recipe
    resumed: Path | None = arguments.resume
    remedy = "Give a recipe to start a run, or --resume RUN to continue one."
    require(
        source is None or resumed is None,
        "train",
        f"both {source} and --resume {resumed} are given; a resumed run has its own recipe",
        remedy,
    )
    if source is not None and Path(source).is_dir():
        remedy = f"Name a .toml file, or continue the run in it with --resume {source}."
        raise ConfigError(f"{source}: a folder, not a recipe. {remedy}")
    overrides = parse_flags(arguments.settings)
    if resumed is not None:
        message = "a resumed run stays in its folder"
        require(arguments.out is None, "--out", message, "Omit --out.")
        message = "a resumed run continues from its own weights"
        require(
            arguments.start_from is None, "--start-from", message, "Omit --start-from or --resume."
        )
        recipe, out = read_recipe(resumed, overrides), resumed
    elif source is not None:
        if arguments.start_from is not None:
            overrides = merge(overrides, {"start": {"checkpoint": arguments.start_from}})
        recipe, out = resolve_recipe(source, overrides), arguments.out or default_folder(source)
    else:
        raise ConfigError(f"train: no recipe is given. {remedy}")
    resume = resumed is not None
    result = train(recipe, out, resume=resume, follow_links=arguments.follow_links)
    return 1 if result.status == "diverged" else 0
