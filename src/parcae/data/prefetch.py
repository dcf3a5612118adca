"""Make the next items in a background thread while the caller works on this one."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items in the same order, at most `depth` of them made ahead; 0 makes none ahead.

    An error comes out where its item would have. Closing the generator, or forgetting it, ends
    the thread; so nothing hangs when a consumer stops early.
    """
    if depth == 0:
        yield from items
        return
    room = threading.Semaphore(depth)
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def produce() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                ready.put((next(items), None))
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=produce, name="parcae-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item
    finally:
        stopped.set()
        room.release()
        if not sys.is_finalizing():  # a daemon thread no longer runs then, and would be waited for
            thread.join()
