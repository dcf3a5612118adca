"""One process, several with copies of the model (DDP), or with shards of it (FSDP2).

`torchrun` sets the rank in the environment; without it there is one process. Depths and noise of a
row depend on (seed, step, row) only, so all three ways train on the same rows.

FSDP2: prelude, loop, coda and the rest are a unit each. The loop is one module whose forward runs
all loops, and it is not resharded in between: its weights are gathered once per micro-step,
backward included, and ranks may loop different numbers of times.

The helpers for optimisers at the end work on parameters of which every rank holds some rows
(DTensor); plain tensors they return unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from parcae.config import ConfigError, require
from parcae.device import TRAINING_DEVICES, find_device, multiplies_bfloat16
from parcae.files import FileError
from parcae.model.base import LanguageModel
from parcae.model.init_weights import init_weights
from parcae.model.looped import LoopedModel
from parcae.training.settings import Recipe, RunConfig

TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective."""
POLL_SECONDS = 1.0
BFLOAT16_WIDTH = 128
"""Narrower models gain little from bfloat16 on a CPU, and train in minutes."""


class Workers:
    """A single process, and the interface that several share."""

    rank = 0
    size = 1
    local_size = 1
    """Processes on this machine."""
    sharded = False
    replica_group: dist.ProcessGroup | None = None
    """Processes that hold the same weights and can split the optimiser's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def initialise(self, model: LanguageModel, seed: int) -> nn.Module:
        """Give a model from the meta device its initial weights, which depend on the seed only.

        Returns the module that a training step calls: the model, or one that reduces gradients.
        """
        model.to_empty(device="cpu")  # its generator gives the same weights on every device
        init_weights(model, model.config, torch.Generator().manual_seed(seed))
        return model.to(self.device)

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-step: gradients are reduced in the last one of a step only."""
        return nullcontext()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """The context in which every process holds whole weights, outside of a training step."""
        yield

    def full_norm(self, norm: Tensor) -> Tensor:
        """A gradient norm, which FSDP2 returns sharded, as a plain tensor."""
        return norm

    def gather(self, values: Tensor) -> Tensor:
        """The values of all processes, [processes, ...], on the CPU."""
        return values.cpu()[None]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""

    @contextmanager
    def first_works(self) -> Iterator[None]:
        """The context in which the first process works alone; the others wait at its end.

        They wait without a limit of time, unlike in a collective, and check every second.
        """
        yield

    def raise_together(self, error: BaseException | None) -> None:
        """Raise in every process if any of them has an error. All must call this."""
        if self.any(error is not None):
            raise error or FileError("another process of this run has failed; see its message.")


class ProcessGroupWorkers(Workers):
    """Several processes in the default process group of `torch.distributed`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.background_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        """For collectives of other threads while training continues."""
        self._store = dist.distributed_c10d._get_default_store()
        self._waits = 0

    def gather(self, values: Tensor) -> Tensor:
        values = values.cpu()
        values_of_all = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(values_of_all, values)
        return torch.stack(values_of_all)

    def any(self, flag: bool) -> bool:
        return bool(self.gather(torch.tensor([float(flag)])).sum() > 0)

    def barrier(self) -> None:
        dist.barrier()

    @contextmanager
    def first_works(self) -> Iterator[None]:
        self._waits += 1
        done = f"parcae: the first process is done, {self._waits}"
        try:
            yield
        finally:
            if self.is_first:
                self._store.set(done, "1")
        while not self._store.check([done]):  # raises if the process that holds the store ends
            time.sleep(POLL_SECONDS)


class ReplicatedWorkers(ProcessGroupWorkers):
    """DDP: every process holds the whole model; gradients are averaged."""

    def initialise(self, model: LanguageModel, seed: int) -> nn.Module:
        super().initialise(model, seed)
        self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.replica_group = dist.group.WORLD
        return self._wrapped

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._wrapped.no_sync()


class ShardedWorkers(ProcessGroupWorkers):
    """FSDP2: every process holds a part of each weight, gradient and optimiser state."""

    sharded = True

    def initialise(self, model: LanguageModel, seed: int) -> nn.Module:
        """Only this process's shards get memory. Every process draws all weights, block by block in
        CPU memory, and keeps its part, so that they do not depend on the number of processes.

        Without a mixed-precision policy: it would round decay and the state as well, and gradients
        before they are summed, all of which `model/precision.py` keeps in float32.
        """
        units: list[nn.Module] = []
        if isinstance(model, LoopedModel):
            fully_shard(model.prelude)
            fully_shard(model.loop, reshard_after_forward=False)
            fully_shard(model.coda)
            units += [model.prelude, model.loop, model.coda]
        fully_shard(model, reshard_after_forward=False)
        self._units = [unit for unit in (model, *units) if isinstance(unit, FSDPModule)]
        kept = {model, model.loop} if isinstance(model, LoopedModel) else {model}
        self._resharded = [unit for unit in self._units if unit not in kept]
        model.to_empty(device=self.device)
        generator = torch.Generator().manual_seed(seed)
        init_weights(model, model.config, generator, whole=whole_parameters)
        return model

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        self._units[0].set_requires_gradient_sync(last)  # recurses into the other units
        return nullcontext()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Weights stay whole after a forward: processes may run different numbers of forwards."""
        # Where no step was taken yet, the first part to run would else become the root.
        self._units[0]._get_fsdp_state()._lazy_init()
        self._reshard_after_forward(False)
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
            self._reshard_after_forward(True)

    def _reshard_after_forward(self, enabled: bool) -> None:
        """Set it for the units that are resharded after their forward in training."""
        for unit in self._resharded:
            unit.set_reshard_after_forward(enabled, recurse=False)

    def full_norm(self, norm: Tensor) -> Tensor:
        return norm.full_tensor()  # type: ignore[attr-defined]


