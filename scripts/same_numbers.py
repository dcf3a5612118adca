"""Record every number that must not change when code is only moved, and compare two records.

    python scripts/same_numbers.py record before.json     # in the checkout of one commit
    python scripts/same_numbers.py record after.json      # in that of another
    python scripts/same_numbers.py compare before.json after.json

It records, on one thread: logits of every preset at a fixed seed; every loss, gradient norm and
telemetry value of `recipes/smoke.toml` and the weights it ends with; generated text; scores, where
`PARCAE_TEST_DATA` names a folder of evaluation data; and every number of a fit. Only the public
interface is used (`parcae.create` and the commands), so the script runs on either side of a
restructuring. Put the checkout to be recorded on the path: `PYTHONPATH=src`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BY_THE_CLOCK = {"tokens_per_second", "peak_fraction", "seconds", "training_seconds"}
BY_THE_PATH = {"checkpoint", "file", "source", "seal"}
SUITES = ("val", "wikitext", "lambada", "core", "zero-shot")


def record(presets: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = {"presets": preset_logits()} if presets else {}
        run = folder / "run"
        parcae("train", "recipes/smoke.toml", "--out", run)
        numbers["training"] = training_numbers(run)
        numbers["text"] = generated_text(run)
        numbers["scores"] = scores(run, folder / "scores")
        (folder / "runs.csv").write_text(table_of_runs(), encoding="utf-8")
        parcae(
            "fit",
            folder / "runs.csv",
            "--out",
            folder / "fit",
            "--bootstrap-samples",
            "20",
            "--no-figures",
        )
        numbers["fit"] = json.loads((folder / "fit" / "fit.json").read_text())
    return numbers


def parcae(*arguments: object) -> str:
    command = [sys.executable, "-m", "parcae", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def preset_logits() -> dict[str, Any]:
    import torch

    import parcae

    torch.set_num_threads(1)
    logits = {}
    for name in parcae.PRESETS:
        print(name, file=sys.stderr, flush=True)
        model = parcae.create(name, seed=0).eval()
        # earlier versions call the number of loops `depths`
        keyword = "loops" if "loops" in inspect.signature(model.forward).parameters else "depths"
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (2, 6), generator=generator)
        torch.manual_seed(0)  # draws the initial state of the loop
        with torch.no_grad():
            loops = {} if model.config.architecture == "transformer" else {keyword: 2}
            output = model(tokens, **loops).logits
        digest = hashlib.sha256(output.contiguous().numpy().tobytes()).hexdigest()
        logits[name] = {"sha256": digest, "first": output[0, 0, :3].tolist()}
        del model
    return logits


def training_numbers(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    newest = max((run / "checkpoints").glob("step-*"))
    weights = (newest / "model.safetensors").read_bytes()
    return {"metrics": lines, "weights": hashlib.sha256(weights).hexdigest()}


def generated_text(run: Path) -> list[Any]:
    texts = []
    for options in (
        ["--temperature", "0"],
        ["--temperature", "0.9", "--seed", "3"],
        ["--temperature", "0", "--exit", "state:0.1"],
    ):
        output = json.loads(
            parcae(
                "generate",
                run,
                "import ",
                "--max-new-tokens",
                "24",
                "--loops",
                "4",
                *options,
                "--json",
            )
        )
        texts.append(output["text"])
    return texts


def scores(run: Path, out: Path) -> dict[str, Any]:
    data = os.environ.get("PARCAE_TEST_DATA")
    suites = SUITES if data else SUITES[:1]
    folder = ["--task-data", str(Path(data) / "data")] if data else []
    options = ["--loops", "1,4", "--limit", "8", "--seeds", "1234", *folder, "--out", out]
    parcae("eval", run, "--suites", ",".join(suites), *options)
    return json.loads((out / "result.json").read_text())["suites"]


def table_of_runs() -> str:
    """Three budgets, five mean loops, two test loops: losses of a law with a little noise."""
    import random

    draw = random.Random(0)
    lines = ["model,mean_loops,tokens,flops,effective_params,test_loops,loss"]
    for budget in (1e15, 4e15, 1.6e16):
        for loops in (1, 2, 4, 6, 8, 12):
            parameters = 1e6 * (2 + loops)
            flops_per_token = 6e6 * (2 + (loops + min(loops, -(-loops // 2))) / 2)
            tokens = budget / flops_per_token
            for depth in (1, 2, 4, 8, 16) if loops > 1 else (1,):
                loss = 1.6 + 400 / parameters**0.34 + 900 / tokens**0.35
                loss += 0.2 * 2.718281828 ** (-1.5 * depth / loops) if loops > 1 else 0.0
                loss *= 1 + draw.gauss(0, 3e-4)
                row = ("made", loops, tokens, budget, parameters, depth, loss)
                lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree of dictionaries and lists, with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in BY_THE_CLOCK | BY_THE_PATH:
                yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs; 0 if every number of both records is the same."""
    a, b = dict(leaves(before)), dict(leaves(after))
    changed = [path for path in a if path in b and a[path] != b[path]]
    for path in changed[:40]:
        print(f"changed  {path}: {a[path]!r} -> {b[path]!r}")
    for path in [path for path in a if path not in b][:40]:
        print(f"only before  {path}")
    for path in [path for path in b if path not in a][:40]:
        print(f"only after   {path}")
    print(f"{len(changed)} of {len(a.keys() & b.keys())} values changed")
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="write the numbers of this checkout to a file")
    recording.add_argument("out", type=Path, help="JSON file to write")
    recording.add_argument("--no-presets", action="store_true", help="omit the presets' logits")
    comparing = actions.add_parser("compare", help="compare two such files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "record":
        os.environ["OMP_NUM_THREADS"] = "1"
        numbers = record(presets=not arguments.no_presets)
        arguments.out.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        return 0
    before, after = (json.loads(p.read_text()) for p in (arguments.before, arguments.after))
    return compare(before, after)


if __name__ == "__main__":
    sys.exit(main())
