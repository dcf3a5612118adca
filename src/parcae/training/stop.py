"""Ctrl-C and SIGTERM as a wish to stop, to be granted between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """`asked` turns true at the first signal. A second Ctrl-C ends the process as usual; a second
    SIGTERM does not, since a launcher may send one after a cluster did."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.asked = False
        self._signals = signals
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self._signals}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if (interrupt := self._before.pop(signal.SIGINT, None)) is not None:
            signal.signal(signal.SIGINT, interrupt)  # type: ignore[arg-type]

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
