"""The routes, in OpenAI's format; texts are those of the engine."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from oracles import text_model, tokenizer
from parcae.evaluation.loop_trace import trace_loops
from parcae.files import FileError
from parcae.serving.models import ChatTemplate
from parcae.serving.protocol import ApiError, Message
from serving_fixtures import client_of, listening, make_app

STOPS = (0, 1)
"""BOS and EOS, with which the server ends texts."""


def events(response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def choice_of(http, body, path="/v1/completions") -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("options", [{}, {"num_loops": 2, "exit": "state:0.5"}, {"draft": 1}])
def test_a_completion_is_the_engines(http, plain_engine, options):
    body = {"prompt": "def ", "max_tokens": 12, "seed": 3, "model": "tiny", **options}
    names = {"num_loops": "loops", "draft": "draft_loops"}
    same = {names.get(key, key): value for key, value in options.items()}
    expected = plain_engine.generate(
        "def ", max_new_tokens=12, seed=3, temperature=1.0, stop_tokens=STOPS, **same
    )
    tree = http.post("/v1/completions", json={**body, "return_depths": True}).json()
    choice = tree["choices"][0]
    assert choice["text"] == expected.text
    assert [token["id"] for token in choice["parcae"]["tokens"]] == list(expected.tokens)
    assert [token["loops"] for token in choice["parcae"]["tokens"]] == list(expected.loops)
    assert choice["finish_reason"] == {"length": "length", "stop": "stop"}[expected.finish]
    count, prompt = len(expected.tokens), plain_engine.encode("def ")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    assert tree["usage"] == {**usage, "total_tokens": len(prompt) + count}

    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_depths": True}
    *chunks, last = events(http.post("/v1/completions", json=body))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == expected.text
    tokens = [token for part in parts for token in part["parcae"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == expected.text
    assert parts[0]["parcae"]["prompt_token_ids"] == list(prompt)
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert (last["choices"], last["usage"]) == ([], tree["usage"])


def test_prompts_and_n_are_choices_in_order_with_successive_seeds(http, plain_engine):
    body = {"prompt": ["def ", "import "], "n": 2, "seed": 5, "max_tokens": 6}
    tree = http.post("/v1/completions", json=body).json()
    expected = [
        plain_engine.generate(p, max_new_tokens=6, seed=s, temperature=1.0, stop_tokens=STOPS).text
        for p in ("def ", "import ")
        for s in (5, 6)
    ]
    assert [choice["text"] for choice in tree["choices"]] == expected
    prompts = sum(len(plain_engine.encode(p)) for p in ("def ", "import "))
    assert tree["usage"]["prompt_tokens"] == prompts
    streamed = events(http.post("/v1/completions", json={**body, "stream": True}))
    for index, text in enumerate(expected):
        parts = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == text


@pytest.mark.slow
def test_ids_echo_stop_and_a_random_seed(http, plain_engine):
    ids = list(plain_engine.encode("import "))
    given = {"max_tokens": 8, "seed": 1, "temperature": 0}
    text = choice_of(http, {"prompt": "import ", **given})["text"]
    assert choice_of(http, {"prompt": ids, **given})["text"] == text
    assert choice_of(http, {"prompt": "import ", "echo": True, **given})["text"] == "import " + text
    stop = text[3:5]
    ended = choice_of(http, {"prompt": "import ", "stop": ["\0", stop], **given})
    assert (ended["text"], ended["finish_reason"]) == (text[: text.index(stop)], "stop")
    body = {"prompt": "a", "max_tokens": 12}
    assert len({choice_of(http, body)["text"] for _ in range(4)}) > 1


def test_logprobs_in_both_formats(http, plain_engine):
    body = {"prompt": "höhe", "max_tokens": 8, "seed": 2}
    expected = plain_engine.generate(
        "höhe", max_new_tokens=8, seed=2, temperature=1.0, logprobs=3, stop_tokens=STOPS
    )
    assert expected.logprobs is not None
    choice = choice_of(http, {**body, "logprobs": 3})
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx([e.logprob for e in expected.logprobs])
    assert [len(top) for top in found["top_logprobs"]] == [3] * len(expected.tokens)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert choice_of(http, {**body, "logprobs": 0})["logprobs"]["top_logprobs"] is None
    assert choice_of(http, body)["logprobs"] is None
    streamed = events(http.post("/v1/completions", json={**body, "logprobs": 3, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in streamed]
    assert [value for part in parts for value in part] == found["token_logprobs"]

    message = {"role": "user", "content": "hi"}
    chat = {"messages": [message], "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 2}
    content = choice_of(http, chat, "/v1/chat/completions")["logprobs"]["content"]
    assert 1 <= len(content) <= 4
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert math.exp(entry["top_logprobs"][0]["logprob"]) <= 1


def test_a_chat_without_a_template_is_lines_of_names(http, plain_engine):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    body = {"messages": messages, "seed": 1, "max_completion_tokens": 6}
    choice = choice_of(http, body, "/v1/chat/completions")
    expected = plain_engine.generate(
        "System: x\nUser: hi\nAssistant:",
        max_new_tokens=6,
        seed=1,
        temperature=1.0,
        stop=("\nUser:", "\nSystem:"),
        stop_tokens=STOPS,
    )
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    streamed = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == expected.text


def test_the_tokenizers_template_is_used_in_a_sandbox(tmp_path):
    template = "{% for m in messages %}<|bos|>{{ m.role }}:{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    config = {"eos_token": {"content": "<|pad|>"}, "chat_template": "other"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = ChatTemplate.read(tmp_path, tokenizer())
    ids = chat.encode([Message(role="user", content="hi")])
    assert ids == [0, *tokenizer().encode("user:hi")]
    assert chat.stop_tokens == (tokenizer().backend_tokenizer.token_to_id("<|pad|>"),)
    for code in ("{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        with pytest.raises(ApiError, match="refuses"):
            ChatTemplate(tokenizer(), code).encode([Message(role="user", content="hi")])


def test_a_message_cannot_write_special_tokens():
    """Only the template can; also where it changes the text of a message."""
    template = "{% for m in messages %}<|bos|>{{ m.content | trim }}<|eos|>{% endfor %}"
    chat = ChatTemplate(tokenizer(), template)
    plain = tokenizer().encode
    for text in ("<|bos|>", "a <|eos|><|bos|>b", "<|<|eos|>eos|>"):
        ids = chat.encode([Message(role="user", content=text)])
        assert (ids[0], ids[-1], [token for token in ids[1:-1] if token < 3]) == (0, 1, [])
        assert tokenizer().decode(ids[1:-1]) == text
    cut = "{{ messages[0].content.split('<|eos|>')[1:] | join('') }}<|bos|>"
    ids = ChatTemplate(tokenizer(), cut).encode([Message(role="user", content="a<|eos|>b<|pad|>")])
    assert [token for token in ids if token < 3] == [0]
    expected = [0, *plain("hi"), 1]
    assert chat.encode([Message(role="user", content=" hi ")]) == expected


@pytest.mark.timeout(20)
def test_a_template_that_cannot_be_used(tmp_path):
    ChatTemplate(tokenizer(), "{{ 9 ** 9 ** 9 }}")  # not computed before it is needed
    path = tmp_path / "tokenizer_config.json"
    deep = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
    for config in ([], {"chat_template": 3}, {"chat_template": "{% for"}, {"chat_template": deep}):
        path.write_text(json.dumps(config))
        with pytest.raises(FileError, match="no valid chat template"):
            ChatTemplate.read(tmp_path, tokenizer())
    path.write_text("[" * 100_000)
    with pytest.raises(FileError, match="not valid JSON"):
        ChatTemplate.read(tmp_path, tokenizer())


def test_a_trace_is_that_of_trace_loops(http, plain_engine):
    ids = list(plain_engine.encode("def main"))
    tree = http.post("/v1/trace", json={"prompt": "def main", "num_loops": 3, "top": 2}).json()
    trace = trace_loops(text_model(), [*ids, 5], loops=3)
    assert tree["position"] == len(ids) - 1
    assert tree["token"]["id"] == ids[-1]
    assert [loop["loop"] for loop in tree["loops"]] == [1, 2, 3]
    for loop, row in zip(tree["loops"], range(3), strict=True):
        assert loop["residual"] == pytest.approx(float(trace.change[row, -1]))
        assert loop["top"][0]["id"] == int(trace.predicted[row, -1])
        assert len(loop["top"]) == 2
    shorter = http.post("/v1/trace", json={"prompt": ids, "position": 1, "num_loops": 3}).json()
    alone = http.post("/v1/trace", json={"prompt": ids[:2], "num_loops": 3}).json()
    assert shorter == alone


@pytest.mark.slow
def test_traces_are_computed_in_turn_for_clients_that_are_there(monkeypatch):
    gate, traced = threading.Semaphore(0), []

    def trace(model, tokens, *arguments):
        traced.append(len(tokens))
        gate.acquire()
        return []

    monkeypatch.setattr("parcae.serving.app.trace_next_token", trace)
    app = make_app(max_waiting=2, max_choices=1)

    def post(length: int) -> httpx.Response:
        body = {"prompt": [5] * length}
        return httpx.post(f"{url}/v1/trace", json=body, timeout=0.3 if length == 2 else 60)

    with listening(app) as url, ThreadPoolExecutor() as pool:
        first = pool.submit(post, 1)
        wait_until(lambda: traced == [1])
        with pytest.raises(httpx.ReadTimeout):
            post(2)
        refused = post(3)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        gate.release(3)
        assert first.result().status_code == 200
        wait_until(lambda: app.state.traces == 0)
        assert post(4).status_code == 200
    assert traced == [1, 4]


def test_models(http):
    tree = http.get("/v1/models").json()
    assert [card["id"] for card in tree["data"]] == ["tiny"]
    depths = {"looped": True, "default_loops": 4, "max_loops": 16, "context_length": 64}
    assert tree["data"][0]["parcae"] == {**depths, "exit_rules": ["budget", "kl", "state"]}
    assert http.get("/v1/models/tiny").json() == tree["data"][0]


WRONG = [
    ({"prompt": 3}, "prompt"),
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": "a" * 400}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a", "num_loop": 3}, "num_loop"),
    ({"prompt": "a", "num_loops": 17}, "num_loops"),
    ({"prompt": "a", "num_loops": 2.5}, "num_loops"),
    ({"prompt": "a", "exit": "state"}, "exit"),
    ({"prompt": "a", "exit": "none:1"}, "exit"),
    ({"prompt": "a", "draft": 4}, "draft"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 65}, "max_tokens"),
    ({"prompt": "a", "n": 17}, "n"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "warm"}, "temperature"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    ({"prompt": "a", "stop_token_ids": [5000]}, "stop_token_ids"),
    ({"prompt": "a", "stream_options": {"include_usage": "yes"}}, "stream_options"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_wrong_request_is_answered_in_openais_format(http, body, param):
    content = json.dumps(body)
    answer = http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 2}),
        ("/v1/trace", {"prompt": "a", "position": 60}),
        ("/v1/trace", {"prompt": "a", "num_loops": 17}),
        ("/v1/trace", {"prompt": [5000]}),
    ],
)
def test_other_wrong_requests(http, path, body):
    assert http.post(path, json=body).status_code == 400


def test_fields_of_openai_that_have_no_effect_are_accepted(http):
    body = {"prompt": "a", "max_tokens": 1, "user": "x", "presence_penalty": 0, "best_of": 1}
    assert choice_of(http, {**body, "logit_bias": None, "temperature": None, "stop": None})


def test_unknown_models_paths_and_methods(http):
    answer = http.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/settings.py", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("OPTIONS", "/v1/completions", 405),
    ):
        answer = http.request(method, path)
        assert answer.status_code == status
        assert "message" in answer.json()["error"]


def test_health_and_metrics(http, served_app):
    assert http.get("/health").json() == {"status": "ok"}
    before = _metrics(http)
    choice_of(http, {"prompt": "def ", "max_tokens": 5, "num_loops": 3, "temperature": 0})
    after = _metrics(http)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert 1 <= grown("parcae_tokens_total") <= 5
    assert grown("parcae_loops_total") == 3 * grown("parcae_tokens_total")
    assert grown("parcae_first_token_seconds_count") == 1
    assert grown("parcae_batch_size_count") >= grown("parcae_tokens_total")
    assert after["parcae_cache_bytes"] > 0
    assert after["parcae_queue_waiting"] == 0


def _metrics(http) -> dict[str, float]:
    """Sums over labels, by Prometheus' own parser."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


