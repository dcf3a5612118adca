"""Beyond the paper: pointers and arithmetic, for a model the size of a shallow one.

A looped model of three layers, a Transformer of the same three, and a Transformer as deep as the
loop unrolled, on pointer chasing; then more nodes and hops, hops that training left out, and
modular arithmetic.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parcae import plotting
from parcae.data.synthetic import TASKS, PointerChasing
from parcae.evaluation.task_accuracy import accuracies
from parcae.experiments.experiment import Experiment, Results, Row, Run, Table
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, describe, differences, positive, together
from parcae.runs import load, read_result

LOOPS = (1, 2, 3, 4, 6, 8, 12, 16)
ENOUGH = 8
"""The mean number of loops in training."""
TITLES = {
    "pointers": "Pointers: 6 nodes, up to 4 hops",
    "pointers-large": "Pointers: 8 nodes, up to 8 hops",
    "pointers-unseen": "Pointers: 5 to 8 hops are new",
    "arithmetic": "Arithmetic mod 7, prefix form",
}
MODELS = {
    "looped": ("parcae", {}),
    "shallow": ("transformer", {}),
    "deep": ("transformer", {"core_layers": ENOUGH}),
}
"""By name: the preset's family, and how many layers it changes."""
FIRST, HARDER = "pointers", ("pointers-large", "arithmetic", "pointers-unseen")

START = "Ticks on the left: the start itself as the answer."
CAPTIONS = {
    "looped": "Dots: the looped model, one line per seed.",
    "shallow": "Dotted: a Transformer of the same layers.",
    "deep": "Dashed: a Transformer of ten layers.",
}


