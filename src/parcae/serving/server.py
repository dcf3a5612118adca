"""`parcae.serve`: listen until SIGTERM, then finish what has begun."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from parcae.config import ConfigError, require
from parcae.machine import allow_open_files
from parcae.runs import Checkpoint
from parcae.serving.app import close, create_app, drain, end, has_failed
from parcae.serving.protocol import ApiError, busy
from parcae.serving.settings import ServerSettings

MAX_CONNECTIONS = 1024
OTHER_FILES = 256
"""Open files that are not connections, and connections that have yet to be refused."""
ACCEPT_AT_ONCE, BACKLOG = 32, 2048
"""Connections accepted before others are refused, and those that may wait to be accepted."""
HEAD_SECONDS = 30.0
"""For the head of a request to arrive, after the connection or the answer before it."""
SEND_SECONDS = 5
"""For clients to read the last answers of a server that stops."""


class EngineFailed(ConfigError):
    """A model can no longer be served by this process."""


def serve(
    *models: str | Path,
    named: Mapping[str, Checkpoint | str | Path] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    allowed_hosts: Collection[str] = (),
    settings: ServerSettings | None = None,
    on_start: Callable[[str], None] | None = None,
    **engine_options: Any,
) -> None:
    """Serve models with OpenAI's API and a web page until SIGTERM or SIGINT.

    The first signal refuses new requests and finishes those that have begun, for at most
    `settings.drain_seconds`; the second ends at once. If the thread of a model ends by an error the
    server stops too, with `EngineFailed`: a supervisor can then start it again. `host` may be other
    than loopback only with an API key. `on_start` is called with the server's URL when it listens;
    port 0 takes a free one. The other arguments are those of `create_app`.
    """
    require(
        bool(api_keys) or is_loopback(host),
        "host",
        f"{host} can be reached from other machines, and there is no API key",
        "Give one (--api-key-file FILE, or the variable PARCAE_API_KEY), or use 127.0.0.1.",
    )
    settings = settings or ServerSettings()
    listener = _listen(host, port)  # first: opening the models may take long
    try:
        app = create_app(
            *models,
            named=named,
            api_keys=api_keys,
            allowed_hosts=[*allowed_hosts, host],
            settings=settings,
            **engine_options,
        )
    except BaseException:
        listener.close()
        raise
    Connection.limit = max(1, allow_open_files(MAX_CONNECTIONS + OTHER_FILES) - OTHER_FILES)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Connection,
        ws="none",
        backlog=ACCEPT_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + SEND_SECONDS,
    )
    # What uvicorn reports is the fault of a client, or a stack trace.
    level = logging.WARNING if os.environ.get("PARCAE_DEBUG") else logging.CRITICAL
    logging.getLogger("uvicorn").setLevel(level)
    server = Server(config, app, on_start)
    try:
        server.run(sockets=[listener])
    finally:
        close(app)
    if server.engine_failed:
        raise EngineFailed(
            "serve: the thread of a model ended by an error. Start the server again."
        )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address; connections wait until the server accepts them."""
    require(0 <= port <= 65535, "port", f"{port} is out of range", "Use 0 to 65535.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"port: {port} of {host} is not available ({error.strerror}). Choose another port, or "
            "0 for a free one."
        ) from None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection(H11Protocol):
    """Closed if no request arrives in time, and at once if there are too many."""

    limit = MAX_CONNECTIONS
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            transport.write(_answer(busy(f"The server has {self.limit} connections.")))
            transport.close()
        self._expect_request_after(None)

    def on_response_complete(self) -> None:
        last = self.cycle
        super().on_response_complete()
        self._expect_request_after(last)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _expect_request_after(self, last: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_unless_after, last)

    def _close_unless_after(self, last: object) -> None:
        if self.cycle is last:
            self.transport.close()


def _answer(error: ApiError) -> bytes:
    """An error as a whole HTTP response."""
    body = json.dumps(error.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), **error.headers}
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nConnection: close\r\n"
    return (head + "".join(lines) + "\r\n").encode() + body


class Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, app: FastAPI, on_start: Callable[[str], None] | None
    ) -> None:
        super().__init__(config)
        self._app, self._on_start = app, on_start
        self.engine_failed = self._ends_at_once = False

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        if self.started and self._on_start is not None:
            host = self.config.host
            port = self.servers[0].sockets[0].getsockname()[1]
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        if has_failed(self._app):
            self.engine_failed = self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down at the first signal, end texts at the second."""
        if self.should_exit:
            self._ends_at_once = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Finish what has begun; what takes too long ends with an error that its client sees."""
        drain(self._app)
        seconds = self._app.state.settings.drain_seconds
        timer = asyncio.get_running_loop().call_later(seconds, end, self._app)
        ending = asyncio.create_task(self._end_at_once())
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            ending.cancel()

    async def _end_at_once(self) -> None:
        """At a second signal. uvicorn's `force_exit` alone waits for connections from Python 3.12
        on, and cuts them off without an error before."""
        while not self._ends_at_once:
            await asyncio.sleep(0.05)
        end(self._app)
        await asyncio.sleep(SEND_SECONDS)
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore[reportOptionalMemberAccess]
