"""What telemetry costs at the paper's largest size.

    python benchmarks/telemetry.py [--recipe parcae-1.3b] [--devices 8]

Seconds of one core, which other programs hardly change, for the spectra of matrices of the recipe's
width: estimated as in training, and decomposed in full. Then the FLOPs of everything that telemetry
computes against those of the steps between two measurements; other devices wait for the first one,
so its FLOPs count `devices` times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from parcae.model.flops import token_flops
from parcae.training.schedule import flops_per_step
from parcae.training.settings import resolve_recipe
from parcae.training.telemetry import (
    ARNOLDI_STEPS,
    LANCZOS_STEPS,
    SQUARINGS,
    spectral_norm,
    spectral_radius,
)


def seconds(function: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="parcae-1.3b")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    recipe = resolve_recipe(arguments.recipe)
    width, every = recipe.model.core_block.width, recipe.run.telemetry_every
    dense = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    diagonal = torch.diag(dense.diagonal())

    torch.set_num_threads(1)
    print(f"{arguments.recipe}: width {width}")
    for name, estimate, exact in (
        ("norm of A, diagonal", lambda: spectral_norm(diagonal), lambda: svd(diagonal)),
        ("norm of B or C", lambda: spectral_norm(dense), lambda: svd(dense)),
        ("radius of A, dense", lambda: spectral_radius(dense), lambda: eigenvalues(dense)),
    ):
        now, before = seconds(estimate, arguments.repetitions), seconds(exact, 1)
        print(f"{name:24}{now:8.3f} s   in full {before:8.3f} s   {before / now:6.0f}x")

    step = flops_per_step(recipe)
    model, tokens = recipe.model, recipe.run.telemetry_rows * recipe.model.context_length
    forward = token_flops(model, model.context_length).forward(model.loop.nominal_loops)
    norms = 2 * 4 * LANCZOS_STEPS * width**2
    radius = 2 * SQUARINGS * width**3 + 2 * ARNOLDI_STEPS * width**2
    work = {
        "forward of the rows": tokens * forward,
        "two dense norms": norms,
        "a dense radius": radius,
    }
    for name, flops in work.items():
        share = arguments.devices * flops / (every * step)
        print(f"{name:24}{flops:.2e} FLOPs, {share:.5%} of the {every} steps between measurements")
    print(f"a step on {arguments.devices} devices: {step:.2e} FLOPs")


def svd(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(matrix, ord=2)


def eigenvalues(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvals(matrix.double())


if __name__ == "__main__":
    main()
