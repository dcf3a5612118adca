"""`parcae show`: what a preset or recipe comes to, with flags applied: settings, size, cost."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "show",
        help="resolve a preset or recipe and print its settings, size and cost",
        epilog="Settings may be changed with --table.key VALUE, e.g. --model.loop.mean_loops 4.",
    )
    parser.add_argument("source", metavar="PRESET|RECIPE.toml")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.config import require
    from parcae.model import flops
    from parcae.model.injection import INJECTIONS
    from parcae.presets import model_from_table
    from parcae.recipe import check_tables, merge, parse_flags, plain, read_toml, write_toml
    from parcae.train.settings import TABLES

    source = arguments.source
    is_recipe = source.endswith(".toml") or "/" in source
    recipe = read_toml(source) if is_recipe else {"model": {"preset": source}}
    tree = merge(recipe, parse_flags(arguments.settings))
    check_tables(tree, TABLES)
    require("model" in tree, "model", f"{source} has no such table", "Start with [model].")
    config = model_from_table(tree["model"])

    console.out.print(write_toml({"model": plain(config)}), markup=False, highlight=False)
    loop, cost = config.loop, flops.token_flops(config)
    rows = [
        ("parameters", f"{flops.parameter_count(config):,}"),
        ("of them in the looped core", f"{flops.core_parameter_count(config):,}"),
        (
            f"effective parameters N(mu = {loop.mean_loops:g})",
            f"{flops.effective_parameters(config):,.0f}",
        ),
        (
            f"forward FLOPs per token at T = {loop.nominal_loops}",
            console.short(cost.forward(loop.nominal_loops)),
        ),
        ("training FLOPs per token", console.short(flops.training_flops_per_token(config))),
    ]
    if config.architecture == "looped":
        rows.append(("stability by construction", INJECTIONS[config.injection].stability))
    console.out.print(console.table("What it comes to", ("", ""), rows))
    return 0
