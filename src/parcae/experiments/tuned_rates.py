"""Beyond the paper: Parcae against its rivals, each at the learning rate that suits it best.

The comparisons of the paper use one learning rate for all models. At this scale that rate is best
for none of them, so each is trained again at larger ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.rdm_comparison import MODELS as RDM_MODELS
from parcae.experiments.scales import Scale
from parcae.experiments.transformer_comparison import LONGER
from parcae.experiments.verdicts import NOT_RUN, Claim, describe, differences, interval, lower

LOOPS = 8
PARCAE = "Parcae"


Tree = dict[str, Any]


def _transformer_setup(scale: Scale, family: str, rate: float) -> Tree:
    """One rate for AdamW and Muon, and at micro scale four times the data."""
    steps = LONGER.get(scale.name, (1,))[0] * scale.text()["budget"].get("steps", 0)
    budget = {"steps": steps} if steps else {}
    return scale.text(family, optimiser={"lr": rate, "muon_lr": rate}, budget=budget)


def _rdm_setup(scale: Scale, family: str, rate: float) -> Tree:
    return scale.rdm(family, optimiser={"lr": rate})


class Setup(NamedTuple):
    """Models that are compared with one another."""

    tree: Callable[[Scale, str, float], Tree]
    """Tables of a run by scale, family of presets and learning rate."""
    models: Mapping[str, str]
    """Families of presets by name."""
    rates: Mapping[str, tuple[float, ...]]
    """By scale; the first is that of the other experiments."""


SETUPS = {
    "Transformer setup": Setup(
        _transformer_setup,
        {PARCAE: "parcae", "Transformer": "transformer"},
        {"micro": (8e-3, 1.6e-2, 3.2e-2), "toy": (8e-3, 1.6e-2), "paper": (8e-3, 4e-3, 1.6e-2)},
    ),
    "RDM setup": Setup(
        _rdm_setup,
        RDM_MODELS,
        {"micro": (2e-3, 4e-3, 8e-3), "toy": (2e-3, 8e-3), "paper": (4e-4, 2e-4, 6e-4, 8e-4)},
    ),
}


class TunedRates(Experiment):
    name = "tuned-rates"
    title = "Each model at its best learning rate"
    in_paper = "beyond the paper"
    paper = (
        "The paper tunes the rates of the Transformer and uses them for Parcae; all models of the "
        "RDM setup have the largest rate at which the RDM converges."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (name, setup) in itertools.product(scale.seeds, SETUPS.items()):
            for rate, model in itertools.product(setup.rates[scale.name], setup.models):
                recipe = scale.recipe(setup.tree(scale, setup.models[model], rate), seed)
                yield Run(recipe, {"setup": name, "model": model, "lr": rate, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        claims = []
        for name, setup in SETUPS.items():
            ours, rate = best_losses(results, name, PARCAE)
            for rival in list(setup.models)[1:]:
                theirs, their_rate = best_losses(results, name, rival)
                label = rival.replace(", ", " with ")
                statement = f"At their best rates Parcae has a lower loss than the {label}"
                if not has_all_rates(results, name, (PARCAE, rival)):
                    claims.append(Claim(statement, NOT_RUN, "not at all rates so far"))
                    continue
                gains = describe(differences(theirs, ours))
                evidence = f"{gains} nats lower; rates {rate:g} and {their_rate:g}"
                claims.append(Claim(statement, lower(ours, theirs), evidence))
        return claims

    def table(self, results: Results) -> Table:
        rows = []
        for name, setup in SETUPS.items():
            for model, rate in itertools.product(setup.models, results.values("lr", setup=name)):
                labels = {"setup": name, "model": model, "lr": rate}
                found = results.where(**labels)
                if found:
                    loops = (1, 4, LOOPS) if len(found[0]["losses"]) > 1 else (1,)
                    cells = [format_losses(results.loss(loop, **labels)) for loop in loops]
                    count = f"{found[0]['parameters']:,}"
                    blank = [""] * (3 - len(cells))
                    rows.append((name, model, count, f"{rate:g}", *cells, *blank))
        at = ("T = 1", "T = 4", f"T = {LOOPS}")
        return ("", "model", "parameters", "learning rate", *at), rows

    def draw(self, results: Results, path: Path) -> Path:
        names = [name for name in SETUPS if results.where(setup=name)]
        with plotting.figure(1, len(names), width=4.4) as (canvas, axes):
            for panel, name in zip([axes] if len(names) == 1 else axes, names, strict=True):
                for index, model in enumerate(SETUPS[name].models):
                    colour = plotting.colour(index)
                    losses = losses_by_rate(results, name, model)
                    means = {rate: interval(list(by.values()))[0] for rate, by in losses.items()}
                    panel.plot(means.keys(), means.values(), color=colour, label=model)
                    for rate, by_seed in losses.items():
                        panel.plot([rate] * len(by_seed), by_seed.values(), "o", color=colour)
                rates = sorted(results.values("lr", setup=name))
                panel.set_xscale("log")
                panel.set_xticks(rates, labels=[f"{rate:g}" for rate in rates])
                panel.minorticks_off()
                panel.set(title=name, xlabel="learning rate", ylabel="held-out loss")
                panel.legend(fontsize=8)
            return plotting.save(canvas, path)


def losses_by_rate(results: Results, setup: str, model: str) -> dict[float, dict[int, float]]:
    """Losses by rate, sorted, and seed: at eight loops, of a Transformer at its one."""
    rates = sorted(results.values("lr", setup=setup, model=model))
    return {rate: results.loss(LOOPS, setup=setup, model=model, lr=rate) for rate in rates}


def has_all_rates(results: Results, setup: str, models: Sequence[str]) -> bool:
    """Whether these models have the same seeds at several rates, so that one is their best."""
    rates = results.values("lr", setup=setup)
    seeds = {
        tuple(sorted(results.values("seed", setup=setup, model=model, lr=rate)))
        for model, rate in itertools.product(models, rates)
    }
    return len(rates) > 1 and len(seeds) == 1


def best_losses(results: Results, setup: str, model: str) -> tuple[dict[int, float], float]:
    """The losses by seed at the rate with the lowest mean, and that rate."""
    losses = losses_by_rate(results, setup, model)
    if not losses:
        return {}, 0.0
    complete = max(len(by_seed) for by_seed in losses.values())
    means = {
        rate: interval(list(by_seed.values()))[0]
        for rate, by_seed in losses.items()
        if len(by_seed) == complete
    }
    rate = min(means, key=means.__getitem__)
    return losses[rate], rate
