"""Beyond the paper: a task in which every loop takes one more step.

Walks through a permutation, of one to eight steps, for a looped model, a Transformer of the same
layers and a Transformer as deep as the loop unrolled; then walks longer than those in training, for
the steps from an RDM to Parcae and for training at a fixed depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parcae import plotting
from parcae.data.synthetic import TASKS, Walks
from parcae.experiments.ablation_ladder import STEPS
from parcae.experiments.experiment import Experiment, Results, Row, Run, Table
from parcae.experiments.reasoning import accuracy, measure_accuracy
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, always, describe, differences, positive, together

LOOPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
MEAN_LOOPS = 8
CORE_LAYERS = 2
"""One to look back at the node before, one to look up where its edge leads."""
MODELS = {
    "looped": ("parcae", CORE_LAYERS),
    "shallow": ("transformer", CORE_LAYERS),
    "deep": ("transformer", CORE_LAYERS * MEAN_LOOPS),
}
"""By name: family and layers of the core."""
TRAINING = {"data": {"global_batch": 32, "micro_batch": 32}, "budget": {"steps": 2000}}
SOLVED = 0.95
FEW, MANY = 8, 32
"""Loops with which walks longer than in training are compared."""
SHOWN_DEPTHS = (1, 2, 4, 8)
FIXED = "Parcae, always 8 loops"
VARIANTS = {**STEPS, FIXED: {"loop": {"sampler": "fixed"}}}
"""What each changes of Parcae's [model]; "+ prelude norm" is Parcae itself."""
SEEN, LONGER = range(1, 5), range(5, 9)
"""Steps of the walks in training, and of longer ones."""


