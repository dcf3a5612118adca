"""Synthetic tasks: answers by brute force, batches by step, training that resumes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import parcae
from parcae.cli import main
from parcae.config import ConfigError
from parcae.data.synthetic import (
    NO_TARGET,
    TASKS,
    ModularArithmetic,
    PointerChasing,
    TaskLoader,
    Walks,
    find_task,
)
from parcae.evaluation.task_accuracy import accuracies
from parcae.experiments.scales import Scale
from parcae.files import FileError
from parcae.model.base import IGNORED_TARGET
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
    assert NO_TARGET == IGNORED_TARGET
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


@pytest.mark.parametrize("name", TASKS)
def test_rows_can_be_printed_and_read_again(name):
    task = TASKS[name]
    tokenizer, examples = task.tokenizer(), task.draw(4, RANDOM(0), every_level=True)
    assert tokenizer.vocab_size == task.vocab_size
    for tokens, answers, levels in zip(*examples, strict=True):
        assert tokens[0] == tokenizer.bos
        text = tokenizer.decode(tokens[1:])
        assert tokenizer.encode(text) == tokens[1:].tolist()
        stream = tokenizer.decode_stream()
        assert "".join(map(stream, tokens[1:].tolist())) == text
        read = np.array([*task.answers_in(tokens.tolist())])
        asked = levels > 0
        asked[-1] &= isinstance(task, Walks)  # elsewhere the last answer is not in the text
        assert (read[asked] == answers[asked]).all()
        if isinstance(task, Walks):
            assert (read[~asked] == NO_TARGET).all()


def test_a_walk_is_printed_as_one_writes_it():
    tokenizer = TASKS["walks"].tokenizer()
    assert tokenizer.decode([2, 8, 8, 9, 11 + 8 * 2 + 5]) == "2 > > _ 2->5"
    with pytest.raises(FileError, match=r"'2→5' is no token\. Tokens: 0, 1, 2, 3, "):
        tokenizer.encode("0->1 2→5")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_share_the_rows_of_a_step(world_size):
    task = TASKS["pointers"]
    whole = next(TaskLoader(task, 8, 1)).inputs
    for rank in range(world_size):
        part = next(TaskLoader(task, 8, 1, rank, world_size)).inputs
        assert torch.equal(part, whole[rank::world_size])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": ["task:walks", "builtin"]}, "task:walks is one of several"),
        ({"sources": ["task:walk"]}, "'walk'. Did you mean walks"),
        ({"tokenizer": "x.json"}, "data.tokenizer: given, but task:walks has a vocabulary"),
    ],
)
def test_recipes_that_do_not_fit_a_task_are_refused(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        parcae.train("walks", tmp_path / "run", data=data)
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_a_context_shorter_than_a_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="context_length: 40, but the rows of task:walks have 41"):
        parcae.train("walks", tmp_path / "run", model={"context_length": 40})


WALK = "4->1 0->7 3->0 7->4 1->2 2->5 5->6 6->3 2 > > > > > > >"


@pytest.mark.slow
def test_a_run_of_walks_generates_is_traced_and_scored(tmp_path, capsys):
    run = tmp_path / "run"
    short = {"budget": {"steps": 2}, "run": {"validation_rows": 8, "device": "cpu"}}
    parcae.train("walks", run, **short)
    capsys.readouterr()
    assert main(["generate", str(run), WALK, "--loops", "8", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{WALK} ")
    assert main(["depth", str(run), WALK, "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert [token["text"] for token in traced["tokens"]] == list("56307412")
    model = load(run)
    tokens = torch.tensor([[10, *TASKS["walks"].tokenizer().encode(WALK)]])
    logits = model(tokens, loops=3, state="zero").logits[0, -8:]
    loss = torch.nn.functional.cross_entropy(
        logits, torch.tensor([5, 6, 3, 0, 7, 4, 1, 2]), reduction="none"
    )
    assert [token["loss"][2] for token in traced["tokens"]] == pytest.approx(loss.tolist(), 1e-4)
    result = parcae.evaluate(run, loops=(1, 16))
    losses = result.suites["val"]["by_loops"]
    validation = parcae.runs.read_result(run).losses
    assert losses["16"]["loss"] == pytest.approx(validation[16], rel=1e-5)
    assert main(["depth", str(run), "4->1 0->7"]) == 2
    assert "no position has an answer" in capsys.readouterr().err


def test_a_wrong_task_is_named():
    with pytest.raises(ConfigError, match=r"'pointer'. Did you mean pointers"):
        find_task("task:pointer")


@pytest.mark.slow
def test_training_resumes_and_accuracy_counts_right_answers(tmp_path):
    scale = Scale("toy")
    recipe = scale.recipe(scale.task("pointers"), seed=0)
    result = parcae.train(recipe, tmp_path / "whole")
    assert (result.status, result.steps) == ("finished", 3)
    again = parcae.train(recipe, tmp_path / "whole", resume=True)
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
