"""One training step: ours against the plain version, interleaved in one run.

    python benchmarks/train_step.py [--repetitions 5] [--no-compile] [--out result.json]
    python benchmarks/train_step.py --threads 1 --cpu-time     # beside other programs
    python benchmarks/train_step.py --grid                     # other batches, lengths and depths

All do forward, backward and a fused AdamW step on the same weights, tokens and depths, each in a
process of its own, taking turns. The plain
version (reference.py, eager) loops every row to the batch's maximum, computes B e and the
value embeddings in every loop, and sees all logits at once. Ours runs as a user would run it,
compiled; eager is printed too, with what each of its parts contributes, and both in bfloat16. The
peak memory is taken in processes of their own, at a vocabulary of 32,768.
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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

DRAWS = 3
GRID = (
    *((rows, 128, loops) for rows in (4, 16, 64) for loops in (2, 8, 16)),
    *((rows, 512, loops) for rows in (4, 16) for loops in (2, 8)),
    *((4, 2048, loops) for loops in (2, 8)),
)
"""Sequences, positions, mean loops; more tokens than these exceed the plain version's memory."""
MEMORY_VOCABULARY = 32_768


class Shape(NamedTuple):
    rows: int = 32
    length: int = 128
    mean_loops: int = 8
    preset: str = "parcae-10m"

    def config(self, **changes: Any) -> parcae.ModelConfig:
        length = max(self.length, parcae.preset(self.preset).context_length)
        loop = {"mean_loops": self.mean_loops}
        return parcae.preset(self.preset, {"context_length": length, "loop": loop, **changes})


class How(NamedTuple):
    """How a candidate takes a step."""

    method: str
    """Of `Step`."""
    compiled: bool = False
    keeps_freed_memory: bool = True


class Step:
    """Everything one candidate needs: its own weights and optimiser, the common batches."""

    def __init__(self, shape: Shape, how: How, vocab: int | None = None) -> None:
        self.how = how
        if how.keeps_freed_memory:
            keep_freed_memory()
        self.rows = shape.rows
        config = shape.config() if vocab is None else shape.config(vocab_size=vocab)
        self.model = parcae.create(config)
        assert isinstance(self.model, LoopedModel)
        if how.compiled:
            self.model.compile_layers()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        size = (2, shape.rows, shape.length)
        self.tokens, self.targets = torch.randint(config.vocab_size, size, generator=generator)
        self.state = torch.zeros(shape.rows, shape.length, config.core_block.width)

    def __call__(self, depths: Depths) -> None:
        getattr(self, self.how.method)(depths)

    def run(self, loss: Tensor) -> None:
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def ours(self, depths: Depths) -> None:
        self.run(self.model(self.tokens, self.targets, loops=depths, state=self.state).loss)

    def ours_in_bfloat16(self, depths: Depths) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(self.tokens, self.targets, loops=depths, state=self.state).loss
        self.run(loss)

    def all_logits(self, depths: Depths) -> None:
        logits = self.model(self.tokens, loops=depths, state=self.state).logits
        self.run(F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()))

    def every_row_to_the_maximum(self, depths: Depths) -> None:
        no_grad, grad = max(depths.no_grad_loops), max(depths.gradient_loops)
        self.ours(Depths((no_grad + grad,) * self.rows, (grad,) * self.rows))

    def plain(self, depths: Depths) -> None:
        self.run(reference.forward(self.model, self.tokens, self.targets, depths, self.state))

    def plain_in_bfloat16(self, depths: Depths) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = reference.forward(self.model, self.tokens, self.targets, depths, self.state)
        self.run(loss)


