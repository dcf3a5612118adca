"""A small served model, in process and behind a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parcae.serving.settings import ServerSettings

if TYPE_CHECKING:  # slow imports, which tests of other packages need not wait for
    import httpx
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from parcae.infer.engine import Engine
    from parcae.runs import Checkpoint


def checkpoint() -> Checkpoint:
    from oracles import text_model, tokenizer
    from parcae.runs import Checkpoint

    return Checkpoint(text_model(), tokenizer(), Path("unused"))


def make_app(**options) -> FastAPI:
    """A server of the model `tiny`."""
    from parcae.serving.app import create_app

    limits = {name: options.pop(name) for name in list(options) if hasattr(ServerSettings, name)}
    settings = ServerSettings(**{"cache_gib": 0.1, **limits})
    return create_app(named={"tiny": checkpoint()}, settings=settings, **options)


@contextmanager
def client_of(app: FastAPI) -> Iterator[TestClient]:
    from fastapi.testclient import TestClient

    with TestClient(app, base_url="http://localhost") as client:
        yield client


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The URL of an application behind a socket."""
    import uvicorn

    from parcae.serving.app import close

    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        close(app)


@pytest.fixture(scope="session")
def served_app() -> Iterator[FastAPI]:
    from parcae.serving.app import close

    app = make_app()
    yield app
    close(app)


@pytest.fixture(scope="session")
def server_url(served_app) -> Iterator[str]:
    with listening(served_app) as url:
        yield url


@pytest.fixture(scope="session")
def http(server_url) -> Iterator[httpx.Client]:
    import httpx

    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def plain_engine() -> Engine:
    """The oracle: the same model, one request at a time."""
    from oracles import text_model, tokenizer
    from parcae.infer.engine import Engine

    return Engine(text_model(), tokenizer(), max_batch_size=1)
