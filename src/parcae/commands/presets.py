"""`parcae presets`: all presets, with their number of parameters and cost."""

from __future__ import annotations

import argparse
import json


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("presets", help="list the models that can be built by name")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.model.flops import parameter_count, training_flops_per_token
    from parcae.presets import PRESETS
    from parcae.recipe import to_dict

    if arguments.json:
        listing = [
            {
                "name": name,
                "parameters": parameter_count(config),
                "training_flops_per_token": training_flops_per_token(config),
                "config": to_dict(config),
            }
            for name, config in PRESETS.items()
        ]
        print(json.dumps(listing, indent=2))
        return 0
    rows = [
        (
            name,
            f"{parameter_count(config):,}",
            f"{config.prelude_layers}+{config.core_layers}+{config.coda_layers}",
            f"{config.width:,}",
            f"{config.vocab_size:,}",
            f"{config.loop.mean_loops:g}",
            console.format_flops(training_flops_per_token(config)),
        )
        for name, config in PRESETS.items()
    ]
    columns = ("preset", "parameters", "layers", "width", "vocabulary", "mean loops")
    console.out.print(console.table("Presets", (*columns, "training FLOPs per token"), rows))
    return 0
