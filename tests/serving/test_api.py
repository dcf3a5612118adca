"""The routes, in OpenAI's format; texts are those of the engine."""

from __future__ import annotations

import json

import pytest


def events(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@pytest.mark.parametrize("options", [{}, {"num_loops": 2, "exit": "state:0.5"}, {"draft": 1}])
def test_a_completion_is_the_engines(http, plain_engine, options):
    body = {"prompt": "def ", "max_tokens": 12, "seed": 3, "model": "tiny", **options}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    names = {"num_loops": "loops", "draft": "draft_loops"}
    same = {names.get(key, key): value for key, value in options.items()}
    bos, eos = 0, 1
    expected = plain_engine.generate(
        "def ", new_tokens=12, seed=3, temperature=1.0, stop_tokens=(bos, eos), **same
    )
    tree = answer.json()
    assert tree["choices"][0]["text"] == expected.text
    assert tree["usage"]["completion_tokens"] == len(expected.tokens)
    streamed = events(http.post("/v1/completions", json={**body, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == expected.text
