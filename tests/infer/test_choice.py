"""The faster of C++ and PyTorch is measured once per shape and size, and remembered."""

from __future__ import annotations

import json
import time

import pytest
import torch

from conftest import KINDS, randomised
from oracles import GreedyEngine as Engine
from parcae.infer.cache import CacheTooLarge
from parcae.infer.native import choice
from parcae.infer.native.choice import Choices
from parcae.infer.native.kernels import Kernels, KernelsUnavailable
from parcae.infer.network import TorchNetwork


def passes(native: float, plain: float, sizes: list[int]):
    """Passes that take so many seconds; the sizes asked for are recorded."""

    def of(size: int):
        sizes.append(size)
        return lambda: time.sleep(native), lambda: time.sleep(plain)

    return of


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr(choice, "seconds_without_core", lambda: 0.0)


@pytest.mark.parametrize(("native", "plain", "expected"), [(0, 0.004, True), (0.004, 0, False)])
def test_the_faster_one_wins_and_is_remembered(native, plain, expected, tmp_path):
    measured: list[int] = []
    choices = Choices("cpu", "shape", tmp_path)
    for tokens in (1, 3, 4, 3, 1):
        assert choices.prefers_native(tokens, passes(native, plain, measured)) is expected
    assert measured == [1, 4], "once per power of two"
    again = Choices("cpu", "shape", tmp_path)
    assert again.prefers_native(4, passes(plain, native, measured)) is expected
    assert measured == [1, 4], "from the file"
    for machine, shape in (("other", "shape"), ("cpu", "other")):
        Choices(machine, shape, tmp_path).prefers_native(4, passes(plain, native, measured))
    assert measured == [1, 4, 4, 4]


def test_a_tie_goes_to_cpp(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(choice.time, "perf_counter", lambda: float(next(clock)))
    assert choice.native_is_faster(lambda: None, lambda: None)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', '{"x": {"1": "yes"}}', "\0"])
def test_a_damaged_file_is_measured_again(content, tmp_path):
    measured: list[int] = []
    Choices("cpu", "shape", tmp_path).prefers_native(1, passes(0, 0.004, measured))
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    Choices("cpu", "shape", tmp_path).prefers_native(1, passes(0, 0.004, measured))
    assert measured == [1, 1]
    assert list(json.loads(path.read_text()).values()) == [{"1": True}]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    measured: list[int] = []
    choices = Choices("cpu", "shape", tmp_path / "file" / "folder")
    for _ in range(2):
        assert choices.prefers_native(1, passes(0, 0.004, measured))
    assert measured == [1], "kept in the process"


def test_what_other_programs_held_up_is_not_kept(tmp_path, monkeypatch):
    measured: list[int] = []
    choices = Choices("cpu", "shape", tmp_path)
    choices.prefers_native(1, passes(0, 0.004, measured))
    monkeypatch.setattr(choice, "seconds_without_core", time.perf_counter)  # waits all the time
    for _ in range(2):
        assert not choices.prefers_native(2, passes(0.004, 0, measured))
    assert measured == [1, 2], "kept in the process"
    for size in (1, 2):
        assert Choices("cpu", "shape", tmp_path).prefers_native(size, passes(0, 0.004, measured))
    assert measured == [1, 2, 2], "but not in the file"


def test_two_processes_keep_what_both_measured(tmp_path):
    first, second = Choices("cpu", "a", tmp_path), Choices("cpu", "b", tmp_path)
    first.prefers_native(1, passes(0, 0.004, []))
    second.prefers_native(2, passes(0, 0.004, []))
    measured: list[int] = []
    for shape, tokens in (("a", 1), ("b", 2)):
        Choices("cpu", shape, tmp_path).prefers_native(tokens, passes(0, 0, measured))
    assert measured == []


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """C++ layers that are chosen by measurement, and none made yet."""
    try:
        Kernels()
    except KernelsUnavailable as problem:
        pytest.skip(f"the C++ layers cannot be built here: {problem}")
    monkeypatch.delenv("PARCAE_NATIVE")
    monkeypatch.setattr("parcae.infer.native.kernels.cache_folder", lambda: tmp_path)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("native", [True, False])
def test_the_engine_follows_the_measurement(native, monkeypatch):
    model = randomised(KINDS["parcae"])
    expected = Engine(model, backend="torch").generate([3, 5], max_new_tokens=4).tokens
    measured = []

    def is_faster(*functions):
        for function in functions:
            function()
        measured.append(functions)
        return native

    monkeypatch.setattr(choice, "native_is_faster", is_faster)
    engine = Engine(model)
    assert engine.generate([3, 5], max_new_tokens=4).tokens == expected
    assert len(measured) == 2, "the prompt of two tokens, and single tokens"
    assert engine.network.name(torch.float32).startswith("C++" if native else "PyTorch")
    Engine(model, backend="native").generate([3, 5], max_new_tokens=4)
    assert len(measured) == 2, "forced: not measured"
    for _ in range(2):
        Engine(model, cache_dtype="bfloat16").generate([3, 5], max_new_tokens=4)
        assert len(measured) == 4, "a cache of another dtype: measured by itself, once"


@pytest.mark.usefixtures("unmeasured")
def test_measurements_have_the_dtype_of_the_cache(monkeypatch):
    dtypes = []
    monkeypatch.setattr(TorchNetwork, "forward", lambda _, batch, cache, *rest: cache.dtype)

    def is_faster(native, torch_pass):
        dtypes.append(torch_pass())
        return dtypes[-1] == torch.bfloat16

    monkeypatch.setattr(choice, "native_is_faster", is_faster)
    engine = Engine(randomised(KINDS["parcae"]), cache_dtype="bfloat16")
    assert engine.network.name(torch.bfloat16).startswith("C++")
    assert engine.network.name(torch.float32).startswith("PyTorch")
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.usefixtures("unmeasured")
def test_without_memory_for_a_measurement_cpp_is_taken(monkeypatch):
    model = randomised(KINDS["parcae"])
    expected = Engine(model, backend="torch").generate([3, 5], max_new_tokens=4).tokens
    engine = Engine(model)

    def too_large(*_):
        raise CacheTooLarge("128 rows")

    monkeypatch.setattr(engine.network, "_passes", too_large)
    assert engine.generate([3, 5], max_new_tokens=4).tokens == expected
