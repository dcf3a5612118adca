"""Table "Hyperparameter instability" and the figures of state norm and spectral radius.

A run has converged if it finished and covers at least half of the way from guessing, the logarithm
of the vocabulary's size, to the best loss of all runs. One that stalls at the frequencies of tokens
covers about a third.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    loss_at,
)
from parcae.experiments.figures import series
from parcae.experiments.rdm_comparison import MODELS
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import NOT_SHOWN, Claim, always, positive

LOOPS = 8
RATES = {
    "paper": (2e-4, 4e-4, 6e-4, 8e-4, 1e-3),
    "micro": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "toy": (1e-3, 1.6e-2),
}
"""Small models take larger rates: the grid at micro scale begins at the paper's largest. Its last
two were added when nothing had diverged up to 1.6e-2."""
SHORT = {"micro": {"steps": 400}, "toy": {"steps": 3}}


class LrRobustness(Experiment):
    name = "lr-robustness"
    title = "Convergence over learning rates"
    in_paper = "the table of hyperparameter instability and its two figures"
    paper = (
        "Of the rates 2e-4, 4e-4, 6e-4, 8e-4, 1e-3 the pre-norm RDM converges at the first, the "
        "residual-norm RDM at the first two, Parcae at all five. Divergent runs learn a spectral "
        "radius of at least 1, convergent ones stay below."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        budget = SHORT.get(scale.name, {})
        for seed, lr in itertools.product(scale.seeds, RATES[scale.name]):
            for model, family in MODELS.items():
                tree = scale.rdm(
                    family, optimiser={"lr": lr}, run={"telemetry_every": 10}, budget=budget
                )
                yield Run(scale.recipe(tree, seed), {"model": model, "lr": lr, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        guessing = math.log(run.recipe.model.vocab_size)
        return {**super().measure(run, store), "guessing": guessing}

    def claims(self, results: Results) -> list[Claim]:
        parcae = [converged(row, results) for row in results.where(model="Parcae")]
        shares = {
            model: {seed: share_converged(results, model, seed) for seed in results.values("seed")}
            for model in MODELS
            if results.where(model=model)
        }
        lead = [
            shares["Parcae"][seed] - share
            for seed, share in shares.get("RDM, pre-norm", {}).items()
            if "Parcae" in shares
        ]
        counts = "; ".join(
            f"{model} {sum(converged(row, results) for row in results.where(model=model))} of "
            f"{len(results.where(model=model))}"
            for model in shares
        )
        return [
            Claim(
                "Parcae converges at every learning rate",
                always(parcae),
                f"{sum(parcae)} of {len(parcae)} runs",
            ),
            Claim(
                "Parcae converges at more learning rates than the pre-norm RDM",
                positive(lead),
                counts,
            ),
            radius_claim(results),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for lr in results.values("lr"):
            cells = []
            for model in MODELS:
                found = results.where(model=model, lr=lr)
                good = [row for row in found if converged(row, results)]
                losses = [loss_at(row, LOOPS) for row in good]
                mean = f", loss {sum(losses) / len(losses):.2f}" if losses else ""
                radii = [final_radius(row) for row in found]
                rho = f", ρ {min(radii):.2f} to {max(radii):.2f}" if radii else ""
                cells.append(f"{len(good)} of {len(found)}{mean}{rho}")
            rows.append((f"{lr:g}", *cells))
        return ("learning rate", *MODELS), rows

    def draw(self, results: Results, path: Path) -> Path:
        rates = results.values("lr")
        columns = (
            ("training", "loss", "loss in training"),
            ("telemetry", "state_norm", "norm of the state"),
            ("telemetry", "spectral_radius", "spectral radius of A"),
        )
        with plotting.figure(3, len(MODELS), width=3.7, height=2.7) as (canvas, grid):
            for across, model in enumerate(MODELS):
                for down, (kind, column, ylabel) in enumerate(columns):
                    panel = grid[down][across]
                    if across:
                        panel.sharey(grid[down][0])
                    for colour, lr in zip(plotting.shades(len(rates)), rates, strict=True):
                        for number, row in enumerate(results.where(model=model, lr=lr)):
                            label = f"{lr:g}" if number == 0 else None
                            failed = not converged(row, results)
                            panel.plot(
                                *series(row, kind, column),
                                color=plotting.RED if failed else colour,
                                ls="--" if failed else "-",
                                lw=1.2,
                                label=label,
                            )
                    if not across:
                        panel.set_ylabel(ylabel)
                    if kind == "telemetry":
                        panel.set_yscale("log")
                    if column == "spectral_radius":
                        panel.axhline(1, color=plotting.LIGHT_GREY, lw=1)
                        panel.set_xlabel("step")
                failures = [
                    row for row in results.where(model=model) if not converged(row, results)
                ]
                grid[0][across].set_title(f"{model}: {len(failures) or 'none'} failed")
                if failures:
                    steps, losses = series(failures[-1], "training", "loss")
                    note = {"color": plotting.RED, "ha": "right", "va": "bottom", "fontsize": 8.5}
                    grid[0][across].annotate(
                        "failed",
                        (steps[-1], losses[-1]),
                        (0, 3),
                        textcoords="offset points",
                        **note,
                    )
            grid[0][0].legend(title="learning rate", fontsize=7.5, title_fontsize=8)
            return plotting.save(canvas, path)


def radius_claim(results: Results) -> Claim:
    """Whether divergence and a spectral radius of at least 1 go together, over pre-norm RDMs."""
    statement = (
        "Pre-norm RDMs that diverge have learned a spectral radius of at least 1, those that "
        "converge have not"
    )
    runs = [
        (converged(row, results), final_radius(row)) for row in results.where(model="RDM, pre-norm")
    ]
    agree = [(radius >= 1) != good for good, radius in runs]
    if len({good for good, _ in runs}) == 1:
        text = "all runs converged" if runs[0][0] else "no run converged"
        return Claim(statement, NOT_SHOWN, f"{text}, so there is nothing to compare")
    return Claim(statement, always(agree), f"{sum(agree)} of {len(agree)} runs agree")


def converged(row: Row, results: Results) -> bool:
    """Whether a run covers half of the way from guessing to the best loss of all runs."""
    best = min(loss_at(other, LOOPS) for other in results.rows)
    return loss_at(row, LOOPS) < (row["guessing"] + best) / 2


def share_converged(results: Results, model: str, seed: int) -> float:
    rows = results.where(model=model, seed=seed)
    return sum(converged(row, results) for row in rows) / len(rows) if rows else 0.0


def final_radius(row: Row) -> float:
    """The last spectral radius that was measured; infinite if the matrix was not finite."""
    _, values = series(row, "telemetry", "spectral_radius")
    return values[-1] if values and math.isfinite(values[-1]) else math.inf
