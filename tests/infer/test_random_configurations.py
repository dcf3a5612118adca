"""Random small models, requests and engines give the same tokens natively and through PyTorch.

    python tests/infer/test_random_configurations.py [--first 0] [--count 1000]

Head sizes, widths and vocabularies that are no multiple of a vector, up to 33 rows, exits, drafts,
cache policies, int8 weights, bfloat16 caches, one to three threads.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import randomised
from oracles import GreedyEngine as Engine
from parcae.config import LoopConfig, ModelConfig
from parcae.infer.native import kernels as native

NEW_TOKENS = 4
GAP = {
    ("float32", "float32"): 1e-3,
    ("int8", "float32"): 0.1,
    ("float32", "bfloat16"): 0.1,
    ("int8", "bfloat16"): 0.5,
}
"""Difference of log-probabilities below which either token may be chosen, by the dtypes of weights
and cache. With int8 weights an input may be rounded to the integer above or below, 1/127 of the
largest input apart, and later layers carry that on; so it is with keys and values in bfloat16, up
to 1/128 apart, and products with int8 weights enlarge their differences (up to 0.43 was seen). It
is rare: 2 of 1,000 configurations differ."""


def random_config(draw: random.Random) -> ModelConfig:
    looped = draw.random() < 0.9
    kv_heads = draw.choice([1, 1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    width = heads * draw.choice([2, 6, 8, 10, 14, 22])
    options = {
        "vocab_size": draw.choice([1, 2, 7, 33, 96, 301]),
        "context_length": draw.choice([16, 24, 33]),
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "mlp_width": draw.choice([None, 1, 5, 37, 64, 130]),
        "prelude_layers": draw.randint(0 if looped else 1, 2),
        "core_layers": draw.randint(1, 2),
        "coda_layers": draw.randint(0, 2),
        "mlp": draw.choice(["relu2", "swiglu"]),
        "norm": draw.choice(["pre", "residual"]),
        "qk_norm": draw.random() < 0.5,
        "value_embeddings": draw.random() < 0.5,
        "tied_embeddings": draw.random() < 0.5,
    }
    if not looped:
        loop = LoopConfig(mean_loops=1)
        options |= {"architecture": "transformer", "injection": "none"}
        return ModelConfig(**options, readout=False, prelude_norm=False, loop=loop)
    options |= {
        "injection": draw.choice(["diagonal", "concatenation", "addition"]),
        "readout": draw.random() < 0.5,
        "prelude_norm": draw.random() < 0.5,
    }
    if options["readout"] and options["injection"] != "addition" and draw.random() < 0.5:
        state_heads = draw.choice([1, 2, 4])
        options |= {"state_heads": state_heads, "state_kv_heads": draw.choice([1, state_heads])}
        options |= {"state_width": state_heads * draw.choice([2, 6, 14])}
    return ModelConfig(**options, loop=LoopConfig(mean_loops=3))


def compare(seed: int) -> str:
    """Decode natively and through PyTorch: 'equal', or 'tie' where a token or exit was decided by
    less than rounding. AssertionError for any other difference."""
    draw = random.Random(seed)
    config = random_config(draw)
    weights = draw.choice(["float32", "int8"])
    policy = draw.choice(["full", "full", "last:2", "first:2", "shared"])
    rows = draw.choice([1, 1, 2, 5, 33])
    vocabulary = config.vocab_size
    options: dict = {"loops": draw.randint(1, 4), "max_new_tokens": NEW_TOKENS}
    if config.architecture == "transformer":
        del options["loops"]
    elif draw.random() < 0.5:
        options["exit"] = draw.choice(["budget:2", "state:0.2", "kl:0.02", "kl:0.0005"])
    elif policy == "full" and options["loops"] > 1 and draw.random() < 0.6:
        options |= {"draft_loops": draw.randint(1, options["loops"] - 1), "draft_tokens": 3}
    lengths = [draw.randint(1, 6) for _ in range(rows)]
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
    torch.set_num_threads(draw.choice([1, 1, 2, 3]))
    cache_dtype = draw.choice(["float32", "float32", "bfloat16"])
    model = randomised(config, seed)
    logprobs = min(vocabulary, 20)
    native_texts, plain_texts = (
        Engine(
            model,
            backend=backend,
            weight_dtype=weights,
            cache=policy,
            cache_dtype=cache_dtype,
            max_batch_size=draw.choice([rows, 40]),
        ).generate_all(prompts, logprobs=logprobs, **options)
        for backend in ("native", "torch")
    )
    outcome = "equal"
    for ours, theirs in zip(native_texts, plain_texts, strict=True):
        if ours.tokens == theirs.tokens:
            continue
        outcome = "tie"
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        index = next(i for i, (a, b) in enumerate(pairs) if a != b)
        entry = theirs.logprobs[index]
        chances = dict(entry.alternatives)
        other = chances.get(ours.tokens[index], float("-inf"))
        exits_differ = ours.loops[: index + 1] != theirs.loops[: index + 1]
        assert exits_differ or entry.logprob - other < GAP[weights, cache_dtype], (
            f"seed {seed}, token {index}: {ours.tokens} natively, {theirs.tokens} through PyTorch, "
            f"log-probs {other} and {entry.logprob}; {weights}, cache {policy} in {cache_dtype}, "
            f"{options}; {config}"
        )
    return outcome


@pytest.mark.slow
def test_random_configurations_give_the_same_tokens(monkeypatch):
    """A share of the thousand that the script runs."""
    monkeypatch.setattr(native, "MIN_PARALLEL_PRODUCTS", 0)
    try:
        native.Kernels()
    except native.KernelsUnavailable as problem:
        pytest.skip(f"the C++ layers cannot be built here: {problem}")
    outcomes = [compare(seed) for seed in range(40)]
    assert outcomes.count("tie") <= 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="configurations")
    arguments = parser.parse_args()
    native.MIN_PARALLEL_PRODUCTS = 0
    ties = []
    for seed in range(arguments.first, arguments.first + arguments.count):
        if compare(seed) == "tie":
            ties.append(seed)
        if sys.stderr.isatty() or seed % 100 == 99:
            print(f"seed {seed}: {len(ties)} ties", file=sys.stderr)
    print(f"{arguments.count} configurations: {arguments.count - len(ties)} equal, ties: {ties}")
    if len(ties) > arguments.count // 10:
        sys.exit("too many ties")


if __name__ == "__main__":
    main()
