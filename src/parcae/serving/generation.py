"""From the scheduler's thread to the event loop: the texts of a request as they are written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from parcae.infer.request import Request
from parcae.serving.protocol import ApiError
from parcae.serving.responses import Format, event
from parcae.serving.scheduler import Delta, Job, Scheduler

Indexed = tuple[int, Delta]


async def generate(
    scheduler: Scheduler, requests: Sequence[Request], http: HttpRequest, client: str
) -> AsyncGenerator[Indexed]:
    """Yield (index of the text, delta) until all texts have ended. ApiError if one fails.

    Everything is cancelled when the client disconnects, and when the generator is closed.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Delta | ApiError]] = asyncio.Queue()

    def emitter(index: int) -> Any:
        def emit(event: Delta | ApiError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        return emit

    seconds = scheduler.settings.request_seconds
    jobs = [Job(request, emitter(i), client, seconds) for i, request in enumerate(requests)]
    watch = asyncio.create_task(_report_disconnect(http, events))
    try:
        scheduler.submit(jobs)
        left = len(jobs)
        while left:
            index, delta = await events.get()
            if isinstance(delta, ApiError):
                raise delta
            left -= delta.finish is not None
            yield index, delta
    finally:
        watch.cancel()
        scheduler.cancel(jobs)


async def _report_disconnect(http: HttpRequest, events: asyncio.Queue[Any]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait((0, ApiError(499, "The client has gone.", code="disconnected")))


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
