"""Which optimiser updates which parameter, and all optimisers of a model behind one interface.

    attention q, k, v, out; MLP fc, proj                                         Muon
    embeddings, value tables and their gates, head, norms, injection, readout    AdamW

Any other kind is one optimiser for all of them; `parcae.register_optimiser` adds some;
the built-in names are in `registry.OPTIMISERS`. A SwiGLU's
`fc` holds two matrices, [gate; up]; as in the authors' release it is one to Muon.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from parcae.config import ConfigError
from parcae.model.blocks import Block
from parcae.registry import OPTIMISERS
from parcae.training.adamw_atan2 import AdamWAtan2, new_moments
from parcae.training.muon import Muon
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig

Named = list[tuple[str, nn.Parameter]]

_FUSED_DEVICES = ("cpu", "cuda", "mps")


def assign(model: nn.Module, kind: str) -> dict[str, Named]:
    """Named parameters by optimiser: "adamw" and "muon" for "muon-adamw", else all for `kind`."""
    named = list(model.named_parameters())
    if kind != "muon-adamw":
        return {kind: named}
    to_muon = {id(p) for block in model.modules() if isinstance(block, Block) for p in _of(block)}
    return {
        "adamw": [(name, p) for name, p in named if id(p) not in to_muon],
        "muon": [(name, p) for name, p in named if id(p) in to_muon],
    }


def _of(block: Block) -> list[Tensor]:
    """The matrices of a block that Muon optimises: all but the value gate and the norms."""
    attn, mlp = block.attn, block.mlp
    return [linear.weight for linear in (attn.q, attn.k, attn.v, attn.out, mlp.fc, mlp.proj)]


class Optimiser:
    """The optimisers of one model, stepped together.

    Parameters that are frozen when it is created have no state and are never updated; those without
    a gradient are not updated in that step. Weight decay applies to matrices, not to vectors such
    as the weights of a norm.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimiserConfig,
        process_group: ProcessGroup | None = None,
        muon_dtype: torch.dtype | None = None,
    ) -> None:
        """`process_group`: ranks with the same parameters and gradients (DDP), to split work.
        `muon_dtype` is that of Muon's products; by default it follows the device."""
        self.config = config
        self.names: dict[Tensor, str] = {}
        self.members: dict[str, Optimizer] = {}
        for kind, named in assign(model, config.kind).items():
            trained = [(name, p) for name, p in named if p.requires_grad]
            if trained:
                self.names |= {p: name for name, p in trained}
                parameters = [p for _, p in trained]
                self.members[kind] = _make(kind, parameters, config, process_group, muon_dtype)

    def step(self, factors: Factors) -> None:
        config = self.config
        for kind, member in self.members.items():
            for group in member.param_groups:
                if kind == "muon":
                    group["lr"] = config.muon_lr * factors.lr
                    group["momentum"] = factors.momentum
                    group["weight_decay"] = config.muon_weight_decay * factors.weight_decay
                    continue
                group["lr"] = group["base_lr"] * factors.lr
                if kind == "adamw-atan2":  # torch's AdamW multiplies by the learning rate itself
                    group["weight_decay"] = group["full_weight_decay"] * factors.lr
            member.step()

    def zero_grad(self) -> None:
        for member in self.members.values():
            member.zero_grad(set_to_none=True)

    def learning_rates(self) -> dict[str, float]:
        """Learning rates of the last step; before the first, those of the configuration."""
        return {kind: member.param_groups[0]["lr"] for kind, member in self.members.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by "<parameter>.<slot>": the live tensors, so a checkpoint is loaded by
        copying into them. State that an optimiser would create later is created now."""
        for kind, member in self.members.items():
            _create_state(member, kind)
        return {
            f"{self.names[p]}.{slot}": tensor
            for member in self.members.values()
            for p, state in member.state.items()
            for slot, tensor in state.items()
            if tensor is not None
        }


def _make(
    kind: str,
    parameters: list[nn.Parameter],
    config: OptimiserConfig,
    group: ProcessGroup | None,
    muon_dtype: torch.dtype | None,
) -> Optimizer:
    if kind == "muon":
        return Muon(
            parameters,
            lr=config.muon_lr,
            momentum=config.muon_momentum,
            beta2=config.muon_beta2,
            weight_decay=config.muon_weight_decay,
            dtype=muon_dtype,
            process_group=group,
        )
    optimiser = OPTIMISERS[kind](_decaying(parameters, config), config)
    for part in optimiser.param_groups:
        part["base_lr"] = part["lr"]
    return optimiser


def adamw(groups: list[dict[str, Any]], config: OptimiserConfig) -> Optimizer:
    """PyTorch's AdamW, fused where the device has it."""
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in _FUSED_DEVICES for p in parameters)
    betas = (config.beta1, config.beta2)
    optimiser = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
    for p in parameters:
        optimiser.state[p] = new_moments(p)
    return optimiser


def adamw_atan2(groups: list[dict[str, Any]], config: OptimiserConfig) -> Optimizer:
    return AdamWAtan2(groups, lr=config.lr, betas=(config.beta1, config.beta2))


@torch.no_grad()
def _create_state(optimiser: Optimizer, kind: str) -> None:
    """Create the state of parameters that have none yet, as most of PyTorch's optimisers do only in
    their first step: by a step with zero gradients and a learning rate of zero."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    new = [p for p in parameters if not optimiser.state.get(p)]
    if not new:
        return
    weights, gradients = [p.clone() for p in new], [p.grad for p in parameters]
    rates = [group["lr"] for group in optimiser.param_groups]
    optimiser.zero_grad(set_to_none=True)
    for p in new:
        p.grad = torch.zeros_like(p)
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    optimiser.step()
    for group, lr in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = lr
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for p, before in zip(new, weights, strict=True):
        p.copy_(before)
    for slot, value in [item for p in new for item in optimiser.state[p].items()]:
        if value is not None and not isinstance(value, Tensor):
            raise ConfigError(
                f"optimiser.kind: {kind!r} has the state {slot} = {value!r}, which a checkpoint "
                "cannot hold. Keep it as a tensor."
            )


def _decaying(parameters: list[nn.Parameter], config: OptimiserConfig) -> list[dict[str, Any]]:
    """Parameter groups: matrices with the configured decay, vectors with none."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [(matrices, config.weight_decay), (vectors, 0.0)]
    return [
        {"params": members, "weight_decay": decay, "full_weight_decay": decay}
        for members, decay in groups
        if members
    ]
