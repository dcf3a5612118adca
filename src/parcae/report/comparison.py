"""`parcae.compare`: any number of runs in one table, and item by item with the first.

comparison = parcae.compare("runs/a", "runs/b", "runs/c")
pandas.DataFrame(comparison.table())        one row per run
print(comparison.format("latex"))           the same as text, the best values in bold
comparison.differences()                    each run minus the first, by task
comparison.seeds                            means and intervals of runs that differ in the seed only
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parcae.config import ConfigError
from parcae.console import format_items
from parcae.evaluation.item_scores import Evaluation, evaluation_of, read_evaluation
from parcae.evaluation.paired import PairedComparison, compare_evaluations, scores_at
from parcae.evaluation.results import RESULT, EvaluationResult
from parcae.evaluation.suites import SUITES
from parcae.files import FileError
from parcae.report.runs import Run, distinct_names, note_on_validation, read_run
from parcae.report.seeds import NOTE, over_seeds
from parcae.runs.layout import EVALUATION_FOLDER, RECIPE_FILE, find_run, list_steps, step_of
from parcae.tables import Best, Format, ShownAsTable, format_table

Loops = int | Sequence[int] | Literal["each"] | None

BEST: Mapping[str, Best] = {
    **dict.fromkeys(("train_loss", "loss", "perplexity", "bits_per_byte"), "lowest"),
    **{
        name.replace("-", "_"): "highest" if suite.metric == "score" else "lowest"
        for name, suite in SUITES.items()
    },
}
"""By column of the table, which value is the best."""
TITLES = {
    "flops": "FLOPs",
    "loops": "loops T",
    **{
        name.replace("-", "_"): suite.title + (f", {suite.unit}" if suite.metric != "score" else "")
        for name, suite in SUITES.items()
    },
}
DIGITS = {"train_loss": 4, "loss": 4, "perplexity": 2, "bits_per_byte": 4}


@dataclass(frozen=True)
class Compared:
    """One of the runs: what training and `parcae eval` have written about it."""

    name: str
    run: Run | None
    """None for an evaluation of a model that is not a run."""
    evaluation: Evaluation | None
    """None for a run that was not evaluated."""

    @property
    def measured_loops(self) -> list[int]:
        """All numbers of loops it has a loss or a score at."""
        validated = self.run.validations[-1].depths if self.run and self.run.validations else ()
        return sorted({*validated, *(self.evaluation.loops if self.evaluation else ())})

    @property
    def default_loops(self) -> int | None:
        """The mean of training where it was scored (or validated), else the largest scored."""
        mean = self.run.nominal_depth if self.run else None
        if self.evaluation is None:
            measured = self.measured_loops
            return mean if mean in measured else max(measured, default=mean)
        return mean if mean in self.evaluation.loops else self.evaluation.default_loops

    def row(self, loops: int | None) -> dict[str, Any]:
        """Its row of the table at one number of loops; None where a value is not known."""
        run, values = self.run, dict[str, Any](run=self.name)
        if run is not None:
            values |= {
                "parameters": _whole(run.parameters),
                "tokens": _whole(run.amount("tokens")),
                "flops": _known(run.amount("flops")),
                "loops": loops,
                "train_loss": _known(run.train_loss),
            }
            final = run.validations[-1].depths.get(loops or 0) if run.validations else None
            for name in ("loss", "perplexity", "bits_per_byte"):
                values[name] = _known(getattr(final, name)) if final else None
        values["loops"] = loops
        if self.evaluation is not None and loops in self.evaluation.loops:
            for suite, (score, error) in scores_at(self.evaluation, loops).items():
                column = suite.replace("-", "_")
                values |= {column: score, f"{column}_error": error}
        return values


@dataclass(frozen=True)
class Comparison(ShownAsTable):
    rows: list[dict[str, Any]]
    pairs: list[tuple[str, PairedComparison]]
    """The first evaluated run (A) and each other one (B) item by item, with the name of B."""
    notes: list[str]
    """What was left out, and why."""
    seeds: list[dict[str, Any]]
    """Mean, interval and difference from the first of runs that differ in the seed only, one row
    for each group, number of loops and metric; empty without such runs."""
    same_held_out: bool = True
    """Whether the losses are of the same held-out rows; otherwise none of them is the best."""

    def table(self) -> list[dict[str, Any]]:
        """One row per run and number of loops.

        `loss`, `perplexity` and `bits_per_byte` are those of the last validation of training; a
        column for each suite of `parcae eval` has its score, and `..._error` its standard error.
        Columns without any value are left out; a value that is not known is None.
        """
        keys = dict.fromkeys(key for row in self.rows for key in row)
        used = [key for key in keys if any(row.get(key) is not None for row in self.rows)]
        return [{key: row.get(key) for key in used} for row in self.rows]

    def differences(self) -> list[dict[str, Any]]:
        """One row for each run but the first, task or suite, and metric: the run minus the first.

        `difference_error` is the standard error of the paired differences; `p` is of a sign test.
        """
        return [{"run": name, **row} for name, pair in self.pairs for row in pair.table()]

    def format(self, format: Format = "markdown") -> str:
        """The table as Markdown, CSV or LaTeX, with the best value of each column in bold, unless
        they are losses of different rows; `notes` says so."""
        best = dict(BEST)
        if not self.same_held_out:
            for column in DIGITS:
                del best[column]
        return format_table(self.table(), format, titles=TITLES, best=best, digits=DIGITS)

    def to_json(self) -> dict[str, Any]:
        """What `parcae compare --json` prints."""
        pairs = [{"run": name, **pair.to_json()} for name, pair in self.pairs]
        return {
            "table": self.table(),
            "pairs": pairs,
            "seeds": self.seeds,
            "notes": self.notes,
        }


def compare(*runs: str | Path | EvaluationResult, loops: Loops = None) -> Comparison:
    """Compare runs and evaluations in one table; evaluated ones also item by item with the first.

    Args:
        runs: Folders of runs (evaluated or not) or of evaluations, or results of
            `parcae.evaluate`.
        loops: One number of loops for all, a number for each run, or "each" for every number that
            was measured. Default: the mean of a run's training where it was measured, else the
            largest number measured.
    """
    if not runs:
        raise ConfigError("runs: none is given. Give the folder of a run.")
    compared = _read(runs)
    chosen = _choose(compared, loops)
    rows = [
        [one.row(count) for count in counts] for one, counts in zip(compared, chosen, strict=True)
    ]
    seeds = over_seeds(
        [one.run for one in compared], rows, [name for name in BEST if name != "perplexity"]
    )
    pairs, notes = _compare_pairs(compared, chosen, loops)
    different = note_on_validation([one.run for one in compared if one.run])
    about_runs = [
        *_unfinished(compared),
        *_without_loss(compared, chosen),
        *([different] if different else ()),
        *_stale(compared),
    ]
    everything = [row for of_run in rows for row in of_run]
    notes = [*about_runs, *notes, *([NOTE] if seeds else [])]
    return Comparison(everything, pairs, notes, seeds, same_held_out=different is None)


def _read(runs: Sequence[str | Path | EvaluationResult]) -> list[Compared]:
    folders = [
        Path(run.folder or run.checkpoint) if isinstance(run, EvaluationResult) else Path(run)
        for run in runs
    ]
    for source, folder in zip(runs, folders, strict=True):
        results = (folder / RESULT, folder / EVALUATION_FOLDER / RESULT)
        if not isinstance(source, EvaluationResult) and not any(p.exists() for p in results):
            find_run(folder, "the folder of a run or an evaluation")
    owners = [_run_of_evaluation(folder) for folder in folders]
    names = distinct_names([owner.resolve() for owner in owners])
    compared = []
    for source, owner, name in zip(runs, owners, names, strict=True):
        run = read_run(owner, name) if (owner / RECIPE_FILE).is_file() else None
        if isinstance(source, EvaluationResult):
            evaluation = evaluation_of(source)
        elif run is None or (owner / EVALUATION_FOLDER / RESULT).exists():
            evaluation = read_evaluation(source)
        else:
            evaluation = None
        compared.append(Compared(name, run, evaluation))
    return compared


def _run_of_evaluation(folder: Path) -> Path:
    """The run that an evaluation's folder is in; any other folder itself."""
    is_inside = folder.resolve().name == EVALUATION_FOLDER
    owner = folder.resolve().parent if is_inside else folder
    return owner if (owner / RECIPE_FILE).is_file() else folder


