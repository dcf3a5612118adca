"""Whether C++ or PyTorch runs a pass faster on this machine: measured once, and remembered.

For each model shape and size of pass (1, 2, 4, ... tokens) both are timed for some milliseconds
when the first pass of that size is due. The winner stays the same for the life of the process, and
is kept in the cache folder, in a file for this CPU, library, PyTorch and number of threads, unless
other programs held the measurement up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from parcae import files
from parcae.machine import SpinLimiter, seconds_without_core

ROUNDS = 6
SECONDS = 0.03
"""The measurement ends after this time or ROUNDS rounds, but not before the second round."""
Passes = tuple[Callable[[], object], Callable[[], object]]
TOLERANCE = 1.05
"""PyTorch is chosen if C++ takes more than this factor of its time."""


class Choices:
    """The winners for one model shape on this machine."""

    def __init__(self, machine: str, shape: str, folder: Path) -> None:
        """`machine` and `shape` describe everything that the times depend on."""
        self._path = folder / f"choices-{_digest(machine)}.json"
        self._shape = _digest(shape)
        self._kept = dict(_read(self._path).get(self._shape, {}))
        self._by_size = dict(self._kept)

    def prefers_native(self, tokens: int, passes: Callable[[int], Passes]) -> bool:
        """Whether a pass of this many tokens is to run in C++. `passes` returns functions that run
        a pass of a given size in C++ and in PyTorch."""
        size = 1 << max(0, tokens - 1).bit_length()
        if str(size) not in self._by_size:
            waited, start = seconds_without_core() or 0.0, time.perf_counter()
            self._by_size[str(size)] = native_is_faster(*passes(size))
            waited = (seconds_without_core() or 0.0) - waited
            if waited <= SpinLimiter.BUSY * (time.perf_counter() - start):
                self._kept[str(size)] = self._by_size[str(size)]
                self._write()
        return self._by_size[str(size)]

    def _write(self) -> None:
        """Add to what is in the file. Another process may write at the same time: then one of the
        two measures again in its next run."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            stored = _read(self._path)
            stored[self._shape] = {**stored.get(self._shape, {}), **self._kept}
            files.write_json(self._path, stored)
        except OSError:  # not kept, which costs a measurement in the next run
            pass


def native_is_faster(native: Callable[[], object], plain: Callable[[], object]) -> bool:
    """Compare the shortest times of both, taken in turns after a first call of each."""
    shortest = [float("inf"), float("inf")]
    native()
    plain()
    start = time.perf_counter()
    for number in range(ROUNDS):
        for index, function in enumerate((native, plain)):
            before = time.perf_counter()
            function()
            shortest[index] = min(shortest[index], time.perf_counter() - before)
        if number > 0 and time.perf_counter() - start > SECONDS:
            break
    return shortest[0] <= TOLERANCE * shortest[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, bool]]:
    """The content of the file; empty if there is none, or it is damaged."""
    try:
        stored = files.read_json(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        shape: sizes
        for shape, sizes in stored.items()
        if isinstance(sizes, dict) and all(isinstance(value, bool) for value in sizes.values())
    }
