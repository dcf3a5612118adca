"""What is refused before a request is parsed, and what answers and logs do not contain."""

from __future__ import annotations

import logging

import httpx
import pytest

from parcae.config import ConfigError
from parcae.serving.security import HEADERS
from parcae.serving.server import is_loopback, serve
from serving_fixtures import client_of, make_app

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def guarded():
    """With two keys, an allowed name and a small limit."""
    app = make_app(api_keys=["first", "sécond"], allowed_hosts=["Models.lan"], max_body_bytes=2000)
    with client_of(app) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("10.0.0.5:80", 200),
        ("models.lan", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.com\\@127.0.0.1", 421),
        ("evil.com@127.0.0.1", 421),
        ("127.0.0.1/evil.com", 421),
        ("127.0.0.1?evil.com", 421),
        ("[::1", 421),
        ("127.0.0.1:x", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_names_in_the_host_header_must_be_known(guarded, host, status):
    assert guarded.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://evil.example", 403),
        ("http://localhost:9", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://[::1", 403),
    ],
)
def test_other_origins_are_refused_and_never_allowed(guarded, origin, status):
    answer = guarded.get("/health", headers={"Origin": origin})
    assert answer.status_code == status
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic first", 401),
        ("Bearer firs", 401),
        ("Bearer first", 200),
        ("bearer sécond", 200),
    ],
)
def test_a_key_is_needed(guarded, value, status):
    headers = {} if value is None else {"Authorization": value.encode()}
    answer = guarded.get("/v1/models", headers=headers)
    assert answer.status_code == status
    for path in ("/metrics", "/openapi.json", "/v1/nothing"):
        assert guarded.get(path).status_code == 401
    assert guarded.get("/").status_code == guarded.get("/health").status_code == 200


def test_keys_are_compared_in_constant_time(guarded, monkeypatch):
    import hmac

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    guarded.get("/v1/models", headers={"Authorization": "Bearer first"})
    assert compared == [(b"first", b"first"), (b"first", "sécond".encode())]


def test_bodies_are_json_of_limited_size():
    app = make_app(max_body_bytes=2000)
    with client_of(app) as client:

        def status(content, **headers) -> int:
            return client.post(
                "/v1/completions", content=content, headers={**JSON, **headers}
            ).status_code

        large = b'{"prompt": "' + b"a" * 3000 + b'"}'
        assert status(large) == 413
        assert status(iter([large[:1500], large[1500:]])) == 413, "without a length"
        assert status(b"{}", **{"Content-Length": "9" * 5000}) == 413
        assert status(b"{}", **{"Content-Type": "text/plain"}) == 415
        for broken in (b"", b"{", b"[" * 1900, b'{"prompt": NaN}', b'{"n": ' + b"1" * 1900 + b"}"):
            assert status(broken) == 400, broken[:20]
        for broken in (rb'{"\ud800": 1}', b'{"\xed\xa0\x80": 1}', b'{"prompt": "\xff"}'):
            assert status(broken) == 400, broken


def test_the_number_of_requests_is_limited(monkeypatch):
    from parcae.serving import security

    app = make_app()
    with client_of(app) as client:
        assert client.get("/v1/models").status_code == 200
        monkeypatch.setattr(security, "MAX_REQUESTS", 0)
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert client.get("/health").status_code == 200
        monkeypatch.setattr(security, "MAX_REQUESTS", 1)
        assert client.get("/v1/models").status_code == 200, "those that have ended do not count"


@pytest.mark.slow
def test_every_answer_has_the_headers_and_pages_run_no_other_code(guarded):
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/", "/health", "/v1/models", "/nothing"):
        answer = guarded.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_errors_and_logs_contain_no_prompt_path_or_trace(caplog, monkeypatch):
    monkeypatch.delenv("PARCAE_DEBUG", raising=False)
    app = make_app()
    model = app.state.models["tiny"]
    with client_of(app) as client, caplog.at_level(logging.DEBUG, "parcae"):
        bodies = [
            {"prompt": "SECRET", "max_tokens": 2},
            {"prompt": "SECRET", "temperature": 9},
            {"prompt": ["SECRET", 1]},
            {"prompt": "SECRET" * 100},
        ]
        answers = [client.post("/v1/completions?SECRET", json=body) for body in bodies]
        assert [answer.status_code for answer in answers] == [200, 400, 400, 400]

        def broken(*arguments):
            raise RuntimeError("SECRET")

        monkeypatch.setattr(model, "requests", broken)
        answers.append(client.post("/v1/completions", json=bodies[0]))
        assert answers[-1].status_code == 500
        assert answers[-1].json()["error"]["code"] == "internal"
    texts = [answer.text for answer in answers[1:]] + [caplog.text]
    for text in texts:
        assert "SECRET" not in text
        assert "Traceback" not in text
        assert ".py" not in text.replace("security.py", "").replace("scheduler.py", "")
    assert "RuntimeError" in caplog.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],  # noqa: S104
)
def test_other_addresses_need_a_key(host, expected):
    assert is_loopback(host) == expected
    if not expected:
        with pytest.raises(ConfigError, match="no API key"):
            serve("nothing", host=host)


@pytest.mark.slow
def test_a_slow_body_is_given_up(monkeypatch):
    from parcae.serving import security
    from serving_fixtures import listening

    monkeypatch.setattr(security, "BODY_SECONDS", 0.2)
    app = make_app()
    with listening(app) as url:
        import socket

        host, port = httpx.URL(url).host, httpx.URL(url).port
        with socket.create_connection((host, port)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
            connection.sendall((head + "Content-Type: application/json\r\n\r\n{").encode())
            connection.settimeout(30)
            assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]


def test_rows_are_shared_among_as_many_keys_as_there_are(guarded):
    assert [model.scheduler.keys for model in guarded.app.state.models.values()] == [2]
