"""Passes in C++ against PyTorch's, for every architecture, pass and weight."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import KINDS, randomised
from parcae.config import ConfigError, LoopConfig
from parcae.infer.cache import Policy
from parcae.infer.deepen import Task, deepen
from parcae.infer.engine import Engine
from parcae.infer.exit import ExitRule
from parcae.infer.native import build
from parcae.infer.native.kernels import MOST_TOKENS, Kernels
from parcae.infer.network import Network
from parcae.infer.quantise import matrix
from parcae.infer.work import Part, Work

RULES = ["budget:2", "state:0.3", "kl:0.02", "kl:0.3", "entropy:0.02", "entropy:0.2"]

try:
    KERNELS = Kernels()
except build.NoKernels as problem:
    pytest.skip(f"the C++ layers cannot be built here: {problem}", allow_module_level=True)


def run(network, parts, limits, rules, policy, loops):
    """Two passes over one cache: what the first leaves, the second reads."""
    cache = network.cache(Policy.parse(policy))
    cache.reserve(4, 16, loops)
    generator = torch.Generator().manual_seed(1)
    reached = []
    for first in (0, 3):
        moved = [Part(p.row, p.first + first, p.count) for p in parts]
        count = sum(part.count for part in parts)
        ids = torch.randint(network.config.vocab_size, (count,), generator=generator).tolist()
        cache.outer[:, :, : 3 + first].nan_to_num_(0.0) if first else cache.outer.zero_()
        cache.core.nan_to_num_(0.0) if first else cache.core.zero_()
        work = Work(moved, ids, network.device)
        reached.append(deepen(network, cache, Task(work=work, limits=limits, rules=rules)))
    return reached, cache


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
    policy=st.sampled_from(["full", "last:2", "first:2", "shared"]),
    weights=st.sampled_from(["float32", "int8"]),
)
def test_equals_pytorch(kind, counts, data, policy, weights):
    model = randomised(KINDS[kind])
    parts = [Part(row, 0, count) for row, count in enumerate(counts)]
    limits = data.draw(st.lists(st.integers(1, 5), min_size=len(parts), max_size=len(parts)))
    rules = [None] * len(parts)
    if all(count == 1 for count in counts):
        choice = st.sampled_from([None, *map(ExitRule.parse, RULES)])
        rules = data.draw(st.lists(choice, min_size=len(parts), max_size=len(parts)))
    results = [
        run(Network(model, weights, kernels), parts, limits, rules, policy, 5)
        for kernels in (KERNELS, None)
    ]
    (native, native_cache), (plain, plain_cache) = results
    for ours, theirs in zip(native, plain, strict=True):
        for name in ("logits", "state"):
            pair = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(*pair, atol=2e-4, rtol=1e-4)
        assert ours.loops == theirs.loops
    torch.testing.assert_close(native_cache.core, plain_cache.core, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(native_cache.outer, plain_cache.outer, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 100), (130, 48)])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_products_of_any_shape(threads, shape, weights):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(shape, generator=generator)
        stored = matrix(weight, weights)
        for tokens in (1, 2, 3, 6, 7, 16, MOST_TOKENS):
            x = torch.randn(tokens, shape[1], generator=generator)
            found = KERNELS.multiply(stored, x)
            torch.testing.assert_close(found, stored(x), atol=1e-4, rtol=1e-4)
            alone = torch.cat([KERNELS.multiply(stored, row[None]) for row in x])
            assert torch.equal(found, alone), "company must not show"
    finally:
        torch.set_num_threads(before)


def test_a_pass_does_not_change_what_it_is_given():
    model = randomised(KINDS["parcae"])
    network = Network(model, "float32", KERNELS)
    cache = network.cache(Policy.parse("full"))
    cache.reserve(1, 4, 3)
    work = Work([Part(0, 0, 2)], [3, 5], network.device)
    native = network.native
    assert native is not None
    drive = native.begin(work, cache)
    h = torch.randn_like(drive)
    kept = h.clone(), drive.clone()
    native.loop(h, drive, work, cache, range(1, 4))
    native.read(h, work, cache)
    deepen(network, cache, Task(work=work, limits=[3], start=h))
    assert torch.equal(h, kept[0])
    assert torch.equal(drive, kept[1])


def test_a_transformer_too():
    from conftest import tiny

    config = tiny(
        architecture="transformer",
        injection="none",
        readout=False,
        prelude_norm=False,
        loop=LoopConfig(mean_loops=1),
    )
    model = randomised(config)
    texts = [
        Engine(model, layers=layers).generate([3, 5, 8], new_tokens=6).tokens
        for layers in ("native", "torch")
    ]
    assert texts[0] == texts[1]


def test_who_wants_none_gets_none(monkeypatch):
    model = randomised(KINDS["parcae"])
    assert Engine(model, layers="torch").network.native is None
    assert Engine(model, layers="auto").network.native is not None
    assert Engine(model, weights="bfloat16").network.native is None
    with pytest.raises(ConfigError, match="float32 and int8"):
        Engine(model, layers="native", weights="bfloat16")
    with pytest.raises(ConfigError, match="not an option"):
        Engine(model, layers="fast")  # pyright: ignore[reportArgumentType]


CHILD = """
import parcae
from parcae.infer.engine import Engine
model = parcae.create("parcae-1m")
print(Engine(model).network.native)
Engine(model, layers="native")
"""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PARCAE_NATIVE": "0"}, "turns them off"),
        ({"PATH": "", "CXX": ""}, "no C\\+\\+ compiler"),
        ({"CXX": "false", "XDG_CACHE_HOME": "EMPTY"}, "failed"),
    ],
)
def test_without_a_compiler_pytorch_does_it(environment, message, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path) if value == "EMPTY" else value)
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr
    assert "ConfigError" in done.stderr
    import re

    assert re.search(message, done.stderr)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["parcae", "rdm", "parcae-grouped-heads"])
def test_company_does_not_change_a_bit(kind, weights, threads, monkeypatch):
    """Whatever shares a pass, whoever computes it, and in however many passes a text is read."""
    monkeypatch.setattr("parcae.infer.native.kernels.WORTH_SHARING", 0)
    network = Network(randomised(KINDS[kind]), weights, KERNELS)
    texts = [[(7 * i + 3 * row) % 96 for i in range(5)] for row in range(6)]

    def read(rows, cuts):
        cache = network.cache(Policy.parse("full"))
        cache.reserve(len(texts), 5, 3)
        for first, end in pairwise(cuts):
            ids = [token for row in rows for token in texts[row][first:end]]
            parts = [Part(row, first, end - first) for row in rows]
            limits = [3 - row % 2 for row in rows]
            work = Work(parts, ids, network.device)
            task = Task(work=work, limits=limits, predict=work.last_tokens)
            reached = deepen(network, cache, task)
        return reached.logits

    before = torch.get_num_threads()
    alone = torch.cat([read([row], [0, 1, 2, 3, 4, 5]) for row in range(len(texts))])
    torch.set_num_threads(threads)
    try:
        assert torch.equal(read(range(len(texts)), [0, 5]), alone)
        assert torch.equal(read(range(len(texts)), [0, 3, 5]), alone)
        assert torch.equal(read([4, 1], [0, 2, 4, 5]), alone[[4, 1]])
    finally:
        torch.set_num_threads(before)
