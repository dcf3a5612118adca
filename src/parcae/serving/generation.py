"""From the scheduler's thread to the event loop: the texts of a request as they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from parcae.infer.request import Request
from parcae.serving.protocol import ApiError, disconnected
from parcae.serving.responses import Format, event
from parcae.serving.scheduler import Delta, Job, Scheduler

Indexed = tuple[int, Delta]
Event = tuple[int, Delta | ApiError]
"""The index of a text, and what happened to it."""


class Inbox:
    """The events of one request that have not been read. Belongs to the event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All events so far; waits for one if there is none."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


class Mailbox:
    """Carries events of all requests from the threads of the schedulers to one event loop.

    A step ends with an event for every text. The loop is woken up once for all of them: every
    wake-up is a system call, and gives the interpreter's lock away.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[Inbox, Event]] = deque()
        self._is_due = False
        """Whether `_deliver` will run. It is cleared before events are taken, and set after one is
        added, so that none is left."""

    def send(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, event: Event) -> None:
        self._sent.append((inbox, event))
        if not self._is_due:
            self._is_due = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        while self._sent:
            inbox, event = self._sent.popleft()
            inbox.put(event)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


async def generate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    http: HttpRequest,
    client: str,
    stream: bool = True,
) -> AsyncGenerator[Indexed]:
    """Yield (index of the text, delta) until all texts have ended. ApiError if one fails.

    Without `stream` there is one delta per text. Everything is cancelled when the client
    disconnects, and when the generator is closed.
    """
    loop, inbox = asyncio.get_running_loop(), Inbox()
    mailbox = _mailboxes.setdefault(loop, Mailbox())

    def emitter(index: int) -> Any:
        return lambda event: mailbox.send(loop, inbox, (index, event))

    seconds = scheduler.settings.request_seconds
    jobs = [Job(request, emitter(i), client, seconds, stream) for i, request in enumerate(requests)]
    watch = asyncio.create_task(_report_disconnect(http, inbox))
    try:
        scheduler.submit(jobs)
        left = len(jobs)
        while left:
            for index, delta in _merged(await inbox.take()):
                if isinstance(delta, ApiError):
                    raise delta
                left -= delta.finish is not None
                yield index, delta
    finally:
        watch.cancel()
        scheduler.cancel(jobs)


def _merged(events: Iterable[Event]) -> list[Event]:
    """One event per text, where a reader that is slower than the engine finds several; they end
    with the first error."""
    merged: dict[int, Delta] = {}
    for index, delta in events:
        if isinstance(delta, ApiError):
            return [*merged.items(), (index, delta)]
        merged[index] = merged[index].then(delta) if index in merged else delta
    return list(merged.items())


async def _report_disconnect(http: HttpRequest, inbox: Inbox) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    inbox.put((0, disconnected()))


class EventStream(StreamingResponse):
    """Server-sent events of a generation. A client that does not read is dropped after a time."""

    def __init__(
        self, form: Format, first: Indexed, rest: AsyncGenerator[Indexed], seconds: float
    ) -> None:
        super().__init__(_events(form, first, rest), media_type="text/event-stream")
        self._generation, self._seconds = rest, seconds

    async def stream_response(self, send: Any) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            pass
        finally:
            await self._generation.aclose()


async def _events(
    form: Format, first: Indexed, rest: AsyncGenerator[Indexed]
) -> AsyncIterator[bytes]:
    yield event(form.add(*first))
    try:
        async for index, delta in rest:
            yield event(form.add(index, delta))
    except ApiError as error:
        yield event(error.body())
        return
    if form.body.include_usage:
        yield event(form.usage_chunk())
    yield event("[DONE]")
