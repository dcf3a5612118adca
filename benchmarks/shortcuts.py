"""Loss, time and memory of early exit, cache policies, formats of weights and cache, and drafts.

    parcae train recipes/python.toml --out runs/python
    python benchmarks/shortcuts.py runs/python [--rows 16] [--out result.json] [--picture FILE.png]
    python benchmarks/shortcuts.py runs/python --only drafts [--rounds 16]

Held-out rows are decoded token by token with the true text forced (forced_decoding.py), so
losses are exact and comparable; times are for one sequence at a time, the candidates taking turns.
Speculation generates its own text after the first tokens of held-out rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forced_decoding import Decoded, decode_forced
from parcae import console
from parcae import plotting as draw
from parcae.infer.engine import Engine
from parcae.infer.exit import ExitRule
from parcae.infer.network import Network, open_network
from parcae.infer.request import DepthPlan
from parcae.machine import keep_freed_memory
from parcae.runs import open_checkpoint
from parcae.training.corpora import open_corpora
from parcae.training.run import read_recipe

PROMPT = 32
RULES = {
    "budget": (2, 3, 4, 5, 6),
    "state": (0.4, 0.2, 0.1, 0.05, 0.03),
    "kl": (0.1, 0.03, 0.01, 0.003, 0.001),
}
POLICIES = (
    "full",
    "first:6",
    "first:4",
    "first:3",
    "first:2",
    "last:6",
    "last:4",
    "last:2",
    "shared",
)
DRAFTS = ((1, 2), (1, 4), (1, 6), (2, 2), (2, 4), (2, 6), (3, 4))


class Bench:
    def __init__(self, run: Path, rows: int, rounds: int) -> None:
        opened = open_checkpoint(run)
        self.model, self.tokenizer, self.folder = opened
        recipe = read_recipe(run)
        batches = open_corpora(recipe, run).validation(recipe, rows)
        self.text: Tensor = next(iter(batches)).inputs
        self.loops = self.model.config.loop.nominal_loops
        self.rounds = rounds
        self.network = self.network_of("float32")
        self.full = self.forced(DepthPlan(loops=self.loops))

    def network_of(self, weights) -> Network:
        return open_network(self.model, weights)

    def forced(
        self, plan: DepthPlan, policy: str = "full", network: Network | None = None
    ) -> Decoded:
        return decode_forced(network or self.network, self.text, plan, policy, PROMPT)

    def against_full(self, measured: Decoded) -> dict[str, float]:
        more = measured.loss / self.full.loss - 1
        return {"loss": measured.loss, "more_loss": more, "loops": measured.mean_loops}

    def times(self, plans: dict[str, DepthPlan]) -> dict[str, float]:
        """Seconds per token with each plan over those at full depth, one sequence at a time."""
        every = {"": DepthPlan(loops=self.loops), **plans}
        taken: dict[str, list[float]] = {name: [] for name in every}
        for number in range(self.rounds):
            row = self.text[number % len(self.text)][None, : PROMPT + 97]
            for name, plan in every.items():
                taken[name].append(decode_forced(self.network, row, plan, "full", PROMPT).seconds)
        ratios = {
            name: statistics.median(a / b for a, b in zip(taken[name], taken[""], strict=True))
            for name in plans
        }
        return ratios | {"milliseconds": 1e3 * min(taken[""]) / 96}

    def depth(self) -> list[dict[str, Any]]:
        """Loss against loops."""
        return [
            {"loops": loops, "loss": self.forced(DepthPlan(loops=loops)).loss}
            for loops in range(1, self.loops + 1)
        ]

    def exits(self) -> list[dict[str, Any]]:
        rules = [ExitRule(name, x) for name, numbers in RULES.items() for x in numbers]
        plans = {str(rule): DepthPlan(loops=self.loops, exit=rule) for rule in rules}
        times = self.times(plans)
        return [
            {"rule": name, **self.against_full(self.forced(plan)), "time": times[name]}
            for name, plan in plans.items()
        ]

    def policies(self) -> list[dict[str, Any]]:
        from parcae.infer.cache import Policy

        plan = DepthPlan(loops=self.loops)
        rows = []
        for name in POLICIES:
            size = self.network.model.layout.bytes_per_token(Policy.parse(name), self.loops)
            measured = self.against_full(self.forced(plan, name))
            rows.append({"policy": name, "bytes_per_token": size, **measured})
        return rows

    def weights(self) -> list[dict[str, Any]]:
        plan = DepthPlan(loops=self.loops)
        formats = [
            {"weights": weights, **self.against_full(self.forced(plan, network=network))}
            for weights in ("float32", "int8", "bfloat16")
            for network in [self.network_of(weights)]
        ]
        short = decode_forced(self.network, self.text, plan, "full", PROMPT, cache_dtype="bfloat16")
        return [*formats, {"weights": "float32, cache bfloat16", **self.against_full(short)}]

    def drafts(self, temperature: float) -> list[dict[str, Any]]:
        """Time of plain decoding over that of speculation, in turns; the texts must be equal."""
        import time

        engine = Engine(self.model, reuse_prefixes=False, max_batch_size=1)
        prompts = self.text[:, :64].tolist()
        ways: dict[str, dict[str, Any]] = {"": {}} | {
            f"{d}:{k}": {"draft_loops": d, "draft_tokens": k} for d, k in DRAFTS if d < self.loops
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        drafted, accepted = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
        flips = 0
        for number in range(self.rounds):
            texts = {}
            for name, way in ways.items():
                request = engine.request(
                    prompts[number % len(prompts)],
                    max_new_tokens=128,
                    loops=self.loops,
                    temperature=temperature,
                    seed=number,
                    **way,
                )
                start = time.perf_counter()
                completion = engine.complete([request])[0]
                taken[name].append(time.perf_counter() - start)
                drafted[name] += completion.drafted
                accepted[name] += completion.accepted
                texts[name] = completion.tokens
            flips += sum(text != texts[""] for text in texts.values())
        return [
            {
                "draft_loops": int(name.split(":")[0]),
                "draft_tokens": int(name.split(":")[1]),
                "temperature": temperature,
                "accepted": accepted[name] / drafted[name],
                "speedup": statistics.median(
                    a / b for a, b in zip(taken[""], taken[name], strict=True)
                ),
                "texts_that_differ": flips,
            }
            for name in ways
            if name
        ]


def picture(result: dict[str, Any], path: Path) -> Path:
    with draw.figure(1, 3, width=4.6, height=3.7) as (canvas, axes):
        for kind in RULES:
            points = [x for x in result["exits"] if x["rule"].startswith(kind)]
            points.sort(key=lambda x: x["loops"])
            label = "fixed number" if kind == "budget" else kind
            style = "k--" if kind == "budget" else "o-"
            xs, ys = ([100 * p["more_loss"] for p in points], [p["loops"] for p in points])
            axes[0].plot(ys, xs, style, label=label, linewidth=1.4)
        axes[0].axhline(0.5, color="#999999", linewidth=0.8)
        axes[0].set(
            title="Stopping early",
            xlabel="mean loops per token",
            ylabel="increase of loss over full depth, %",
        )
        axes[0].legend()
        points = result["depth"]
        axes[1].plot([p["loops"] for p in points], [p["loss"] for p in points], "o-")
        axes[1].set(title="Fixed depth", xlabel="loops", ylabel="loss, nats")
        for point in result["policies"]:
            x, y = point["bytes_per_token"] / 1024, 100 * point["more_loss"]
            kind = point["policy"].split(":")[0]
            color = {"full": "k", "first": draw.PALETTE[0]}.get(kind, draw.PALETTE[1])
            axes[2].plot(x, y, "o", color=color)
            axes[2].annotate(point["policy"], (x, y), xytext=(4, 4), textcoords="offset points")
        axes[2].set(
            title="Cache policies", xlabel="cache per token, KiB", ylabel="increase of loss, %"
        )
        return draw.save(canvas, path)


PARTS = ("depth", "exits", "policies", "weights", "drafts")


def show(result: dict[str, Any]) -> None:
    for title in PARTS:
        if title not in result:
            continue
        rows = result[title]
        cells = [[f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in rows]
        console.out.print(console.table(title, list(rows[0]), cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.only and arguments.picture:
        parser.error("--picture needs all parts")
    keep_freed_memory()
    torch.manual_seed(0)
    bench = Bench(arguments.run, arguments.rows, arguments.rounds)
    measurements = {
        "depth": bench.depth,
        "exits": bench.exits,
        "policies": bench.policies,
        "weights": bench.weights,
        "drafts": lambda: [*bench.drafts(0.0), *bench.drafts(0.8)],
    }
    result = {
        "checkpoint": str(bench.folder),
        "tokens": int(bench.full.nats.numel()),
        "loss": bench.full.loss,
        **{part: measurements[part]() for part in PARTS if arguments.only in (None, part)},
    }
    show(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.picture:
        picture(result, arguments.picture)


if __name__ == "__main__":
    main()
