"""Two evaluations item by item: what one answers and the other does not, and how sure that is.

    compare(a, b, (8, 8))      A at 8 loops against B at 8, task by task; differences are B - A

Both answered the same questions, so the error of the difference is that of the paired differences,
which is smaller than the errors of the two scores suggest. A question asked with several draws of
examples is one question: its answers are averaged before anything is estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from parcae.config import ConfigError
from parcae.evaluation.finished import Evaluation, Item, Key
from parcae.evaluation.job import mean, standard_error
from parcae.files import FileError

Pair = tuple[Item, Item]
Loops = tuple[int, int]
"""Of A and of B."""


def choose_loops(a: Evaluation, b: Evaluation, words: str | None) -> list[Loops]:
    """The deepest of each; `8` or `4,8` for one's own choice; `each` for every depth both have."""
    if words is None:
        return [(max(a.loops), max(b.loops))]
    if words == "each":
        return _each(a, b)
    try:
        numbers = [int(word) for word in words.split(",")]
        first, second = numbers * 2 if len(numbers) == 1 else numbers
    except ValueError:
        raise ConfigError(f"loops: {words!r} is not `8`, `4,8` (of A, of B) or `each`.") from None
    for letter, one, wanted in (("A", a, first), ("B", b, second)):
        if wanted not in one.loops:
            held = ", ".join(map(str, one.loops))
            raise ConfigError(f"loops: {letter} was not scored at {wanted}, but at {held}.")
    return [(first, second)]


def _each(a: Evaluation, b: Evaluation) -> list[Loops]:
    """A model without loops stands against every depth of the other."""
    if not (a.is_looped and b.is_looped):
        return [(s, t) for s in a.loops for t in b.loops]
    if common := [t for t in a.loops if t in b.loops]:
        return [(t, t) for t in common]
    raise ConfigError("loops: no number of loops was scored in both. Choose by --loops A,B.")


def compare(a: Evaluation, b: Evaluation, loops: Loops) -> dict[str, Any]:
    places = a.loops.index(loops[0]), b.loops.index(loops[1])
    answers, texts = {}, {}
    for task, keys in in_common(a, b).items():
        pairs = {key: (a.items[task][key], b.items[task][key]) for key in keys}
        if any(one.credit is not None for one, _ in pairs.values()):
            answers[task] = _answers(pairs, *places)
        if any(one.nats is not None for one, _ in pairs.values()):
            texts[task] = _texts(list(pairs.values()), *places)
    return {"loops": {"a": loops[0], "b": loops[1]}, "tasks": answers, "texts": texts}


def in_common(a: Evaluation, b: Evaluation) -> dict[str, list[Key]]:
    """Tasks with items in both, in A's order; none at all is an error."""
    shared = {
        task: [key for key in items if key in b.items.get(task, ())]
        for task, items in a.items.items()
    }
    found = {task: keys for task, keys in shared.items() if keys}
    if found:
        return found
    reason = f"A has {_names(a)}; B has {_names(b)}."
    if both := [task for task in a.items if task in b.items]:
        reason = f"{', '.join(both)}: asked from other files or with other seeds."
    raise FileError(f"{a.folder} and {b.folder}: no item in common. {reason}")


def only_in_one(a: Evaluation, b: Evaluation) -> dict[str, dict[str, int]]:
    """How many items of each task the other evaluation does not have."""
    counts = {}
    for task in dict.fromkeys((*a.items, *b.items)):
        of_a, of_b = a.items.get(task, {}).keys(), b.items.get(task, {}).keys()
        if of_a != of_b:
            counts[task] = {"a": len(of_a - of_b), "b": len(of_b - of_a)}
    return counts


def _answers(pairs: Mapping[Key, Pair], place_a: int, place_b: int) -> dict[str, Any]:
    questions: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for key, (one, other) in pairs.items():
        credits = _at(one.credit, place_a), _at(other.credit, place_b)
        questions[key.data, key.number].append(credits)
    of_a, of_b = (
        [mean([seed[side] for seed in seeds]) for seeds in questions.values()] for side in (0, 1)
    )
    differences = [q - p for p, q in zip(of_a, of_b, strict=True)]
    better_a, better_b = (sum(s * d > 1e-9 for d in differences) for s in (-1, 1))
    # a tie with other alternatives earns a share, and is not counted as right
    right = [(p == 1, q == 1) for seeds in questions.values() for p, q in seeds]
    return {
        "questions": len(questions),
        "answers": len(right),
        "accuracy": {"a": mean(of_a), "b": mean(of_b)},
        "both_right": right.count((True, True)),
        "only_a_right": right.count((True, False)),
        "only_b_right": right.count((False, True)),
        "neither_right": right.count((False, False)),
        "difference": mean(differences),
        "standard_error": standard_error(differences),
        "questions_better": {"a": better_a, "b": better_b},
        "p": sign_test(better_a, better_b),
    }


def _texts(pairs: Sequence[Pair], place_a: int, place_b: int) -> dict[str, Any]:
    """Nats per byte of documents, or of each passage's last word."""
    of_documents = pairs[0][0].bytes is not None
    sizes, of_a, of_b = [], [], []
    for one, other in pairs:
        sizes.append(one.bytes or 1)
        of_a.append(_at(one.nats, place_a))
        of_b.append(_at(other.nats, place_b))
    whole = sum(sizes)
    difference, error = ratio([q - p for p, q in zip(of_a, of_b, strict=True)], sizes)
    return {
        "items": len(pairs),
        "unit": "nats per byte" if of_documents else "nats per word",
        "nats": {"a": sum(of_a) / whole, "b": sum(of_b) / whole},
        "difference": difference,
        "standard_error": error,
    }


def _at(by_depth: Sequence[float | None] | None, place: int) -> float:
    value = by_depth[place] if by_depth else None
    if value is None:
        raise ConfigError(
            "loops: at this depth a model had no predictions to compare. Choose fewer by --loops."
        )
    return value


def ratio(values: Sequence[float], sizes: Sequence[int]) -> tuple[float, float | None]:
    """Sum over sum, and its standard error: a long document counts by its length."""
    count, whole = len(values), sum(sizes)
    found = sum(values) / whole
    if count < 2:
        return found, None
    squares = sum((v - found * s) ** 2 for v, s in zip(values, sizes, strict=True))
    return found, (squares * count / (count - 1)) ** 0.5 / whole


def sign_test(better_a: int, better_b: int) -> float:
    """Two-sided: how often a fair coin is at least this one-sided. Exact at any size."""
    count, fewer = better_a + better_b, min(better_a, better_b)
    ways = term = 1
    for k in range(fewer):
        term = term * (count - k) // (k + 1)
        ways += term
    return min(1.0, 2 * ways / 2**count)


def _names(one: Evaluation) -> str:
    return ", ".join(one.items) or "no items"
