"""Muon: its orthogonalisation by singular values, its step against brute force and the release."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parcae.training.muon import COEFFICIENTS, Muon, descend, orthogonalise, reduce_variance

SHAPES = [(1, 1), (1, 9), (9, 1), (16, 16), (48, 192), (192, 48), (33, 70)]


def with_singular_values(rows: int, cols: int, values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, len(values), generator=generator).double() for n in (rows, cols))
    return torch.linalg.qr(left)[0] @ torch.diag(values.double()) @ torch.linalg.qr(right)[0].mT


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e6])
@pytest.mark.parametrize("condition", [1.0, 10.0, 60.0])
def test_singular_values_come_close_to_one_whatever_shape_scale_and_condition(
    rows, cols, scale, condition
):
    n = min(rows, cols)
    values = scale * torch.logspace(0, -math.log10(condition), n)
    x = orthogonalise(with_singular_values(rows, cols, values)[None].float())[0]
    found = torch.linalg.svdvals(x.double())
    assert found.min() > 0.858
    assert found.max() < 1.142


def test_the_interval_of_the_docstring_is_that_of_the_five_polynomials():
    s = torch.logspace(math.log10(1 / 500), 0, 100_001, dtype=torch.float64) / 1.02
    tiny = torch.tensor(1e-9, dtype=torch.float64)
    for a, b, c in COEFFICIENTS:
        s, tiny = (a * x + b * x**3 + c * x**5 for x in (s, tiny))
    assert 0.858 < s.min() < 0.86
    assert 1.14 < s.max() < 1.142
    assert tiny == pytest.approx(990e-9, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_are_kept_in_float32_and_bfloat16(dtype):
    """U^T X V of the input's own singular vectors is diagonal up to the precision."""
    g = torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(0))
    x = orthogonalise(g, dtype)
    assert x.dtype == dtype
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    core = u.mT @ x.float() @ vh.mT
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    slack = 1e-4 if dtype == torch.float32 else 0.06
    assert (core - torch.diag_embed(diagonal)).abs().max() < slack
    assert ((diagonal > 0.858 - slack) & (diagonal < 1.142 + slack)).all()


def test_zero_and_rank_deficient_matrices_stay_finite():
    deficient = with_singular_values(20, 30, torch.tensor([3.0, 1.0])).float()
    x = orthogonalise(torch.stack((torch.zeros(20, 30), deficient, torch.ones(20, 30))))
    assert x.isfinite().all()
    assert not x[0].any()
    for matrix, rank in ((x[1], 2), (x[2], 1)):
        values = torch.linalg.svdvals(matrix)
        assert ((values[:rank] > 0.858) & (values[:rank] < 1.142)).all()
        assert values[rank:].max() < 1e-3


