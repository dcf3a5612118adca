"""Estimated spectra against full decompositions."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import KINDS
from parcae.model import create
from parcae.model.injection import Injection
from parcae.training import telemetry
from parcae.training.telemetry import matrices, spectral_norm, spectral_radius

SIZE = 192
NOISE = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)) / math.sqrt(SIZE)
VECTORS = torch.randn(2, SIZE, 4, generator=torch.Generator().manual_seed(2))
SQUARE = {
    "random": NOISE,
    "orthogonal": torch.linalg.qr(NOISE).Q,
    "near the identity": torch.eye(SIZE) + 0.02 * NOISE,
    "shrinking": 0.3 * torch.eye(SIZE) + 0.3 * NOISE,
    "low rank": VECTORS[0] @ VECTORS[1].T,
    "symmetric": NOISE + NOISE.T,
    "tiny": 1e-30 * NOISE,
    "large": 1e30 * NOISE,
    "nilpotent": NOISE.triu(1),
}


@pytest.mark.parametrize("name", SQUARE)
def test_estimates_agree_with_full_decompositions(name):
    matrix = SQUARE[name]
    assert telemetry.EXACT_WIDTH < SIZE
    norm = torch.linalg.svdvals(matrix.double())[0].item()
    assert spectral_norm(matrix) == pytest.approx(norm, rel=1e-5)
    if name == "nilpotent":  # all eigenvalues are zero; in floats they are those of the rounding
        assert spectral_radius(matrix) < 0.5 * norm
    else:
        radius = torch.linalg.eigvals(matrix.double()).abs().max().item()
        assert spectral_radius(matrix) == pytest.approx(radius, rel=1e-3)


@pytest.mark.parametrize("shape", [(160, 300), (300, 160)])
def test_norms_of_matrices_that_are_not_square(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(matrix.double())[0].item()
    assert spectral_norm(matrix) == pytest.approx(expected, rel=1e-5)


def test_diagonal_zero_and_bad_matrices():
    diagonal = torch.linspace(-0.9, 0.7, SIZE)
    for measure in (spectral_norm, spectral_radius):
        assert measure(torch.diag(diagonal)) == diagonal.abs().max().item()
        assert measure(torch.zeros(SIZE, SIZE)) == 0
        assert math.isnan(measure(torch.full((SIZE, SIZE), math.nan)))
        assert math.isnan(measure(torch.full((SIZE, SIZE), math.inf)))


@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_a_model_has_the_spectra_of_its_matrices(kind):
    """Nothing is decomposed where a closed form is known, whatever the width."""
    model = create(KINDS[kind])
    injection = model.loop.core.injection
    found, transition = matrices(model), injection.transition_matrix()
    exact = Injection.spectral_radius(injection)
    assert found["spectral_radius"] == pytest.approx(exact, rel=1e-5)
    assert found["transition_norm"] == pytest.approx(spectral_norm(transition), rel=1e-6)
    assert found["input_norm"] == pytest.approx(spectral_norm(injection.input_matrix()), rel=1e-6)


def test_the_paper_size_decomposes_nothing(monkeypatch):
    """At the width of the largest model, diagonal injection."""
    for name in ("eigvals", "matrix_norm", "svdvals"):
        monkeypatch.setattr(torch.linalg, name, None)
    assert spectral_radius(torch.diag(torch.rand(1536))) < 1
    assert spectral_norm(torch.eye(1536) + 0.01) == pytest.approx(1 + 15.36, rel=1e-5)
