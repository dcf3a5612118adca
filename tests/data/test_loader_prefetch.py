"""Prefetched items: same order, errors in place, no thread left, no hang."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from parcae.data.loader import prefetched


def threads() -> int:
    return sum(thread.name == "parcae-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_order_is_kept(depth):
    assert list(prefetched(iter(range(50)), depth)) == list(range(50))
    assert threads() == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_comes_where_its_item_would(depth):
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    stream = prefetched(items(), depth)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert threads() == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_are_made_ahead(depth):
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    stream = prefetched(items(), depth)
    next(stream)
    deadline = time.monotonic() + 5
    while len(made) < depth + 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == depth + 1
    stream.close()


def test_stopping_early_ends_the_thread():
    stream = prefetched(iter(range(10**9)), 2)
    next(stream)
    assert threads() == 1
    stream.close()
    assert threads() == 0


@pytest.mark.slow
def test_forgetting_the_stream_ends_the_thread():
    stream = prefetched(iter(range(10**9)), 2)
    next(stream)
    del stream
    gc.collect()
    assert threads() == 0


@pytest.mark.slow
def test_a_program_that_just_ends_does_not_hang():
    program = (
        "from parcae.data.loader import prefetched\n"
        "stream = prefetched(iter(range(10**9)), 2)\n"
        "print(next(stream))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0\n"
