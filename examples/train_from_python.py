"""Train a small looped model, then generate text with 1, 2, 4 and 8 loops.

    python examples/train_from_python.py --source my_text.txt --separator "<|endoftext|>"

A source is a text file with a line between its documents, or a folder of text files. 5 % of the
documents are held out for validation, so there should be some dozens.
"""

import argparse

import parcae

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--out", default="runs/example", help="run folder (default: runs/example)")
parser.add_argument("--steps", type=int, default=100, help="optimiser steps (default: 100)")
parser.add_argument(
    "--source", default="builtin", help="folder of text files (default: Python's standard library)"
)
parser.add_argument("--separator", help="line between the documents of a text file (default: none)")
args = parser.parse_args()

recipe = {
    "model": {
        "preset": "parcae-1m",
        "vocab_size": 1024,
        "context_length": 128,
        "loop": {"mean_loops": 4},
    },
    "data": {
        "sources": [args.source],
        "separator": args.separator,
        "validation_fraction": 0.05,
        "global_batch": 16,
        "split_long": True,  # documents longer than the context become several rows
    },
    "budget": {"steps": args.steps},
    "run": {"validation_loops": [1, 2, 4, 8], "validation_rows": 32},
}
result = parcae.train(recipe, args.out)
for loops, loss in result.losses.items():
    print(f"T = {loops}: held-out loss {loss:.3f} nats per token")

checkpoint = parcae.open_checkpoint(args.out)
engine = parcae.Engine(checkpoint.model, checkpoint.tokenizer)
for loops in (1, 2, 4, 8):
    text = engine.generate("import ", loops=loops, max_new_tokens=32).text
    print(f"{loops} loops: {text!r}")
