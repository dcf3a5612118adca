"""Two evaluations item by item, with the uncertainty of their difference.

Both evaluations answered the same questions, so the standard error of the difference is that of
the paired differences, which is smaller than the errors of the two scores suggest. A question asked
with several draws of few-shot examples is one question: its answers are averaged first.
`parcae.compare` takes any number of runs and compares the first one with each other in this way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

from parcae.config import ConfigError
from parcae.evaluation.item_scores import Evaluation, ItemScore, Key, evaluation_of
from parcae.evaluation.metrics import mean, ratio, standard_error
from parcae.evaluation.results import EvaluationResult
from parcae.evaluation.suites import SUITES, job_name
from parcae.evaluation.tasks import centre
from parcae.files import FileError

Pair = tuple[ItemScore, ItemScore]
Loops = tuple[int, int]
"""Loops of A and of B."""


@dataclass(frozen=True)
class Side:
    """One of the two evaluations."""

    folder: str
    checkpoint: str
    looped: bool
    loops: tuple[int, ...]
    context_length: int


@dataclass(frozen=True)
class PairedComparison:
    a: Side
    b: Side
    comparisons: list[dict[str, Any]]
    """One for each pair of numbers of loops: `tasks` with right answers, `texts` with losses (the
    held-out loss is the text `val`), `suites` with the means of their tasks, and `left_out` with
    the reason why a task or a suite that both have is not compared."""
    only_in_one: dict[str, dict[str, int]]
    """By task, how many items only A or only B has; they are not compared."""

    def table(self) -> list[dict[str, Any]]:
        """One row for each pair of numbers of loops, task or suite, and metric; `p` is of a sign
        test."""
        return [
            {
                "loops_a": comparison["loops"]["a"],
                "loops_b": comparison["loops"]["b"],
                "task": task,
                "metric": entry.get("unit", "accuracy"),
                "items": entry.get("questions", entry.get("items", entry.get("tasks"))),
                "a": values["a"],
                "b": values["b"],
                "difference": entry["difference"],
                "difference_error": entry["standard_error"],
                "p": entry.get("p"),
            }
            for comparison in self.comparisons
            for key, metric in (("tasks", "accuracy"), ("texts", "nats"), ("suites", "score"))
            for task, entry in comparison[key].items()
            for values in (entry[metric],)
        ]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        sides = {
            name: {**asdict(side), "loops": list(side.loops)}
            for name, side in (("a", self.a), ("b", self.b))
        }
        return {**sides, "comparisons": self.comparisons, "only_in_one": self.only_in_one}


def compare_evaluations(
    a: str | Path | EvaluationResult | Evaluation,
    b: str | Path | EvaluationResult | Evaluation,
    loops: int | Loops | str | None = None,
) -> PairedComparison:
    """Compare two evaluations on the items both have: same task, seed, index and data.

    Args:
        a: A result of `parcae.evaluate`, the folder of one, or the run it belongs to.
        b: Likewise; differences are B - A.
        loops: Numbers of loops of A and of B, one number for both, or "each" for every number both
            have. Default: the mean of each in training where it was scored, else the largest.
    """
    first, second = (
        side if isinstance(side, Evaluation) else evaluation_of(side) for side in (a, b)
    )
    pairs = choose_loops(first, second, loops)
    return PairedComparison(
        _side(first),
        _side(second),
        [compare_at(first, second, pair) for pair in pairs],
        only_in_one(first, second),
    )


def _side(evaluation: Evaluation) -> Side:
    return Side(
        evaluation.name,
        evaluation.checkpoint,
        evaluation.is_looped,
        evaluation.loops,
        evaluation.context_length,
    )


def choose_loops(
    a: Evaluation, b: Evaluation, loops: int | Loops | str | None = None
) -> list[Loops]:
    """The pairs of numbers of loops to compare; see `compare_evaluations`."""
    if loops is None:
        return [(a.default_loops, b.default_loops)]
    if loops == "each":
        return _each(a, b)
    pair = (loops, loops) if isinstance(loops, int) else loops
    if isinstance(pair, str) or len(pair) != 2:
        raise ConfigError(f"loops: {loops!r} is not 8, (4, 8) (of A, of B) or 'each'.")
    for letter, evaluation, wanted in (("A", a, pair[0]), ("B", b, pair[1])):
        if wanted not in evaluation.loops:
            scored = ", ".join(map(str, evaluation.loops))
            raise ConfigError(f"loops: {letter} was not scored at {wanted}, but at {scored}.")
    return [pair]


def _each(a: Evaluation, b: Evaluation) -> list[Loops]:
    """A model without loops is compared with every number of loops of the other."""
    if not (a.is_looped and b.is_looped):
        return [(s, t) for s in a.loops for t in b.loops]
    if common := [t for t in a.loops if t in b.loops]:
        return [(t, t) for t in common]
    raise ConfigError("loops: A and B were scored at no common number. Choose two with `loops`.")


def compare_at(a: Evaluation, b: Evaluation, loops: Loops) -> dict[str, Any]:
    """A at one number of loops with B at another, task by task."""
    depths = a.loops.index(loops[0]), b.loops.index(loops[1])
    answers, texts, left_out = {}, {}, {}
    for task, keys in in_common(a, b).items():
        pairs = {key: (a.items[task][key], b.items[task][key]) for key in keys}
        if reason := _not_scored(pairs.values(), depths, loops):
            left_out[task] = reason
            continue
        if any(item.credit is not None for item, _ in pairs.values()):
            answers[task] = _compare_answers(pairs, *depths)
        if any(item.nats is not None for item, _ in pairs.values()):
            texts[task] = _compare_texts(list(pairs.values()), *depths)
    suites, without_mean = _compare_suites(a, b, answers)
    return {
        "loops": {"a": loops[0], "b": loops[1]},
        "tasks": answers,
        "texts": texts,
        "suites": suites,
        "left_out": left_out | without_mean,
    }


def _not_scored(pairs: Iterable[Pair], depths: tuple[int, int], loops: Loops) -> str | None:
    """Why a task cannot be compared at these depths, or None."""
    for side, (letter, depth) in enumerate(zip("AB", depths, strict=True)):
        if any(depth in pair[side].missing for pair in pairs):
            return f"not all of {letter}'s items are scored at {loops[side]} loops"
    return None


def _compare_suites(
    a: Evaluation, b: Evaluation, answers: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The means over the compared tasks of each suite that both have, and the suites without."""
    means, left_out = {}, {}
    for suite, of_a in a.suites.items():
        of_b = b.suites.get(suite)
        if of_b is None or "tasks" not in of_a or "tasks" not in of_b:
            continue
        jobs = {name: job_name(suite, name) for name in of_a["tasks"]}
        compared = {name: answers[job] for name, job in jobs.items() if job in answers}
        if of_a.get("baselines") != of_b.get("baselines"):
            left_out[suite] = "A and B are centred by different baselines"
        elif not compared:
            left_out[suite] = "none of its tasks is compared"
        else:
            means[suite] = _suite_mean(of_a["tasks"], compared)
    return means, left_out


