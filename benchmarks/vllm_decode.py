"""Milliseconds per token beside vLLM on a CPU, with a Llama of the same work per token.

    scripts/vllm/install
    python benchmarks/vllm_decode.py [--rounds 10] [--threads 2] [--no-bfloat16]

vLLM decodes a Llama with random weights: the width, heads and vocabulary of parcae-140m, as many
layers as a token passes here with 8 loops, and MLPs of three matrices with as many multiply-adds as
our two. Each of its layers has its own weights, so it has more of them to read than we have; the
command prints both. vLLM also decodes parcae-140m itself, by the code that `parcae export` writes,
in eager mode.

Each instance of vLLM has a process, and all take turns with passes of decode.py. Greedy, 256 tokens
in the cache; times of vLLM are those of single steps of its engine, without the server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import decode
import parcae
from parcae.hub.remote_code import AUTO_MAP, write_code
from parcae.infer.network import open_network
from parcae.infer.quantise import WeightDType
from parcae.machine import keep_freed_memory
from parcae.model.hf_format import MODEL_TYPE, to_hf_config

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 16)
LOOPS = 8
OURS: tuple[WeightDType, ...] = ("float32", "bfloat16", "int8")
BASE = "vLLM, Llama, float32"
STEPS = 8
"""Steps of a turn."""
PAUSE = 0.3
"""Seconds between turns: threads of Intel's OpenMP spin for 0.2 seconds before they sleep."""

Turn = Callable[[int], list[float]]
"""Seconds per token of some steps, for a number of sequences."""


def llama(config: parcae.ModelConfig) -> dict[str, Any]:
    """The configuration of a Llama whose tokens pass as many layers of the same work."""
    block = config.block
    layers = config.prelude_layers + LOOPS * config.core_layers + config.coda_layers
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": block.width,
        "intermediate_size": 2 * block.mlp_width // 3,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "num_hidden_layers": layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
    }


def print_work(model) -> None:
    """Multiply-adds with weights per token, and the weights."""
    ours, once = (decode.Limit(model, loops, 1).weights for loops in (LOOPS, 1))
    shape = llama(model.config)
    width = shape["hidden_size"]
    layer = 4 * width**2 + 3 * width * shape["intermediate_size"]
    theirs = shape["num_hidden_layers"] * layer + width * shape["vocab_size"]
    for name, work, weights in (("parcae-140m", ours, once), ("Llama", theirs, theirs)):
        print(
            f"{name:32s} {work / 1e6:.1f} million multiply-adds per token, with "
            f"{4 * weights / 2**20:.0f} MiB of weights (float32)"
        )


def write_llama(folder: Path, model) -> None:
    (folder / "config.json").write_text(json.dumps(llama(model.config)), encoding="utf-8")


def write_parcae(folder: Path, model) -> None:
    """What `parcae export` writes, without weights and tokenizer."""
    config = {
        "architectures": ["ParcaeForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": MODEL_TYPE,
        **to_hf_config(model.config),
        "num_loops": LOOPS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_code(folder)


EXPORTED = {"model_impl": "transformers", "trust_remote_code": True, "enforce_eager": True}
VLLM: dict[str, tuple[Callable[[Path, Any], None], dict[str, Any]]] = {
    # name: (what writes the model's folder, arguments of vllm.LLM)
    BASE: (write_llama, {"dtype": "float32"}),
    "vLLM, Llama, bfloat16": (write_llama, {"dtype": "bfloat16"}),
    "vLLM, parcae-140m, float32": (write_parcae, {"dtype": "float32", **EXPORTED}),
}


@contextmanager
def open_vllm(
    home: Path, folder: Path, options: dict[str, Any], context: int, threads: int
) -> Iterator[Turn]:
    """Turns of a process of vLLM's environment, with its engine in the same process: in another,
    sequences would arrive one by one."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if (openmp := home / "lib" / "libiomp5.so").exists():
        environment["LD_PRELOAD"] = str(openmp)  # as vLLM recommends
    command = [home / "bin" / "python", ROOT / "scripts/vllm/decode.py", folder]
    numbers = map(str, (context, max(ROWS), STEPS))
    process = subprocess.Popen(
        [*map(str, command), json.dumps(options), *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )

    def turn(rows: int) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(rows, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"vLLM ended with code {process.wait()}")
        return [seconds / rows for seconds in json.loads(answer)]

    try:
        yield turn
    finally:
        process.terminate()
        process.wait(timeout=60)


def our_turns(model, weights: WeightDType, context: int) -> Turn:
    network = open_network(model, weights, "auto")
    cache = decode.filled_cache(network, max(ROWS), LOOPS, context)
    passes = {rows: decode.decode_pass(network, cache, rows, LOOPS, context) for rows in ROWS}

    @torch.no_grad()
    def turn(rows: int) -> list[float]:
        taken = []
        for _ in range(STEPS):
            start = time.perf_counter()
            passes[rows]()
            taken.append((time.perf_counter() - start) / rows)
        return taken

    return turn


def measure(
    model, home: Path, rounds: int, context: int, threads: int, without: str | None
) -> dict[str, list[float]]:
    """Seconds per token of every step, by candidate and number of sequences.

    `without`: a dtype that is left out.
    """
    ours: list[WeightDType] = [weights for weights in OURS if weights != without]
    turns = {f"ours, {weights}": our_turns(model, weights, context) for weights in ours}
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name, (write, options) in VLLM.items():
            if options["dtype"] == without:
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write(folder, model)
            opened = open_vllm(home, folder, options, context, threads)
            turns[name] = stack.enter_context(opened)
            turns[name](1)  # wait until it has started
        for repetition in range(rounds + 1):
            for rows in ROWS:
                for name, turn in turns.items():
                    time.sleep(PAUSE)
                    seconds = turn(rows)
                    if repetition:  # the first reads prompts and warms up
                        taken.setdefault(f"{name}, {rows}", []).extend(seconds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each candidate")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm", help="its environment")
    parser.add_argument("--no-bfloat16", action="store_true", help="slow without AVX-512")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    without = "bfloat16" if arguments.no_bfloat16 else None
    home = arguments.vllm.resolve()
    if not (home / "bin" / "python").exists():
        parser.error(f"{home} is not an environment with vLLM; scripts/vllm/install makes it")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    model = decode.filled(parcae.create("parcae-140m"))
    taken = measure(model, home, arguments.rounds, arguments.context, arguments.threads, without)
    print(f"{decode.cpu_name()}, {arguments.threads} threads, context {arguments.context}")
    print_work(model)
    print(f"{'sequences':32s} {'ms, minimum':>11s} {'median':>8s} {'by minima':>11s} by medians")
    for rows in ROWS:
        base = taken[f"{BASE}, {rows}"]
        for name in (name for name in taken if name.endswith(f", {rows}")):
            least, median = min(taken[name]), statistics.median(taken[name])
            ratios = min(base) / least, statistics.median(base) / median
            print(
                f"{name:32s} {1e3 * least:11.2f} {1e3 * median:8.2f} "
                f"{ratios[0]:10.2f}x {ratios[1]:9.2f}x"
            )
    print(f"ratios: time per token of {BASE!r} over it")
    if arguments.out:
        arguments.out.write_text(json.dumps(taken, indent=2) + "\n")


if __name__ == "__main__":
    main()
