"""The official `openai` client, and LangChain's."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from serving_fixtures import listening, make_app

STOPS = (0, 1)


@pytest.fixture(scope="module")
def openai():
    """The package, which takes a second to import: only a process that runs these tests does."""
    import openai

    return openai


@pytest.fixture(scope="module")
def client(openai, server_url):
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(plain_engine, **options) -> str:
    return plain_engine.generate(
        "import ", max_new_tokens=10, temperature=1.0, stop_tokens=STOPS, **options
    ).text


def test_completions(client, plain_engine):
    answer = client.completions.create(
        model="tiny",
        prompt="import ",
        max_tokens=10,
        seed=4,
        extra_body={"num_loops": 2, "return_depths": True},
    )
    assert answer.choices[0].text == expected(plain_engine, seed=4, loops=2)
    assert {token["loops"] for token in answer.choices[0].parcae["tokens"]} == {2}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_streams_and_chat(client, plain_engine):
    stream = client.completions.create(
        model="tiny", prompt="import ", max_tokens=10, seed=4, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected(plain_engine, seed=4)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    common = {"model": "tiny", "messages": messages, "seed": 1, "max_completion_tokens": 6}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=1)
    assert whole.choices[0].logprobs.content[0].top_logprobs
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_asynchronous_requests_share_the_engine(openai, server_url, plain_engine):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
            calls = (
                client.completions.create(model="tiny", prompt="import ", max_tokens=10, seed=seed)
                for seed in range(8)
            )
            answers = await asyncio.gather(*calls)
            stream = await client.completions.create(
                model="tiny", prompt="import ", max_tokens=10, seed=8, stream=True
            )
            streamed = [chunk.choices[0].text async for chunk in stream]
            return [answer.choices[0].text for answer in answers] + ["".join(streamed)]

    assert asyncio.run(run()) == [expected(plain_engine, seed=seed) for seed in range(9)]


def test_cancellation(openai, client, server_url, served_app):
    scheduler = served_app.state.models["tiny"].scheduler

    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:
            call = client.completions.create(model="tiny", prompt="a", max_tokens=60, n=8)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.05)

    stream = client.completions.create(model="tiny", prompt="a", max_tokens=60, stream=True)
    next(iter(stream))
    stream.close()
    asyncio.run(cancel())
    deadline = time.monotonic() + 30
    while scheduler.running or scheduler.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_errors_are_the_clients_own(openai, client):
    call = client.completions.create
    with pytest.raises(openai.NotFoundError):
        call(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as error:
        call(model="tiny", prompt="a", extra_body={"num_loops": 99})
    assert (error.value.param, error.value.type) == ("num_loops", "invalid_request_error")
    with pytest.raises(openai.BadRequestError):
        call(model="tiny", prompt="a", presence_penalty=1.5)


@pytest.mark.slow
def test_errors_of_the_server_are_the_clients_own(openai):
    app = make_app(api_keys=["right"])
    model = app.state.models["tiny"]
    step = model.engine.step
    model.engine.step = lambda: (time.sleep(0.05), step())[1]
    with listening(app) as url:
        options = {"base_url": f"{url}/v1", "max_retries": 0}
        wrong = openai.OpenAI(**options, api_key="wrong")
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(**options, api_key="right") as client:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 60, "temperature": 0}
            stream = iter(client.completions.create(**body, stream=True))
            next(stream)
            model.scheduler._waiting.size = 0
            with pytest.raises(openai.RateLimitError) as error:
                client.completions.create(**body)
            assert error.value.response.headers["retry-after"] == "2"
            model.scheduler.end()
            with pytest.raises(openai.APIError, match="stopping"):
                list(stream)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(**body)


@pytest.mark.slow
def test_langchain(server_url, plain_engine):
    from langchain_openai import ChatOpenAI, OpenAI  # two seconds, which `make check` does not need

    options = {"base_url": f"{server_url}/v1", "api_key": "none", "model": "tiny"}
    text = OpenAI(**options, max_tokens=10, seed=4, temperature=1.0)
    assert text.invoke("import ") == expected(plain_engine, seed=4)
    assert "".join(text.stream("import ")) == expected(plain_engine, seed=4)
    chat = ChatOpenAI(**options, max_tokens=6, seed=4, extra_body={"num_loops": 2})
    answer = chat.invoke([("system", "x"), ("user", "hi")])
    assert answer.usage_metadata["output_tokens"] >= 1
    streamed = "".join(
        str(chunk.content) for chunk in chat.stream([("system", "x"), ("user", "hi")])
    )
    assert streamed == answer.content