def _suite_mean(tasks: Mapping[str, Any], compared: Mapping[str, Any]) -> dict[str, Any]:
    """Centred accuracy where the suite has baselines, else accuracy; the mean over tasks."""
    guesses = {name: tasks[name].get("baseline") or 0.0 for name in compared}
    scales = [centre(1.0, g) - centre(0.0, g) for g in guesses.values()]
    scores = {
        side: mean([centre(compared[name]["accuracy"][side], g) for name, g in guesses.items()])
        for side in ("a", "b")
    }
    errors = [entry["standard_error"] for entry in compared.values()]
    error = None
    if None not in errors:
        terms = zip(scales, errors, strict=True)
        error = sum((scale * e) ** 2 for scale, e in terms) ** 0.5 / len(errors)
    centred = any("baseline" in tasks[name] for name in compared)
    return {
        "tasks": len(compared),
        "tasks_wanted": len(tasks),
        "unit": "centred accuracy" if centred else "accuracy",
        "score": scores,
        "difference": scores["b"] - scores["a"],
        "standard_error": error,
    }


def scores_at(evaluation: Evaluation, loops: int) -> dict[str, tuple[float, float | None]]:
    """By suite the score at a number of loops, as in `SUITES`, and its standard error.

    The error is that of drawing other items (not other tasks); that of a perplexity follows from
    the error of the loss to first order. Suites that diverged or were not scored are left out.
    """
    scores: dict[str, tuple[float, float | None]] = {}
    for name, suite in evaluation.suites.items():
        metrics = suite["by_loops"].get(str(loops))
        value = metrics and metrics.get(SUITES[name].metric)
        if value is not None:
            scores[name] = float(value), _score_error(evaluation, name, loops, float(value))
    return scores


