"""Serve an exported model with vLLM and with parcae, and compare them over the openai client.

    python compare.py EXPORTED REFERENCE.json PARCAE

Texts, alone and together, are compared with those of `reference.py`. Then tokens per second with 1,
8 and 32 clients: the best of three rounds, in which the two servers take turns. Runs in vLLM's
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import openai

START_SECONDS = 900
CLIENTS = (1, 8, 32)
ROUNDS = 3
MODEL = "model"
VLLM = (
    "serve {folder} --served-model-name {name} --model-impl transformers --trust-remote-code "
    '--hf-overrides {{"num_loops":{loops}}} '
    "--dtype float32 --enforce-eager --no-enable-prefix-caching --host 127.0.0.1 --port {port}"
)
PARCAE = "serve {name}={folder} --max-batch-size 32 --port {port}"


def main(folder: str, reference: str, parcae: str) -> None:
    expected = json.loads(Path(reference).read_text(encoding="utf-8"))
    vllm_command = str(Path(sys.executable).parent / "vllm")
    names = {"folder": folder, "name": MODEL, "loops": expected["loops"]}
    with serving(vllm_command, VLLM, names) as vllm_port, serving(parcae, PARCAE, names) as ours:
        asyncio.run(compare({"vLLM": vllm_port, "parcae": ours}, expected))


@contextmanager
def serving(program: str, options: str, names: dict) -> Iterator[int]:
    """The port of a server, while the context lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = options.format(**names, port=port).split()
    server = subprocess.Popen(
        [program, *arguments],
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
    )
    try:
        seconds = wait_until_ready(server, f"http://127.0.0.1:{port}/v1/models")
        print(f"{Path(program).name} is up after {seconds:.0f} s")
        yield port
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> float:
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if server.poll() is not None:
            sys.exit(f"the server ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(address, timeout=5):  # noqa: S310 (of this machine)
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"the server was not ready after {START_SECONDS} s")


async def compare(ports: dict[str, int], expected: dict) -> None:
    prompts, texts = expected["prompts"], expected["texts"]
    clients = {
        name: openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for name, port in ports.items()
    }

    async def complete(server: str, prompt: str) -> tuple[str, int]:
        answer = await clients[server].completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=expected["max_new_tokens"],
            temperature=0,
            extra_body={"num_loops": expected["loops"]} if server == "parcae" else None,
        )
        return answer.choices[0].text, answer.usage.completion_tokens

    async def complete_all(server: str, batch: list[str]) -> list[tuple[str, int]]:
        return await asyncio.gather(*(complete(server, prompt) for prompt in batch))

    print(", ".join(f"{name} {version(name)}" for name in ("vllm", "transformers", "torch")))
    print(f"{cpu_name()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    wrong = 0
    for server in ports:
        alone = [(await complete(server, prompt))[0] for prompt in prompts]
        together = [text for text, _ in await complete_all(server, prompts)]
        for name, answers in (("alone", alone), ("together", together)):
            equal = sum(map(str.__eq__, answers, texts))
            print(f"texts of {server} equal to the engine's, {name}: {equal} of {len(texts)}")
            wrong += len(texts) - equal
    best: dict[tuple[str, int], float] = {}
    for _ in range(ROUNDS):
        for count in CLIENTS:
            for server in ports:
                start = time.perf_counter()
                answers = await complete_all(server, (prompts * 2)[:count])
                speed = sum(tokens for _, tokens in answers) / (time.perf_counter() - start)
                best[server, count] = max(best.get((server, count), 0), speed)
    print("clients  " + "  ".join(f"{server:>6} tokens/s" for server in ports))
    for count in CLIENTS:
        print(f"{count:>7}  " + "  ".join(f"{best[server, count]:15.0f}" for server in ports))
    if wrong:
        sys.exit("texts differ")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main(*sys.argv[1:])