@pytest.fixture
def slow_server():
    """A server with one row whose steps wait for `gate`, and a client of it."""
    app = make_app(max_batch_size=1, max_waiting=2, max_choices=1)
    model = app.state.models["tiny"]
    gate, step = threading.Semaphore(0), model.engine.step
    model.engine.step = lambda: (gate.acquire(), step())[1]
    with listening(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, model.scheduler, gate
        gate.release(10_000)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(slow_server, stream):
    client, scheduler, gate = slow_server
    body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": stream}
    if stream:
        gate.release(3)
    with httpx.Client(base_url=client.base_url, timeout=60) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.5)

    def freed() -> bool:  # steps go on slowly until the server notices
        gate.release(1)
        time.sleep(0.05)
        return scheduler.running == 0

    wait_until(freed)
    gate.release(1000)
    assert choice_of(client, {"prompt": "a", "max_tokens": 2})
    assert scheduler.metrics.tokens < 50


@pytest.mark.slow
def test_a_full_queue_answers_429_with_retry_after(slow_server):
    client, scheduler, gate = slow_server
    body = {"prompt": "a", "max_tokens": 4}
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(f"{client.base_url}/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=post) for _ in range(3)]
    threads[0].start()
    wait_until(lambda: scheduler.running == 1)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: scheduler.waiting == 2)
    refused = client.post("/v1/completions", json={**body, "stream": True})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    gate.release(1000)
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200] * 3


def test_an_error_after_the_first_token_is_an_event(slow_server):
    client, scheduler, gate = slow_server
    gate.release(3)
    body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        scheduler._running[0].seconds = 0.0
        gate.release(1000)
        last = [line for line in lines if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "timeout"


@pytest.mark.slow
def test_a_stopping_server_answers_503(slow_server):
    client, scheduler, _ = slow_server
    scheduler.drain()
    assert client.get("/health").status_code == 503
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.slow
def test_the_default_depth_is_within_the_limit(plain_engine):
    app = make_app(max_loops=2)
    with client_of(app) as client:
        assert client.get("/v1/models").json()["data"][0]["parcae"]["default_loops"] == 2
        body = {"prompt": "def ", "max_tokens": 4, "seed": 1, "return_depths": True}
        choice = choice_of(client, body)
        assert {token["loops"] for token in choice["parcae"]["tokens"]} == {2}
        assert len(client.post("/v1/trace", json={"prompt": "def "}).json()["loops"]) == 2


@pytest.mark.slow
def test_a_request_larger_than_the_cache_is_refused():
    app = make_app(cache_gib=1e-5)
    with listening(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 60})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
