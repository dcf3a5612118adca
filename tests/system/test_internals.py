"""The internals page lists the files that run, in the order in which they run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import parcae
from parcae.experiments.paper_runs import paper_table
from parcae.laws.table import write_table

ROOT = Path(__file__).parents[2]
PACKAGE = str(ROOT / "src" / "parcae") + "/"
RECIPE = {
    "model": {"preset": "parcae-1m", "vocab_size": 300, "context_length": 32, "width": 32},
    "data": {"validation_fraction": 0.1, "global_batch": 4, "split_long": True},
    "budget": {"steps": 1},
    "run": {"validation_rows": 4},
}


class FirstLoss(Exception):
    """Ends a run at its first backward."""


def trace(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The (file, function) pairs of the package that `call` executes, by first call."""
    calls: list[tuple[str, str]] = []
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_new = event == "call" and code not in seen and code.co_filename.startswith(PACKAGE)
        if is_new and not is_importing(frame):
            seen.add(code)
            calls.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def section(title: str) -> tuple[list[tuple[str, str]], set[str]]:
    """A section's numbered (file, function) pairs, and the files it says are not listed."""
    text = (ROOT / "docs" / "internals.md").read_text()
    body = text.split(f"### {title}\n")[1].split("\n##")[0]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`, `([\w.]+)`", body, re.MULTILINE)
    return listed, set(re.findall(r"`([\w/]+\.py)`", body.split("Executed but not listed")[1]))


def check(title: str, calls: list[tuple[str, str]], most: int) -> None:
    listed, others = section(title)
    assert 0 < len(listed) <= most
    assert [call for call in calls if call in listed] == listed
    executed = {file for file, _ in calls} - {file for file, _ in listed}
    assert executed == others


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        lines = (f"def add_{number}_{n}(a):\n    return a + {n}\n\n" for n in range(10))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.mark.slow
def test_from_text_to_loss(text, tmp_path, monkeypatch):
    def stop(*_args, **_kwargs):
        raise FirstLoss

    monkeypatch.setattr(torch.Tensor, "backward", stop)
    recipe = {**RECIPE, "data": {**RECIPE["data"], "sources": [str(text)]}}

    def train() -> None:
        with pytest.raises(FirstLoss):
            parcae.train(recipe, tmp_path / "run")

    check("From text to loss", trace(train), most=12)


@pytest.mark.slow
def test_from_a_table_of_runs_to_fit_json(tmp_path):
    write_table(tmp_path / "runs.csv", paper_table())

    def fit() -> None:
        laws = parcae.fit(tmp_path / "runs.csv", starts=20, unified_starts=20, bootstrap_samples=20)
        laws.save(tmp_path, figures=False)

    check("From a table of runs to fit.json", trace(fit), most=10)


@pytest.mark.slow
def test_from_a_prompt_to_a_token(text):
    tokenizer = parcae.data.train_tokenizer([text], size=300)
    model = parcae.create("parcae-1m", vocab_size=300, context_length=32, width=32)
    engine = parcae.Engine(model, tokenizer, backend="torch")
    calls = trace(lambda: engine.generate("def add", max_new_tokens=2))
    check("From a prompt to a token", calls, most=12)
