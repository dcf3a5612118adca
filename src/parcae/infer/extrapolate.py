"""Guessing the fixed point that the loop is on its way to, from its last few states.

`aitken`: if every step is the same fraction r of the one before, what is left to go is
r / (1 - r) times the last step; r is measured along the last step, one for each token.

`anderson`: the affine combination of the last states whose steps cancel best (Anderson acceleration
of depth 2), one least-squares problem for each token.

Both cost a few dot products and no loop. They are applied once, to the state that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

Extrapolation = Literal["none", "aitken", "anderson"]
EXTRAPOLATIONS: tuple[Extrapolation, ...] = get_args(Extrapolation)
STATES = 4
"""How many states are looked back on, at most."""
LARGEST_RATIO = 0.9
"""A step nearly as long as the one before says nothing about where the loop will end."""


def extrapolate(kind: Extrapolation, states: Sequence[Tensor]) -> Tensor:
    """From the last states [N, d_h], oldest first, to what they seem to converge to."""
    if kind == "none" or len(states) < 3:
        return states[-1]
    return _aitken(*states[-3:]) if kind == "aitken" else _anderson(states)


def _aitken(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    earlier, last = second - first, third - second
    ratio = (last * earlier).sum(-1, keepdim=True) / (earlier * earlier).sum(
        -1, keepdim=True
    ).clamp(min=1e-30)
    ratio = ratio.clamp(0.0, LARGEST_RATIO)
    return third + ratio / (1 - ratio) * last


def _anderson(states: Sequence[Tensor]) -> Tensor:
    steps = [after - before for before, after in pairwise(states)]
    change = torch.stack([steps[-1] - step for step in steps[:-1]], dim=-1)
    moved = torch.stack([states[-1] - state for state in states[1:-1]], dim=-1)
    gram = change.mT @ change
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp(min=1e-30)
    ridge = 1e-4 * scale * torch.eye(gram.shape[-1], device=gram.device)
    weights = torch.linalg.solve(gram + ridge, change.mT @ steps[-1][..., None])
    return states[-1] - (moved @ weights)[..., 0]
