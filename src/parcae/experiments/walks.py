"""Beyond the paper: a task in which every loop takes one more step.

Walks through a permutation, of one to eight steps, for a looped model, a Transformer of the same
layers and a Transformer as deep as the loop unrolled; then walks longer than those in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Row, Run, Table
from parcae.experiments.reasoning import accuracy, measure_accuracy
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.tasks import TASKS, Walks
from parcae.experiments.verdicts import Claim, always, describe, differences, positive

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


class OneStepPerLoop(Experiment):
    name = "walks"
    title = "One loop, one step"
    in_paper = "beyond the paper"
    paper = "The paper has no such task."
    core_hours = 0.8

    def runs(self, scale: Scale) -> Iterator[Run]:
        plan = [
            *(("walks", model, seed) for seed in scale.seeds for model in ("looped", "shallow")),
            *(("walks-unseen", "looped", seed) for seed in scale.seeds),
            ("walks", "deep", 0),
        ]
        for task, model, seed in plan:
            family, layers = MODELS[model]
            tree = scale.task(task, family, model={"core_layers": layers}, **training(scale))
            yield Run(scale.recipe(tree, seed), {"task": task, "model": model, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        return measure_accuracy(run, store, LOOPS)

    def claims(self, results: Results) -> list[Claim]:
        one, many = (accuracy(results, "walks", "looped", loops) for loops in (1, MEAN_LOOPS))
        shallow = accuracy(results, "walks", "shallow")
        rows = results.where(task="walks", model="looped")
        solved = [", ".join(str(steps_solved(row, t)) for t in SHOWN_DEPTHS) for row in rows]
        task = _walks("walks-unseen")
        unseen = task.levels[task.steps :]
        few, more = (
            accuracy(results, "walks-unseen", "looped", loops, levels=unseen)
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
                always(steps_solved(row, 4) - steps_solved(row, 1) >= 3 for row in rows),
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
            right.legend(title="steps", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
            canvas.supxlabel("Lines: means over seeds. Dashed: longer than in training.", size=8.5)
            return plotting.save(canvas, path)


def training(scale: Scale) -> dict[str, Any]:
    """Less than the other tasks need."""
    return {} if scale.name == "toy" else TRAINING


def steps_solved(row: Row, loops: int) -> int:
    """The longest walk of which it and all shorter ones end right in at least 95 %."""
    count = 0
    for share in row["accuracy"][str(loops)].values():
        if share < SOLVED:
            break
        count += 1
    return count


def _walks(name: str) -> Walks:
    task = TASKS[name]
    assert isinstance(task, Walks)
    return task


def _mean(results: Results, task: str, model: str, loops: int, level: int) -> float:
    shares = accuracy(results, task, model, loops, (level,)).values()
    return 100 * sum(shares) / len(shares)


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
    panel.set(title="Walks of 8 steps in training", xlabel="steps", ylim=(0, 104))
