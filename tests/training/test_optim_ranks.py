"""Two processes must train what one does: parameters sharded by FSDP2, or replicated as by DDP.

Two processes sum in another order than one. Orthogonalisation amplifies the rounding of the
smallest singular values about 990 times, and cautious weight decay depends on the sign of each
update, so float32 results may differ by a whole decay step. Everything here is computed in float64,
where both effects together stay far below the tolerance.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from conftest import randomised, tiny
from parcae.training.optim import Optimiser
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig
from training import runs

RANKS = 2
# Rows that two ranks cannot share evenly: 97 and 63, and a gate of one row, none of it on rank 1.
UNEVEN = tiny(vocab_size=97, mlp_width=63, kv_heads=1)
TOLERANCE = 1e-9
KINDS = ("muon-adamw", "adamw", "adamw-atan2")


def train(model: nn.Module, optimiser: Optimiser, steps: int = 3) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(97, (2, 2, 16), generator=generator)
        ((seed + 1) * model(tokens, targets, state="zero").loss).backward()
        optimiser.step(Factors(momentum=0.9))
        optimiser.zero_grad()


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        error = (whole(tensor) - whole(expected[name])).abs().max()
        assert error < TOLERANCE, f"{name}: {error}"


def check_sharded(kind: str) -> None:
    config = OptimiserConfig(kind=kind, weight_decay=0.01)  # pyright: ignore
    alone = randomised(UNEVEN)
    sharded = fully_shard(copy.deepcopy(alone))
    one, many = Optimiser(alone, config), Optimiser(sharded, config)
    for name, tensor in many.tensors().items():
        replicated = name.endswith((".variance", ".step"))
        assert isinstance(tensor, DTensor) != replicated, name
    train(alone, one)
    train(sharded, many)
    assert_same(dict(sharded.named_parameters()), dict(alone.named_parameters()))
    assert_same(many.tensors(), one.tensors())


def check_replicated() -> None:
    """Sharing the work must leave every rank with bit for bit the same parameters."""
    alone = randomised(UNEVEN)
    replica = copy.deepcopy(alone)
    group = dist.group.WORLD
    train(alone, Optimiser(alone, OptimiserConfig()))
    train(replica, Optimiser(replica, OptimiserConfig(), process_group=group))
    assert_same(dict(replica.named_parameters()), dict(alone.named_parameters()))
    for name, p in replica.named_parameters():
        copies = [torch.empty_like(p) for _ in range(RANKS)]
        dist.all_gather(copies, p.detach())
        assert torch.equal(*copies), name


def run_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    runs.compute_in_float64()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        for kind in KINDS:
            check_sharded(kind)
        check_replicated()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path: Path):
    torch.multiprocessing.spawn(run_rank, (str(tmp_path / "store"),), nprocs=RANKS)
