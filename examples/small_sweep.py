"""Train a small grid of runs, fit scaling laws to their losses, and predict a larger run.

    python examples/small_sweep.py --out runs/small-sweep

These models are too small for a law that holds at other scales; the calls are the same for large
ones.
"""

import argparse

import parcae

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--out", default="runs/small-sweep", help="folder of the sweep")
parser.add_argument("--flops", type=float, default=1e10, help="smallest budget (default: 1e10)")
parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
parser.add_argument(
    "--source", default="builtin", help="folder of text files (default: Python's standard library)"
)
args = parser.parse_args()

recipe = {
    "model": {
        "preset": "parcae-1m",
        "vocab_size": 512,
        "context_length": 64,
        "width": 32,
        "heads": 1,
    },
    "data": {
        "sources": [args.source],
        "validation_fraction": 0.05,
        "global_batch": 8,
        "split_long": True,
    },
    "budget": {"flops": args.flops},  # replaced by the budgets of the sweep
    "run": {"validate_every": 0, "telemetry_every": 0, "validation_rows": 32},
}
budgets = [args.flops, 2 * args.flops, 4 * args.flops]  # training FLOPs of a run
grid = {"flops": budgets, "mean_loops": [2, 3, 4], "test_loops": [1, 2, 4, 8]}
sweep = parcae.sweep(recipe, args.out, workers=args.workers, **grid)
laws = parcae.fit(sweep.table())
laws.save(sweep.folder / "fit")

for row in laws.table():
    if row["law"] == "training":  # loss = E + X N^-x + Y D^-y
        print("{parameter} = {value:.4g} (90 % interval {low:.4g} to {high:.4g})".format(**row))
for row in parcae.predict(laws, flops=2 * budgets[-1]).table():
    print("with twice the largest budget: {quantity} {value:.4g}".format(**row))
