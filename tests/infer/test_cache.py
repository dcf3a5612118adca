"""The cache: what it weighs, how it grows, and what it refuses before it takes memory."""

from __future__ import annotations

import pytest
import torch

from conftest import tiny
from oracles import GreedyEngine as Engine
from oracles import model_of
from parcae.config import ConfigError
from parcae.infer import batch as batch_module
from parcae.infer import cache as cache_module
from parcae.infer.batch import Batch
from parcae.infer.cache import Cache, Layout, Policy
from parcae.infer.static import StaticBatch

POLICIES = ["full", "shared", "last:2", "last:9", "first:3"]
CPU = torch.device("cpu")


def cache_of(policy: str = "full", dtype: torch.dtype = torch.float32, **changes) -> Cache:
    config = tiny(context_length=4096, **changes)
    return Cache(Layout.of(config), Policy.parse(policy), dtype, CPU)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"heads": 4, "kv_heads": 2}, {"state_width": 64}])
def test_bytes_are_those_of_the_tensors(policy, dtype, changes):
    if "state_width" in changes:
        changes = {**changes, "state_heads": 4}
    cache = cache_of(policy, dtype, **changes)
    assert cache.bytes == 0
    cache.reserve(3, 100, 5)
    stored = cache.outer.untyped_storage().nbytes() + cache.core.untyped_storage().nbytes()
    assert cache.bytes == stored == cache.bytes_per_token(5) * cache.rows * cache.capacity


def test_a_slot_more_costs_its_keys_and_values():
    config = tiny(heads=4, kv_heads=2, core_layers=3)
    layout = Layout.of(config)
    one, two = (layout.bytes_per_token(Policy.parse("full"), loops) for loops in (1, 2))
    assert two - one == 3 * 2 * (2 * 12) * 4  # layers, key and value, heads x channels, float32
    assert layout.bytes_per_token(Policy.parse("shared"), 8) == one


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        ("full", [0, 1, 2, 3, 4]),
        ("shared", [0, 0, 0, 0, 0]),
        ("last:2", [0, 1, 0, 1, 0]),
        ("first:2", [0, 1, 1, 1, 1]),
        ("first:9", [0, 1, 2, 3, 4]),
    ],
)
def test_slots(policy, slots):
    parsed = Policy.parse(policy)
    assert [parsed.slot(loop) for loop in range(1, 6)] == slots
    assert parsed.count(5) == len(set(slots))
    assert parsed.is_exact_for(5) == (len(set(slots)) == 5)
    assert str(parsed) == policy
    assert Policy.parse(parsed) is parsed


@pytest.mark.parametrize("wrong", ["last:0", "first:0", "last:-1", "last", "half", "", "last:x", 3])
def test_impossible_policies(wrong):
    with pytest.raises(ConfigError, match=r"cache: .* Use full, last:K, first:K or shared"):
        Engine(model_of("parcae"), cache=wrong)


def test_growing_keeps_what_is_held():
    cache = cache_of("full")
    cache.reserve(2, 5, 2)
    cache.outer.normal_()
    cache.core.normal_()
    outer, core = cache.outer.clone(), cache.core.clone()
    cache.reserve(3, cache.capacity + 1, 4)
    assert cache.core.shape[:2] == (4 * 2, 3)
    assert torch.equal(cache.outer[:, :2, : outer.shape[2]], outer)
    assert torch.equal(cache.core[: len(core), :2, : core.shape[2]], core)
    for layer in range(2):
        for loop in (1, 2):
            held = cache.core_layers(loop)[layer][:2, : core.shape[2]]
            assert torch.equal(held, core[(loop - 1) * 2 + layer])


def test_positions_double_and_nothing_shrinks():
    cache, sizes = cache_of("shared"), set()
    for length in range(1, 3000):
        cache.reserve(1, length, 1)
        assert cache.capacity >= length
        sizes.add(cache.capacity)
    assert len(sizes) <= 7
    kept = cache.core
    cache.reserve(1, 1, 1)
    assert cache.core is kept
    cache.reserve(1, 4096, 1)
    assert cache.capacity == 4096


