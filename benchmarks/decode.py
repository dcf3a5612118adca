"""Tokens per second at the shape of parcae-140m, compared with alternatives.

    python benchmarks/decode.py [--rounds 8] [--loops 8] [--context 256] [--out result.json]

All candidates take turns in one process; random weights, greedy, float32 unless stated otherwise.

    no cache         the prefix is computed again for every token (parcae.infer.reference)
    transformers     GPT-2 with as many layers as a token passes here, same width, with its cache;
                     omitted if transformers is not installed (pip install -e .[hf])
    products alone   only the matrix-vector products of one token: the machine's limit
    Engine           one sequence; PyTorch only; int8 weights; sixteen sequences
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import parcae
from parcae.infer import reference
from parcae.machine import keep_freed_memory

BATCH = 16
BASE = "Engine"


class EngineStep:
    """One or several sequences in the middle of a text; every call adds a token to each."""

    def __init__(self, model, loops: int, context: int, rows: int = 1, **options) -> None:
        self.engine = parcae.Engine(model, rows=rows, **options)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(model.config.vocab_size, (rows, context), generator=generator)
        requests = [
            self.engine.request(prompt, loops=loops, new_tokens=1000, temperature=0)
            for prompt in prompts.tolist()
        ]
        self.engine.rows.reserve(requests, 0)
        for request in requests:
            self.engine.submit(request)
        self.engine.step()
        self.tokens = rows

    def __call__(self) -> None:
        self.engine.step()


def without_cache(model, loops: int, context: int) -> Callable[[], None]:
    prompt = torch.randint(model.config.vocab_size, (context,)).tolist()

    def one_token() -> None:
        reference.generate(model, prompt, new_tokens=1, loops=loops, temperature=0)

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


def seconds(function: Callable[[], None], repetitions: int, sequences: int) -> float:
    """Seconds per token."""
    start = time.perf_counter()
    for _ in range(repetitions):
        function()
    return (time.perf_counter() - start) / repetitions / sequences


def filled(model):
    """Replace weights that are zero by random ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def measure(loops: int, context: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per token of every round."""
    keep_freed_memory()
    torch.manual_seed(0)
    model = filled(parcae.create("parcae-140m"))
    config = model.config
    steps = {
        # name: (function that adds a token to every sequence, calls per round, sequences)
        "products alone": (products(model, loops), 4, 1),
        BASE: (EngineStep(model, loops, context), 4, 1),
        "Engine, PyTorch only": (EngineStep(model, loops, context, layers="torch"), 4, 1),
        "Engine, int8": (EngineStep(model, loops, context, weights="int8"), 4, 1),
        f"Engine, {BATCH} sequences": (EngineStep(model, loops, context, rows=BATCH), 2, BATCH),
        "no cache": (without_cache(model, loops, context), 1, 1),
    }
    candidates: dict[str, Callable[[], float]] = {
        name: partial(seconds, *step) for name, step in steps.items()
    }
    try:
        candidates["transformers"] = Transformers(config, loops, context).seconds
    except ImportError:
        print("transformers is not installed: omitted (pip install -e .[hf])")
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, candidate in candidates.items():
            result = candidate()
            if number:  # the first round warms up
                taken[name].append(result)
    return taken


def report(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    table = {}
    base = taken[BASE]
    for name, times in taken.items():
        table[name] = {
            "milliseconds": 1e3 * min(times),
            "ratio_by_minima": min(times) / min(base),
            "ratio_by_medians": statistics.median(times) / statistics.median(base),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = report(measure(arguments.loops, arguments.context, arguments.rounds))
    print(f"parcae-140m, {arguments.loops} loops, context {arguments.context}, per token")
    print(f"{'':22s} {'ms, minimum':>11s} {'by minima':>11s} {'by medians':>11s}")
    for name, row in table.items():
        ratios = [f"{row[f'ratio_by_{kind}']:10.2f}x" for kind in ("minima", "medians")]
        print(f"{name:22s} {row['milliseconds']:11.2f} {' '.join(ratios)}")
    print(f"ratios: time per token over that of {BASE}")
    if arguments.out:
        arguments.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