def draws(shape: Shape) -> list[Depths]:
    """The most typical consecutive seeds: the mean of their depths, and the mean of their maxima,
    are nearest to those of a thousand draws."""
    loop, seeds = shape.config().loop, range(1000)
    drawn = [sample(loop, shape.rows, torch.Generator().manual_seed(seed)) for seed in seeds]
    means = torch.tensor([statistics.mean(depths.loops) for depths in drawn])
    maxima = torch.tensor([max(depths.loops) for depths in drawn]).float()
    errors = sum((x.unfold(0, DRAWS, 1).mean(1) / x.mean() - 1).abs() for x in (means, maxima))
    first = int(torch.as_tensor(errors).argmin())
    return drawn[first : first + DRAWS]


CANDIDATES = {
    "plain": How("plain", keeps_freed_memory=False),
    "plain, freed memory kept": How("plain"),
    "plain, bfloat16 autocast": How("plain_in_bfloat16"),
    "ours, eager": How("ours"),
    "  looping every row to the maximum": How("every_row_to_the_maximum"),
    "  with all logits at once": How("all_logits"),
    "  without keeping freed memory": How("ours", keeps_freed_memory=False),
    "ours, bfloat16": How("ours_in_bfloat16"),
    "ours, compiled": How("ours", compiled=True),
    "ours, bfloat16, compiled": How("ours_in_bfloat16", compiled=True),
}


class Clock(NamedTuple):
    """How steps are timed: by the clock, or by the CPU time of the process."""

    cpu_time: bool = False
    threads: int | None = None

    def now(self) -> float:
        return time.process_time() if self.cpu_time else time.perf_counter()

    def set_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def serve(name: str, shape: Shape, clock: Clock, pipe: Connection) -> None:
    """A process of its own for each candidate, so that no heap disturbs another."""
    clock.set_threads()
    take_turns(Step(shape, CANDIDATES[name]), shape, clock, pipe)


def take_turns(
    step: Callable[[Depths], None], shape: Shape, clock: Clock, pipe: Connection
) -> None:
    """Answer each number of a draw with the seconds of a step, until None comes."""
    found = draws(shape)
    while (draw := pipe.recv()) is not None:
        start = clock.now()
        step(found[draw])
        pipe.send(clock.now() - start)


Serve = Callable[[str, Shape, Clock, Connection], None]


class Candidate:
    def __init__(self, name: str, shape: Shape, clock: Clock, serve: Serve) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (name, shape, clock, theirs)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is noticed

    def step(self, draw: int) -> float:
        """Seconds of one training step on one draw of depths."""
        self.pipe.send(draw)
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join()


def time_steps(
    names: list[str], shape: Shape, clock: Clock, repetitions: int, serve: Serve = serve
) -> dict[str, Any]:
    """Times of each candidate; speedups are those over the first."""
    candidates = {name: Candidate(name, shape, clock, serve) for name in names}
    clock.set_threads()
    gemm = GemmRate(clock.now)
    totals = {name: {"minimum": 0.0, "median": 0.0} for name in names}
    work = 0.0
    for draw, depths in enumerate(draws(shape)):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(repetitions + 1):
            for name, candidate in candidates.items():
                taken = candidate.step(draw)
                if repetition:  # the first warms up, and compiles
                    seconds[name].append(taken)
            gemm.sample()
        work += flops.executed_flops(shape.config(), depths, shape.length)
        for name, total in totals.items():
            total["minimum"] += min(seconds[name])
            total["median"] += statistics.median(seconds[name])
    for candidate in candidates.values():
        candidate.stop()
    tokens = DRAWS * shape.rows * shape.length
    for total in totals.values():
        total["tokens_per_second"] = tokens / total["minimum"]
        total["share_of_gemm_rate"] = work / total["minimum"] / gemm.best
        for kind in ("minimum", "median"):
            total[f"speedup_by_{kind}"] = totals[names[0]][kind] / total[kind]
    return {"gemm_gflops": gemm.best / 1e9, "candidates": totals}


