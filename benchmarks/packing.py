"""Speed of best-fit packing compared with a linear search, and of the loader alone.

    python benchmarks/packing.py [--out packing.json]

Packing: `pack` against a list that is searched for every placement, on the same lengths,
interleaved; both must give the same rows. Loading: tokens per second of batches from a
memory-mapped uint16 file, without and with a background thread, compared with the shortest
possible loader (slices at random positions), interleaved. Overlap: how much longer a step takes
when its batch is prepared by the main thread, or by the background thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parcae.console import out, table
from parcae.data.loader import Loader, LoaderConfig, Source
from parcae.data.packing import pack
from parcae.files import write_json

CONTEXT = 512
BUFFER = 1_000
BATCH_ROWS = 64
WAIT_SECONDS = 0.003


def lengths_like_web_text(count: int, median: float, seed: int = 0) -> np.ndarray:
    """Document lengths of web text are close to log-normal."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn, 2, 100_000).astype(np.int64)


def list_scan(lengths: list[int], capacity: int, buffer: int) -> list[list[int]]:
    """The documents of each row, by a linear search for the longest document that fits."""
    stream = iter(enumerate(lengths))
    waiting: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    row: list[int] = []
    remaining = capacity
    while True:
        while len(waiting) < buffer and (arrival := next(stream, None)) is not None:
            waiting.append(arrival)
        if not waiting:
            return rows
        best, best_length = -1, 0
        for i, (_, length) in enumerate(waiting):
            if best_length < length <= remaining:
                best, best_length = i, length
        if best < 0:
            best = min(range(len(waiting)), key=lambda i: waiting[i][1])
        document, length = waiting.pop(best)
        row.append(document)
        remaining -= length
        if remaining <= 0:
            rows.append(row)
            row, remaining = [], capacity


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds per call, A B A B ..., as minimum and median."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(rounds):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {"minimum": min(times), "median": statistics.median(times)}
        for name, times in seconds.items()
    }


