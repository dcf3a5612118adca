"""Everything that is decided about a request before it is parsed, and headers of every answer.

- Host: a name must be localhost or allowed, so that a web site cannot reach a server on loopback
  by making its own name point there. Addresses cannot be made to, and are accepted.
- Origin: requests that a browser makes for another site are refused; there is no CORS.
- API keys: compared in constant time; needed for everything but the page and /health.
- Bodies: JSON only, limited in size and in the time to send them.
- Requests: limited in number, so that those that are sent slowly do not fill the server.
- Errors: an exception becomes a 500 without details, and its type a line in the log.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parcae.serving.protocol import ApiError, busy
from parcae.serving.scheduler import debug

log = logging.getLogger("parcae.serving")

PAGE = Path(__file__).parent / "page"
PAGE_FILES = frozenset(path.name for path in PAGE.iterdir())
PUBLIC_PATHS = frozenset({"/", "/health", *(f"/{name}" for name in PAGE_FILES)})
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?")
"""A Host header, in lower case: an IPv6 address in brackets or a name, and a port."""
BODY_SECONDS = 30.0
MAX_REQUESTS = 512
"""Answered at the same time."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Security:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        allowed_hosts: Collection[str],
        max_body_bytes: int,
        answered: Counter[tuple[str, int]],
    ) -> None:
        """`answered` counts requests by path and status."""
        self.app, self.max_body_bytes, self.answered = app, max_body_bytes, answered
        self.active = 0
        self.api_keys = [key.encode() for key in api_keys]
        self.allowed_hosts = {"localhost", *(host.lower() for host in allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        self.active += 1
        try:
            await self._serve(scope, receive, send_with_headers)
        except Exception as error:
            kind = type(error).__name__
            log.error("%s: %s", scope["method"], kind, exc_info=debug(error))
            if not status:
                failure = ApiError(500, "The server failed on this request.", code="internal")
                await _answer(failure, scope, receive, send_with_headers)
        finally:
            self.active -= 1
        route = getattr(scope.get("route"), "path", "other")
        self.answered[route, status] += 1
        log.info("%s %s %d %.3fs", scope["method"], route, status, time.monotonic() - start)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            scope["client_key"] = self._check_key(scope["path"], headers)
            if self.active > MAX_REQUESTS and scope["path"] not in PUBLIC_PATHS:
                raise busy(f"The server is answering {MAX_REQUESTS} requests.")
            if scope["method"] == "POST" and _has_route(scope):
                body = await self._read_body(headers, receive)
                receive = _replay(body, receive)
        except ApiError as error:
            await _answer(error, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_allowed(host):
            problem = "This Host header is not allowed; the server's --allowed-host allows it."
            raise ApiError(421, problem, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host.lower():
            raise ApiError(403, "Requests of other origins are refused.", code="cross_origin")

    def _is_allowed(self, host: str) -> bool:
        match = HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1] or match[2]
        try:
            return name in self.allowed_hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _check_key(self, path: str, headers: Headers) -> int:
        """The number of the key. All keys are compared, so that the time does not tell which."""
        if not self.api_keys or path in PUBLIC_PATHS:
            return 0
        scheme, _, given = headers.get("authorization", "").partition(" ")
        content = given.strip().encode("latin-1")  # as it was sent
        matches = [hmac.compare_digest(content, key) for key in self.api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "A valid API key is needed: Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key")
        return matches.index(True)

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        too_large = ApiError(413, f"The body is larger than {self.max_body_bytes:,} bytes.")
        length = headers.get("content-length", "0")
        is_long = len(length) > 18  # more digits than any size has, and than int() may refuse
        if length.isdecimal() and (is_long or int(length) > self.max_body_bytes):
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "The client has gone.", code="disconnected")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.max_body_bytes:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.") from None
        return bytes(body)


def _has_route(scope: Scope) -> bool:
    """Whether some route takes this method; otherwise the answer is 404 or 405."""
    routes = scope["app"].routes
    return any(route.matches(scope)[0] == Match.FULL for route in routes)


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that begins with a body that was read."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal first
        message, first = first, None
        return await receive() if message is None else message

    return replayed


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
