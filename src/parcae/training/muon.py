"""Muon: steps along the orthogonalised momentum of matrices.

For a matrix W [rows, cols] with gradient G, momentum mu, variance decay beta and weight decay
lambda, one step is

    M <- mu M + (1 - mu) G                        momentum, as an exponential average
    D  = (1 - mu) G + mu M                        Nesterov, by interpolation
    O  = U V^T of D                               see parcae.training.orthogonal
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

from parcae.training.orthogonal import orthogonalise
from parcae.training.shards import gather, local, scatter, share_work, sharing_group

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
        direction = gather(self._directions(matrices, group["momentum"]), like)
        update = share_work(
            lambda part: orthogonalise(part, self.dtype),
            direction,
            sharing_group(like, self.process_group),
        ).to(like.dtype)

        variance = torch.stack([state["variance"] for state in states])
        update = reduce_variance(update, variance, group["beta2"])
        for state, moved_on in zip(states, variance.unbind(), strict=True):
            state["variance"].copy_(moved_on)

        rows, cols = like.shape
        lr = group["lr"] * sqrt(max(1.0, rows / cols))
        for p, u in zip(matrices, scatter(update, like).unbind(), strict=True):
            descend(local(p), u, lr, group["weight_decay"])

    def _directions(self, matrices: list[Tensor], mu: float) -> list[Tensor]:
        """D of every matrix, on this rank's rows; the momenta move on."""
        found: list[Tensor] = []
        for p in matrices:
            gradient = local(p.grad)  # pyright: ignore[reportArgumentType]
            momentum = local(self.state[p]["momentum"]).lerp_(gradient, 1 - mu)
            found.append(torch.lerp(gradient, momentum, mu))
        return found


def _new_variance(p: Tensor) -> Tensor:
    rows, cols = p.shape
    shape = (rows, 1) if rows >= cols else (1, cols)
    return torch.zeros(shape, dtype=p.dtype, device=p.device)


def reduce_variance(update: Tensor, variance: Tensor, beta2: float) -> Tensor:
    """Even out rows (or columns) that are long on average, keeping each matrix's norm.

    `update` is [N, rows, cols]; `variance` [N, rows, 1] or [N, 1, cols] moves on in place.
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
