"""From the scheduler's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from parcae.infer.sequence import Piece, TokenLogprob
from parcae.serving.generation import Inbox, Mailbox, _merged
from parcae.serving.protocol import ApiError
from parcae.serving.scheduler import Delta


def delta(*tokens: int, finish=None) -> Delta:
    pieces = [Piece(token, str(token), 1) for token in tokens]
    return Delta(pieces, [TokenLogprob(token, -1.0) for token in tokens], finish)


def test_one_wake_up_delivers_the_events_of_all_requests():
    async def run() -> list:
        loop = asyncio.get_running_loop()
        mailbox, inboxes, wake_ups = Mailbox(), [Inbox() for _ in range(8)], []
        original = loop.call_soon_threadsafe

        def call_soon_threadsafe(*arguments):
            wake_ups.append(arguments)
            return original(*arguments)

        loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign]

        def step() -> None:
            for _ in range(2):
                for index, inbox in enumerate(inboxes):
                    mailbox.send(loop, inbox, (index, delta(index)))

        for _ in range(3):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()  # the loop does not run meanwhile
            events = [await inbox.take() for inbox in inboxes]
            assert [[index for index, _ in part] for part in events] == [[n, n] for n in range(8)]
        return wake_ups

    assert len(asyncio.run(run())) == 3


@pytest.mark.slow
def test_no_event_is_left_when_both_sides_are_busy():
    count = 5000

    async def run() -> list[int]:
        loop, mailbox, inbox = asyncio.get_running_loop(), Mailbox(), Inbox()

        def send() -> None:
            for number in range(count):
                mailbox.send(loop, inbox, (number, delta()))

        thread = threading.Thread(target=send)
        thread.start()
        numbers: list[int] = []
        while len(numbers) < count:
            numbers += [number for number, _ in await asyncio.wait_for(inbox.take(), 30)]
        thread.join()
        return numbers

    assert asyncio.run(run()) == list(range(count))


def test_a_slow_reader_finds_one_delta_per_text():
    error = ApiError(500, "x")
    events = [
        (0, delta(1)),
        (1, delta(2)),
        (0, delta(3, 4, finish="stop")),
        (1, error),
        (1, delta(9)),
    ]
    first, second, last = _merged(events)
    assert first == (0, delta(1, 3, 4, finish="stop"))
    assert (second, last) == ((1, delta(2)), (1, error))
    assert _merged([]) == []


def test_events_of_a_closed_loop_are_dropped():
    loop, mailbox = asyncio.new_event_loop(), Mailbox()
    inbox = Inbox()
    loop.close()
    mailbox.send(loop, inbox, (0, delta(1)))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(inbox.take(), 0.01))
