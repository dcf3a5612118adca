"""Tokens per second at the shape of parcae-140m, compared with alternatives.

    python benchmarks/decode.py [--seconds 60] [--loops 8] [--context 256] [--threads 2] [--quick]

Random weights, greedy, float32 unless stated otherwise. All candidates take turns in one process,
in many short repetitions; times are minima and medians of wall-clock time. With --cpu-time and one
thread they are times of the thread, from which other programs on the machine take less.

    products alone   only the matrix-vector products of one token in PyTorch, over the same bytes
    limit            the shortest time by this machine's best rates, measured in the same run: the
                     larger of arithmetic and of reading weights and cache once, fully overlapped
    native, torch    passes in C++ and in PyTorch, with 1, 16 and 64 sequences
    bf16 cache       keys and values in bfloat16
    no cache         the prefix is computed again for every token (benchmarks/reference.py)
    transformers     GPT-2 with as many layers as a token passes here, same width, with its cache;
                     omitted if transformers is not installed (pip install -e .[hf])
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import parcae
import reference
from parcae.infer.batch import Batch, Span
from parcae.infer.cache import Cache, CacheDType
from parcae.infer.native.kernels import Kernels, KernelsUnavailable
from parcae.infer.network import AnyNetwork, open_network
from parcae.infer.quantise import FloatMatrix
from parcae.machine import keep_freed_memory

ROWS = (1, 16, 64)
BASE = "native, 1"


def filled_cache(
    network: AnyNetwork, rows: int, loops: int, context: int, dtype: CacheDType = "float32"
) -> Cache:
    """Random keys and values of `rows` sequences of `context` tokens, and room for a token each."""
    cache = network.model.cache(dtype=dtype)
    cache.reserve(rows, context + 1, loops)
    for part in (cache.outer, cache.core):
        part.normal_(std=0.1)
    return cache


def decode_pass(
    network: AnyNetwork, cache: Cache, rows: int, loops: int, context: int
) -> Callable[[], object]:
    """A pass that adds a token to each of `rows` sequences with `context` tokens in the cache."""
    batch = Batch(
        [Span(row, context) for row in range(rows)], list(range(rows)), network.model.device
    )
    return lambda: network.forward(batch, cache, [loops] * rows).logits.argmax(1)


def without_cache(model, loops: int, context: int) -> Callable[[], None]:
    prompt = torch.randint(model.config.vocab_size, (context,)).tolist()

    def one_token() -> None:
        reference.generate(model, prompt, max_new_tokens=1, loops=loops, temperature=0)

    return one_token


def products(model, loops: int) -> Callable[[], None]:
    """The products of one token with every weight matrix, in the order of a pass."""
    parts = (model.prelude.blocks, model.loop.core.blocks, model.coda.blocks)
    prelude, core, coda = ([_fused(block) for block in part] for part in parts)
    readout = model.coda.readout.weight.detach()
    injection = model.loop.core.injection.B.detach()
    order = [*prelude, [injection], *core * loops, [readout], *coda, [model.unembedding.detach()]]
    weights = [weight for block in order for weight in block]
    inputs = {w.shape[1]: torch.randn(1, w.shape[1]) for w in weights}

    @torch.no_grad()
    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return multiply


class Limit:
    """The shortest time of a token that the machine's arithmetic and memory allow.

    The rates are the best of many short products, in PyTorch or C++: with a matrix that stays in
    the L2 cache, and of one token with a matrix larger than the caches.
    """

    def __init__(self, model, loops: int, context: int) -> None:
        config = model.config
        parts = (model.prelude.blocks, model.loop.core.blocks, model.coda.blocks)
        others = (model.coda.readout.weight, model.loop.core.injection.B, model.unembedding)
        self.weights = sum(weight.numel() for weight in others)
        for part, times in zip(parts, (1, loops, 1), strict=True):
            self.weights += times * sum(w.numel() for block in part for w in _fused(block))
        passes = config.prelude_layers + loops * config.core_layers + config.coda_layers
        self.cached = 2 * passes * context * config.width
        self.kernels = Kernels()
        self.small = FloatMatrix(torch.randn(128, 768))
        self.large = FloatMatrix(model.unembedding.detach())
        self.tokens, self.token = torch.randn(96, 768), torch.randn(1, config.width)
        self.seconds_per_flop = self.seconds_per_byte = float("inf")
        self.in_turns: list[float] = []
        """The best seconds per FLOP of each turn: where the cores are shared with others, these
        vary, and a long pass cannot have the best of all turns."""

    def measure(self, clock: Callable[[], float]) -> None:
        """Time both kinds of products once more."""

        def seconds(multiply: Callable[..., object], matrix: FloatMatrix, x: torch.Tensor) -> float:
            start = clock()
            multiply(matrix, x)
            return clock() - start

        flops, bytes_read = (
            2 * self.small.stored.numel() * len(self.tokens),
            self.large.stored.nbytes,
        )
        best = float("inf")
        for multiply in (self.kernels.gemm, lambda matrix, x: matrix(x)):
            for _ in range(10):
                best = min(best, seconds(multiply, self.small, self.tokens) / flops)
            taken = seconds(multiply, self.large, self.token)
            self.seconds_per_byte = min(self.seconds_per_byte, taken / bytes_read)
        self.in_turns.append(best)
        self.seconds_per_flop = min(self.seconds_per_flop, best)

    def work(self, rows: int) -> tuple[float, float]:
        """FLOPs, and bytes read, per token with `rows` sequences."""
        return 2 * (self.weights + self.cached), 4 * (self.weights / rows + self.cached)

    def include(self, rows: int, seconds: float) -> None:
        """Decoding itself may have reached better rates than the products alone."""
        flops, bytes_read = self.work(rows)
        self.seconds_per_flop = min(self.seconds_per_flop, seconds / flops)
        self.seconds_per_byte = min(self.seconds_per_byte, seconds / bytes_read)

    def seconds(self, rows: int) -> float:
        """Per token, with `rows` sequences."""
        flops, bytes_read = self.work(rows)
        return max(flops * self.seconds_per_flop, bytes_read * self.seconds_per_byte)

    def __str__(self) -> str:
        rates = 1e-9 / self.seconds_per_flop, 1e-9 / self.seconds_per_byte
        typical = 1e-9 / statistics.median(self.in_turns)
        return (
            f"best rates: {rates[0]:.1f} GFLOP/s ({typical:.1f} in the median turn), "
            f"{rates[1]:.1f} GB/s"
        )


def _fused(block) -> list[torch.Tensor]:
    attention, mlp = block.attn, block.mlp
    qkv = torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]).detach()
    others = (attention.out.weight, mlp.fc.weight, mlp.proj.weight)
    return [qkv, *(weight.detach().clone() for weight in others)]


class Transformers:
    """Steps of `generate` with its own cache, timed from the token that follows the prompt."""

    NEW = 9

    def __init__(self, config, loops: int, context: int) -> None:
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel  # pyright: ignore

        layers = config.prelude_layers + loops * config.core_layers + config.coda_layers
        shape = GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.width,
            n_layer=layers,
            n_head=config.heads,
            n_positions=config.context_length,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model = GPT2LMHeadModel(shape).eval()
        self.prompt = torch.randint(config.vocab_size, (1, context))

    @torch.no_grad()
    def seconds(self) -> float:
        clock = Clock()
        self.model.generate(  # pyright: ignore
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            min_new_tokens=self.NEW,
            max_new_tokens=self.NEW,
            do_sample=False,
            streamer=clock,
        )
        _, first, *_, last = clock.times  # the first call is for the prompt
        return (last - first) / (self.NEW - 1)


class Clock:
    """A streamer for transformers that records times."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def filled(model):
    """Replace weights that are zero by random ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def candidates(model, loops: int, context: int) -> dict[str, tuple[Callable[[], object], int]]:
    """For each name a function that adds a token to every sequence, and their number."""
    functions: dict[str, tuple[Callable[[], object], int]] = {
        "products alone": (products(model, loops), 1)
    }
    any_network = open_network(model, "float32", "torch")
    cache, bfloat16_cache = (
        filled_cache(any_network, max(ROWS), loops, context, dtype)
        for dtype in ("float32", "bfloat16")
    )
    for weights in ("float32", "int8"):
        for layers in ("native", "torch"):
            network = open_network(model, weights, layers)
            prefix = layers if weights == "float32" else f"{layers}, {weights}"
            caches = {prefix: cache}
            if layers == "native":
                caches[f"{prefix}, bf16 cache"] = bfloat16_cache
            for (name, used), rows in itertools.product(caches.items(), ROWS):
                functions[f"{name}, {rows}"] = (
                    decode_pass(network, used, rows, loops, context),
                    rows,
                )
    functions["no cache"] = (without_cache(model, loops, context), 1)
    return functions


def measure(
    functions: dict[str, tuple[Callable[[], object], int]],
    limit: Limit,
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Seconds per token of every repetition."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for function, _ in functions.values():
            function()
        end = time.perf_counter() + seconds
        while True:
            limit.measure(clock)
            for name, (function, rows) in functions.items():
                for _ in range(3 if rows == 1 and name != "no cache" else 1):
                    start = clock()
                    function()
                    taken[name].append((clock() - start) / rows)
            if time.perf_counter() > end:
                return taken


def targets(taken: dict[str, list[float]], limit: Limit) -> list[tuple[str, float, str]]:
    """Ratios by minima, and what they should be; for several rows also what the machine allows."""
    best = {name: min(times) for name, times in taken.items()}
    pairs = [(name, name.replace("native", "torch")) for name in best if name.startswith("native")]
    pairs = [pair for pair in pairs if pair[1] in best]
    allowed = {rows: best[BASE] / limit.seconds(rows) for rows in ROWS}
    return [
        ("one row over the products alone", best[BASE] / best["products alone"], "<= 1.1"),
        *(
            (
                f"tokens/s of {rows} rows over one",
                best[BASE] / best[f"native, {rows}"],
                f">= {target}, machine's limit {allowed[rows]:.2f}",
            )
            for rows, target in ((16, 6), (64, 12))
        ),
        *(
            (
                f"tokens/s of {rows} rows over one, bf16 cache",
                best["native, bf16 cache, 1"] / best[f"native, bf16 cache, {rows}"],
                f">= {target}",
            )
            for rows, target in ((16, 6), (64, 12))
        ),
        ("int8 over float32, one row", best[BASE] / best["native, int8, 1"], ">= 2"),
        (
            "C++ over PyTorch, the worst case",
            max(best[native] / best[plain] for native, plain in pairs),
            "<= 1.05",
        ),
    ]


def cpu_name() -> str:
    """The CPU and its vector instructions, from Linux; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    known = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "asimd", "asimddp")
    flags = (values.get("flags") or values.get("Features") or "").split()
    return f"{values.get('model name', 'unknown CPU')} ({' '.join(f for f in known if f in flags)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--quick", action="store_true", help="omit the slowest")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    try:
        target = Kernels().target
    except KernelsUnavailable as problem:
        raise SystemExit(f"The C++ layers are not available: {problem}") from None
    print(f"{cpu_name()}, {arguments.threads} threads; kernels for {target}")
    print(f"parcae-140m, {arguments.loops} loops, context {arguments.context}, per token")
    torch.manual_seed(0)
    model = filled(parcae.create("parcae-140m"))
    functions = candidates(model, arguments.loops, arguments.context)
    if arguments.quick:
        for name in ("no cache", *(name for name in functions if name.startswith("torch, int8"))):
            del functions[name]
    limit = Limit(model, arguments.loops, arguments.context)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    taken = measure(functions, limit, arguments.seconds, clock)
    try:
        if not arguments.quick:
            transformers = Transformers(model.config, arguments.loops, arguments.context)
            taken["transformers, 1"] = [transformers.seconds() for _ in range(3)]
    except ImportError:
        print("transformers is not installed: omitted (pip install -e .[hf])")
    print(f"{'sequences':26s} {'ms, minimum':>11s} {'by minima':>11s} {'by medians':>11s}")
    for rows in ROWS:
        limit.include(rows, min(taken[f"native, {rows}"]))
    base, base_median = min(taken[BASE]), statistics.median(taken[BASE])
    for name, times in taken.items():
        ratios = min(times) / base, statistics.median(times) / base_median
        print(f"{name:26s} {1e3 * min(times):11.2f} {ratios[0]:10.2f}x {ratios[1]:10.2f}x")
    for rows in ROWS:
        seconds = limit.seconds(rows)
        print(f"{f'limit, {rows}':26s} {1e3 * seconds:11.2f} {seconds / base:10.2f}x")
    print(f"ratios: time per token over that of {BASE!r}; {limit}")
    for name, value, target in targets(taken, limit):
        print(f"{name:40s} {value:6.2f}   (target {target})")
    if arguments.out:
        arguments.out.write_text(json.dumps(taken, indent=2) + "\n")


if __name__ == "__main__":
    main()
