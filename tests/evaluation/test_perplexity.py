"""Windows, detokenised WikiText and log-likelihoods as lm-evaluation-harness has them."""

from __future__ import annotations

import json
import math
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation_fixtures import score_all
from parcae import cli
from parcae.config import ConfigError
from parcae.evaluation.perplexity import detokenise, read_wikitext, split_articles
from parcae.evaluation.prompts import continuations, windows

lm_eval_utils = pytest.importorskip("lm_eval.utils", reason="the extra eval is not installed")


@given(st.integers(0, 40), st.integers(1, 12))
def test_windows_are_the_harness_ones(count, context):
    tokens = list(range(100, 100 + count))
    rolled = lm_eval_utils.get_rolling_token_windows(tokens, 7, context, 1)
    want = [lm_eval_utils.make_disjoint_window(pair) for pair in rolled]
    found = list(windows(tokens, 7, context))
    assert [(list(w.tokens[: -w.scored]), list(w.tokens[-w.scored :])) for w in found] == want
    assert [t for w in found for t in w.tokens[-w.scored :]] == tokens


@pytest.mark.slow
def test_wikitext_is_split_and_detokenised_as_in_the_harness(shared_data: Path):
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    found = read_wikitext(shared_data / "data/corpora/wikitext2_raw/wiki.test.raw.gz")
    assert len(found) == 62  # documents in the test split of the harness's data set
    for article in found:
        assert detokenise(article) == wikitext_detokenizer({"page": article})


def test_subtitles_do_not_start_an_article():
    text = " \n = A = \n one \n = = B = = \n two \n = C = \n three"
    assert [part.split()[1] for part in split_articles(text)] == ["A", "C"]


def ask(*requests):
    return [SimpleNamespace(args=one) for one in requests]


@pytest.fixture(scope="module")
def adapter(checkpoint):
    from parcae.evaluation.harness import ParcaeLM

    return ParcaeLM(str(checkpoint), loops=2, batch_tokens=128)


def test_loglikelihoods_do_not_depend_on_the_batch(adapter):
    requests = ask(
        ("the cat", " sat on"),
        ("the cat", " run"),
        ("", "one dog"),
        ("in light ", "rain"),
        ("the cat sat on a mat " * 12, " and saw"),
        ("the cat", " sat on"),
    )
    together = adapter.loglikelihood(requests)
    alone = [adapter.loglikelihood([request])[0] for request in requests]
    for (a, greedy), (b, also) in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy == also
    assert together[0] == together[-1]
    assert all(value < 0 for value, _ in together)


def test_a_whole_text_is_the_sum_of_its_parts(adapter, scorer):
    text = "the cat sat on a mat and saw that one dog run far away"
    (whole,) = adapter.loglikelihood_rolling(ask((text,)))
    (first, _), (rest, _) = adapter.loglikelihood(
        ask(("", "the cat sat"), ("the cat sat", text.removeprefix("the cat sat")))
    )
    assert whole == pytest.approx(first + rest, abs=1e-4)
    long = " ".join([text] * 9)
    assert len(scorer.encode(long)) > 64
    assert adapter.loglikelihood_rolling(ask((long,)))[0] < whole


def test_generated_text_ends_before_its_stop(adapter):
    (text,) = adapter.generate_until(ask(("the cat", {"until": ["\n"], "max_gen_toks": 12})))
    assert "\n" not in text
    again = adapter.generate_until(
        ask(
            ("the cat", {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}),
            ("dog " * 200, {"until": [], "max_gen_toks": 4}),
        )
    )
    assert again[0] == text


def test_a_continuation_that_does_not_fit_is_refused(adapter, scorer, capsys):
    """A context is cut with a warning, as in the harness."""
    text = " rain" * 200
    tokens = scorer.encode(text)
    whole, fits = scorer.tokenizer.decode(tokens[:65]), scorer.tokenizer.decode(tokens[:64])
    assert len(scorer.encode(whole)) == 65
    with pytest.raises(ConfigError, match="a continuation of 65 tokens does not fit the model's"):
        adapter.loglikelihood(ask(("", whole)))
    capsys.readouterr()
    adapter.loglikelihood(ask(("the cat", fits), ("the cat", " sat")))
    assert "1 of 1 contexts" in " ".join(capsys.readouterr().err.split())
    adapter.loglikelihood(ask(("", fits)))
    assert "contexts" not in capsys.readouterr().err


