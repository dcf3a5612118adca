"""The files of `deploy` work with each other and with the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from parcae.cli import parser
from serving_fixtures import listening, make_app

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "models.example.org"


def options(command: list[str]):
    return parser().parse_args(command[command.index("serve") :])


def test_the_unit_starts_a_server_that_the_proxy_reaches(tmp_path):
    unit, proxy = (DEPLOY / "parcae.service").read_text(), (DEPLOY / "nginx.conf").read_text()
    [command] = re.findall(r"^ExecStart=(.*)", unit, re.MULTILINE)
    served = options(shlex.split(command))
    assert served.allowed_host == re.findall(r"server_name (.*);", proxy) == [NAME]
    assert f"proxy_pass http://{served.host}:{served.port};" in proxy
    assert f'"{served.host}:{served.port}"' in (DEPLOY / "prometheus.yml").read_text()
    assert "PARCAE_API_KEY" not in unit
    if shutil.which("systemd-analyze"):
        (tmp_path / "parcae.service").write_text(unit.replace(command.split()[0], "/bin/true"))
        subprocess.run(["systemd-analyze", "verify", tmp_path / "parcae.service"], check=True)


def test_the_container_is_given_its_keys_in_a_file():
    lines = (DEPLOY / "Containerfile").read_text()
    arguments = [json.loads(line) for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)", lines, re.M)]
    served = options([*arguments[0], *arguments[1]])
    assert f"-v ./keys:{served.api_key_file}:ro" in lines
    [cache] = re.findall(r"^VOLUME (.*)", lines, re.M)
    assert f"ENV XDG_CACHE_HOME={cache}\n" in lines
    assert "HEALTHCHECK" in lines


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="nginx is not installed"
)
def test_the_proxy_serves_the_page_and_streams(tmp_path):
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl = ["openssl", "req", "-x509", *kind, *names, *files]
    subprocess.run(openssl, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = make_app(api_keys=["key"], allowed_hosts=[NAME])
    with listening(app) as url:
        site = (DEPLOY / "nginx.conf").read_text().replace("http://127.0.0.1:8000", url)
        site = site.replace("listen 443", f"listen 127.0.0.1:{port}")
        site = re.sub(r"/etc/letsencrypt\S*/fullchain.pem", f"{tmp_path}/cert.pem", site)
        site = re.sub(r"/etc/letsencrypt\S*/privkey.pem", f"{tmp_path}/key.pem", site)
        scratch = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {scratch} {site} }}\n"
        )
        proxy = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
        try:
            wait_for(port)
            verify = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
            base = f"https://127.0.0.1:{port}"
            with httpx.Client(base_url=base, verify=verify, timeout=60) as client:
                check(client, f"{NAME}:{port}")
        finally:
            proxy.terminate()
            proxy.wait()


def check(client: httpx.Client, host: str) -> None:
    same = {"extensions": {"sni_hostname": NAME}}
    headers = {"Host": host, "Origin": f"https://{host}", "Authorization": "Bearer key"}
    assert "<title>parcae" in client.get("/", headers={"Host": host}, **same).text
    asked = {"prompt": "a", "max_tokens": 8, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked, headers=headers, **same) as answer:
        assert answer.status_code == 200
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
    assert "parcae_tokens_total" in client.get("/metrics", headers=headers, **same).text
    other = {**headers, "Host": "evil.example"}
    assert client.get("/health", headers=other, **same).status_code == 421
    foreign = {**headers, "Origin": "https://evil.example"}
    assert client.get("/health", headers=foreign, **same).status_code == 403


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("nginx does not listen")
