"""The laws of the committed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parcae.experiments.experiment import Results
from parcae.experiments.unified import fit_seed

RESULTS = Path(__file__).parents[2] / "results" / "unified.json"


@pytest.mark.slow
def test_a_learned_exponent_of_mu_never_fits_worse_than_a_fixed_one():
    """These runs have several optima, and random starts alone ended in a worse one."""
    runs = json.loads(RESULTS.read_text())["runs"]
    model = fit_seed(Results(runs, len(runs)), 0)
    assert model is not None
    learned, with_mu, without = model.conditionings
    assert learned.grid <= min(with_mu.grid, without.grid) * (1 + 1e-9)
    assert learned.grid_frozen <= min(with_mu.grid_frozen, without.grid_frozen) * (1 + 1e-9)
