"""One training step: ours against the plain version, interleaved in one run.

    python benchmarks/train_step.py [--repetitions 5] [--no-compile] [--out result.json]

All do forward, backward and a fused AdamW step on the same weights, tokens and depths, each in a
process of its own, taking turns. The plain
version (reference.py, eager) loops every row to the batch's maximum, computes B e and the
value embeddings in every loop, and sees all logits at once. Ours runs as a user would run it,
compiled; eager is printed too, with what each of its parts contributes. The peak memory is taken
in processes of their own, at a vocabulary of 32,768.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import parcae
import reference
from measure import GemmRate
from parcae.machine import keep_freed_memory
from parcae.model import flops
from parcae.model.depth import Depths, sample
from parcae.model.looped import LoopedModel

ROWS, LENGTH, MEAN_LOOPS, DRAWS = 32, 128, 8, 3
PRESET = "parcae-10m"
MEMORY_VOCABULARY = 32_768


class Step:
    """Everything one candidate needs: its own weights and optimiser, the common batches."""

    def __init__(self, vocab: int, *, compiled: bool = False) -> None:
        changes = {"vocab_size": vocab, "loop": {"mean_loops": MEAN_LOOPS}}
        self.model = parcae.create(PRESET, **changes)
        assert isinstance(self.model, LoopedModel)
        if compiled:
            self.model.compile_layers()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        self.tokens, self.targets = torch.randint(vocab, (2, ROWS, LENGTH), generator=generator)
        self.state = torch.zeros(ROWS, LENGTH, self.model.config.core_block.width)

    def run(self, loss: Tensor) -> None:
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def ours(self, depths: Depths) -> None:
        self.run(self.model(self.tokens, self.targets, loops=depths, state=self.state).loss)

    def all_logits(self, depths: Depths) -> None:
        logits = self.model(self.tokens, loops=depths, state=self.state).logits
        self.run(F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()))

    def every_row_to_the_maximum(self, depths: Depths) -> None:
        no_grad, grad = max(depths.no_grad_loops), max(depths.gradient_loops)
        self.ours(Depths((no_grad + grad,) * ROWS, (grad,) * ROWS))

    def plain(self, depths: Depths) -> None:
        self.run(reference.forward(self.model, self.tokens, self.targets, depths, self.state))


def draws(config: parcae.ModelConfig) -> list[Depths]:
    """The first consecutive seeds whose draws are typical: mean 8.0, and mean maximum 14.4, which
    is what the largest of 32 clamped Poisson draws comes to on average."""
    for first in range(10_000):
        seeds = range(first, first + DRAWS)
        found = [sample(config.loop, ROWS, torch.Generator().manual_seed(s)) for s in seeds]
        maximum = sum(max(d.loops) for d in found) / DRAWS
        mean = sum(sum(d.loops) for d in found) / DRAWS / ROWS
        if abs(maximum - 14.4) < 0.1 and abs(mean - MEAN_LOOPS) < 0.1:
            return found
    raise RuntimeError("no typical draws were found")


CANDIDATES = {
    # name: (method of Step, compiled, freed memory is kept)
    "plain": ("plain", False, False),
    "plain, freed memory kept": ("plain", False, True),
    "ours, eager": ("ours", False, True),
    "  looping every row to the maximum": ("every_row_to_the_maximum", False, True),
    "  with all logits at once": ("all_logits", False, True),
    "  without keeping freed memory": ("ours", False, False),
    "ours, compiled": ("ours", True, True),
}


def serve(name: str, pipe: Connection) -> None:
    """A process of its own for each candidate, so that no heap disturbs another."""
    method, compiled, keep = CANDIDATES[name]
    if keep:
        keep_freed_memory()
    config = parcae.preset(PRESET)
    step = getattr(Step(config.vocab_size, compiled=compiled), method)
    found = draws(config)
    while (draw := pipe.recv()) is not None:
        start = time.perf_counter()
        step(found[draw])
        pipe.send(time.perf_counter() - start)


class Candidate:
    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, theirs), daemon=True)
        self.process.start()

    def step(self, draw: int) -> float:
        """Seconds of one training step on one draw of depths."""
        self.pipe.send(draw)
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join()


def time_steps(repetitions: int, compiled: bool) -> dict:
    config = parcae.preset(PRESET)
    names = [name for name in CANDIDATES if compiled or "compiled" not in name]
    candidates = {name: Candidate(name) for name in names}
    gemm = GemmRate()
    totals = {name: {"minimum": 0.0, "median": 0.0} for name in names}
    work = 0.0
    for draw, depths in enumerate(draws(config)):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(repetitions + 1):
            for name, candidate in candidates.items():
                taken = candidate.step(draw)
                if repetition:  # the first warms up, and compiles
                    seconds[name].append(taken)
            gemm.sample()
        work += flops.executed(config, depths, LENGTH)
        for name, total in totals.items():
            total["minimum"] += min(seconds[name])
            total["median"] += statistics.median(seconds[name])
    for candidate in candidates.values():
        candidate.stop()
    tokens = DRAWS * ROWS * LENGTH
    for total in totals.values():
        total["tokens_per_second"] = tokens / total["minimum"]
        total["share_of_gemm_rate"] = work / total["minimum"] / gemm.best
        for kind in ("minimum", "median"):
            total[f"speedup_by_{kind}"] = totals["plain"][kind] / total[kind]
    return {"gemm_gflops": gemm.best / 1e9, "candidates": totals}


def profile(compiled: bool) -> dict[str, float]:
    """Shares of a step's time by kind of work, from PyTorch's profiler."""
    keep_freed_memory()
    config = parcae.preset(PRESET)
    step = Step(config.vocab_size, compiled=compiled)
    depths = draws(config)[0]
    for _ in range(3):
        step.ours(depths)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step.ours(depths)
    shares = dict.fromkeys(("matrix products", "attention", "everything else"), 0.0)
    for event in profiler.key_averages():
        is_product = event.key in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
        kind = "attention" if "scaled_dot_product" in event.key else "everything else"
        shares["matrix products" if is_product else kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: time_spent / total for kind, time_spent in shares.items()}


def peak_memory(name: str) -> float:
    """MiB at the peak of two steps, by a process that does nothing else."""
    environment = {**os.environ, "PARCAE_BENCH_MEMORY": name}
    command = [sys.executable, __file__]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(answer.stdout)


def print_own_peak(name: str) -> None:
    if name != "plain":
        keep_freed_memory()
    step = Step(MEMORY_VOCABULARY, compiled=name == "ours, compiled")
    for depths in draws(parcae.preset(PRESET))[:2]:
        (step.plain if name == "plain" else step.ours)(depths)
    status = Path("/proc/self/status").read_text()  # getrusage would include the parent's peak
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024)  # pyright: ignore


def main() -> None:
    if name := os.environ.get("PARCAE_BENCH_MEMORY"):
        print_own_peak(name)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="only say where a step's time goes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.profile:
        for kind, share in profile(not arguments.no_compile).items():
            print(f"{kind:20}{share:6.0%}")
        return
    result = time_steps(arguments.repetitions, not arguments.no_compile)
    print(f"{PRESET}, {ROWS} rows of {LENGTH}, mean depth {MEAN_LOOPS}, {DRAWS} draws of depths")
    print(f"best matrix products: {result['gemm_gflops']:.0f} GFLOP/s")
    print(f"{'':38}{'tokens/s':>9}{'by minima':>11}{'by medians':>12}{'of GEMM':>9}")
    for name, one in result["candidates"].items():
        print(
            f"{name:38}{one['tokens_per_second']:9.0f}{one['speedup_by_minimum']:10.2f}x"
            f"{one['speedup_by_median']:11.2f}x{one['share_of_gemm_rate']:9.0%}"
        )
    names = ["plain", "ours, eager", *([] if arguments.no_compile else ["ours, compiled"])]
    memory = {name: peak_memory(name) for name in names}
    print(f"peak memory at a vocabulary of {MEMORY_VOCABULARY:,}:")
    for name, mib in memory.items():
        print(f"{name:38}{mib:7.0f} MiB{mib / memory['plain']:9.2f}x")
    result["peak_mib"] = memory
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
