"""The memory that training needs on each device, without the device, and the micro-batch that fits.

Weights, gradients and the optimiser's state are counted on the meta device. Activations are
traced: one micro-batch goes forward and backward through the model on fake tensors, and every
storage is tracked from its allocation until it is freed. (`torch.distributed._tools.MemTracker`
does not see the workspace of the loss, and is private; this tracker is 30 lines.)

Counted are the tensors that PyTorch's operators allocate, uncompiled, with all rows at the nominal
depth. Not counted: the CUDA context (about 1 GiB), what the allocator keeps beyond the tensors (see
docs/planning.md), and operators' workspaces, except the largest one, the logits of the loss.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parcae import console
from parcae.machine import available_memory
from parcae.model import build
from parcae.model.base import LanguageModel, loss_chunk, mixed_loss_chunk
from parcae.model.flops import parameter_count
from parcae.model.looped import LoopedModel
from parcae.training.distributed import compute_dtype
from parcae.training.optim import Optimiser
from parcae.training.schedule import Factors
from parcae.training.settings import Recipe

FLOAT32_BYTES = 4
MIXED_LOSS_BYTES = 10
"""Of a logit in a mixed loss at the peak: itself, in float32, and its logarithm of a softmax."""
SHARE_OF_MEMORY = {"cpu": 0.25, "cuda": 0.75}
"""Share of the free memory that the estimate may fill. On a CPU a step takes about twice that."""
MOST_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Tokens of a micro-batch chosen here: more were not faster on a CPU; not measured on CUDA."""
GPU_BYTES = 80e9
"""Assumed for a recipe on CUDA where no CUDA device is present."""
ROUGH_FLOATS = 16
"""Activations of a block per channel and token, at most: the traced ones are 5 to 9."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device in bytes."""

    weights: int
    """With FSDP including the units that are gathered at the same time."""
    gradients: int
    optimiser: int
    activations: int
    """Peak of everything else during forward and backward."""
    optimiser_step: int
    """Peak of everything else during the optimiser step, when the activations are freed."""

    @property
    def total(self) -> int:
        temporary = max(self.activations, self.optimiser_step)
        return self.weights + self.gradients + self.optimiser + temporary


def estimate_memory(
    recipe: Recipe,
    dtype: torch.dtype,
    rows: int,
    micro_batches: int,
    devices: int = 1,
    kind: str = "cpu",
) -> Memory:
    """The memory of one of `devices` with micro-batches of `rows` rows, computing in `dtype`."""
    sharded = recipe.run.parallel == "fsdp" and devices > 1
    model = build(recipe.model)
    weights = gradients = _bytes(model.parameters())
    optimiser = Optimiser(model, recipe.optimiser).tensors()
    state = _bytes(optimiser.values())
    if sharded:
        # Muon's variances and the step counts are not sharded.
        shapes = {name: p.shape for name, p in model.named_parameters()}
        split = [t for name, t in optimiser.items() if t.shape == shapes[name.rpartition(".")[0]]]
        state -= _bytes(split) - _share(_bytes(split), devices)
        gathered, largest = _gathered(model)
        # While gradients accumulate, each device holds their whole sum in float32.
        temporary = weights if micro_batches > 1 else largest
        gradients = _share(gradients, devices) + temporary
        weights = _share(weights, devices) + gathered
    return Memory(
        weights=weights,
        gradients=gradients,
        optimiser=state,
        activations=_activations(recipe, dtype, rows, kind),
        optimiser_step=_optimiser_step(recipe, dtype),
    )


class MicroBatch(NamedTuple):
    """Rows that a device processes at once, chosen for a recipe that does not say."""

    rows: int
    reason: str


