"""The RDM recipe's AdamW: no eps, and steps that shrink when gradients are surprisingly large.

    m <- beta1 m + (1 - beta1) g           m_hat = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2         v_hat = v / (1 - beta2^t)
    eta = lr / max(1, RMS(g / sqrt(v_hat)))                update clipping, for each tensor
    w <- (1 - weight_decay) w - eta atan2(m_hat, sqrt(v_hat))

For small quotients atan2(m, s) is m / s, and unlike it never needs an eps: it is bounded, 0 where
both are 0, and the same for gradients on any scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parcae.training.distributed import local_part, sum_over_shards


class AdamWAtan2(Optimizer):
    """`weight_decay` is the share of a weight that one step takes away, whatever the learning rate.

    A schedule has to multiply both. This is the decay of Loshchilov and Hutter's paper and the
    meaning that the recipe's 4e-5 has; times a learning rate of 4e-4 it would do nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = new_moments(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_all(parameters, group)

    def _step_all(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        moments = [self._update_moments(p, *group["betas"]) for p in parameters]
        squares = torch.stack(
            [
                _clipping_ratio(local_part(p.grad), v_hat)
                for p, (_, v_hat) in zip(parameters, moments, strict=True)
                if p.grad is not None
            ]
        )
        sizes = squares.new_tensor([p.numel() for p in parameters])
        # All parameters of a model are sharded alike, so one sum serves them all.
        rms = (sum_over_shards(squares, parameters[0]) / sizes).sqrt()
        rates = (group["lr"] / rms.clamp_min(1.0)).unbind()
        for p, (m_hat, v_hat), rate in zip(parameters, moments, rates, strict=True):
            weight = local_part(p)
            weight.mul_(1 - group["weight_decay"])
            weight.sub_(torch.atan2(m_hat, v_hat.sqrt_()).mul_(rate))

    def _update_moments(self, p: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
        """(m_hat, v_hat) of this rank's part after one more gradient."""
        state = self.state[p]
        gradient = local_part(p.grad)  # pyright: ignore[reportArgumentType]
        m, v, step = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]), state["step"]
        step += 1
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return m / (1 - beta1**step), v / (1 - beta2**step)


def new_moments(p: Tensor) -> dict[str, Tensor]:
    """The state of an Adam before its first step, as `torch.optim` names it and fused kernels
    want it."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
    }


def _clipping_ratio(gradient: Tensor, v_hat: Tensor) -> Tensor:
    """The sum of g^2 / v_hat, where 0 / 0 is 0."""
    return torch.where(v_hat > 0, gradient.square() / v_hat, 0.0).sum()
