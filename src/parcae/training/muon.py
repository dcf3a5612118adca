"""Muon: steps along the orthogonalised momentum of matrices.

For a matrix W [rows, cols] with gradient G, momentum mu, variance decay beta and weight decay
lambda, one step is

    M <- mu M + (1 - mu) G                        momentum, as an exponential average
    D  = (1 - mu) G + mu M                        Nesterov, by interpolation
    O  = U V^T of D                               see `orthogonalise`
    v <- beta v + (1 - beta) mean(O^2)            along the longer side: a number for each row of a
    U  = O / sqrt(v), scaled to |U| = |O|         tall or square matrix, for each column of a wide
    W <- W - eta (U + lambda W [U W >= 0])        decay only where it agrees with the update

with eta the learning rate times sqrt(max(1, rows / cols)).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parcae.training.distributed import (
    gather_stack,
    local_part,
    scatter_stack,
    split_work,
    work_group,
)

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_MARGIN = 1.02
"""Above 1 the polynomials diverge; rounding in bfloat16 must not push a value there."""
_EPS = 1e-6
_TINY = 1e-10
"""Keeps a row of zeros from being divided by zero."""


class Muon(Optimizer):
    """Matrices of one shape are handled as one stack.

    Parameters sharded by FSDP2 are gathered for the orthogonalisation and the variance, which
    must see whole matrices. Several ranks that hold the same whole matrices share the
    orthogonalisation: those of the parameters' mesh, or of `process_group` for replicated ones.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 8e-3,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """`dtype` is that of the orthogonalisation; by default it follows the device."""
        defaults = {"lr": lr, "momentum": momentum, "beta2": beta2, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.dtype = dtype
        self.process_group = process_group
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon: a parameter of shape {[*p.shape]} is not a matrix.")
                self.state[p] = {"momentum": torch.zeros_like(p), "variance": _new_variance(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            stacks: dict[Any, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
                    stacks[p.shape, p.device, p.dtype, layout].append(p)
            for matrices in stacks.values():
                self._step_stack(matrices, group)

    def _step_stack(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        like = matrices[0]
        states = [self.state[p] for p in matrices]
        direction = gather_stack(self._directions(matrices, group["momentum"]), like)
        update = split_work(
            lambda part: orthogonalise(part, self.dtype),
            direction,
            work_group(like, self.process_group),
        ).to(like.dtype)

        variance = torch.stack([state["variance"] for state in states])
        update = reduce_variance(update, variance, group["beta2"])
        for state, updated in zip(states, variance.unbind(), strict=True):
            state["variance"].copy_(updated)

        rows, cols = like.shape
        lr = group["lr"] * sqrt(max(1.0, rows / cols))
        for p, u in zip(matrices, scatter_stack(update, like).unbind(), strict=True):
            descend(local_part(p), u, lr, group["weight_decay"])

    def _directions(self, matrices: list[Tensor], mu: float) -> list[Tensor]:
        """D of every matrix, on this rank's rows; updates the momenta."""
        directions: list[Tensor] = []
        for p in matrices:
            gradient = local_part(p.grad)  # pyright: ignore[reportArgumentType]
            momentum = local_part(self.state[p]["momentum"]).lerp_(gradient, 1 - mu)
            directions.append(torch.lerp(gradient, momentum, mu))
        return directions


def _new_variance(p: Tensor) -> Tensor:
    rows, cols = p.shape
    shape = (rows, 1) if rows >= cols else (1, cols)
    return torch.zeros(shape, dtype=p.dtype, device=p.device)


def orthogonalise(stack: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Approximately U V^T of every matrix in [N, rows, cols], by matrix products only.

    This is Polar Express, a Newton-Schulz iteration with optimised coefficients. For G = U S V^T
    the polar factor is U V^T: all singular values become 1. An odd polynomial of a matrix acts on
    its singular values alone, so a few steps of

        A = X X^T,    X <- a X + (b A + c A^2) X         that is  s <- a s + b s^3 + c s^5

    with well chosen (a, b, c) bring every singular value of a normalised G close to 1. After these
    five steps all that were at least 1/500 of the Frobenius norm lie in [0.858, 1.142]; the
    smallest ones have grown about 990 times, and none exceeds 1.142. Muon needs the direction, not
    the last digit, so bfloat16 is enough: `dtype` is that of the products and of the result, by
    default bfloat16 on CUDA and elsewhere the dtype of `stack`, which most CPUs multiply faster.
    """
    rows, cols = stack.shape[-2:]
    if dtype is None:
        dtype = torch.bfloat16 if stack.device.type == "cuda" else stack.dtype
    x = stack.to(dtype)
    if rows > cols:  # the products X X^T are smallest on the short side
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _MARGIN + _EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if rows > cols else x


def reduce_variance(update: Tensor, variance: Tensor, beta2: float) -> Tensor:
    """Even out rows (or columns) that are long on average, keeping each matrix's norm.

    `update` is [N, rows, cols]; `variance`, [N, rows, 1] or [N, 1, cols], is updated in place.
    """
    along = -1 if variance.shape[-1] == 1 else -2
    variance.lerp_(update.square().mean(along, keepdim=True), 1 - beta2)
    reduced = update * variance.clamp_min(_TINY).rsqrt()
    norm, new_norm = (x.norm(dim=(-2, -1), keepdim=True) for x in (update, reduced))
    return reduced * (norm / new_norm.clamp_min(_TINY))


def descend(weight: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    """W <- W - lr (U + weight_decay W [U W >= 0]), in place."""
    if weight_decay:
        agreeing = weight * (update * weight >= 0)
        update = update.add(agreeing, alpha=weight_decay)
    weight.sub_(update, alpha=lr)