def choose_micro_batch(
    recipe: Recipe, device: torch.device, devices: int = 1, on_this_machine: int = 1
) -> MicroBatch:
    """A device's rows in as few micro-batches as fit its memory and `MOST_TOKENS`, equal but for
    one row.

    It fits if the estimate is below a share of the memory that is available now, which processes on
    a CPU divide among them. Where depths are drawn per micro-batch, its size changes what is
    learned, so it is always the whole share.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    rows, length = recipe.data.global_batch // devices, recipe.model.context_length
    if not recipe.model.loop.draws_per_sequence:
        return MicroBatch(rows, "depths are drawn per micro-batch")
    most = max(1, MOST_TOKENS[kind] // length)
    sizes = sorted({-(-rows // n) for n in range(-(-rows // most), rows + 1)}, reverse=True)
    available = _available(device, on_this_machine)
    limited = f"at most {MOST_TOKENS[kind]:,} tokens" if sizes[0] < rows else "the whole batch"
    if available is None:
        return MicroBatch(sizes[0], limited)
    limit = SHARE_OF_MEMORY[kind] * available
    dtype = compute_dtype(recipe, device)
    if _rough_bytes(recipe, dtype, sizes[0], kind) <= limit:
        return MicroBatch(sizes[0], limited)
    one = estimate_memory(recipe, dtype, 1, rows, devices, kind)
    fixed = one.weights + one.gradients + one.optimiser
    per_row = _activations(recipe, dtype, 2, kind) - one.activations

    def total(n: int) -> int:
        return fixed + max(one.activations + (n - 1) * per_row, one.optimiser_step)

    fitting = next((n for n in sizes if total(n) <= limit), None)
    if fitting == sizes[0]:
        return MicroBatch(sizes[0], limited)
    share = f"{SHARE_OF_MEMORY[kind]:.0%} of the {console.format_bytes(available)} available"
    if fitting is None:
        return MicroBatch(1, f"the estimate, {console.format_bytes(one.total)}, exceeds {share}")
    return MicroBatch(fitting, f"{console.format_bytes(total(fitting))} fits in {share}")


def _available(device: torch.device, on_this_machine: int) -> float | None:
    """Bytes for one process; None where unknown."""
    if device.type == "cuda":
        return available_memory(device) if torch.cuda.is_available() else GPU_BYTES
    size = available_memory("cpu")
    return None if size is None else size / on_this_machine


def _rough_bytes(recipe: Recipe, dtype: torch.dtype, rows: int, kind: str = "cpu") -> float:
    """An upper bound of the estimate for `rows` rows without tracing, which takes seconds."""
    config = recipe.model
    once, shape = config.prelude_layers + config.coda_layers, config.core_block
    uses = once + config.core_layers * (config.loop.gradient_loops or 1)
    channels = max(block.width + block.mlp_width for block in (config.block, shape))
    tokens = rows * config.context_length
    mixed = dtype != torch.float32
    chunk = (
        2 * mixed_loss_chunk(config.vocab_size, kind) if mixed else loss_chunk(config.vocab_size)
    )
    logits = 2 * min(chunk, 2 * tokens) * config.vocab_size
    weights = 8 * parameter_count(config)  # with gradient, optimiser and its step
    activations = ROUGH_FLOATS * tokens * uses * channels
    return FLOAT32_BYTES * (weights + activations + logits)


def checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of weights and optimiser on disk; other files of a checkpoint are some kilobytes."""
    model = build(recipe.model)
    optimiser = Optimiser(model, recipe.optimiser)
    return _bytes(model.state_dict().values()) + _bytes(optimiser.tensors().values())


def _activations(recipe: Recipe, dtype: torch.dtype, rows: int, kind: str = "cpu") -> int:
    config, mixed = recipe.model, dtype != torch.float32
    with FakeTensorMode():
        model = _fake(build(config))  # in float32; copies made under autocast are counted
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        if recipe.run.activation_checkpointing:
            model.activation_checkpointing()
        with LiveBytes() as live:
            tokens = torch.zeros(rows, config.context_length, dtype=torch.long)
            state: dict[str, Tensor] = {}
            if isinstance(model, LoopedModel):
                shape = (*tokens.shape, config.core_block.width)
                state["state"] = torch.zeros(shape)
            autocast: AbstractContextManager[Any] = nullcontext()
            if mixed:
                autocast = torch.autocast("cpu", dtype)
            with autocast, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about CPU kernels; the estimate is for any device
                output = model(tokens, tokens, **state)
            # One operator allocates logits and their gradient, or is traced with a CPU's chunk.
            chunk = loss_chunk(config.vocab_size)
            if mixed:
                chunk = mixed_loss_chunk(config.vocab_size, kind)
            size = MIXED_LOSS_BYTES if mixed else 2 * FLOAT32_BYTES
            live.add_workspace(min(chunk, tokens.numel()) * config.vocab_size * size)
            output.loss.backward()
    return live.peak


def _optimiser_step(recipe: Recipe, dtype: torch.dtype) -> int:
    with FakeTensorMode():
        model = _fake(build(recipe.model))
        optimiser = Optimiser(model, recipe.optimiser, muon_dtype=dtype)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        with LiveBytes() as live:
            optimiser.step(Factors())
    return live.peak


def _fake(model: LanguageModel) -> LanguageModel:
    """The model with fake CPU weights instead of meta ones."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, device="cpu")))
    return model


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages allocated inside that still exist, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def add_workspace(self, size: int) -> None:
        """Count `size` bytes that an operator used internally just now."""
        self.peak = max(self.peak, self.now + size)

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
    """Bytes that FSDP gathers at the same time, and the largest of its units.

    The root unit (tables and head) and the loop stay gathered from forward to backward; prelude and
    coda do not. A unit is copied out of the buffer it is received in.
    """
    everything = sum(p.numel() for p in model.parameters())
    if not isinstance(model, LoopedModel):
        return 2 * everything * FLOAT32_BYTES, everything * FLOAT32_BYTES
    prelude, loop, coda = (
        sum(p.numel() for p in unit.parameters())
        for unit in (model.prelude, model.loop, model.coda)
    )
    root = everything - prelude - loop - coda
    gathered, largest = root + loop + max(prelude, coda), max(root, prelude, loop, coda)
    return (gathered + largest) * FLOAT32_BYTES, largest * FLOAT32_BYTES


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _share(size: int, devices: int) -> int:
    return -(-size // devices)