def _score_error(evaluation: Evaluation, name: str, loops: int, score: float) -> float | None:
    depth, suite = evaluation.loops.index(loops), evaluation.suites[name]
    if "tasks" not in suite:
        items = list(evaluation.items.get(name, {}).values())
        nats = [item.nats[depth] if item.nats else None for item in items]
        if not items or None in nats or score <= 0:
            return None
        loss, error = ratio([float(n) for n in nats if n is not None], [i.size for i in items])
        return None if error is None or not loss else abs(score * log(score) * error / loss)
    errors = []
    for task, of_task in suite["tasks"].items():
        if of_task is None:
            continue
        questions: dict[tuple[str, int], list[float]] = defaultdict(list)
        for key, item in evaluation.items.get(job_name(name, task), {}).items():
            credit = item.credit[depth] if item.credit else None
            if credit is None:
                return None
            questions[key.data, key.number].append(credit)
        error = standard_error([mean(seeds) for seeds in questions.values()])
        if error is None:
            return None
        guess = of_task.get("baseline") or 0.0
        errors.append((centre(1.0, guess) - centre(0.0, guess)) * error)
    return sum(error**2 for error in errors) ** 0.5 / len(errors) if errors else None


def in_common(a: Evaluation, b: Evaluation) -> dict[str, list[Key]]:
    """The items of each task that both have, in A's order; none at all is an error."""
    shared = {
        task: [key for key in items if key in b.items.get(task, ())]
        for task, items in a.items.items()
    }
    common = {task: keys for task, keys in shared.items() if keys}
    if common:
        return common
    reason = f"A has {_task_names(a)}; B has {_task_names(b)}."
    if both := [task for task in a.items if task in b.items]:
        reason = (
            f"{', '.join(both)}: the data or the seeds differ. Evaluate both on the same files, "
            "with the same separator and seeds."
        )
    raise FileError(f"{a.name} and {b.name}: no item in common. {reason}")


def only_in_one(a: Evaluation, b: Evaluation) -> dict[str, dict[str, int]]:
    """The number of items of each task that the other evaluation does not have."""
    counts = {}
    for task in dict.fromkeys((*a.items, *b.items)):
        of_a, of_b = a.items.get(task, {}).keys(), b.items.get(task, {}).keys()
        if of_a != of_b:
            counts[task] = {"a": len(of_a - of_b), "b": len(of_b - of_a)}
    return counts


def _compare_answers(pairs: Mapping[Key, Pair], depth_a: int, depth_b: int) -> dict[str, Any]:
    questions: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for key, (of_a, of_b) in pairs.items():
        credits = _at(of_a.credit, depth_a), _at(of_b.credit, depth_b)
        questions[key.data, key.number].append(credits)
    means_a, means_b = (
        [mean([credits[side] for credits in seeds]) for seeds in questions.values()]
        for side in (0, 1)
    )
    differences = [q - p for p, q in zip(means_a, means_b, strict=True)]
    better_a, better_b = (sum(s * d > 1e-9 for d in differences) for s in (-1, 1))
    # a tie with other alternatives earns a fraction, and is not counted as right
    right = [(p == 1, q == 1) for seeds in questions.values() for p, q in seeds]
    return {
        "questions": len(questions),
        "answers": len(right),
        "accuracy": {"a": mean(means_a), "b": mean(means_b)},
        "both_right": right.count((True, True)),
        "only_a_right": right.count((True, False)),
        "only_b_right": right.count((False, True)),
        "neither_right": right.count((False, False)),
        "difference": mean(differences),
        "standard_error": standard_error(differences),
        "questions_better": {"a": better_a, "b": better_b},
        "p": sign_test(better_a, better_b),
    }


def _compare_texts(pairs: Sequence[Pair], depth_a: int, depth_b: int) -> dict[str, Any]:
    """Nats per byte or token of documents and rows, or of the last word of each passage."""
    sizes, of_a, of_b = [], [], []
    for item_a, item_b in pairs:
        sizes.append(item_a.size)
        of_a.append(_at(item_a.nats, depth_a))
        of_b.append(_at(item_b.nats, depth_b))
    total = sum(sizes)
    difference, error = ratio([q - p for p, q in zip(of_a, of_b, strict=True)], sizes)
    return {
        "items": len(pairs),
        "unit": f"nats per {pairs[0][0].unit}",
        "nats": {"a": sum(of_a) / total, "b": sum(of_b) / total},
        "difference": difference,
        "standard_error": error,
    }


def _at(by_depth: Sequence[float | None] | None, depth_index: int) -> float:
    value = by_depth[depth_index] if by_depth else None
    if value is None:
        raise ConfigError(
            "loops: a model diverged at this number of loops. Choose fewer with `loops`."
        )
    return value


def _task_names(evaluation: Evaluation) -> str:
    return ", ".join(evaluation.items) or "no items"


def sign_test(better_a: int, better_b: int) -> float:
    """The two-sided p-value of an exact sign test; 1 without any difference."""
    from scipy.stats import binomtest  # slow to import

    count = better_a + better_b
    return float(binomtest(better_a, count).pvalue) if count else 1.0