def brute_force_step(w, g, m, v, *, lr, mu, beta2, decay) -> list[list[float]]:
    """One matrix, in Python's own floats, entry by entry. m and v are changed in place."""
    rows, cols = len(w), len(w[0])
    indices = [(i, j) for i in range(rows) for j in range(cols)]

    def product(a, b):
        inner = range(len(b))
        return [[sum(row[k] * b[k][j] for k in inner) for j in range(len(b[0]))] for row in a]

    def transpose(a):
        return [list(column) for column in zip(*a, strict=True)]

    for i, j in indices:
        m[i][j] = mu * m[i][j] + (1 - mu) * g[i][j]
    x = [[(1 - mu) * g[i][j] + mu * m[i][j] for j in range(cols)] for i in range(rows)]
    norm = math.sqrt(sum(x[i][j] ** 2 for i, j in indices)) * 1.02 + 1e-6
    x = [[entry / norm for entry in row] for row in x]
    for a, b, c in COEFFICIENTS:  # on the left whatever the shape, which is the same polynomial
        xxt = product(x, transpose(x))
        first, second = product(xxt, x), product(product(xxt, xxt), x)
        for i, j in indices:
            x[i][j] = a * x[i][j] + b * first[i][j] + c * second[i][j]

    by_row = rows >= cols
    for k in range(rows if by_row else cols):
        line = x[k] if by_row else [x[i][k] for i in range(rows)]
        v[k] = beta2 * v[k] + (1 - beta2) * sum(entry**2 for entry in line) / len(line)
    u = [[x[i][j] / math.sqrt(v[i if by_row else j]) for j in range(cols)] for i in range(rows)]
    ratio = math.sqrt(sum(x[i][j] ** 2 for i, j in indices) / sum(u[i][j] ** 2 for i, j in indices))
    lr *= math.sqrt(max(1, rows / cols))
    result = [list(row) for row in w]
    for i, j in indices:
        update = u[i][j] * ratio
        agrees = (update >= 0) == (w[i][j] >= 0)
        result[i][j] -= lr * (update + (decay * w[i][j] if agrees else 0))
    return result


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_three_steps_equal_brute_force_one_matrix_at_a_time(decay):
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 4), (4, 6), (5, 5), (6, 4), (5, 5), (12, 3)]
    weights = [nn.Parameter(torch.randn(*s, generator=generator).double()) for s in shapes]
    optimiser = Muon(weights, lr=0.02, weight_decay=decay, dtype=torch.float64)
    slow = [w.detach().tolist() for w in weights]
    momenta = [torch.zeros(s).tolist() for s in shapes]
    variances = [[0.0] * max(s) for s in shapes]
    for mu in (0.85, 0.9, 0.95):
        optimiser.param_groups[0]["momentum"] = mu
        for i, w in enumerate(weights):
            w.grad = torch.randn(w.shape, generator=generator).double()
            slow[i] = brute_force_step(
                slow[i], w.grad.tolist(), momenta[i], variances[i],
                lr=0.02, mu=mu, beta2=0.95, decay=decay,
            )  # fmt: skip
        optimiser.step()
    for w, expected, m, v in zip(weights, slow, momenta, variances, strict=True):
        torch.testing.assert_close(w.detach(), torch.tensor(expected).double(), rtol=1e-5, atol=0)
        state = optimiser.state[w]
        assert torch.allclose(state["momentum"], torch.tensor(m, dtype=torch.float64))
        assert torch.allclose(state["variance"].flatten(), torch.tensor(v, dtype=torch.float64))


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (12, 5), (5, 12)])
def test_variance_reduction_keeps_the_norm_and_evens_out_the_lines(rows, cols):
    update = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0)).double()
    update[:, 0] *= 10
    shape = (3, rows, 1) if rows >= cols else (3, 1, cols)
    variance = torch.zeros(shape, dtype=torch.float64)
    reduced = reduce_variance(update, variance, beta2=0.9)
    assert torch.allclose(reduced.norm(dim=(1, 2)), update.norm(dim=(1, 2)))
    lines = reduced.norm(dim=2 if rows >= cols else 1)  # one gradient only: all are equally long
    assert torch.allclose(lines, lines[:, :1].expand_as(lines))
    assert (reduced.sign() == update.sign()).all()
    zeros = torch.zeros(1, rows, cols)
    assert not reduce_variance(zeros, torch.zeros(1, *shape[1:]), 0.9).any()


def test_decay_touches_only_weights_that_agree_in_sign_with_the_update():
    weight = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    update = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.5])
    descend(weight, update, lr=0.1, weight_decay=0.2)
    assert torch.allclose(weight, torch.tensor([0.93, 1.05, -1.05, -0.93, -0.05]))


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="not a matrix"):
        Muon([nn.Parameter(torch.zeros(3))])


MUON_KEYS = ("attn.c_q", "mlp.fc", "mlp.proj")


@pytest.fixture(scope="module")
def golden(shared_data) -> dict[str, Tensor]:
    return load_file(shared_data / "fixtures" / "muon_adamw_golden.safetensors")


def worst_quantiles(golden, dtype, mu=0.95, beta2=0.95, decay=0.2, lr=8e-3) -> Tensor:
    """Median and 99 % quantile of |update - release's update| / RMS of it, at its worst."""
    names = [k.removeprefix("start.") for k in golden if k.startswith("start.")]
    found = []
    for name in (n for n in names if any(part in n for part in MUON_KEYS)):
        weight = nn.Parameter(golden[f"start.{name}"].clone())
        optimiser = Muon([weight], lr, mu, beta2, decay, dtype=dtype)
        for step in range(6):
            before, after = weight.detach().clone(), golden[f"after{step}.{name}"]
            weight.grad = golden[f"grad{step}.{name}"].clone()
            optimiser.step()
            error = (weight.detach() - after).abs() / (after - before).square().mean().sqrt()
            found.append(error.flatten().quantile(torch.tensor([0.5, 0.99])))
            weight.data.copy_(after)  # a flipped entry of the mask must not count in later steps
    assert len(found) == 18
    return torch.stack(found).amax(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_equal_the_releases_up_to_its_bfloat16(golden, dtype):
    found = worst_quantiles(golden, dtype)
    assert found[0] < 0.04
    assert found[1] < 0.2


@pytest.mark.parametrize("wrong", [{"mu": 0.9}, {"decay": 0.1}, {"lr": 7.5e-3}])
def test_that_comparison_notices_a_wrong_setting(golden, wrong):
    assert (worst_quantiles(golden, torch.float32, **wrong) > torch.tensor([0.04, 0.2])).all()


def test_that_comparison_notices_a_missing_variance_reduction(golden, monkeypatch):
    monkeypatch.setattr("parcae.training.muon.reduce_variance", lambda update, *_: update)
    assert (worst_quantiles(golden, torch.float32) > torch.tensor([0.04, 0.2])).all()
