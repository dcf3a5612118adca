"""How many files a reader meets from one end of the package to the other. May only be lowered."""

from __future__ import annotations

import shutil

import pytest

import parcae
from parcae.experiments.paper_runs import paper_table
from parcae.laws.table import write_table
from serving_fixtures import client_of, make_app
from system.test_internals import RECIPE, ROOT, text, trace  # noqa: F401 (text is a fixture)

FILES = {
    "text to checkpoint": 68,
    "runs to figure": 19,
    "prompt to HTTP response": 36,
    "claim to page": 46,
}


def check(walk: str, calls: list[tuple[str, str]]) -> None:
    files = {file for file, _ in calls}
    assert len(files) <= FILES[walk], sorted(files)


@pytest.mark.slow
def test_text_to_checkpoint(text, tmp_path):  # noqa: F811
    recipe = {**RECIPE, "data": {**RECIPE["data"], "sources": [str(text)]}}
    check("text to checkpoint", trace(lambda: parcae.train(recipe, tmp_path / "run")))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_runs_to_figure(tmp_path):
    write_table(tmp_path / "runs.csv", paper_table())

    def fit() -> None:
        laws = parcae.fit(tmp_path / "runs.csv", starts=20, unified_starts=20, bootstrap_samples=20)
        laws.save(tmp_path / "fit")

    check("runs to figure", trace(fit))
    assert list((tmp_path / "fit").glob("*.svg"))


@pytest.mark.slow
def test_prompt_to_http_response():
    def ask() -> None:
        with client_of(make_app(backend="torch")) as client:
            body = {"model": "tiny", "prompt": "def", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200

    check("prompt to HTTP response", trace(ask))


@pytest.mark.slow
def test_claim_to_page(tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "discretisation.json", tmp_path / "results")

    def reproduce() -> None:
        parcae.reproduce("discretisation", out=tmp_path, redraw=True)

    check("claim to page", trace(reproduce))
    assert (tmp_path / "reproduction.md").exists()