def packing_speed(documents: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    for context, median in ((CONTEXT, 150), (CONTEXT, 400), (2048, 400), (2048, 1500)):
        lengths = lengths_like_web_text(documents, median)
        as_list, capacity = lengths.tolist(), context + 1
        packing = pack(lengths, capacity, BUFFER)
        rows = [[s.document for s in packing.row(r)] for r in range(packing.rows)]
        assert rows == list_scan(as_list, capacity, BUFFER), "the two packings differ"
        times = interleave(
            {
                "list scan": lambda a=as_list, c=capacity: list_scan(a, c, BUFFER),
                "pack": lambda a=lengths, c=capacity: pack(a, c, BUFFER),
            },
            rounds,
        )
        results.append(
            {
                "context": context,
                "median_length": median,
                "documents": documents,
                "cropped_share": packing.cropped_tokens / packing.all_tokens,
                "seconds": times,
                "ratio_of_minima": times["list scan"]["minimum"] / times["pack"]["minimum"],
                "ratio_of_medians": times["list scan"]["median"] / times["pack"]["median"],
                "microseconds_per_document": times["pack"]["minimum"] / documents * 1e6,
            }
        )
    return results


class MappedDocuments:
    """Documents in one memory-mapped file, as in a shard."""

    def __init__(self, path: Path, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self._ends = np.cumsum(lengths).tolist()
        self._starts = [0, *self._ends[:-1]]
        self.all_tokens = np.memmap(path, dtype=np.uint16, mode="r").view(np.ndarray)
        self.fingerprint = "benchmark"

    def tokens(self, document: int) -> np.ndarray:
        return self.all_tokens[self._starts[document] : self._ends[document]]


def mapped_documents(folder: Path, count: int, median: float) -> MappedDocuments:
    lengths = lengths_like_web_text(count, median)
    path = folder / f"tokens-{median:g}.bin"
    rng = np.random.default_rng(0)
    rng.integers(0, 32_768, int(lengths.sum()), dtype=np.uint16).tofile(path)
    return MappedDocuments(path, lengths)


def load(store: MappedDocuments, steps: int, prefetch: int, work: Callable[[], object]) -> None:
    """Read batches and call `work` after each, like a trainer."""
    config = LoaderConfig(
        context_length=CONTEXT, global_batch=BATCH_ROWS, split_long=False, prefetch=prefetch
    )
    with Loader([Source(store)], config) as loader:
        for _ in range(steps):
            next(loader)
            work()


def random_slices(store: MappedDocuments, steps: int) -> None:
    """The shortest possible loader: slices at random positions."""
    tokens, rng = store.all_tokens, np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - CONTEXT - 1, BATCH_ROWS).tolist()
        slices = [tokens[i : i + CONTEXT + 1].astype(np.int64) for i in starts]
        torch.stack([torch.from_numpy(s[:-1]) for s in slices])
        torch.stack([torch.from_numpy(s[1:]) for s in slices])


def loading_speed(folder: Path, documents: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    tokens = steps * BATCH_ROWS * CONTEXT
    for median in (30, 150, 400):
        store = mapped_documents(folder, documents, median)
        times = interleave(
            {
                "random slices": partial(random_slices, store, steps),
                "no thread": partial(load, store, steps, 0, nothing),
                "thread": partial(load, store, steps, 2, nothing),
            },
            rounds,
        )
        speeds = {
            name: {"best": tokens / t["minimum"], "median": tokens / t["median"]}
            for name, t in times.items()
        }
        results.append({"median_length": median, "tokens": tokens, "tokens_per_second": speeds})
    return results


def overlap(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of steps that wait, as for a GPU, without and with loading.

    If the work uses every core, as training on the CPU does, there is nothing to overlap with.
    """
    store = mapped_documents(folder, 100_000, 150)

    def work() -> None:
        time.sleep(WAIT_SECONDS)

    def wait_alone() -> None:
        for _ in range(steps):
            work()

    return interleave(
        {
            "waiting alone": wait_alone,
            "no thread": partial(load, store, steps, 0, work),
            "thread": partial(load, store, steps, 2, work),
        },
        rounds,
    )


def nothing() -> None:
    pass


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument(
        "--documents", type=int, default=4_000, help="documents to pack (default: 4000)"
    )
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument(
        "--steps", type=int, default=200, help="batches of 64 rows per measurement (default: 200)"
    )
    arguments.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = arguments.parse_args()
    torch.set_num_threads(1)

    packing = packing_speed(options.documents, options.rounds)
    out.print(
        table(
            f"Best fit, buffer of {BUFFER}: list scan / pack",
            ["context", "median length", "cropped", "minima", "medians", "pack, us/document"],
            [
                (
                    r["context"],
                    r["median_length"],
                    f"{r['cropped_share']:.1%}",
                    f"{r['ratio_of_minima']:.1f}x",
                    f"{r['ratio_of_medians']:.1f}x",
                    f"{r['microseconds_per_document']:.2f}",
                )
                for r in packing
            ],
        )
    )
    with tempfile.TemporaryDirectory() as name:
        loading = loading_speed(Path(name), 100_000, options.steps, options.rounds)
        overlapping = overlap(Path(name), options.steps, options.rounds)
    out.print(
        table(
            f"Loader alone, context {CONTEXT}, mapped uint16: million tokens/s, best (median)",
            ["median length", "no thread", "thread", "random slices"],
            [
                (
                    r["median_length"],
                    *(
                        f"{speed['best'] / 1e6:.1f} ({speed['median'] / 1e6:.1f})"
                        for name in ("no thread", "thread", "random slices")
                        for speed in [r["tokens_per_second"][name]]
                    ),
                )
                for r in loading
            ],
        )
    )
    alone = overlapping["waiting alone"]
    out.print(
        table(
            f"Time of steps that wait {WAIT_SECONDS * 1e3:g} ms, relative to waiting alone",
            ["loading", "minima", "medians"],
            [
                (name, *(f"{t[kind] / alone[kind]:.2f}x" for kind in ("minimum", "median")))
                for name, t in overlapping.items()
            ],
        )
    )
    if options.out:
        write_json(options.out, {"packing": packing, "loading": loading, "overlap": overlapping})


if __name__ == "__main__":
    main()