@pytest.mark.parametrize("policy", ["full", "last:2"])
@pytest.mark.parametrize("way", ["spans", "padded", "static"])
def test_bfloat16_is_float32_with_rounded_keys_and_values(way, policy, monkeypatch):
    """Exactly, in PyTorch: of single tokens, of prompts, on an accelerator."""
    monkeypatch.setattr(batch_module, "pads_attention", lambda device: way == "padded")
    backend = "static" if way == "static" else "torch"
    prompts = [[3, 5, 7, 2], [9], [4, 4, 1]]

    def generate(**options):
        engine = Engine(model_of("parcae-grouped-heads"), backend=backend, cache=policy, **options)
        engine.cache.zeroed = True
        return engine.generate_all(prompts, loops=3, max_new_tokens=6), engine.cache

    made, bfloat16_cache = generate(cache_dtype="bfloat16")
    for kind in (Batch, StaticBatch):

        def rounded(batch, kv, k, v, write=kind.write_kv):
            write(batch, kv, k.bfloat16().float(), v.bfloat16().float())

        monkeypatch.setattr(kind, "write_kv", rounded)
    expected, float32_cache = generate()
    assert [text.tokens for text in made] == [text.tokens for text in expected]
    assert torch.equal(bfloat16_cache.core.float(), float32_cache.core)
    assert torch.equal(bfloat16_cache.outer.float(), float32_cache.outer)
    assert 2 * bfloat16_cache.bytes == float32_cache.bytes


def test_unknown_cache_dtypes():
    with pytest.raises(ConfigError, match="cache_dtype: 'int4' is not an option"):
        Engine(model_of("parcae"), cache_dtype="int4")


def count_allocations(engine: Engine, monkeypatch) -> list[tuple[int, ...]]:
    made, empty = [], engine.cache._empty

    def counted(shape, layers, rows, capacity):
        made.append((layers, rows, capacity))
        return empty(shape, layers, rows, capacity)

    monkeypatch.setattr(engine.cache, "_empty", counted)
    return made


@pytest.mark.parametrize("way", ["stream", "submit", "generate"])
def test_decoding_allocates_when_it_begins_and_never_again(way, monkeypatch):
    engine = Engine(model_of("parcae"))
    made = count_allocations(engine, monkeypatch)
    options = {"max_new_tokens": 25, "loops": 2}
    if way == "stream":
        assert len(list(engine.stream([1, 2], **options))) == 25
    elif way == "submit":
        sequence = engine.submit(engine.request([1, 2], **options))
        while not sequence.finish:
            engine.step()
    else:
        engine.generate([1, 2], **options)
    assert len(made) == 2  # outer and core


def test_many_requests_one_after_the_other_allocate_seldom(monkeypatch):
    engine = Engine(model_of("parcae"), max_batch_size=16)
    made = count_allocations(engine, monkeypatch)
    for first in range(40):
        engine.submit(engine.request([first, 2], max_new_tokens=2, loops=1))
        engine.step()
    assert engine.cache.rows <= 16
    assert len(made) <= 2 * 5


def test_a_cache_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(cache_module, "available_memory", lambda device: 1000)
    engine = Engine(model_of("parcae"))
    for refused in (
        lambda: engine.generate([1], max_new_tokens=30, loops=4),
        lambda: list(engine.stream([1], max_new_tokens=30, loops=4)),
        lambda: engine.submit(engine.request([1], max_new_tokens=30, loops=4)),
    ):
        with pytest.raises(ConfigError, match=r"cache: 1 rows x .* KiB .*fewer rows or tokens"):
            refused()
        assert engine.cache.bytes == 0
    assert engine.step() == 0
    monkeypatch.undo()
    assert len(engine.generate([1], max_new_tokens=3, loops=4).tokens) == 3


def test_what_is_idle_makes_room_for_what_is_asked(monkeypatch):
    engine = Engine(model_of("parcae"), max_batch_size=4)
    for first in range(3):
        engine.generate([first], max_new_tokens=3, loops=1)
    alone = engine.cache.bytes_per_token(6) * engine.cache.capacity
    monkeypatch.setattr(cache_module, "available_memory", lambda device: alone)
    made = engine.generate([5, 6], max_new_tokens=3, loops=6)
    assert engine.cache.rows == 1
    assert made == Engine(model_of("parcae")).generate([5, 6], max_new_tokens=3, loops=6)


def test_a_request_too_many_leaves_those_that_wait_alone(monkeypatch):
    engine = Engine(model_of("parcae"), max_batch_size=4)
    first = engine.submit(engine.request([5, 6], max_new_tokens=3, loops=2))
    monkeypatch.setattr(cache_module, "available_memory", lambda device: 0)
    with pytest.raises(ConfigError, match="cache"):
        engine.submit(engine.request([5, 7], max_new_tokens=3, loops=6))
    for _ in range(3):
        engine.step()
    monkeypatch.undo()
    expected = Engine(model_of("parcae")).generate([5, 6], max_new_tokens=3, loops=2)
    assert first.completion() == expected
