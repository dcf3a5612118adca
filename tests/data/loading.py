"""What the tests of the loader share: corpora whose tokens say where they came from."""

import numpy as np
import torch

from parcae.data.loader import LoaderConfig, Source
from parcae.data.shards import InMemoryDocuments

BOS = 0


def corpus(count=300, seed=0, longest=40, first_id=1) -> InMemoryDocuments:
    """Every token after BOS names its document and place, so a batch shows where it came from."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return InMemoryDocuments(
        [
            np.concatenate([[BOS], first_id + 64 * number + np.arange(length - 1)])
            for number, length in enumerate(lengths)
        ]
    )


def config(**changes) -> LoaderConfig:
    small = {"context_length": 15, "global_batch": 4, "buffer": 10, "block_documents": 50}
    small["split_long"] = False  # as in the paper
    return LoaderConfig(**{**small, "prefetch": 0, **changes})


def rows_of(batch) -> list[tuple[int, ...]]:
    rows = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
    return [tuple(row) for row in rows.tolist()]


def take(loader, steps) -> list[list[tuple[int, ...]]]:
    with loader:
        return [rows_of(next(loader)) for _ in range(steps)]


def two_sources() -> list[Source]:
    return [
        Source(corpus(200, seed=1), weight=0.7, name="web"),
        Source(corpus(40, seed=2, first_id=100_001), weight=0.3, name="books"),
    ]
