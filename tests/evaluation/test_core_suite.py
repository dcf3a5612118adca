"""Draws, prompts, spans, losses and answers against the reference release and an oracle."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from statistics import mean

import pytest
import torch

import one_at_a_time
import parcae
from evaluation_fixtures import score_all
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.core_suite import (
    InContext,
    Questions,
    draw_examples,
    render,
    shuffled_order,
    tokenise_item,
)
from parcae.evaluation.jobs import DataFile
from parcae.evaluation.metrics import credit
from parcae.evaluation.prompts import Answer, Prompt, Span
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.suites import SEEDS
from parcae.evaluation.tasks import Item, core, core_extended, locate, tasks_named

NAMES = [task.name for task in core_extended()]
SMALL = ("copa", "winograd", "bigbench_operators", "lambada_openai")
"""The tasks of `task_folder`, in place of the published files where those are not at hand."""
HERE = NAMES if os.environ.get("PARCAE_TEST_DATA") else [name for name in NAMES if name in SMALL]


@pytest.fixture(scope="module")
def golden(shared_data: Path) -> Path:
    return shared_data / "fixtures" / "eval-tiny"


@pytest.fixture(scope="module")
def model(golden: Path):
    return parcae.load(golden)


@pytest.fixture(scope="module")
def tokenizer(golden: Path) -> Tokenizer:
    return Tokenizer.load(golden)


@pytest.fixture(scope="module")
def expected(golden: Path) -> list[dict]:
    return json.loads((golden / "expected.json").read_text())


@pytest.fixture(scope="module")
def task_data(request) -> Path:
    if HERE == NAMES:
        return request.getfixturevalue("shared_data") / "data"
    return request.getfixturevalue("task_folder")


@pytest.fixture(scope="module")
def any_model(request):
    """The release's model and tokenizer, or small ones of ours."""
    names = ("model", "tokenizer") if HERE == NAMES else ("small_model", "small_tokenizer")
    return tuple(request.getfixturevalue(name) for name in names)


_read: dict[str, Questions] = {}


def questions(name: str, folder: Path) -> Questions:
    if name not in _read:
        (task,) = tasks_named([name])
        path = locate(task, folder)
        assert path is not None
        _read[name] = Questions(task, DataFile(path, "test"))
    return _read[name]


def test_the_table_is_the_papers():
    assert len(core_extended()) == 46
    assert len(core()) == 22
    assert len(set(NAMES)) == 46
    assert {task.shots for task in core_extended()} == {0, 3, 5, 10}


def test_published_scores_are_centred_by_the_default_baselines(shared_data: Path):
    """The file has the accuracy and the centred score of GPT-2."""
    path = shared_data / "data/core_eval/meta/openai-community-gpt2.csv"
    known = {task.name: task for task in core_extended()}
    seen = 0
    for line in path.read_text().splitlines()[1:]:
        name, accuracy, centred = (word.strip() for word in line.split(","))
        if name in known:
            assert known[name].centred(float(accuracy)) == pytest.approx(float(centred), abs=2e-6)
            seen += 1
    assert seen == 22
    siqa = known["siqa"]
    assert siqa.centred(0.5, "dclm") == 0.0
    assert siqa.centred(0.5) > 0.2


@pytest.mark.slow
def test_draws_prompts_and_spans_are_the_releases(shared_data, expected, tokenizer):
    for want in expected:
        asked = questions(want["task"], shared_data / "data")
        task = asked.task
        assert (task.kind, task.shots, task.delimiter) == (
            want["type"],
            want["num_fewshot"],
            want["delimiter"],
        )
        index = want["index"]
        assert asked.rows[index] == want["source_row"]
        assert draw_examples(len(asked), index, task.shots, want["seed"]) == want["few_shot"]
        job = InContext(asked, want["seed"])
        texts = job.texts(index)
        assert texts == want["prompts"]
        prompt = tokenise_item(task.kind, texts, tokenizer.encode, tokenizer.bos, 1024)
        assert [list(span) for span in prompt.spans] == want["spans"]
        assert list(prompt.lengths) == want["untruncated_lengths"]
        assert list(prompt.sequences[-1]) == want["last_prompt_tokens"]
    assert any(want["untruncated_lengths"][0] > 1024 for want in expected)