def _choose(compared: Sequence[Compared], loops: Loops) -> list[list[int | None]]:
    """The numbers of loops of the rows of each run."""
    if loops == "each":
        return [list(one.measured_loops) or [None] for one in compared]
    if loops is None:
        return [[one.default_loops] for one in compared]
    counts = [loops] * len(compared) if isinstance(loops, int) else list(loops)
    if isinstance(loops, str) or len(counts) != len(compared):
        raise ConfigError(
            f"loops: {loops!r} for {format_items(len(compared), 'run')}. Give one number, a number "
            "for each run, or 'each'."
        )
    for one, count in zip(compared, counts, strict=True):
        if count not in one.measured_loops:
            measured = ", ".join(map(str, one.measured_loops)) or "none"
            raise ConfigError(f"loops: {one.name} was not scored at {count}, but at {measured}.")
    return [[count] for count in counts]


def _compare_pairs(
    compared: Sequence[Compared], chosen: Sequence[Sequence[int | None]], loops: Loops
) -> tuple[list[tuple[str, PairedComparison]], list[str]]:
    pairs, notes = [], []
    evaluated = [index for index, one in enumerate(compared) if one.evaluation]
    for index in evaluated[1:]:
        first, second = compared[evaluated[0]], compared[index]
        assert first.evaluation is not None
        assert second.evaluation is not None
        numbers: Any = tuple(counts[0] for counts in (chosen[evaluated[0]], chosen[index]))
        try:
            wanted = "each" if loops == "each" else numbers
            pair = compare_evaluations(first.evaluation, second.evaluation, wanted)
        except (FileError, ConfigError) as error:
            notes.append(f"{second.name} is not compared item by item with {first.name}: {error}")
        else:
            pairs.append((second.name, pair))
    return pairs, notes