@contextmanager
def open_workers(config: RunConfig) -> Iterator[Workers]:
    """The processes of this run as `torchrun` started them; a single one needs no torchrun."""
    device = training_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Workers(device)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE: {os.environ['WORLD_SIZE']} processes, but {', '.join(missing)} is not "
            "set. Start them with torchrun, or unset WORLD_SIZE."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _form_group(backend)
    try:
        yield ShardedWorkers(device) if config.parallel == "fsdp" else ReplicatedWorkers(device)
    finally:
        dist.destroy_process_group()


def _form_group(backend: str) -> None:
    """`dist.init_process_group`, with keys of its own for each restart of torchrun.

    All restarts share torchrun's store, where a process may find the address of one that has died
    before the new one has written its own. Nodes may count restarts differently, so several nodes
    use PyTorch's keys.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"restart-{restart}", store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


@contextmanager
def deterministic(enabled: bool, device: torch.device) -> Iterator[None]:
    """The context in which a recipe gives the same bits in every run on a machine.

    The previous mode is restored at the end.
    """
    if not enabled:
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), options.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        options.fill_uninitialized_memory = fill


def compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype that `run.precision` means on a device."""
    if recipe.run.precision != "auto":
        return getattr(torch, recipe.run.precision)
    pays = device.type == "cuda" or (
        device.type == "cpu"
        and recipe.model.core_block.width >= BFLOAT16_WIDTH
        and multiplies_bfloat16()
    )
    return torch.bfloat16 if pays else torch.float32


def training_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device that `run.device` means for a process; `auto` prefers CUDA, then MPS."""
    device = find_device(wanted, auto=TRAINING_DEVICES, key="run.device")
    if device.type != "cuda":
        return device
    require(
        local_rank < torch.cuda.device_count(),
        "run.device",
        f"process {local_rank} of this node has no GPU of its own "
        f"({torch.cuda.device_count()} here)",
        "Start fewer with --nproc-per-node.",
    )
    return torch.device("cuda", local_rank)


def local_part(x: Tensor) -> Tensor:
    """The part of x on this rank, sharing its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """The context in which a sharded module has whole parameters, uninitialised, in CPU memory.

    At its end the shards take this rank's part of them.
    """
    sharded = [
        (owner, name, p)
        for owner in module.modules()
        for name, p in owner.named_parameters(recurse=False)
    ]
    for owner, name, p in sharded:
        owner._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
    try:
        yield
    finally:
        for owner, name, p in sharded:
            values, owner._parameters[name] = owner._parameters[name], p
            if values is not None and isinstance(p, DTensor):
                part = distribute_tensor(
                    values.detach(), p.device_mesh, p.placements, src_data_rank=None
                )
                p.to_local().copy_(part.to_local())


def _stacked(like: DTensor) -> list[Placement]:
    return [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]


def gather_stack(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """[N, rows, cols]: whole matrices from this rank's parts of N matrices laid out like `like`."""
    stack = torch.stack(tuple(parts))
    if not isinstance(like, DTensor):
        return stack
    whole = torch.empty(len(parts), *like.shape, device="meta")
    return DTensor.from_local(
        stack,
        like.device_mesh,
        _stacked(like),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    ).full_tensor()


def scatter_stack(stack: Tensor, like: Tensor) -> Tensor:
    """The inverse of `gather_stack`: this rank's parts, cut out without communication."""
    if not isinstance(like, DTensor):
        return stack
    cut = distribute_tensor(stack, like.device_mesh, _stacked(like), src_data_rank=None)
    return cut.to_local()


def sum_over_shards(sums: Tensor, like: Tensor) -> Tensor:
    """Sums over whole tensors laid out like `like`, from the sums over this rank's parts."""
    if not isinstance(like, DTensor):
        return sums
    placements = [Partial() if isinstance(p, Shard) else p for p in like.placements]
    return DTensor.from_local(sums, like.device_mesh, placements, run_check=False).full_tensor()


def work_group(like: Tensor, group: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks that hold the same whole matrices and can split the work on them."""
    if isinstance(like, DTensor):
        return like.device_mesh.get_group(like.device_mesh.ndim - 1)
    return group


def split_work(
    work: Callable[[Tensor], Tensor], stack: Tensor, group: ProcessGroup | None
) -> Tensor:
    """work(stack), of which every rank of the group computes an equal share and sends it to all.

    All ranks hold the same stack before and bit for bit the same result after.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1 or len(stack) == 1:
        return work(stack)
    share = -(-len(stack) // ranks)
    rank = dist.get_rank(group)
    mine = work(stack[rank * share : (rank + 1) * share])
    sent = mine.new_zeros(share, *stack.shape[1:])
    sent[: len(mine)] = mine
    received = sent.new_empty(ranks * share, *stack.shape[1:])
    dist.all_gather_single(received, sent, group=group)
    return received[: len(stack)]
