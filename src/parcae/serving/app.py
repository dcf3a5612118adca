"""The routes: HTTP requests to engine requests, and texts back.

app = parcae.create_app("out/demo/run")     # an ASGI application, for any ASGI server
parcae.serve("out/demo/run")                # the same with uvicorn, until SIGTERM
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from parcae.config import ConfigError, require
from parcae.evaluation.loop_trace import trace_next_token
from parcae.infer.request import check_prompt
from parcae.plotting import page_style
from parcae.runs import Checkpoint
from parcae.serving.generation import EventStream, generate
from parcae.serving.metrics import Exposition
from parcae.serving.models import ServedModel, open_models
from parcae.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    TraceRequest,
    busy,
    disconnected,
    invalid,
    stopping,
)
from parcae.serving.responses import ChatFormat, CompletionFormat, Format, TokenTexts
from parcae.serving.security import PAGE, PAGE_FILES, Security
from parcae.serving.settings import ServerSettings

ANY_ERROR = {"model": ErrorBody, "description": "An error in OpenAI's format"}
router = APIRouter(responses={"4XX": ANY_ERROR, "5XX": ANY_ERROR})
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts; with `stream`, chunks of them as server-sent events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus' text format", "content": {"text/plain": {}}}
}


def create_app(
    *models: str | Path,
    named: Mapping[str, Checkpoint | str | Path] | None = None,
    api_keys: Sequence[str] = (),
    allowed_hosts: Collection[str] = (),
    settings: ServerSettings | None = None,
    **engine_options: Any,
) -> FastAPI:
    """An ASGI application that serves models with OpenAI's API and a web page.

    `models`: model folders, runs or checkpoints, each as PATH or NAME=PATH; "demo" is the run of
    `make demo`. Or `named`: models by name, which may be open checkpoints.
    `api_keys`: one of them must be sent with every request, if there are any.
    `allowed_hosts`: names in the Host header besides localhost and addresses.
    `settings`: limits and sizes. `device`: where models opened from a path run; the default is
    "auto". Further options are those of `Engine`, such as `weight_dtype`.
    """
    settings = settings or ServerSettings()
    require(not (models and named), "named", "models are given by path too", "Give one of the two.")
    served = open_models(models if named is None else named, settings, **engine_options)
    for model in served.values():
        model.scheduler.keys = max(1, len(api_keys))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(close, app)

    app = FastAPI(
        title="parcae", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.models, app.state.settings = served, settings
    app.state.answered = Counter()
    app.state.traces, app.state.tracing = 0, asyncio.Semaphore(1)
    app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(UnicodeEncodeError, _not_unicode)
    app.add_middleware(
        Security,
        api_keys=api_keys,
        allowed_hosts=allowed_hosts,
        max_body_bytes=settings.max_body_bytes,
        answered=app.state.answered,
    )
    return app


def has_failed(app: FastAPI) -> bool:
    """Whether the thread of a model has ended by an error."""
    return any(model.scheduler.state == "failed" for model in app.state.models.values())


def drain(app: FastAPI) -> None:
    """Refuse what has not begun."""
    for model in app.state.models.values():
        model.scheduler.drain()


def end(app: FastAPI) -> None:
    """Answer what runs with 503."""
    for model in app.state.models.values():
        model.scheduler.end()


def close(app: FastAPI) -> None:
    """End everything and stop the threads of the models."""
    for model in app.state.models.values():
        model.scheduler.close()


@router.get("/v1/models")
async def list_models(request: Request) -> Any:
    data = [model.card() for model in request.app.state.models.values()]
    return {"object": "list", "data": data}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Any:
    return _model(request, name).card()


@router.post("/v1/completions", responses=EVENTS)
async def complete(request: Request, body: CompletionRequest) -> Response:
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "Log-probabilities of the prompt are not supported.")
    return await _generate(request, body, CompletionFormat)


@router.post("/v1/chat/completions", responses=EVENTS)
async def chat(request: Request, body: ChatRequest) -> Response:
    return await _generate(request, body, ChatFormat)


async def _generate(
    http: Request, body: CompletionRequest | ChatRequest, format: type[Format]
) -> Response:
    model = _model(http, body.model)
    requests = await asyncio.to_thread(model.requests, body)  # long texts take time to encode
    form = format(body, model.name, requests, model.tokenizer)  # type: ignore[arg-type]
    deltas = generate(model.scheduler, requests, http, _client(http), bool(body.stream))
    if body.stream:
        # Errors up to the first token have a status of their own.
        first = await anext(deltas)
        return EventStream(form, first, deltas, model.settings.request_seconds)
    async with aclosing(deltas):
        async for index, delta in deltas:
            form.add(index, delta)
    return JSONResponse(form.response())


@router.post("/v1/trace")
async def trace(request: Request, body: TraceRequest) -> Any:
    model = _model(request, body.model)
    config = model.model.config
    num_loops = body.num_loops or model.default_loops
    model.check_loops(num_loops)
    ids = await asyncio.to_thread(model.engine.encode, body.prompt)
    model.check_length(ids)
    position = len(ids) - 1 if body.position is None else body.position
    if position >= len(ids):
        raise invalid("position", f"{position}, but the prompt has {len(ids)} tokens.")
    try:
        prefix = check_prompt(ids, config.vocab_size, config.context_length)[: position + 1]
        async with _turn_to_trace(request, model):
            call = (trace_next_token, model.model, prefix, num_loops, body.top)
            loops = await asyncio.to_thread(*call)
    except ConfigError as error:
        param, _, message = str(error).partition(": ")
        raise invalid(param, message) from None
    texts = TokenTexts(model.tokenizer)
    return {
        "position": position,
        "token": {"id": prefix[-1], "text": texts(prefix[-1])},
        "loops": [
            {
                "loop": number,
                "residual": loop.change,
                "top": [
                    {"id": token, "text": texts(token), "probability": probability}
                    for token, probability in loop.likeliest
                ],
            }
            for number, loop in enumerate(loops, start=1)
        ],
    }


@asynccontextmanager
async def _turn_to_trace(request: Request, model: ServedModel) -> AsyncIterator[None]:
    """One trace is computed at a time; clients that left meanwhile, as the page does when the
    pointer moves on, are skipped."""
    state, most = request.app.state, model.settings.max_waiting
    if model.scheduler.state != "ok":
        raise stopping()
    if state.traces >= most:
        raise busy(f"The queue is full: {most} traces may wait.")
    state.traces += 1
    try:
        async with state.tracing:
            if await request.is_disconnected():
                raise disconnected()
            yield
    finally:
        state.traces -= 1


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are accepted, 503 when the server stops or a thread has failed."""
    states = {model.scheduler.state for model in request.app.state.models.values()}
    status = next((state for state in ("failed", "closed", "draining") if state in states), "ok")
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/metrics", responses=METRICS, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    exposition = Exposition()
    for model in request.app.state.models.values():
        model.expose(exposition)
    exposition.add_requests(request.app.state.answered)
    return PlainTextResponse(exposition.text(), media_type="text/plain; version=0.0.4")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return FileResponse(PAGE / "index.html")