@pytest.mark.slow
def test_losses_and_answers_are_the_releases(shared_data, expected, model, tokenizer):
    scorer = LoopedScorer(model, tokenizer, [4])
    jobs = [
        InContext(questions(want["task"], shared_data / "data"), want["seed"]) for want in expected
    ]
    prompts = [job.prompt(w["index"], scorer) for job, w in zip(jobs, expected, strict=True)]
    answers = score_all(scorer, prompts)
    for want, job, prompt, found in zip(expected, jobs, prompts, answers, strict=True):
        record = job.record(want["index"], prompt, found)
        assert record["credit"] == [float(want["correct"])]
        if want["type"] == "language_modeling":
            assert record["said"] == [want["greedy"]]
        else:
            assert record["losses"][0] == pytest.approx(want["mean_losses"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_every_task_as_one_at_a_time_without_cache(name, task_data, any_model):
    asked, (model, tokenizer) = questions(name, task_data), any_model
    task, depths = asked.task, (2,)
    rows = one_at_a_time.read(asked.source.path)
    scorer = LoopedScorer(model, tokenizer, depths)
    seed = SEEDS[1]
    indices = [0, len(rows) - 1]
    job = InContext(asked, seed)
    prompts = [job.prompt(index, scorer) for index in indices]
    answers = score_all(scorer, prompts)
    for index, prompt, found in zip(indices, prompts, answers, strict=True):
        record = job.record(index, prompt, found)
        for place, loops in enumerate(depths):
            want = one_at_a_time.score(model, tokenizer, task, rows, index, seed, loops)
            assert job.texts(index) == want.prompts
            assert [list(tokens) for tokens in prompt.sequences] == want.tokens
            assert list(prompt.spans) == want.spans
            losses = [answer.nats[place].mean().item() for answer in found]
            assert losses == pytest.approx(want.losses, abs=2e-5)
            ranked = sorted(want.losses)
            if len(ranked) > 1 and ranked[1] - ranked[0] < 1e-4:
                continue  # too close to call for rounding
            if task.kind == "language_modeling":
                assert found[0].likeliest[place].tolist() == want.greedy
            assert record["credit"][place] == float(want.correct)


def stderr(nats: float) -> Answer:
    return Answer(torch.tensor([[nats]]).double(), torch.zeros(1, 1), torch.ones(1))


GUESSES = [stderr(0.001 * number) for number in range(1000)]
"""Any of these tasks shows the accuracy of guessing."""


CHOICES = [task.name for task in tasks_named(HERE) if task.kind != "language_modeling"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_random_scores_have_uniform_chance(name, task_data):
    asked, dice = questions(name, task_data), random.Random(5)
    job, empty = InContext(asked, SEEDS[0]), Prompt((), (), ())
    chances = [1 / len(item.answers) for item in asked.items]
    assert asked.chance == pytest.approx(mean(chances))
    some = range(0, len(chances), 1 + len(chances) // 1000)
    chances = [chances[number] for number in some]

    def accuracy(guesses: list[Answer]) -> float:
        records = [
            job.record(number, empty, dice.choices(guesses, k=len(asked.items[number].answers)))
            for number in some
        ]
        return job.summarise(records, 0)["accuracy"]

    assert accuracy(GUESSES[:1]) == pytest.approx(mean(chances))
    error = (sum(p * (1 - p) for p in chances) ** 0.5) / len(chances)
    assert abs(accuracy(GUESSES) - mean(chances)) < 4 * error


def test_equal_scores_share_the_credit():
    assert credit([1.0, 2.0, 3.0], 0) == 1.0
    assert credit([1.0, 2.0, 3.0], 1) == 0.0
    assert credit([1.0, 1.0, 3.0], 1) == 0.5
    assert credit([1.0, 1.0 + 1e-7, 1.0], 2) == pytest.approx(1 / 3)


def test_examples_never_include_the_question_itself():
    for index in range(20):
        drawn = draw_examples(20, index, 19, 1234)
        assert sorted(drawn) == [other for other in range(20) if other != index]


@pytest.mark.parametrize("count", [2, 12, 300, 38_148])
def test_examples_are_drawn_as_from_the_list_of_all_others(count):
    shots = min(10, count - 1)
    for index in {0, 1, count // 2, count - 1}:
        others = [other for other in range(count) if other != index]
        wanted = random.Random(2345 + index).sample(others, shots)
        assert draw_examples(count, index, shots, 2345) == wanted


def test_shuffle_is_a_permutation():
    assert sorted(shuffled_order(100)) == list(range(100))
    assert shuffled_order(100) != list(range(100))


def test_an_answer_that_begins_another_still_has_a_token_to_score():
    encode = list
    prompt = tokenise_item("multiple_choice", [b"qa", b"qab"], encode, 0, 100)  # type: ignore
    assert prompt.spans == (Span(2, 3), Span(2, 4))
    equal = tokenise_item("multiple_choice", [b"qa", b"qa"], encode, 0, 100)  # type: ignore
    assert equal.spans == (Span(2, 3), Span(2, 3))


def test_an_answer_that_does_not_begin_a_token_is_marked():
    """The release stops there; here the token that spans both is scored, and counted."""
    texts = [b"q", b"qab"]
    assert tokenise_item("language_modeling", texts, list, 0, 100).is_aligned  # type: ignore
    joined = tokenise_item(
        "language_modeling", ["q", "qab"], {"q": [5], "qab": [7, 8]}.__getitem__, 0, 100
    )
    assert joined.spans == (Span(1, 3),)
    assert not joined.is_aligned


def test_a_span_longer_than_the_context_is_scored_as_far_as_it_fits():
    prompt = tokenise_item("multiple_choice", [b"q123456", b"qabcdef"], list, 0, 4)  # type: ignore
    assert prompt.is_cut
    assert prompt.spans == (Span(1, 4), Span(1, 4))


def test_language_modelling_trims_the_context():
    (task,) = tasks_named(["lambada_openai"])
    texts = render(task, Item((" the end \n",), ("word",), 0), [])
    assert texts == ["the end", "the end word"]