def _unfinished(compared: Sequence[Compared]) -> list[str]:
    """A note on each run that has not finished."""
    return [
        f"{one.name} has not finished ({one.run.status}): its values are those of step "
        f"{_whole(one.run.amount('steps')) or 0}."
        for one in compared
        if one.run is not None and one.run.status != "finished"
    ]


def _without_loss(
    compared: Sequence[Compared], chosen: Sequence[Sequence[int | None]]
) -> list[str]:
    """A note on each run that was validated, but not at the loops of its row."""
    notes = []
    for one, counts in zip(compared, chosen, strict=True):
        validated = one.run.validations[-1].depths if one.run and one.run.validations else {}
        if validated and not any(count in validated for count in counts):
            measured = ", ".join(map(str, validated))
            notes.append(
                f"{one.name} was validated in training at T = {measured}, not at {counts[0]}, so "
                "its loss is left out."
            )
    return notes


def _stale(compared: Sequence[Compared]) -> list[str]:
    """A note on each run whose scores are not those of its newest checkpoint."""
    notes = []
    for one in compared:
        if one.run is None or one.evaluation is None:
            continue
        steps, checkpoint = list_steps(one.run.folder), Path(one.evaluation.checkpoint)
        if steps and checkpoint.name.startswith("step-") and step_of(checkpoint) != steps[-1]:
            notes.append(
                f"{one.name} was evaluated at step {step_of(checkpoint)}; its newest checkpoint is "
                f"of step {steps[-1]}."
            )
    return notes


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else round(value)
