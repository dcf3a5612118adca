"""What a device's memory must hold in training, counted before there is a device.

Weights, gradients and the optimiser's state are what the real objects hold, made on the meta
device. Activations are measured: one micro-batch goes forward and backward through the model on
tensors without contents, and every storage that is made is followed until it is freed.

Counted are the tensors that PyTorch's operators make, uncompiled, with all rows at the nominal
depth. Not counted: the context of CUDA (about 1 GB), what the allocator keeps beyond the tensors
(see docs/planning.md), and operators' inner workspaces, except the largest one, the logits of the
loss.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parcae.model import build
from parcae.model.frame import LOSS_CHUNK, LanguageModel
from parcae.model.looped import LoopedModel
from parcae.training.muon import Muon
from parcae.training.optim import Optimiser
from parcae.training.schedule import Factors
from parcae.training.settings import Recipe

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    weights: int
    """Also, under FSDP, the units that are gathered at the same time."""
    gradients: int
    optimiser: int
    activations: int
    """The most that exists beside the others during a forward and backward."""
    optimiser_step: int
    """The same during an optimiser step, when the activations are gone."""

    @property
    def total(self) -> int:
        passing = max(self.activations, self.optimiser_step)
        return self.weights + self.gradients + self.optimiser + passing


def memory(
    recipe: Recipe, dtype: torch.dtype, rows: int, micro_batches: int, devices: int = 1
) -> Memory:
    """Of one device out of so many, with `rows` in a micro-batch, computing in `dtype`."""
    sharded = recipe.run.parallel == "fsdp" and devices > 1
    model = build(recipe.model)
    weights = gradients = _bytes(model.parameters())
    optimiser = Optimiser(model, recipe.optimiser).tensors()
    state = _bytes(optimiser.values())
    if sharded:
        # Muon's variances and the counts of steps are whole on every device.
        shapes = {name: p.shape for name, p in model.named_parameters()}
        split = [t for name, t in optimiser.items() if t.shape == shapes[name.rpartition(".")[0]]]
        state -= _bytes(split) - _share(_bytes(split), devices)
        gathered, largest = _gathered(model)
        # While micro-batches accumulate, each device holds the whole sum, in float32.
        passing = weights if micro_batches > 1 else largest
        gradients = _share(gradients, devices) + passing
        weights = _share(weights, devices) + gathered
    return Memory(
        weights=weights,
        gradients=gradients,
        optimiser=state,
        activations=_activations(recipe, dtype, rows),
        optimiser_step=_optimiser_step(recipe, dtype),
    )


def checkpoint_bytes(recipe: Recipe) -> int:
    """On disk: weights and optimiser, without the few kilobytes of the rest."""
    model = build(recipe.model)
    optimiser = Optimiser(model, recipe.optimiser)
    return _bytes(model.state_dict().values()) + _bytes(optimiser.tensors().values())


def _activations(recipe: Recipe, dtype: torch.dtype, rows: int) -> int:
    config, mixed = recipe.model, dtype != torch.float32
    with FakeTensorMode():
        model = _contentless(build(config))  # in float32; the copies that autocast makes count
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        if recipe.run.checkpoint_loops:
            model.checkpoint_loops()
        with LiveBytes() as live:
            tokens = torch.zeros(rows, config.context_length, dtype=torch.long)
            chance: dict[str, Tensor] = {}
            if isinstance(model, LoopedModel):
                shape = (*tokens.shape, config.core_block.width)
                chance["state"] = torch.zeros(shape)
            autocast: AbstractContextManager[Any] = nullcontext()
            if mixed:
                autocast = torch.autocast("cpu", dtype)
            with autocast, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about kernels of a CPU, which is not meant
                output = model(tokens, tokens, **chance)
            if not mixed:  # one operator, which makes logits and their gradient by the chunk
                positions = min(LOSS_CHUNK, tokens.numel())
                live.note(2 * positions * config.vocab_size * FLOAT32_BYTES)
            output.loss.backward()
    return live.peak


def _optimiser_step(recipe: Recipe, dtype: torch.dtype) -> int:
    with FakeTensorMode():
        model = _contentless(build(recipe.model))
        optimiser = Optimiser(model, recipe.optimiser)
        for member in optimiser.members.values():
            if isinstance(member, Muon):
                member.dtype = dtype
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with LiveBytes() as live:
            optimiser.step(Factors())
    return live.peak


def _contentless(model: LanguageModel) -> LanguageModel:
    """The model with weights that claim to be on the CPU but have no contents."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, device="cpu")))
    model.check = lambda tokens, targets: None  # there are no values to check
    return model


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside and still exist, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def note(self, inside: int) -> None:
        """An operator has used so many bytes that it did not show."""
        self.peak = max(self.peak, self.now + inside)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in before and key not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _gathered(model: LanguageModel) -> tuple[int, int]:
    """Bytes that FSDP holds whole at the same time, and the largest of its units.

    The root unit (tables and head) and the loop stay from forward to backward; prelude and coda
    come and go. A unit is copied out of the buffer it arrives in.
    """
    everything = sum(p.numel() for p in model.parameters())
    if not isinstance(model, LoopedModel):
        return 2 * everything * FLOAT32_BYTES, everything * FLOAT32_BYTES
    prelude, loop, coda = (
        sum(p.numel() for p in unit.parameters())
        for unit in (model.prelude, model.loop, model.coda)
    )
    root = everything - prelude - loop - coda
    staying, largest = root + loop + max(prelude, coda), max(root, prelude, loop, coda)
    return (staying + largest) * FLOAT32_BYTES, largest * FLOAT32_BYTES


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _share(size: int, devices: int) -> int:
    return -(-size // devices)
