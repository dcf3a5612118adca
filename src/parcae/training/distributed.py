"""One process, several with copies (DDP), or several with shards (FSDP2), behind one interface.

Started by `torchrun` the environment names the rank; without it there is one process. What a row
gets depends on (seed, step, row) only, so all three train on the same thing.

FSDP2: prelude, loop, coda and the rest are a unit each. The loop is one module whose forward holds
all loops, and it is not resharded in between: its weights are gathered once per micro-step,
backward included, and ranks may loop different numbers of times.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from parcae.config import ConfigError, require
from parcae.files import FileError
from parcae.model.frame import LanguageModel
from parcae.model.looped import LoopedModel
from parcae.training.settings import RunConfig

TIMEOUT = timedelta(minutes=30)


class Processes:
    """A single process; also what the others have in common."""

    rank = 0
    size = 1
    sharded = False
    replicas: dist.ProcessGroup | None = None
    """Processes that hold the same weights and may share the optimiser's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: LanguageModel) -> nn.Module:
        """What the training step calls instead of the model."""
        return model

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-step: gradients are exchanged in the last one only."""
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole weights on every process, for a look at the model outside of its forward."""
        yield

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm

    def gather(self, values: Tensor) -> Tensor:
        """[processes, ...]: what each of them has; in the CPU's memory."""
        return values.cpu()[None]

    def any(self, flag: bool) -> bool:
        return flag

    def wait(self) -> None:
        """For all others to come here."""

    def share(self, problem: BaseException | None) -> None:
        """Raise it, in every process: none waits for one that has given up. All come here."""
        if self.any(problem is not None):
            raise problem or FileError("another process of this run has failed; see its message.")


class Several(Processes):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.quiet_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        """For what other threads say to each other while training goes on."""

    def gather(self, values: Tensor) -> Tensor:
        values = values.cpu()
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def any(self, flag: bool) -> bool:
        return bool(self.gather(torch.tensor([float(flag)])).sum() > 0)

    def wait(self) -> None:
        dist.barrier()


class Copies(Several):
    """DDP: every process holds the model, gradients are averaged."""

    def wrap(self, model: LanguageModel) -> nn.Module:
        self._wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.replicas = dist.group.WORLD
        return self._wrapped

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._wrapped.no_sync()


class Shards(Several):
    """FSDP2: every process holds a part of each weight, gradient and optimiser state."""

    sharded = True

    def wrap(self, model: LanguageModel) -> nn.Module:
        """Without a mixed-precision policy: it would round RoPE, decay and the state as well, which
        autocast, here as with copies, keeps in float32."""
        units: list[nn.Module] = []
        if isinstance(model, LoopedModel):
            fully_shard(model.prelude)
            fully_shard(model.loop, reshard_after_forward=False)
            fully_shard(model.coda)
            units += [model.prelude, model.loop, model.coda]
        fully_shard(model, reshard_after_forward=False)
        self._units = [unit for unit in (model, *units) if isinstance(unit, FSDPModule)]
        staying = {model, model.loop} if isinstance(model, LoopedModel) else {model}
        self._passing = [unit for unit in self._units if unit not in staying]
        return model

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        self._units[0].set_requires_gradient_sync(last)  # recurses into the other units
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Also after a forward inside: processes may run different numbers of them, or none."""
        self._reshard_after_forward(False)
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
            self._reshard_after_forward(True)

    def _reshard_after_forward(self, wanted: bool) -> None:
        """Of the units that do so in training."""
        for unit in self._passing:
            unit.set_reshard_after_forward(wanted, recurse=False)

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm.full_tensor()  # type: ignore[attr-defined]


@contextmanager
def processes(config: RunConfig) -> Iterator[Processes]:
    """The processes of this run, as `torchrun` has started them; one needs nothing of it."""
    device = find_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device)
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
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Shards(device) if config.parallel == "fsdp" else Copies(device)
    finally:
        dist.destroy_process_group()


def find_device(wanted: str, local_rank: int = 0) -> torch.device:
    """CUDA, then Apple's GPU, then the CPU, unless the recipe names one."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    kind = next(name for name, here in available.items() if here) if wanted == "auto" else wanted
    require(
        available[kind],
        "run.device",
        f"there is no {kind} device here",
        'Use "auto", or one of ' + ", ".join(n for n, here in available.items() if here) + ".",
    )
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"run.device: process {local_rank} of this node has no GPU of its own "
                f"({torch.cuda.device_count()} here). Start fewer with --nproc-per-node."
            )
        return torch.device("cuda", local_rank)
    return torch.device(kind)
