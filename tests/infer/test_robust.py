"""What goes wrong in one place stays there: threads, interrupts, autocast, broken weights."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from conftest import KINDS, randomised, tiny
from oracles import GreedyEngine as Engine
from oracles import model_of
from parcae.config import ConfigError
from parcae.infer.sampling import NonFiniteLogits
from reference import generate as plain

PROMPTS = [[5, 17, 80], [1, 2, 3, 4], [9], [5, 17, 80, 7]]


def texts(model, **options):
    return [
        tuple(plain(model, p, max_new_tokens=6, loops=3, temperature=0, **options)) for p in PROMPTS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_autocast_around_an_engine_changes_nothing(backend):
    model = model_of("parcae")
    with torch.autocast("cpu", torch.bfloat16):
        made = Engine(model, backend=backend).generate_all(PROMPTS, max_new_tokens=6, loops=3)
        long = Engine(model, backend=backend).generate([3] * 31, max_new_tokens=1, loops=3)
    assert [m.tokens for m in made] == texts(model)
    assert list(long.tokens) == plain(model, [3] * 31, max_new_tokens=1, loops=3, temperature=0)


@pytest.mark.slow
def test_more_threads_than_at_first():
    model = model_of("parcae")
    engine, before = Engine(model), torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            made = engine.generate_all(PROMPTS, max_new_tokens=6, loops=3)
            assert [m.tokens for m in made] == texts(model)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_fewer_threads_than_asked_for():
    """OpenMP may be limited by its environment; threads of a pass must not wait for others."""
    code = """
import torch
from parcae.infer.native.kernels import Kernels
from parcae.infer.quantise import FloatMatrix
torch.set_num_threads(4)
print(Kernels().gemm(FloatMatrix(torch.ones(99, 64)), torch.ones(3, 64)).sum().item())
"""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    if "KernelsUnavailable" in result.stderr:
        pytest.skip("no C++ kernels here")
    assert result.stdout.strip() == str(3.0 * 99 * 64), result.stderr


def test_a_default_type_is_not_for_the_layers():
    model = model_of("parcae")
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = Engine(model).generate_all(PROMPTS, max_new_tokens=6, loops=3, exit="budget:3")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [m.tokens for m in made] == texts(model)


@pytest.mark.slow
def test_several_threads_use_one_engine():
    model = model_of("parcae")
    engine = Engine(model, max_batch_size=3)
    expected = texts(model)

    def ask(number: int) -> tuple[int, ...]:
        return engine.generate(PROMPTS[number % 4], max_new_tokens=6, loops=3).tokens

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(24)))
    assert found == [expected[number % 4] for number in range(24)]


@pytest.mark.slow
def test_an_interrupt_while_prompts_are_read_damages_nobody():
    model = model_of("parcae")
    engine, expected = Engine(model, backend="torch"), texts(model)
    waiting = [engine.submit(engine.request(p, max_new_tokens=6, loops=3)) for p in PROMPTS[:2]]
    loop = engine.network.run_loops

    def interrupted(*rest):
        raise KeyboardInterrupt

    engine.network.run_loops = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.network.run_loops = loop  # type: ignore[method-assign]
    while not all(s.finish for s in waiting):
        engine.step()
    assert [s.completion().tokens for s in waiting] == expected[:2]
    again = engine.generate_all(PROMPTS, max_new_tokens=6, loops=3)
    assert [m.tokens for m in again] == expected


@pytest.mark.parametrize("draft", [0, 1])
def test_one_that_breaks_does_not_break_the_others(draft):
    model = randomised(tiny(tied_embeddings=False))
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
    engine = Engine(model)
    options = {"max_new_tokens": 6, "loops": 3, "draft_loops": draft}
    broken = engine.submit(engine.request([7], **options))
    made = engine.generate([1, 2], **options)
    assert list(made.tokens) == plain(model, [1, 2], max_new_tokens=6, loops=3, temperature=0)
    assert broken.finish == "error"
    with pytest.raises(NonFiniteLogits):
        broken.completion()
    with pytest.raises(NonFiniteLogits):
        list(engine.stream([7], **options))


def test_shared_slots_do_not_hoard_rows():
    engine = Engine(randomised(KINDS["parcae"]), cache="shared")
    for first in range(12):
        engine.generate([first, 3], max_new_tokens=2, loops=3)
    assert engine.cache.rows == 1


@pytest.mark.slow
def test_what_does_not_fit_at_once_waits(monkeypatch):
    model = model_of("parcae")
    engine = Engine(model, max_batch_size=16)
    row = engine.cache.bytes_per_token(3) * model.config.context_length
    monkeypatch.setattr("parcae.infer.cache.available_memory", lambda device: int(3.5 * row))
    made = engine.generate_all(PROMPTS * 2, max_new_tokens=6, loops=3)
    assert engine.cache.rows <= 3
    assert [m.tokens for m in made] == texts(model) * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_tokens": [1.5]},
        {"stop_tokens": [10**6]},
        {"stop_tokens": 5},
        {"temperature": None},
        {"temperature": "0.5"},
        {"repetition_penalty": "2"},
        {"repetition_penalty": 1e-300},
    ],
)
def test_requests_that_would_fail_later(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Engine(model_of("parcae")).request([1, 2], **wrong)


def test_ids_of_any_whole_type():
    engine = Engine(model_of("parcae"))
    assert engine.request([1], stop_tokens=torch.tensor([3])).stop_tokens == {3}
    with pytest.raises(ConfigError, match="max_batch_size"):
        Engine(model_of("parcae"), max_batch_size=10**9)
    with pytest.raises(ConfigError, match="prompt"):
        engine.request(None)  # type: ignore[arg-type]