def print_steps(result: dict[str, Any], shape: Shape) -> None:
    """The table of `time_steps`."""
    print(
        f"{shape.preset}, {shape.rows} rows of {shape.length}, mean depth {shape.mean_loops}, "
        f"{DRAWS} draws of depths"
    )
    print(f"best matrix products: {result['gemm_gflops']:.0f} GFLOP/s")
    print(f"{'':38}{'tokens/s':>9}{'by minima':>11}{'by medians':>12}{'of GEMM':>9}")
    for name, one in result["candidates"].items():
        print(
            f"{name:38}{one['tokens_per_second']:9.0f}{one['speedup_by_minimum']:10.2f}x"
            f"{one['speedup_by_median']:11.2f}x{one['share_of_gemm_rate']:9.0%}"
        )


def print_grid(
    shapes: list[Shape], names: list[str], clock: Clock, repetitions: int
) -> list[dict[str, Any]]:
    print("speedup over the plain version, by minima / by medians")
    print(f"{'sequences':>9}{'positions':>10}{'loops':>6}" + "".join(f"{n:>18}" for n in names))
    results = []
    for shape in shapes:
        found = time_steps(["plain", *names], shape, clock, repetitions)["candidates"]
        results.append({**shape._asdict(), **{name: found[name] for name in names}})
        speedups = "".join(
            f"{found[name]['speedup_by_minimum']:10.2f}x /{found[name]['speedup_by_median']:5.2f}x"
            for name in names
        )
        print(f"{shape.rows:9}{shape.length:10}{shape.mean_loops:6}{speedups}", flush=True)
    return results


def profile(name: str, shape: Shape) -> dict[str, float]:
    """Shares of a step's time by kind of work, from PyTorch's profiler."""
    step = Step(shape, CANDIDATES[name])
    depths = draws(shape)[0]
    for _ in range(3):
        step(depths)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(depths)
    shares = dict.fromkeys(("matrix products", "attention", "everything else"), 0.0)
    for event in profiler.key_averages():
        is_product = event.key in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
        kind = "attention" if "attention" in event.key else "everything else"
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
    shape = Shape()
    step = Step(shape, CANDIDATES[name], vocab=MEMORY_VOCABULARY)
    for depths in draws(shape)[:2]:
        step(depths)
    status = Path("/proc/self/status").read_text()  # getrusage would include the parent's peak
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024)  # pyright: ignore


def main() -> None:
    if name := os.environ.get("PARCAE_BENCH_MEMORY"):
        print_own_peak(name)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, help="time these, in this order")
    parser.add_argument("--preset", default=Shape().preset)
    parser.add_argument(
        "--profile",
        nargs="?",
        const="ours, compiled",
        choices=CANDIDATES,
        help="only say where a step's time goes",
    )
    parser.add_argument("--grid", action="store_true", help="only the table over shapes")
    parser.add_argument("--shape", type=int, nargs=3, help="rows length loops")
    parser.add_argument("--threads", type=int, help="(default: PyTorch's)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of the clock")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    clock = Clock(arguments.cpu_time, arguments.threads)
    clock.set_threads()
    shape = Shape(*(arguments.shape or ()), preset=arguments.preset)
    if arguments.profile:
        for kind, share in profile(arguments.profile, shape).items():
            print(f"{kind:20}{share:6.0%}")
        return
    if arguments.grid:
        names = ["ours, eager", *([] if arguments.no_compile else ["ours, compiled"])]
        grid = print_grid([Shape(*one) for one in GRID], names, clock, arguments.repetitions)
        if arguments.out:
            arguments.out.write_text(json.dumps(grid, indent=2) + "\n")
        return
    names = arguments.only or [
        name for name in CANDIDATES if not (arguments.no_compile and "compiled" in name)
    ]
    result = time_steps(names, shape, clock, arguments.repetitions)
    print_steps(result, shape)
    memory = {name: peak_memory(name) for name in names if not name.startswith(" ")}
    print(f"peak memory at a vocabulary of {MEMORY_VOCABULARY:,}:")
    for name, mib in memory.items():
        print(f"{name:38}{mib:7.0f} MiB{mib / memory[names[0]]:9.2f}x")
    result["peak_mib"] = memory
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
