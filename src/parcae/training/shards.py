"""What optimisers need to know about parameters of which every rank holds some rows (FSDP2).

Elementwise work is done on the part at hand; what concerns a whole matrix goes through here. For
plain tensors everything returns what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor


def local(x: Tensor) -> Tensor:
    """The part of x on this rank, sharing its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def _stacked(like: DTensor) -> list[Placement]:
    return [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]


def gather(parts: Sequence[Tensor], like: Tensor) -> Tensor:
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


def scatter(stack: Tensor, like: Tensor) -> Tensor:
    """The inverse of `gather`: this rank's parts, cut out without communication."""
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


def sharing_group(like: Tensor, group: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks that hold the same whole matrices and may split work on them."""
    if isinstance(like, DTensor):
        return like.device_mesh.get_group(like.device_mesh.ndim - 1)
    return group


def share_work(
    work: Callable[[Tensor], Tensor], stack: Tensor, group: ProcessGroup | None
) -> Tensor:
    """work(stack), of which every rank of the group does an equal share and sends it to the others.

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
