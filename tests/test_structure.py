"""Bounds on the structure of the package. They may only be lowered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import structure
from parcae.experiments.reproduce import CATALOGUE
from parcae.experiments.scales import Scale

RESULTS = Path(__file__).parents[1] / "results"
CLOSURES = {
    # module: most modules it imports, directly or not, and most lines of them
    "parcae.training.trainer": (102, 23_600),
    "parcae.infer.engine": (64, 14_700),
    "parcae.data.loader": (36, 8_600),
    "parcae.laws.fit": (42, 10_000),
}
IN_CYCLES = 20
"""Modules that import each other, directly or not."""
REPEATED_CLASSES = {
    "Answer",
    "Batch",
    "Estimate",
    "Grid",
    "Job",
    "LayerKV",
    "Run",
    "Schedule",
    "Source",
    "Span",
    "Task",
}
OPTION_CALLS = 129
"""Calls of `add_argument`: options of commands that are no fields of settings."""


@pytest.mark.parametrize("module", CLOSURES)
def test_what_a_module_imports_is_bounded(module):
    names = structure.closure(module)
    most_modules, most_lines = CLOSURES[module]
    assert len(names) <= most_modules, sorted(names)
    assert structure.lines(names) <= most_lines


def test_modules_that_import_each_other():
    assert sum(map(len, structure.cycles())) <= IN_CYCLES, structure.cycles()


def test_a_class_name_stands_for_one_thing():
    assert structure.repeated_classes() <= REPEATED_CLASSES


def test_options_of_commands_come_from_settings():
    assert structure.option_calls() <= OPTION_CALLS


@pytest.mark.parametrize("name", [n for n in CATALOGUE if (RESULTS / f"{n}.json").exists()])
def test_committed_runs_are_found_by_their_keys(name):
    """A changed default or setting that changes the keys would train every run again."""
    measured = {row["key"] for row in json.loads((RESULTS / f"{name}.json").read_text())["runs"]}
    assert {run.key for run in CATALOGUE[name].runs(Scale())} <= measured
