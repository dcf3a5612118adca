"""Random requests: whatever a client sends, the answer is 200 or an error that names its mistake.

`make test-api` does the same with schemathesis, over the whole OpenAPI schema.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

JSON = {"Content-Type": "application/json"}
TEXTS = st.text(st.characters(), max_size=6)  # with halves of surrogate pairs
NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([0.0, 0.5, 1.0, 1e-320, 1e308, -0.0, 2**63, -(2**63) - 1, 10**400]),
    st.floats(),
)
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
IDS = st.lists(st.integers(0, 320), min_size=1, max_size=4)
EXITS = st.sampled_from(
    ["state:0.5", "kl:1e39", "budget:2", "budget:1e308", "state:nan", "kl:", ":"]
)
FIELDS = {
    "model": st.just("tiny"),
    "max_tokens": st.integers(1, 4),
    "temperature": st.sampled_from([0, 0.7, 5e-324, 2]),
    "top_p": st.sampled_from([1e-320, 0.5, 1]),
    "top_k": st.sampled_from([1, 5, 2**70]),
    "min_p": st.sampled_from([0, 0.5, 1]),
    "repetition_penalty": st.sampled_from([1e-300, 0.5, 10]),
    "n": st.integers(1, 3),
    "seed": st.sampled_from([0, -(2**63), 2**63 - 1]),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": IDS,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "num_loops": st.integers(1, 5),
    "exit": EXITS,
    "draft": st.integers(0, 3),
    "draft_tokens": st.integers(1, 9),
    "return_depths": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "position": st.integers(0, 5),
    "top": st.integers(1, 20),
    "user": JUNK,
}
MESSAGE = st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS})
PATHS = {
    "/v1/completions": {
        "prompt": TEXTS | IDS | st.lists(TEXTS, max_size=2) | st.lists(IDS, max_size=2),
        "logprobs": st.integers(0, 20),
        "echo": st.booleans(),
    },
    "/v1/chat/completions": {
        "messages": st.lists(MESSAGE, max_size=3),
        "logprobs": st.booleans(),
        "max_completion_tokens": st.integers(1, 4),
    },
    "/v1/trace": {"prompt": TEXTS | IDS},
}


@st.composite
def requests(draw) -> tuple[str, dict]:
    """A path and a body: mostly valid fields, some of them of another path, and some junk."""
    path = draw(st.sampled_from(sorted(PATHS)))
    own = PATHS[path]
    body = {name: draw(own[name]) for name in ("prompt", "messages") if name in own}
    body["max_tokens"] = 4
    known = {**FIELDS, **own}
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)):
        body[name] = draw(st.one_of(known[name], known[name], known[name], JUNK))
    if path == "/v1/trace":
        body = {name: body[name] for name in body if draw(st.booleans()) or name == "prompt"}
        body.pop("max_tokens", None)
    return path, body


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(requests())
@example(("/v1/completions", {"prompt": "a", "max_tokens": 2, "exit": "state:1e39"}))
@example(("/v1/completions", {"prompt": "a", "max_tokens": 2, "top_k": 2**70}))
def test_no_request_makes_the_server_fail(http, request):
    path, body = request
    answer = http.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code == 200 and body.get("stream") is not True:
        assert "choices" in answer.json() or "loops" in answer.json()
    elif answer.status_code == 200:
        assert answer.text.endswith("data: [DONE]\n\n"), (body, answer.text)
    else:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
@example(b"[" * 100_000)
@example(b'{"prompt": "a", "n": ' + b"1" * 10_000 + b"}")
@example(b'{"prompt": "a", "seed": -Infinity}')
@example(b'"\\ud800"')
@pytest.mark.slow
def test_no_bytes_make_the_server_fail(http, content):
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text


def test_the_schema_lists_the_errors_that_are_answered(http):
    paths = http.get("/openapi.json").json()["paths"]
    for path in PATHS:
        responses = paths[path]["post"]["responses"]
        assert "422" not in responses, "invalid fields are answered with 400"
        schema = responses["4XX"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert "text/event-stream" in paths["/v1/completions"]["post"]["responses"]["200"]["content"]
