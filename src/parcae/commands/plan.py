"""`parcae plan`: the cost of a recipe before training."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parcae.training.plan import Plan


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="estimate the cost of a recipe: FLOPs, memory, disk, hours",
        epilog="Settings may be changed with --table.key VALUE, e.g. --data.micro_batch 8.",
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE.toml",
        help="recipe file, or the name of a recipe that comes with parcae",
    )
    parser.add_argument(
        "--start-from",
        metavar="CHECKPOINT",
        help="run, checkpoint or model folder whose weights the run starts from (default: none)",
    )
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="number of devices (default: 1)"
    )
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="share of the devices' peak speed that training reaches, 0 to 1 (default: 0.4)",
    )
    parser.add_argument(
        "--device-flops",
        metavar="FLOPS|NAME",
        help="peak speed of one device: FLOP/s such as 312e12, a100, h100, or cpu, which is "
        "measured (default: that of the recipe's device; a100 for cuda without a GPU here)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON with sizes in bytes (default: tables)"
    )
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    import json

    from parcae import console
    from parcae.recipe import merge, parse_flags
    from parcae.training.settings import resolve_recipe

    overrides = parse_flags(arguments.settings)
    if arguments.start_from is not None:
        overrides = merge(overrides, {"start": {"checkpoint": arguments.start_from}})
    recipe = resolve_recipe(arguments.recipe, overrides)

    from parcae.training.plan import plan  # imports torch: errors of the recipe come first

    estimate = plan(
        recipe, arguments.devices, arguments.utilisation, device_speed(arguments.device_flops)
    )
    if arguments.json:
        print(json.dumps(estimate.to_dict(), indent=2))
        return 0
    for title, rows in _tables(estimate).items():
        console.out.print(console.table(title, ("", ""), rows))
    if estimate.data_problem is not None:
        console.print_text(f"Data: unknown. {estimate.data_problem}", console=console.err)
    for use in estimate.data or ():
        if (warning := use.warning()) is not None:
            console.print_text(warning, console=console.err)
    return 0


def device_speed(text: str | None) -> str | float | None:
    """A number of FLOP/s, or the name of a device."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _tables(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    from parcae import console

    def count(value: float | None) -> str:
        return "unknown: the budget is in minutes" if value is None else f"{value:,.0f}"

    def flops(value: float | None) -> str:
        return count(None) if value is None else console.format_flops(value)

    ratio = plan.tokens_per_parameter
    work = [
        ("parameters", count(plan.parameters)),
        ("parameters in the looped core", count(plan.core_parameters)),
        ("effective parameters", count(plan.effective_parameters)),
        ("training FLOPs per token", flops(plan.flops_per_token)),
        ("tokens per step", count(plan.tokens_per_step)),
        ("steps", count(plan.steps)),
        ("tokens", count(plan.tokens)),
        ("tokens per parameter", count(None) if ratio is None else console.format_number(ratio)),
        ("FLOPs", flops(plan.flops)),
    ]
    memory = plan.memory
    temporary = "activations (peak)"
    if memory.optimiser_step > memory.activations:
        temporary = "optimiser step (peak, above activations)"
    sizes = [
        ("weights", console.format_bytes(memory.weights)),
        ("gradients", console.format_bytes(memory.gradients)),
        ("optimiser", console.format_bytes(memory.optimiser)),
        (temporary, console.format_bytes(max(memory.activations, memory.optimiser_step))),
        ("total", console.format_bytes(memory.total)),
        ("checkpoint on disk", console.format_bytes(plan.checkpoint_bytes)),
    ]
    speed = plan.device_flops
    fastest = "unknown" if speed is None else console.format_si(speed, "FLOP/s")
    duration = "unknown: give --device-flops"
    if plan.hours is not None:
        duration = console.format_duration(3600 * plan.hours)
    name = f"{plan.devices} x {plan.device}, {plan.precision}"
    step = "unknown"
    if plan.seconds_per_step is not None:
        step = console.format_duration(plan.seconds_per_step)
    batches = f"{plan.micro_batches} of {console.format_items(plan.micro_batch, 'row')}"
    if plan.last_micro_batch < plan.micro_batch:
        batches += f", the last of {plan.last_micro_batch}"
    if plan.micro_batch_reason is not None:
        batches += f" ({plan.micro_batch_reason})"
    time = [
        ("micro-batches per step and device", batches),
        ("peak speed of a device", fastest),
        (f"time of a step at {plan.utilisation:.0%} of that", step),
        ("time of all steps", duration),
    ]
    if plan.steps is None:
        time[-1] = ("time of all steps, by the budget", duration)
    return {"The run": work, "Data": _data(plan), "Memory of one device": sizes, name: time}


def _data(plan: Plan) -> list[tuple[str, str]]:
    """Tokens, share dropped and epochs of each source."""
    from parcae import console

    if plan.data is None:
        return [("tokens", "unknown, see below")]
    rows = []
    for use in plan.data:
        about = "about " if use.estimated else ""
        epochs = "unknown" if use.epochs is None else f"{about}{console.format_number(use.epochs)}"
        rows += [
            (f"{use.source}: tokens", f"{about}{console.format_count(use.tokens)}"),
            ("  dropped by packing", f"{about}{use.dropped_share:.1%}"),
            ("  epochs", epochs),
        ]
    return rows