def test_repeated_samples_differ_and_are_reproducible(adapter):
    """A task with `repeats` sends the same request several times."""
    options = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    requests = ask(*[("the cat", options)] * 3, ("one dog", options))
    made = adapter.generate_until(requests)
    assert len(set(made[:3])) == 3
    assert adapter.generate_until(requests[1:2]) == made[:1]
    assert adapter.generate_until(requests[-1:]) == made[-1:]


def test_tasks_have_several_names_for_the_token_limit(adapter):
    asked = ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_gen_toks": 3, "max_tokens": 9})
    three = adapter.generate_until(ask(("the cat", {"until": [], "max_new_tokens": 3})))
    for options in asked:
        assert adapter.generate_until(ask(("the cat", {"until": [], **options}))) == three
    with pytest.raises(ConfigError, match="num_beams"):
        adapter.generate_until(ask(("the cat", {"until": [], "num_beams": 4})))


def test_scores_before_a_kill_are_in_the_harness_cache(adapter, monkeypatch):
    kept = []
    hook = SimpleNamespace(add_partial=lambda *one: kept.append(one))
    monkeypatch.setattr(adapter, "cache_hook", hook)
    score, calls = adapter.scorer.score, iter([True, False])

    def once(prompts, seeds=None):
        if not next(calls):
            raise KeyboardInterrupt
        return score(prompts, seeds)

    monkeypatch.setattr(adapter.scorer, "score", once)
    monkeypatch.setattr(adapter.scorer, "batch_tokens", 8)
    requests = ask(("the cat sat on", " a mat"), ("one dog", " run"))
    with pytest.raises(KeyboardInterrupt):
        adapter.loglikelihood(requests)
    ((kind, arguments, (value, _)),) = kept
    assert (kind, arguments) == ("loglikelihood", ("the cat sat on", " a mat"))
    assert value < 0


def test_lambada_is_scored_after_bos(scorer, adapter):
    prompt = continuations("the cat sat on", [" a"], scorer)
    ((answer,),) = score_all(scorer, [prompt])
    ((value, _),) = adapter.loglikelihood(ask(("the cat sat on", " a")))
    assert -answer.nats[1].sum().item() == pytest.approx(value, abs=1e-5)


@pytest.mark.slow
def test_the_harness_runs_on_local_data(checkpoint, task_folder, tmp_path, monkeypatch, capsys):
    """Offline, through its own command, with the same log-likelihoods; without the list of its own
    tasks, thousands of files that take half a minute to read."""
    from lm_eval.tasks import TaskManager

    init = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", init)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    data = task_folder / "commonsense_reasoning/copa.jsonl"
    (tmp_path / "copa.yaml").write_text(
        "task: local_copa\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{query}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        "task: local_text\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{query}}"\n'
        "metric_list:\n  - metric: word_perplexity\n"
    )
    path = str(checkpoint)
    words = f"lm-eval run --model parcae --model_args path={path},loops=2 --log_samples"
    words += (
        f" --tasks local_copa,local_text --include_path {tmp_path} --output_path {tmp_path}/out"
    )
    code = cli.main(words.split())
    assert code == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    message = json.loads(results.read_text())["results"]
    (samples,) = (tmp_path / "out").rglob("samples_local_copa_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 12

    from parcae.evaluation.scorer import open_scorer

    ours = open_scorer(checkpoint, [2])
    right = 0.0
    for row in rows:
        doc = row["doc"]
        prompt = continuations(doc["query"], [f" {one}" for one in doc["choices"]], ours)
        (answers,) = score_all(ours, [prompt])
        logs = [-answer.nats[0].sum().item() for answer in answers]
        theirs = [float(response[0][0]) for response in row["resps"]]
        assert theirs == pytest.approx(logs, abs=1e-4)
        right += logs.index(max(logs)) == doc["gold"]
    assert message["local_copa"]["acc,none"] == pytest.approx(right / 12)
    assert math.isfinite(message["local_text"]["word_perplexity,none"])
    assert _from_python(path, tmp_path) == message["local_copa"]["acc,none"]


def _from_python(path: str, tasks: Path) -> float:
    """By name and as an object, as the harness tests its own models."""
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks))
    model_args = f"path={path},loops=2"
    by_name = lm_eval.simple_evaluate(
        model="parcae", model_args=model_args, tasks=["local_copa"], task_manager=manager
    )
    model = get_model("parcae").create_from_arg_string(model_args, {"batch_size": None})
    as_object = lm_eval.evaluate(model, manager.load(["local_copa"]))
    assert by_name is not None
    assert as_object is not None
    first, second = (found["results"]["local_copa"]["acc,none"] for found in (by_name, as_object))
    assert first == second
    return first
