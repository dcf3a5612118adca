"""Open a file that may be compressed by gzip or zstandard, as a stream of its content."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import zstandard

ZSTANDARD_PIECE_BYTES = 512
"""Compressed bytes decoded at once; a block of 4 bytes can hold 128 KiB, so at most 16 MiB."""


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The decompressed content, and a function for the fraction of the file that was read."""
    size = path.stat().st_size
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb", buffering=0))
        raw: Any = file
        if path.suffix == ".gz":
            raw = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.suffix == ".zst":
            raw = ZstandardStream(file)
        yield io.BufferedReader(raw, 1 << 20), lambda: file.tell() / size


class ZstandardStream(io.RawIOBase):
    """Decompress zstandard; unlike the library's stream, fail if the file is truncated.

    Input is decoded in small pieces, because a few bytes can decompress to many.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: Any = None
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._output:
            self._input = self._input or memoryview(self._file.read(1 << 16))
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            piece = self._input[:ZSTANDARD_PIECE_BYTES]
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(frame.decompress(piece))
            self._input = self._input[len(piece) - len(frame.unused_data) :]
            self._frame = None if frame.eof else frame
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
