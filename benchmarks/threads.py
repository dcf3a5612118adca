"""Training beside other programs: tokens per second by the way its threads wait for each other.

    python benchmarks/threads.py [--seconds 5] [--rounds 3] [--settings default,passive,...]

Each setting is a process that trains the demo's model, two threads unless it says otherwise; all
take turns, alone and beside one and two busy loops, and rest in between. Printed are medians over
the rounds, and the share of what the default reaches alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

DEFAULT = "default"
BUSY = (0, 1, 2)
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "PARCAE_BENCH_LIMITER")
COMPARED = (DEFAULT, "limited when busy", "spins=300", "passive", "one thread")
SETTINGS: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "limited when busy": {"PARCAE_BENCH_LIMITER": "1"},
    **{f"spins={n}": {"GOMP_SPINCOUNT": n} for n in ("300", "1000", "3000", "10000", "30000")},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def serve(pipe: Connection) -> None:
    import torch

    import parcae
    from parcae.machine import SpinLimiter, keep_freed_memory
    from parcae.training.optim import Optimiser
    from parcae.training.schedule import schedule_factors, total_steps
    from parcae.training.settings import resolve_recipe

    keep_freed_memory()
    if os.environ.get("PARCAE_BENCH_LIMITER"):
        SpinLimiter().__enter__()
    recipe = resolve_recipe("demo", {})
    model = parcae.create(recipe.model)
    optimiser = Optimiser(model, recipe.optimiser)
    rows, length = recipe.data.global_batch, recipe.model.context_length
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(recipe.model.vocab_size, (2, rows, length), generator=generator)
    factor = schedule_factors(recipe.schedule, recipe.optimiser, 1, 0.0, total_steps(recipe))

    def step(number: int) -> None:
        model(tokens, targets, **model.draw(0, 0, range(rows), length)).loss.backward()
        optimiser.step(factor)
        optimiser.zero_grad()

    for number in range(2):
        step(number)
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        start, number = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            step(number)
            number += 1
        pipe.send(number * rows * length / taken)


class Trainer:
    def __init__(self, variables: dict[str, str]) -> None:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs,), daemon=True).start()
        theirs.close()  # so that the end of the process is noticed

    def rate(self, seconds: float) -> float:
        self.pipe.send(seconds)
        return self.pipe.recv()


def start_busy_loop() -> subprocess.Popen[bytes]:
    """In a session of its own, as from another terminal, with the same priority: Linux shares the
    cores among sessions first, and then often puts both threads of a session on one core."""
    group, code = Path("/proc/self/autogroup"), "while 1: pass"
    if group.exists():
        nice = group.read_text().split()[-1]
        code = f"open('{group}', 'w').write('{nice}')\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", default=",".join(COMPARED), help=", ".join(SETTINGS))
    arguments = parser.parse_args()
    names = arguments.settings.split(",")
    trainers = {name: Trainer(SETTINGS[name]) for name in names}
    for trainer in trainers.values():
        trainer.pipe.recv()
    rates: dict[tuple[str, int], list[float]] = {(n, b): [] for n in names for b in BUSY}
    for _ in range(arguments.rounds):
        for busy in BUSY:
            others = [start_busy_loop() for _ in range(busy)]
            for name, trainer in trainers.items():
                rates[name, busy].append(trainer.rate(arguments.seconds))
            for other in others:
                other.kill()
                other.wait()
    for trainer in trainers.values():
        trainer.pipe.send(None)
    alone = statistics.median(rates[names[0], 0])
    print(f"{'tokens/s beside busy loops:':28}" + "".join(f"{b:>14}" for b in BUSY))
    for name in names:
        rate = [statistics.median(rates[name, busy]) for busy in BUSY]
        print(f"{name:28}" + "".join(f"{r:8.0f}{r / alone:6.0%}" for r in rate))


if __name__ == "__main__":
    main()
