"""`parcae plan`: what a recipe will cost, before anything is spent."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parcae.training.plan import Plan


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="say what a recipe will cost: FLOPs, memory, disk, hours",
        epilog="Settings may be changed with --table.key VALUE, e.g. --data.micro_batch 8.",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument("--devices", type=int, default=1, metavar="N")
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="of the devices' best speed that training will reach (default: 0.4)",
    )
    parser.add_argument(
        "--device-flops",
        metavar="FLOPS|NAME",
        help="of one device: a number such as 312e12, a100, h100, or cpu, which is measured "
        "(default: the recipe's device; a100 if that is cuda and there is none here)",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    import json

    from parcae import console
    from parcae.recipe import parse_flags
    from parcae.training.settings import recipe_from_file

    recipe = recipe_from_file(arguments.recipe, parse_flags(arguments.settings))

    from parcae.training.plan import plan  # after the recipe, whose errors need not wait for it

    found = plan(
        recipe, arguments.devices, arguments.utilisation, device_speed(arguments.device_flops)
    )
    if arguments.json:
        print(json.dumps(found.plain(), indent=2))
        return 0
    for title, rows in _tables(found).items():
        console.out.print(console.table(title, ("", ""), rows))
    return 0


def device_speed(text: str | None) -> str | float | None:
    """A number of FLOP/s, or a device's name."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _tables(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    from parcae import console

    def count(value: float | None) -> str:
        return "unknown: the clock decides" if value is None else f"{value:,.0f}"

    def flops(value: float | None) -> str:
        return count(None) if value is None else console.format_flops(value)

    each = plan.tokens_per_parameter
    work = [
        ("parameters", count(plan.parameters)),
        ("of them in the looped core", count(plan.core_parameters)),
        ("effective parameters", count(plan.effective_parameters)),
        ("training FLOPs per token", flops(plan.flops_per_token)),
        ("tokens per step", count(plan.tokens_per_step)),
        ("steps", count(plan.steps)),
        ("tokens", count(plan.tokens)),
        ("tokens per parameter", count(None) if each is None else console.format_number(each)),
        ("FLOPs", flops(plan.flops)),
    ]
    memory = plan.memory
    passing = "activations, at most"
    if memory.optimiser_step > memory.activations:
        passing = "the optimiser's step, more than activations"
    room = [
        ("weights", console.format_bytes(memory.weights)),
        ("gradients", console.format_bytes(memory.gradients)),
        ("optimiser", console.format_bytes(memory.optimiser)),
        (passing, console.format_bytes(max(memory.activations, memory.optimiser_step))),
        ("total", console.format_bytes(memory.total)),
        ("a checkpoint on disk", console.format_bytes(plan.checkpoint_bytes)),
    ]
    speed = plan.device_flops
    fastest = "unknown" if speed is None else console.format_si(speed, "FLOP/s")
    duration = "unknown: give --device-flops"
    if plan.hours is not None:
        duration = console.format_duration(3600 * plan.hours)
    name = f"{plan.devices} x {plan.device}, {plan.precision}"
    time = [
        ("micro-batches per step and device", f"{plan.micro_batches} of {plan.micro_batch} rows"),
        ("peak speed of a device", fastest),
        (f"time at {plan.utilisation:.0%} of that", duration),
    ]
    if plan.steps is None:
        time[-1] = ("time, by the clock", duration)
    return {"The run": work, "Memory of a device": room, name: time}
