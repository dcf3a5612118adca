"""Stability as a property: what each parameterisation guarantees, and what it does not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from conftest import tiny
from parcae.model import create
from parcae.model.injection import DISCRETISATIONS, build_injection

STEPS = 10_000
any_float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
vectors = npst.arrays("float32", 6, elements=any_float32)


def exact_decay(log_A: float, dt_bias: float) -> float:
    """exp(-softplus(dt) exp(log_A)) in double precision, through logarithms."""
    log_step = math.log(math.log1p(math.exp(dt_bias))) if dt_bias > -30 else dt_bias
    if dt_bias > 30:
        log_step = math.log(dt_bias)
    return math.exp(-math.exp(min(log_A + log_step, 50.0)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(log_A=vectors, dt_bias=vectors, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", DISCRETISATIONS)
def test_decay_lies_in_the_unit_interval_for_any_finite_parameters(name, log_A, dt_bias, dtype):
    parameters = [torch.from_numpy(v.copy()).to(dtype) for v in (log_A, dt_bias)]
    parameters = [p.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max) for p in parameters]
    leaves = [p.detach().requires_grad_() for p in parameters]
    decay, gain = DISCRETISATIONS[name](*leaves)
    assert ((decay >= 0) & (decay <= 1)).all()
    assert (gain >= 0).all()
    assert gain.isfinite().all()
    decay.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(log_A=st.floats(-40, 3), dt_bias=st.floats(-40, 40))
def test_decay_is_below_one_in_exact_arithmetic_and_ours_is_its_rounding(log_A, dt_bias):
    log_step = math.log(math.log1p(math.exp(dt_bias))) if -30 < dt_bias < 30 else (
        dt_bias if dt_bias <= -30 else math.log(dt_bias)
    )  # fmt: skip
    assert math.exp(log_A + log_step) > 0  # so that exp(-rate) < 1, whatever rounding says
    ours, _ = DISCRETISATIONS["zoh-euler"](torch.tensor([log_A]), torch.tensor([dt_bias]))
    assert ours.item() == pytest.approx(exact_decay(log_A, dt_bias), abs=3e-6)


def test_both_discretisations_agree_with_their_textbook_formulas():
    log_A, dt_bias = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    a, step = -log_A.double().exp(), torch.nn.functional.softplus(dt_bias.double())
    for name, gain in {
        "zoh-euler": step,
        "zoh": (torch.exp(step * a) - 1) / (step * a) * step,
    }.items():
        decay, ours = DISCRETISATIONS[name](log_A, dt_bias)
        assert torch.allclose(decay.double(), torch.exp(step * a), rtol=1e-5)
        assert torch.allclose(ours.double(), gain, rtol=1e-5)


def linear_loop(injection, h, e, steps=STEPS):
    """The loop without its blocks: h <- A_bar h + B_bar e. Also the largest |h| seen."""
    transition, drive = injection.prepare(e)
    largest = h.abs()
    for _ in range(steps):
        h = injection.mix(h, transition, drive)
        largest = torch.maximum(largest, h.abs())
        if not h.isfinite().all():
            break
    return h, largest


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    log_A=npst.arrays("float32", 8, elements=st.floats(-30, 30, width=32)),
    dt_bias=npst.arrays("float32", 8, elements=st.floats(-30, 30, width=32)),
    seed=st.integers(0, 99),
)
def test_linear_loop_stays_within_the_bound_of_the_theory(log_A, dt_bias, seed):
    injection = build_injection(tiny(width=8, heads=1, value_embeddings=False))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        injection.log_A.copy_(torch.from_numpy(log_A))
        injection.dt_bias.copy_(torch.from_numpy(dt_bias))
        injection.B.copy_(torch.randn(8, 8, generator=generator))
        h, e = torch.randn(2, 1, 3, 8, generator=generator)
        final, largest = linear_loop(injection, h, e)
        decay, drive = (x.double() for x in injection.prepare(e))
        # |h_t| <= a^t |h_0| + (1 + a + ... + a^(t-1)) |b|, and the sum is at most t and 1/(1-a)
        reach = torch.where(decay < 1, (1 - decay**STEPS) / (1 - decay), float(STEPS))
        bound = h.double().abs() + reach * drive.abs()
    assert final.isfinite().all()
    assert (largest.double() <= bound * (1 + 1e-3)).all()
    assert injection.spectral_radius() <= 1


@pytest.mark.slow
def test_addition_and_concatenation_blow_up_in_the_same_loop():
    h, e = torch.randn(2, 1, 3, 48, generator=torch.Generator().manual_seed(0))
    kinds = {}
    for name in ("diagonal", "addition", "concatenation"):
        config = tiny(injection=name, readout=True)
        injection = create(config).loop.core.injection
        if name == "concatenation":
            with torch.no_grad():
                injection.W.mul_(1.1 / injection.spectral_radius())
        with torch.no_grad():
            kinds[name] = linear_loop(injection, h, e)[1].max().item()
    assert kinds["diagonal"] < 20
    assert kinds["addition"] > 1000  # grows linearly: |h_0 + t e|
    assert kinds["concatenation"] == math.inf or kinds["concatenation"] > 1e30


@pytest.mark.parametrize(
    ("name", "stability", "radius"),
    [
        ("diagonal", "stable", math.sqrt(1 / 5)),
        ("addition", "marginally stable", 1.0),
        ("concatenation", "unstable", None),
    ],
)
def test_the_stability_table_of_the_paper(name, stability, radius):
    injection = create(tiny(injection=name)).loop.core.injection
    assert injection.stability == stability
    dense = torch.linalg.eigvals(injection.transition_matrix().double()).abs().max().item()
    assert injection.spectral_radius() == pytest.approx(dense, rel=1e-5)
    if radius is not None:
        assert injection.spectral_radius() == pytest.approx(radius, rel=1e-5)


def test_spectral_radius_and_norm_differ_for_a_matrix_without_symmetry():
    injection = create(tiny(injection="concatenation")).loop.core.injection
    with torch.no_grad():
        injection.W.zero_()
        injection.W[0, 1] = 5.0  # nilpotent: every eigenvalue is 0, the norm is 5
    assert injection.spectral_radius() < 1e-6
    assert torch.linalg.matrix_norm(injection.transition_matrix(), 2).item() == pytest.approx(5.0)


def test_prepare_and_mix_are_the_matrices_they_claim():
    h, e = torch.randn(2, 2, 3, 48, generator=torch.Generator().manual_seed(1))
    for name in ("diagonal", "addition", "concatenation"):
        injection = create(tiny(injection=name)).loop.core.injection
        x = injection.mix(h, *injection.prepare(e))
        dense = h @ injection.transition_matrix().T + e @ injection.input_matrix().T
        assert torch.allclose(x, dense, atol=1e-5), name