class OneStepPerLoop(Experiment):
    name = "walks"
    title = "One loop, one step"
    in_paper = "beyond the paper"
    paper = "The paper has no such task."

    def runs(self, scale: Scale) -> Iterator[Run]:
        plan = [
            *(("walks", model, seed) for seed in scale.seeds for model in ("looped", "shallow")),
            *(("walks-unseen", "looped", seed) for seed in scale.seeds),
            ("walks", "deep", 0),
        ]
        for task, name, seed in plan:
            family, layers = MODELS[name]
            tree = scale.task(task, family, model={"core_layers": layers}, **training(scale))
            yield Run(scale.recipe(tree, seed), {"task": task, "model": name, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        return measure_accuracy(run, store, LOOPS)

    def claims(self, results: Results) -> list[Claim]:
        one, many = (accuracy(results, "walks", "looped", loops) for loops in (1, MEAN_LOOPS))
        shallow = accuracy(results, "walks", "shallow")
        rows = results.where(task="walks", model="looped")
        solved = [", ".join(str(_solved(row, t)) for t in SHOWN_DEPTHS) for row in rows]
        few, more = (
            accuracy(results, "walks-unseen", "looped", loops, levels=LONGER)
            for loops in (FEW, MANY)
        )
        return [
            Claim(
                "Accuracy on walks of 8 steps grows by more than 10 points from 1 loop to 8",
                positive(value - 0.1 for value in differences(many, one)),
                f"{describe(one.values(), 2)} with 1 loop, {describe(many.values(), 2)} with 8",
            ),
            Claim(
                "With 8 loops the model beats a Transformer of the same layers",
                positive(differences(many, shallow)),
                f"8 steps: Transformer {describe(shallow.values(), 2)}",
            ),
            Claim(
                "Each further loop takes at least one more step, up to 4 loops",
                always(_grows_by_a_step_per_loop(row) for row in rows),
                f"steps with at least {SOLVED:.0%} right answers at T = 1, 2, 4, 8: "
                f"{'; '.join(solved)} (by seed)",
            ),
            Claim(
                "Walks longer than in training are solved better with more loops",
                positive(differences(more, few)),
                f"5 to 8 steps after training on walks of 4: {describe(few.values(), 2)} with "
                f"{FEW} loops, {describe(more.values(), 2)} with {MANY}",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for task in results.values("task"):
            for model in results.values("model", task=task):
                for loops in (1, 2, 4, 8, 16, 32) if model == "looped" else (1,):
                    cells = [
                        describe(accuracy(results, task, model, loops, (level,)).values(), 2)
                        for level in (1, 2, 3, 4, 5, 6, 8)
                    ]
                    name = f"{model}, T = {loops}" if model == "looped" else model
                    rows.append((task, name, *(cell.partition(" (")[0] for cell in cells)))
        columns = ("task", "model", "1 step", *(f"{count} steps" for count in (2, 3, 4, 5, 6, 8)))
        return columns, rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(1, 3, width=4.3, height=3.4) as (canvas, (left, middle, right)):
            _draw_by_loops(left, results, "walks")
            left.set_title("Each loop takes one more step")
            _draw_by_steps(middle, results)
            _draw_by_loops(right, results, "walks-unseen")
            right.set_title("Trained on walks of 4 steps")
            if right.lines:
                right.legend(title="steps", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            canvas.supxlabel("Lines: means over seeds. Dashed: longer than in training.", size=8.5)
            return plotting.save(canvas, path)


class Ladder(Experiment):
    name = "walks-ladder"
    title = "From an RDM to Parcae where loops are used"
    in_paper = "beyond the paper: its ladder of changes, on walks"
    paper = (
        "On text: the RDM diverges; constraining A lets it train; a depth per sequence lowers the "
        "loss at T = 1 most (8.99 to 3.38); the prelude norm lowers it at every T."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (name, changes) in itertools.product(scale.seeds, VARIANTS.items()):
            model = {"core_layers": CORE_LAYERS, **changes}
            tree = scale.task("walks-unseen", model=model, **training(scale))
            labels = {"task": "walks-unseen", "model": "looped", "variant": name, "seed": seed}
            yield Run(scale.recipe(tree, seed), labels)

    def measure(self, run: Run, store: Store) -> Row:
        return measure_accuracy(run, store, LOOPS)

    def claims(self, results: Results) -> list[Claim]:
        rdm, constrained, sampled, parcae = STEPS
        more = "solves more walks"
        longer = f"{more} longer than in training"
        return [
            _claim(results, statement, worse, better, levels, depths)
            for statement, worse, better, levels, depths in (
                (f"Constraining A {longer}, at T = 32", rdm, constrained, LONGER, (32,)),
                (
                    f"A depth per sequence {more} at T = 2 than one per micro-batch",
                    *(constrained, sampled, SEEN, (2,)),
                ),
                (f"The prelude norm {longer}, at T = 32", sampled, parcae, LONGER, (32,)),
                (
                    f"Training at sampled depths {more} at T = 2 than at a fixed depth",
                    *(FIXED, parcae, SEEN, (2,)),
                ),
                (
                    f"Training at sampled depths {longer}, at T = 16 and 32",
                    *(FIXED, parcae, LONGER, (16, 32)),
                ),
            )
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for levels, steps in ((SEEN, "1 to 4"), (LONGER, "5 to 8")):
            for name in results.values("variant"):
                cells = [
                    describe(_shares(results, name, loops, levels).values(), 2).partition(" (")[0]
                    for loops in (1, 2, 4, 8, 16, 32)
                ]
                rows.append((steps, name, *cells))
        return ("steps", "model", *(f"T = {loops}" for loops in (1, 2, 4, 8, 16, 32))), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(1, 2, width=4.6, height=3.5) as (canvas, (left, right)):
            _draw_variants(left, results, SEEN)
            left.set_title("Walks of 1 to 4 steps, as in training")
            _draw_variants(right, results, LONGER)
            right.set_title("Walks of 5 to 8 steps")
            return plotting.save(canvas, path)


def training(scale: Scale) -> dict[str, Any]:
    """Less than the other tasks need."""
    return {} if scale.name == "toy" else TRAINING


def steps_solved(shares: Iterable[float]) -> int:
    """The longest walk of which it and all shorter ones end right in at least 95 %, from the shares
    of right answers after 1, 2, ... steps."""
    return sum(1 for _ in itertools.takewhile(lambda share: share >= SOLVED, shares))


def _solved(row: Row, loops: int) -> int:
    return steps_solved(row["accuracy"][str(loops)].values())


def _grows_by_a_step_per_loop(row: Row) -> bool:
    counts = [_solved(row, loops) for loops in (1, 2, 3, 4)]
    return all(a < b for a, b in itertools.pairwise(counts))


def _walks(name: str) -> Walks:
    task = TASKS[name]
    assert isinstance(task, Walks)
    return task


def _mean(results: Results, task: str, model: str, loops: int, level: int) -> float:
    shares = accuracy(results, task, model, loops, (level,)).values()
    return 100 * sum(shares) / len(shares)


def _shares(results: Results, variant: str, loops: int, levels: Sequence[int]) -> dict[int, float]:
    rows = Results(results.where(variant=variant), results.planned)
    return accuracy(rows, "walks-unseen", "looped", loops, levels)


def _claim(
    results: Results,
    statement: str,
    worse: str,
    better: str,
    levels: Sequence[int],
    depths: Sequence[int],
) -> Claim:
    verdicts, evidence = [], []
    for loops in depths:
        a, b = (_shares(results, name, loops, levels) for name in (worse, better))
        verdicts.append(positive(differences(b, a)))
        values = f"{describe(a.values(), 2)} and {describe(b.values(), 2)}"
        evidence.append(f"T = {loops}: {values}")
    return Claim(statement, together(verdicts), "; ".join(evidence))


def _draw_variants(panel: Any, results: Results, levels: Sequence[int]) -> None:
    """The mean over seeds, with a band from the lowest to the highest."""
    for index, name in enumerate(results.values("variant")):
        shares = [list(_shares(results, name, loops, levels).values()) for loops in LOOPS]
        percent = 100 * np.array(shares)
        colour = plotting.colour(index)
        panel.plot(LOOPS, percent.mean(1), color=colour, marker="o", label=name)
        panel.fill_between(LOOPS, percent.min(1), percent.max(1), color=colour, alpha=0.15, lw=0)
    plotting.loop_ticks(panel, LOOPS)
    panel.set(xlabel="loops T", ylabel="right answers, %", ylim=(0, 104))
    if panel.lines:
        panel.legend(fontsize=8)


def _draw_by_loops(panel: Any, results: Results, task: str) -> None:
    levels = _walks(task).levels
    if results.where(task=task, model="looped"):
        for colour, level in zip(plotting.shades(len(levels)), levels, strict=True):
            shares = [_mean(results, task, "looped", loops, level) for loops in LOOPS]
            style = "-" if level <= _walks(task).steps else "--"
            panel.plot(LOOPS, shares, style, color=colour, marker="o", label=f"{level}")
    plotting.loop_ticks(panel, LOOPS)
    panel.set(xlabel="loops T", ylabel="right answers, %", ylim=(0, 104))


def _draw_by_steps(panel: Any, results: Results) -> None:
    levels = _walks("walks").levels
    if results.where(task="walks", model="looped"):
        for colour, loops in zip(plotting.shades(len(SHOWN_DEPTHS)), SHOWN_DEPTHS, strict=True):
            shares = [_mean(results, "walks", "looped", loops, level) for level in levels]
            label = "1 loop" if loops == 1 else f"{loops} loops"
            panel.plot(levels, shares, color=colour, marker="o", label=label)
    for model, style in (("shallow", ":"), ("deep", "--")):
        if rows := results.where(task="walks", model=model):
            shares = [_mean(results, "walks", model, 1, level) for level in levels]
            label = f"Transformer, {rows[0]['parameters'] / 1e6:.2g}M parameters"
            panel.plot(levels, shares, style, color=plotting.GREY, marker="s", label=label)
    if results.where(task="walks"):
        panel.legend(fontsize=7.5, loc="lower left")
    panel.set(title="The same, by steps", xlabel="steps of the walk", ylim=(0, 104))
