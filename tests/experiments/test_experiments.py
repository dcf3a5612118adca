"""Every experiment judges, tabulates and draws made-up results: none, some, all of its runs."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any, get_args

import numpy as np
import pytest

from parcae.data.synthetic import TASKS
from parcae.experiments import experiment as measurements
from parcae.experiments import tokenizer
from parcae.experiments.experiment import Results, Run
from parcae.experiments.isoflop import SHAPES, describe_crossing, find_crossing
from parcae.experiments.reproduce import CATALOGUE
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Verdict
from parcae.model.flops import effective_parameters
from parcae.training.schedule import flops_per_step, tokens_per_step, total_steps

MICRO = Scale("micro", seed_count=2)
STEPS = [50, 100, 150]
QUICK = [name for name in CATALOGUE if name != "unified"]  # its fits take seconds


TOKENIZERS = [
    {
        "key": name,
        "tokenizer": name,
        "vocabulary": size,
        "bytes_per_token": dict.fromkeys(("textbooks", "encyclopedia", "novels"), ratio),
        "core_minutes": 0.1,
    }
    for name, size, ratio in (("ours, 512", 512, 2.0), ("ours, 1,024", 1024, 2.5), ("x", 1024, 2.2))
]


def made_up(run: Run, bonus: float = 0.0) -> dict[str, Any]:
    """A row as if the run had been trained: losses follow a unified law, by `bonus` lower."""
    labels, model = run.labels, run.recipe.model
    steps = total_steps(run.recipe)
    tokens, params = steps * tokens_per_step(run.recipe), effective_parameters(model)
    floor = 2.0 + 110 * params**-0.5 + 40 * tokens**-0.35
    noise = 0.002 * np.random.default_rng(labels["seed"]).standard_normal()
    losses = {
        str(t): floor - bonus + noise + 0.4 * math.exp(-6 * t / model.loop.mean_loops)
        for t in (TEST_LOOPS if model.architecture == "looped" else (1,))
    }
    row = {
        "key": run.key,
        "flops": steps * flops_per_step(run.recipe),
        "effective_params": params,
        "core_minutes": 1.0,
        "status": "finished",
        "parameters": 350_000,
        "tokens": tokens,
        "losses": losses,
        "spikes": 0,
        "wikitext": 150.0,
        "state_norms": [1.0, 1.5, 1.7],
        "guessing": math.log(512),
        "training": {"step": STEPS, "loss": [5.0, 4.0, None]},
        "telemetry": {
            "step": STEPS,
            **{name: [1.0, 2.0, 3.0] for name in ("state_norm", "residual", "input_norm")},
            **{name: [0.8, 0.8, 0.8] for name in ("transition_norm", "readout_expansion")},
            "spectral_radius": [0.5, 0.6, 0.7],
            "readout_norm": [1.0, 1.5, 2.0],
        },
    }
    assert not row.keys() & labels.keys()  # a label must not hide a measurement
    row |= labels
    if "task" in labels:
        levels = TASKS[labels["task"]].levels
        depths = (*range(1, 9), 12, 16, 24, 32) if labels["model"] == "looped" else (1,)
        steps = 1 if labels["task"].startswith("walks") else 4
        row["accuracy"] = {
            str(t): {str(level): min(1.0, 0.2 + t / (steps * level) + noise) for level in levels}
            for t in depths
        }
    return row


def results_of(name: str, count: int | None = None, **bonus: Any) -> Results:
    if name == "tokenizer":
        return Results(TOKENIZERS[:count], len(TOKENIZERS))
    runs = list({run.key: run for run in CATALOGUE[name].runs(MICRO)}.values())
    rows = [made_up(run, _bonus(run, bonus)) for run in runs[:count]]
    return Results(rows, len(runs))


def _bonus(run: Run, bonus: dict[str, Any]) -> float:
    chosen = {k: v for k, v in bonus.items() if k != "by"}
    return bonus.get("by", 0.0) if chosen.items() <= dict(run.labels).items() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_claims_and_tables_of_any_part_of_the_results(name):
    experiment = CATALOGUE[name]
    for count in (0, 1, None):
        results = results_of(name, count)
        claims = experiment.claims(results)
        assert claims
        assert all(claim.verdict in get_args(Verdict) for claim in claims)
        columns, rows = experiment.table(results)
        assert all(len(row) == len(columns) for row in rows)
    assert len(claims) == len({claim.statement for claim in claims})
    assert "not run yet" not in {claim.verdict for claim in claims}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_figures(name, tmp_path):
    path = CATALOGUE[name].draw(results_of(name), tmp_path / f"{name}.png")
    assert path.stat().st_size > 5000


@pytest.mark.slow
def test_runs_are_unique_and_shared():
    runs = {name: list(experiment.runs(MICRO)) for name, experiment in CATALOGUE.items()}
    for planned in runs.values():
        assert len({run.key for run in planned}) == len(planned)
        assert all("seed" in run.labels for run in planned)
    keys = {name: {run.key for run in planned} for name, planned in runs.items()}
    assert keys["per-sequence"] <= keys["ablation-ladder"]
    assert keys["prelude-norm"] <= keys["ablation-ladder"]
    assert len(keys["unified"] - keys["isoflop"]) == 4  # the held-out runs
    assert keys["fixed-or-sampled"] <= keys["truncated-sampling"]
    assert len(keys["tuned-rates"] & keys["transformer-comparison"]) == 4
    assert len(keys["tuned-rates"] & keys["rdm-comparison"]) == 6
    for name in ("transformer-comparison", "test-time", "discretisation"):
        assert len(keys[name] & keys["ablation-ladder"]) == 2, name  # Parcae itself, two seeds


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("transformer-comparison", {"model": "parcae"}, {"model": "transformer"}),
        ("rdm-comparison", {"model": "Parcae"}, {"model": "RDM, residual norm"}),
        ("discretisation", {"rule": "exact ZOH"}, {"rule": "Euler"}),
        ("tuned-rates", {"model": "Parcae", "lr": 1.6e-2}, {"model": "Transformer", "lr": 3.2e-2}),
    ],
)
def test_the_first_verdict_follows_the_numbers(name, better, worse):
    def first(**bonus):
        return CATALOGUE[name].claims(results_of(name, **bonus))[0].verdict

    assert first(**better, by=0.6) == "shown"
    assert first(**worse, by=1.2) == "contradicted"


def test_best_rates_are_compared_when_all_were_trained():
    results = results_of("tuned-rates")
    some = [row for row in results.rows if row["lr"] in (2e-3, 8e-3) or row["seed"] == 0]
    partial = CATALOGUE["tuned-rates"].claims(Results(some, results.planned))
    assert {claim.verdict for claim in partial} == {"not run yet"}


def test_divergence_at_a_radius_of_one():
    experiment = CATALOGUE["lr-robustness"]
    results = results_of("lr-robustness")
    for row in results.rows:
        if row["model"] == "RDM, pre-norm" and row["lr"] >= 4e-3:
            row["losses"] = {}
            row["telemetry"]["spectral_radius"] = [0.9, 1.1, 1.3]
    verdicts = [claim.verdict for claim in experiment.claims(results)]
    assert verdicts == ["shown", "shown", "shown"]
    for row in results.rows:
        row["telemetry"]["spectral_radius"] = [0.9, 0.9, 0.9]
    assert experiment.claims(results)[2].verdict == "not shown at this scale"


@pytest.mark.slow
def test_the_form_of_curves_is_recognised():
    results, agree = results_of("test-time"), {"shown", "shown weakly"}
    exponential = [claim.verdict for claim in CATALOGUE["test-time"].claims(results)]
    assert set(exponential) <= agree
    for row in results.rows:
        row["losses"] = {str(t): 3 + 0.4 / t for t in TEST_LOOPS}
    power = [claim.verdict for claim in CATALOGUE["test-time"].claims(results)]
    assert not set(power) & agree


@pytest.mark.slow
def test_an_optimum_above_one_loop_that_grows_with_the_budget():
    results = results_of("isoflop")
    for row in results.rows:  # parabolas whose optimum is 2.5 loops at first, and grows as C^0.4
        distance = math.log(row["mu"]) - math.log(2.5 * (row["budget"] / 1e11) ** 0.4)
        row["losses"] = {str(row["mu"]): 3 + 0.05 * distance**2 + 1e-4 * row["seed"]}
    claims = CATALOGUE["isoflop"].claims(results)
    assert [claim.verdict for claim in claims] == ["shown", "shown", "shown", "shown"]
    assert claims[1].evidence.count("exponent 0.40") == len(SHAPES["micro"])
    assert claims[3].evidence == "w32: 3 to 4, 3 to 4, by seed"
    claims = CATALOGUE["isoflop"].claims(results_of("isoflop", mu=1, by=0.5))
    assert [claims[i].verdict for i in (0, 2)] == ["contradicted", "contradicted"]
    assert claims[3].evidence == "w32: 1 to 1, 1 to 1, by seed"


@pytest.mark.slow
def test_the_interval_of_a_crossing_contains_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    x = np.log10([1e11, 2.5e11, 6e11] * 3)
    crossings = [
        find_crossing(list(zip(x, 0.02 * (x - 13) + rng.normal(0, 0.004, 9), strict=True)))
        for _ in range(1000)
    ]
    assert sum(c.low <= 13 <= c.high for c in crossings) == pytest.approx(950, abs=25)
    exact = find_crossing([(11, -2), (12, -1), (12.5, -0.5)])
    assert [exact.at, exact.low, exact.high] == pytest.approx([13, 13, 13], abs=1e-3)
    assert describe_crossing(exact) == "crossing near 1e13 FLOPs (1e13 to 1e13)"
    falling = find_crossing([(11, -1), (12, -2), (13, -3)])
    assert describe_crossing(falling) == "no crossing in sight"
    unsure = [(11, -1), (12, -1.5), (13, -0.8)]
    assert "not bounded" in describe_crossing(find_crossing(unsure))
    assert "at least" in describe_crossing(find_crossing(3 * unsure))


@pytest.mark.slow
def test_the_unified_law_is_recovered(tmp_path):
    results = results_of("unified")
    claims = CATALOGUE["unified"].claims(results)
    assert [claim.verdict for claim in claims] == ["shown", "shown", "shown"]
    assert CATALOGUE["unified"].draw(results, tmp_path / "unified.png").exists()


@pytest.mark.slow
def test_accuracy_grows_from_one_loop_to_eight():
    claims = CATALOGUE["reasoning"].claims(results_of("reasoning"))
    assert claims[0].verdict == "shown"
    assert "pointers" in claims[0].evidence
    harder = CATALOGUE["reasoning-harder"].claims(results_of("reasoning-harder"))
    assert harder[2].verdict == "shown"


@pytest.mark.slow
def test_each_loop_takes_one_more_step():
    results = results_of("walks")
    claims = CATALOGUE["walks"].claims(results)
    assert [claim.verdict for claim in claims] == ["shown"] * 3 + ["not shown at this scale"]
    assert "at T = 1, 2, 4, 8: 1, 2, 5, 8;" in claims[2].evidence
    for row in results.where(task="walks-unseen"):
        row["accuracy"]["8"] = row["accuracy"]["2"]
    assert CATALOGUE["walks"].claims(results)[3].verdict == "shown"


@pytest.mark.slow
def test_variants_on_walks_are_compared_at_their_loops():
    results = results_of("walks-ladder")
    for row in results.where(variant="Parcae, always 8 loops"):
        row["accuracy"]["2"] = row["accuracy"]["1"]
    verdicts = [claim.verdict for claim in CATALOGUE["walks-ladder"].claims(results)]
    assert verdicts[3] == "shown"  # fewer walks at T = 2
    assert verdicts[4] == "not shown at this scale"  # all are solved at T = 16 and 32


def test_the_share_of_the_gap_in_core_is_reported_where_core_was_measured():
    scores = {"transformer": {"w64": 10.0, "w96": 20.0, "w128": 30.0}}
    scores["parcae"] = {"w64": 15.0, "w96": 25.0}
    results = results_of("transformer-comparison")
    for row in results.where(data=1):
        row["core"] = scores[row["model"]][row["size"]] + row["seed"]
    assert "in CORE 0.50" in CATALOGUE["transformer-comparison"].claims(results)[1].evidence
    columns, rows = CATALOGUE["transformer-comparison"].table(results)
    assert rows[0][columns.index("CORE")] == "10.0, 11.0"


def test_a_task_that_the_training_text_gives_away_is_left_out(monkeypatch):
    tasks = {
        name: {"by_loops": {"8": {"accuracy": a}}} for name, a in (("sciq", 0.9), ("piqa", 0.5))
    }
    monkeypatch.setattr(measurements, "_can_evaluate", lambda *_: True)
    monkeypatch.setattr(
        measurements, "_evaluate", lambda *_, **__: ({"zero-shot": {"tasks": tasks}}, "8")
    )
    store: Any = None
    for data, accuracy in (({}, 50.0), ({"sources": ["other.txt"]}, 70.0)):
        run = Run(MICRO.recipe(MICRO.rdm(data=data), 0), {})
        assert measurements.zero_shot_record(run, store, 8) == {"zero_shot": accuracy}
        assert measurements.core_record(run, store, 8) == {"core": None, "core-extended": None}


@pytest.mark.slow
def test_the_scale_of_the_paper_plans_its_models():
    scale = Scale("paper")
    presets = {run.recipe.model.width for run in CATALOGUE["rdm-comparison"].runs(scale)}
    assert presets == {1024, 2048}
    lrs = {run.recipe.optimiser.lr for run in CATALOGUE["lr-robustness"].runs(scale)}
    assert lrs == {2e-4, 4e-4, 6e-4, 8e-4, 1e-3}
    for name, experiment in CATALOGUE.items():
        assert list(experiment.runs(scale)) or name == "tokenizer"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choose-mu", "per-sequence"])
def test_claims_and_figures_of_the_papers_grids(name, tmp_path):
    experiment = CATALOGUE[name]
    rows = []
    for run in experiment.runs(Scale("paper", seed_count=2)):
        assert run.labels.get("mu", 8) in run.recipe.run.validation_loops
        better = run.labels.get("draw") == "per sequence" or run.labels.get("mu", 20) < 20
        losses = {str(t): 2.0 if better else 2.5 for t in run.recipe.run.validation_loops}
        measured = {"losses": losses, "spikes": 0 if better else 3, "core_minutes": 1.0}
        telemetry = {"step": [1], "residual": [0.1 if better else 0.2]}
        rows.append({**run.labels, **measured, "telemetry": telemetry})
    results = Results(rows, len(rows))
    first = experiment.claims(results)[0]
    assert first.verdict == "shown", first
    columns, table = experiment.table(results)
    assert len(table) == {"choose-mu": 10, "per-sequence": 4}[name]
    assert {len(row) for row in table} == {len(columns)}
    assert experiment.draw(results, tmp_path / "figure.png").stat().st_size > 0


def test_tokenizers_are_compared_without_training(tmp_path, monkeypatch):
    experiment = CATALOGUE["tokenizer"]
    assert experiment.claims(results_of("tokenizer"))[0].verdict == "shown weakly"
    texts = tmp_path / "corpora"
    for name in (tokenizer.TRAINING, *tokenizer.HELD_OUT.values()):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"text": "the cat sat " * 300}).encode()
        (texts / name).write_bytes(gzip.compress(line))
    monkeypatch.setattr(tokenizer, "SIZES", (300,))
    measured = experiment.measure_texts(texts, tmp_path)
    assert [row["tokenizer"] for row in measured] == ["ours, 300"]
    assert measured[0]["bytes_per_token"]["novels"] > 3
