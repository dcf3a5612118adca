"""Random generators keyed by what is drawn, so that draws do not depend on order or process."""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(
    seed: int, step: int, row: int, purpose: str, device: str | torch.device = "cpu"
) -> torch.Generator:
    """A generator of its own for each (seed, step, row) and purpose.

    The same key gives the same stream in every process: depths and initial states of global rows
    are drawn with it in training, the noise of token positions in decoding.
    """
    key = hashlib.blake2b(f"{seed}/{step}/{row}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