@router.get("/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    if name not in PAGE_FILES:
        raise HTTPException(404, "There is no such path.")
    if name == "page.css":
        text = page_style() + (PAGE / name).read_text(encoding="utf-8")
        return Response(text, media_type="text/css")
    return FileResponse(PAGE / name)


def _model(request: Request, name: str | None) -> ServedModel:
    models = request.app.state.models
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        message = f"There is no such model. Known: {', '.join(models)}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


def _client(request: Request) -> str:
    """Whose turn it is in the queue: the key and the address."""
    address = request.client.host if request.client else ""
    return f"{request.scope.get('client_key', 0)} {address}"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, str(error.detail)).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _not_unicode(request: Request, error: Exception) -> Response:
    """Where the name of a field has half of a surrogate pair, its error cannot be written."""
    return await _api_error(request, ApiError(400, "The body is not valid Unicode text."))


async def _validation_error(request: Request, error: Exception) -> Response:
    """400 with the first field that is wrong; what was given is not repeated."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        return await _api_error(request, ApiError(400, "The body is not valid JSON."))
    field = first.get("ctx", {}).get("field") or next(iter(first["loc"][1:]), "body")
    # A field that may have several types has an error for each.
    messages = dict.fromkeys(error["msg"] for error in errors if error["loc"][1:2] == (field,))
    problem = " or ".join(messages) or first["msg"]
    return await _api_error(request, ApiError(400, f"{field}: {problem}", param=str(field)))
