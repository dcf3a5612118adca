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
from parcae.infer import exit as exit_module
from parcae.infer.cache import Policy
from parcae.infer.deepen import Task, deepen
from parcae.infer.engine import Engine
from parcae.infer.exit import ExitRule
from parcae.infer.native import build
from parcae.infer.native.kernels import MOST_TOKENS, Kernels
from parcae.infer.network import Network
from parcae.infer.quantise import matrix
from parcae.infer.work import Part, Work

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


@pytest.mark.slow
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
    check_against_pytorch(model, weights, parts, limits, [None] * len(parts), policy)


RULES = [
    "budget:2",
    "state:0.3",
    "kl:0.2",
    "kl:0.02",
    "kl:0.002",
    "entropy:0.1",
    "entropy:0.01",
    "kl:0",
]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.lists(
        st.tuples(st.sampled_from([None, *RULES]), st.integers(1, 5)), min_size=1, max_size=4
    ),
    policy=st.sampled_from(["full", "last:2", "first:2", "shared"]),
    weights=st.sampled_from(["float32", "int8"]),
    candidates=st.sampled_from([7, 16, 23, 256]),
)
def test_exits_equal_pytorch(kind, rows, policy, weights, candidates):
    """Of every kind side by side; with few candidates, and all of a small vocabulary."""
    parts = [Part(row, 0) for row in range(len(rows))]
    rules = [rule and ExitRule.parse(rule) for rule, _ in rows]
    limits = [limit for _, limit in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_module, "CANDIDATES", candidates)
        check_against_pytorch(randomised(KINDS[kind]), weights, parts, limits, rules, policy)


def check_against_pytorch(model, weights, parts, limits, rules, policy):
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


def exits(network, rules, rows, limit=6, predict=None):
    """Single tokens, each after two others of its row."""
    cache = network.cache(Policy.parse("full"))
    cache.reserve(max(rows) + 1, 3, limit)
    ids = [token for row in rows for token in (3 + row, 40 - row)]
    read = Work([Part(row, 0, 2) for row in rows], ids, network.device)
    deepen(network, cache, Task(work=read, limits=[limit] * len(rows)))
    work = Work([Part(row, 2) for row in rows], [11 + row for row in rows], network.device)
    rules = [rules[row] and ExitRule.parse(rules[row]) for row in rows]
    task = Task(work=work, limits=[limit] * len(rows), rules=rules, predict=predict)
    return deepen(network, cache, task)


MIXED = ["kl:0.02", None, "entropy:0.01", "state:0.3", "kl:0.2", "budget:3", "kl:0.0005"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("candidates", [19, 256])
@pytest.mark.parametrize("kind", ["parcae-zoh", "rdm"])
def test_company_does_not_change_an_exit(kind, candidates, threads, monkeypatch):
    monkeypatch.setattr("parcae.infer.native.kernels.WORTH_SHARING", 0)
    monkeypatch.setattr(exit_module, "CANDIDATES", candidates)
    network = Network(randomised(KINDS[kind]), "float32", KERNELS)
    alone = [exits(network, MIXED, [row]) for row in range(len(MIXED))]
    assert len({one.loops[0] for one in alone}) > 2
    torch.set_num_threads(threads)
    together = exits(network, MIXED, range(len(MIXED)))
    assert together.loops == [one.loops[0] for one in alone]
    assert torch.equal(together.logits, torch.cat([one.logits for one in alone]))
    assert torch.equal(together.state, torch.cat([one.state for one in alone]))
    some = exits(network, MIXED, range(len(MIXED)), predict=[4, 1])
    assert torch.equal(some.logits, together.logits[[4, 1]])


def test_every_rule_is_one_call(monkeypatch):
    network = Network(randomised(KINDS["parcae"]), "float32", KERNELS)
    for stage in ("begin", "loop", "read", "logits"):
        monkeypatch.setattr(network.native, stage, None)
    assert len(exits(network, MIXED, range(len(MIXED))).logits) == len(MIXED)


@pytest.mark.parametrize("candidates", [19, 256])
@pytest.mark.parametrize(("weight", "loops"), [(0.0, 2), (float("nan"), 6)])
def test_predictions_of_no_use(weight, loops, candidates, monkeypatch):
    """Where all tokens are alike nothing changes; where none is a number nothing can be told."""
    monkeypatch.setattr(exit_module, "CANDIDATES", candidates)
    model = randomised(KINDS["parcae"])
    with torch.no_grad():
        model.coda.norm.weight.fill_(weight)
    rules = ["kl:0.01", "entropy:0.01"]
    for kernels in (KERNELS, None):
        assert exits(Network(model, "float32", kernels), rules, [0, 1]).loops == [loops] * 2


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


@pytest.mark.slow
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


@pytest.mark.slow
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
