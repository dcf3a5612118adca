"""Synthetic tasks: answers by brute force, batches by step, training that resumes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parcae.config import ConfigError
from parcae.experiments.scales import Scale
from parcae.experiments.tasks import (
    TASKS,
    ModularArithmetic,
    PointerChasing,
    TaskLoader,
    Walks,
    accuracies,
    find_task,
    train_task,
)
from parcae.runs import load

RANDOM = np.random.default_rng


def chase(task: PointerChasing, row: np.ndarray) -> list[tuple[int, int, int]]:
    """(hops, expected end, stated end) of every query, read from the tokens alone."""
    pairs = row[1 : 1 + 2 * task.nodes].reshape(-1, 2)
    successor = dict(pairs.tolist())
    rest = row[1 + 2 * task.nodes :].reshape(task.queries, -1)
    found = []
    for *query, end in rest.tolist():
        if task.unary:
            shown = [token for token in query if token != task.nodes + 1]
            node, hops = shown[0], len(shown) - 1
        else:
            hops, node = query[0] - task.nodes, query[1]
        for _ in range(hops):
            node = successor[node]
        found.append((hops, node, end))
    return found


@pytest.mark.parametrize("name", ["pointers", "pointers-large", "pointers-unseen"])
@pytest.mark.parametrize("every_level", [False, True])
def test_pointers_lead_where_the_pairs_say(name, every_level):
    task = TASKS[name]
    examples = task.draw(40, RANDOM(0), every_level=every_level)
    assert examples.tokens.shape == (40, task.length)
    text = np.concatenate((examples.tokens, examples.answers[:, -1:]), 1)
    assert text.max() < task.vocab_size
    most = task.tested_hops if every_level else task.hops
    seen = set()
    for row, levels in zip(text, examples.levels, strict=True):
        queries = chase(task, row)
        assert all(expected == stated for _, expected, stated in queries)
        assert levels[levels > 0].tolist() == [hops for hops, _, _ in queries]
        seen |= {hops for hops, _, _ in queries}
    assert seen == set(range(1, most + 1))


@pytest.mark.parametrize("name", ["walks", "walks-unseen"])
@pytest.mark.parametrize("every_level", [False, True])
def test_walks_end_where_the_edges_lead(name, every_level):
    task = TASKS[name]
    assert isinstance(task, Walks)
    n, steps = task.nodes, task.tested_steps if every_level else task.steps
    examples = task.draw(40, RANDOM(0), every_level=every_level)
    assert examples.tokens.shape == (40, task.length)
    assert examples.tokens.max() < task.vocab_size
    for tokens, answers, levels in zip(*examples, strict=True):
        assert tokens[0] == n + 2
        edges = tokens[1 : n + 1] - (n + 3)
        leads = dict(zip((edges // n).tolist(), (edges % n).tolist(), strict=True))
        assert sorted(leads) == sorted(leads.values()) == list(range(n))
        assert not levels[: n + 1].any()
        rest = (x[n + 1 :].reshape(task.walks, -1) for x in (tokens, answers, levels))
        for walk, ends, level in zip(*rest, strict=True):
            node = int(walk[0])
            assert walk[1:steps].tolist() == [n] * (steps - 1)  # nothing tells where the walk is
            assert (walk[steps:] == n + 1).all()
            assert level.tolist() == [*range(1, steps + 1), *[0] * (task.tested_steps - steps)]
            for end in ends[:steps].tolist():
                node = leads[node]
                assert end == node


def test_arithmetic_has_the_values_of_its_expressions():
    task = ModularArithmetic()
    examples = task.draw(30, RANDOM(1))

    def value(tokens: list[int]) -> int:
        token = tokens.pop(0)
        if token < 7:
            return token
        a = value(tokens)
        b = value(tokens)
        return (a + b, a - b, a * b)[token - 7] % 7

    for row, levels in zip(examples.answers, examples.levels, strict=True):
        for text, level in zip(row.reshape(4, -1).tolist(), levels.reshape(4, -1), strict=True):
            expression = [token for token in text[:-2] if token != 11]
            assert text[-2] == 12
            assert sum(7 <= token < 10 for token in expression) == level[-1]
            assert value(expression) == text[-1]
            assert not expression


def test_only_answers_are_targets():
    examples = TASKS["pointers"].draw(3, RANDOM(2))
    inputs, targets = examples.batch()
    assert torch.equal(inputs, torch.from_numpy(examples.tokens))
    answers = targets != -100
    assert answers.sum(1).tolist() == [8, 8, 8]
    assert targets[answers].tolist() == examples.answers[examples.levels > 0].tolist()


def test_batches_follow_from_seed_and_step():
    task = TASKS["pointers"]
    first, again, other = TaskLoader(task, 4, 1), TaskLoader(task, 4, 1), TaskLoader(task, 4, 2)
    batches = [next(first) for _ in range(3)]
    again.load_state_dict({"step": 2})
    assert torch.equal(next(again).inputs, batches[2].inputs)
    assert not torch.equal(next(other).inputs, batches[0].inputs)
    assert not torch.equal(batches[0].inputs, batches[1].inputs)


def test_a_wrong_task_is_named():
    with pytest.raises(ConfigError, match=r"'pointer'. Did you mean pointers"):
        find_task("task:pointer")


@pytest.mark.slow
def test_training_resumes_and_accuracy_counts_right_answers(tmp_path):
    scale = Scale("toy")
    recipe = scale.recipe(scale.task("pointers"), seed=0)
    result = train_task(recipe, tmp_path / "whole")
    assert (result.status, result.steps) == ("finished", 3)
    again = train_task(recipe, tmp_path / "whole", resume=True)
    assert again.validation == result.validation

    task, model = TASKS["pointers"], load(tmp_path / "whole")
    shares = accuracies(model, task, (1, 4), rows=16)
    examples = task.draw(16, RANDOM((1, 1)), every_level=True)
    logits = model(examples.batch().inputs, loops=4, state="zero").logits
    right = logits.argmax(-1).numpy() == examples.answers
    for level in task.levels:
        expected = right[examples.levels == level].mean()
        assert shares[4][level] == pytest.approx(expected)


def test_a_transformer_is_told_nothing_about_loops():
    scale = Scale("toy", overrides={"model": {"loop": {"mean_loops": 4}}})
    assert scale.recipe(scale.task("pointers"), 0).model.loop.mean_loops == 4
    assert scale.recipe(scale.task("pointers", "transformer"), 0).model.loop.mean_loops == 1
