"""Start vLLM's server with an exported model, and compare it with `reference.py` over the openai
client: texts alone and together, and tokens per second with 1, 8 and 32 clients."""

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
from pathlib import Path

import openai
import torch
import transformers
import vllm

START_SECONDS = 300


def main(folder: str, reference: str) -> None:
    expected = json.loads(Path(reference).read_text(encoding="utf-8"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        f"--model {folder} --served-model-name model --model-impl transformers --trust-remote-code "
        f"--dtype float32 --enforce-eager --host 127.0.0.1 --port {port} "
        "--no-enable-prefix-caching"
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
    )
    try:
        started = wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        asyncio.run(compare(port, expected, started))
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> float:
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if server.poll() is not None:
            sys.exit(f"vLLM ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(address, timeout=5):  # noqa: S310 (of this machine)
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"vLLM was not ready after {START_SECONDS} s")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


async def compare(port: int, expected: dict, started: float) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    async def complete(prompt: str) -> tuple[str, int]:
        answer = await client.completions.create(
            model="model", prompt=prompt, max_tokens=expected["max_new_tokens"], temperature=0
        )
        return answer.choices[0].text, answer.usage.completion_tokens

    prompts, texts = expected["prompts"], expected["texts"]
    alone = [(await complete(prompt))[0] for prompt in prompts]
    together = [text for text, _ in await asyncio.gather(*map(complete, prompts))]
    print(", ".join(f"{m.__name__} {m.__version__}" for m in (vllm, transformers, torch)))
    print(f"{cpu_name()}, {os.cpu_count()} cores; up in {started:.0f} s")
    for name, answers in (("alone", alone), ("together", together)):
        equal = sum(map(str.__eq__, answers, texts))
        print(f"texts equal to parcae's, {name}: {equal} of {len(texts)}")
    print("clients  vLLM tokens/s  parcae tokens/s")
    for clients, ours in expected["speed"].items():
        batch = (prompts * 2)[: int(clients)]
        start = time.perf_counter()
        tokens = sum(count for _, count in await asyncio.gather(*map(complete, batch)))
        print(f"{clients:>7}  {tokens / (time.perf_counter() - start):13.0f}  {ours:15.0f}")
    if alone != texts or together != texts:
        sys.exit("texts differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
