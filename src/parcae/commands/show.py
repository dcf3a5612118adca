"""`parcae show`: the settings, size and cost of a preset or recipe, with flags applied."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.config import ModelConfig


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "show",
        help="print the settings, size and cost of a preset or recipe",
        epilog="A setting is changed with --table.key VALUE, such as --model.loop.mean_loops 4; "
        "`parcae train --help` lists all.",
    )
    parser.add_argument(
        "source", metavar="PRESET|RECIPE.toml", help="name of a preset, or path of a recipe"
    )
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.recipe import from_file, parse_flags, to_dict, write_toml

    source, flags = arguments.source, parse_flags(arguments.settings)
    if source.endswith(".toml") or "/" in source:
        config = from_file(source, flags, _model)
    else:
        config = _model({"model": {"preset": source}}, flags)

    from parcae.model import flops  # imports torch, so after the recipe is known to be valid

    console.out.print(write_toml({"model": to_dict(config)}), markup=False, highlight=False)
    loop, cost = config.loop, flops.token_flops(config)
    rows = [
        ("parameters", f"{flops.parameter_count(config):,}"),
        ("  in the looped core", f"{flops.core_parameter_count(config):,}"),
        (
            f"effective parameters N(mu = {loop.mean_loops:g})",
            f"{flops.effective_parameters(config):,.0f}",
        ),
        (
            f"forward FLOPs per token at T = {loop.nominal_loops}",
            console.format_flops(cost.forward(loop.nominal_loops)),
        ),
        ("training FLOPs per token", console.format_flops(flops.training_flops_per_token(config))),
    ]
    if config.architecture == "looped":
        injection = flops.injection_of(config)
        stability = injection.stability
        if injection.depends_on_input:
            stability += "; A depends on the input: its spectral radius is not defined"
        rows.append(("stability by construction", stability))
    console.out.print(console.table("Size and cost", ("", ""), rows))
    return 0


def _model(tree: dict[str, Any], flags: dict[str, Any]) -> ModelConfig:
    from parcae.config import require
    from parcae.presets import model_from_table
    from parcae.recipe import check_tables, merge
    from parcae.training.settings import TABLES

    tree = merge(tree, flags)
    check_tables(tree, TABLES)
    require("model" in tree, "model", "the recipe has no such table", "Add [model].")
    return model_from_table(tree["model"])