class Reasoning(Experiment):
    name = "reasoning"
    title = "Tasks in which depth decides"
    in_paper = "beyond the paper"
    paper = (
        "The paper has no such task. Elsewhere, on modular arithmetic at equal parameters: "
        "2 layers 22 %, the same looped 6 times 98 %, 12 layers 94 %."
    )
    tasks: ClassVar[Sequence[str]] = (FIRST,)

    def runs(self, scale: Scale) -> Iterator[Run]:
        for task, seed, model in self.plan(scale):
            family, layers = MODELS[model]
            recipe = scale.recipe(scale.task(task, family, model=layers), seed)
            yield Run(recipe, {"task": task, "model": model, "seed": seed})

    def plan(self, scale: Scale) -> Iterator[tuple[str, int, str]]:
        """(task, seed, model) of the runs; one deep Transformer, which no claim is about."""
        yield from itertools.product((FIRST,), scale.seeds, ("looped", "shallow"))
        yield FIRST, 0, "deep"

    def measure(self, run: Run, store: Store) -> Row:
        return measure_accuracy(run, store, LOOPS)

    def claims(self, results: Results) -> list[Claim]:
        gains, leads, texts = [], [], []
        for task in self.tasks:
            one, many = (accuracy(results, task, "looped", loops) for loops in (1, ENOUGH))
            shallow = accuracy(results, task, "shallow")
            gains.append(positive(value - 0.1 for value in differences(many, one)))
            leads.append(positive(differences(many, shallow)))
            texts.append(
                f"{task}: {describe(one.values(), 2)} with 1 loop, "
                f"{describe(many.values(), 2)} with {ENOUGH}, Transformer of the same layers "
                f"{describe(shallow.values(), 2)}"
            )
        return [
            Claim(
                "Accuracy on the hardest questions grows by more than 10 points from 1 loop to 8",
                together(gains),
                "; ".join(texts),
            ),
            Claim(
                "With 8 loops the model beats a Transformer of the same layers",
                together(leads),
                "hardest level, as above",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for task in results.values("task"):
            for model in results.values("model", task=task):
                for loops in (1, 2, 4, 8, 16) if model == "looped" else (1,):
                    cells = [
                        describe(accuracy(results, task, model, loops, (level,)).values(), 2)
                        for level in (1, 2, 4, max(TASKS[task].levels))
                    ]
                    short = [cell.partition(" (")[0] for cell in cells]
                    name = f"{model}, T = {loops}" if model == "looped" else model
                    rows.append((task, name, *short))
        return ("task", "model", "level 1", "level 2", "level 4", "hardest"), rows

    def draw(self, results: Results, path: Path) -> Path:
        tasks = results.values("task")
        with plotting.figure(1, len(tasks), width=4.2, height=3.3) as (canvas, axes):
            for panel, task in zip([axes] if len(tasks) == 1 else axes, tasks, strict=True):
                _draw_task(panel, results, task)
            parts = [CAPTIONS[model] for model in MODELS if results.where(model=model)]
            caption = " ".join([*parts, START])
            canvas.supxlabel(textwrap.fill(caption, 55 * len(tasks)), fontsize=8.5)
            return plotting.save(canvas, path)


class HarderReasoning(Reasoning):
    name = "reasoning-harder"
    title = "More hops, new hops, arithmetic"
    tasks = HARDER

    def plan(self, scale: Scale) -> Iterator[tuple[str, int, str]]:
        for seed, task in itertools.product(scale.few_seeds, HARDER):
            yield from ((task, seed, model) for model in ("looped", "shallow"))

    def claims(self, results: Results) -> list[Claim]:
        few, many = (
            accuracy(results, "pointers-unseen", "looped", loops, levels=(5, 6, 7, 8))
            for loops in (ENOUGH // 2, 2 * ENOUGH)
        )
        start = sum(share_at_start(6, hops) for hops in (5, 6, 7, 8)) / 4
        unseen = Claim(
            "Numbers of hops that training left out are solved better with more loops",
            positive(differences(many, few)),
            f"5 to 8 hops after training on 1 to 4: {describe(few.values(), 2)} with 4 loops, "
            f"{describe(many.values(), 2)} with 16; the start itself is the answer in {start:.2f}",
        )
        return [*super().claims(results), unseen]


def measure_accuracy(run: Run, store: Store, loops: Sequence[int]) -> Row:
    """What is kept of a run on a task; a Transformer has one number of loops."""
    task, folder = TASKS[run.labels["task"]], store.folder(run)
    result = read_result(folder)
    depths = loops if run.labels["model"] == "looped" else (1,)
    return {
        "status": getattr(result, "status", None),
        "parameters": getattr(result, "parameters", None),
        "accuracy": {
            str(depth): {str(level): round(share, 4) for level, share in by_level.items()}
            for depth, by_level in accuracies(load(folder), task, depths).items()
        },
    }


def share_at_start(nodes: int, hops: int) -> float:
    """How often so many hops in a random permutation lead back to the start: the length of a node's
    cycle is uniform over 1 to `nodes`."""
    return sum(hops % length == 0 for length in range(1, nodes + 1)) / nodes


def accuracy(
    results: Results,
    task: str,
    model: str,
    loops: int = 1,
    levels: Sequence[int] | None = None,
) -> dict[int, float]:
    """Mean accuracy by seed over some levels, by default only the hardest."""
    levels = levels or (max(TASKS[task].levels),)
    found = {}
    for row in results.where(task=task, model=model):
        by_level = row["accuracy"][str(loops)]
        found[row["seed"]] = sum(by_level[str(level)] for level in levels) / len(levels)
    return found


def _draw_task(panel: Any, results: Results, task: str) -> None:
    problem = TASKS[task]
    levels = list(problem.levels)
    shown = levels if len(levels) <= 4 else [levels[0], *levels[1::2]]
    for colour, level in zip(plotting.shades(len(shown)), shown, strict=True):
        for row in results.where(task=task, model="looped"):
            shares = [row["accuracy"][str(loops)][str(level)] for loops in LOOPS]
            first = row is results.where(task=task, model="looped")[0]
            label = f"{level}" if first else None
            panel.plot(LOOPS, shares, color=colour, marker="o", alpha=0.8, label=label)
        if isinstance(problem, PointerChasing):
            start = share_at_start(problem.nodes, level)
            panel.plot(0.72, start, "_", color=colour, markersize=9, markeredgewidth=2)
        for model, style in (("shallow", ":"), ("deep", "--")):
            values = accuracy(results, task, model, levels=(level,)).values()
            if values:
                mean = sum(values) / len(values)
                panel.axhline(mean, color=colour, linestyle=style, linewidth=1.1)
    plotting.loop_ticks(panel, LOOPS)
    panel.set(title=TITLES[task], xlabel="loops T", ylabel="accuracy", ylim=(0, 1.03))
    name = "operators" if task == "arithmetic" else "hops"
    panel.legend(title=name, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
