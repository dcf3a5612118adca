"""The nearest orthogonal matrix, approximately and with matrix products only (Polar Express).

For G = U S V^T the polar factor is U V^T: all singular values become 1. An odd polynomial of a
matrix acts on its singular values alone, so a few steps of

    A = X X^T,    X <- a X + (b A + c A^2) X         that is  s <- a s + b s^3 + c s^5

with well chosen (a, b, c) bring every singular value of a normalised G close to 1. After these
five steps all that were at least 1/500 of the Frobenius norm lie in [0.858, 1.142]; the smallest
ones have grown about 990 times, and none exceeds 1.142. Muon needs the direction, not the last
digit, so bfloat16 is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_MARGIN = 1.02
"""Above 1 the polynomials soon diverge; rounding in bfloat16 must not push a value there."""
_EPS = 1e-6


def default_dtype(x: Tensor) -> torch.dtype:
    """bfloat16 on CUDA; elsewhere the tensor's own: most CPUs multiply float32 faster."""
    return torch.bfloat16 if x.device.type == "cuda" else x.dtype


def orthogonalise(stack: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Approximately U V^T of every matrix in [N, rows, cols]; in `dtype`, and returned in it."""
    rows, cols = stack.shape[-2:]
    x = stack.to(default_dtype(stack) if dtype is None else dtype)
    if rows > cols:  # the products X X^T are smallest on the short side
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _MARGIN + _EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if rows > cols else x
