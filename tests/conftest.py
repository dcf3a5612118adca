"""What tests share: the folder of real data, and small models of every kind."""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parcae import registry
from parcae.config import LoopConfig, ModelConfig
from parcae.model import create
from parcae.model.base import LanguageModel

pytest_plugins = ["evaluation_fixtures", "serving_fixtures"]

# Without time measurements, "auto" is the same in every run.
os.environ.setdefault("PARCAE_NATIVE", "1")
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # PyTorch's cache of compiled code does not tell capabilities apart.
    folder = Path(tempfile.gettempdir()) / f"torchinductor-{getpass.getuser()}-{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
torch.set_num_threads(min(2, torch.get_num_threads()))
# On a busy machine an example may take any time.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def _compiler_works() -> bool:
    path = shutil.which(os.environ.get("CXX") or "g++")
    return path is not None and not subprocess.call([path, "--version"], stdout=subprocess.DEVNULL)


needs_compiler = pytest.mark.skipif(not _compiler_works(), reason="no C++ compiler")

TESTS = Path(__file__).parent
LONGEST = (
    "system/test_docs.py",
    "training/test_resume.py",
    "model/test_compile.py",
    "training/test_plan.py",
    "sweeps/test_sweep_on_slurm.py",
    "system/test_torchrun.py",
    "system/test_slurm.py",
    "sweeps/test_sweep_runs.py",
)
"""The files of the longest tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: one of them at the end would leave the other worker idle."""

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(TESTS).as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_configure() -> None:
    """A fifth of the time of collection: what imports create is never garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, without searching all that is imported each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Reference outputs and real text; in CI they must be there."""
    folder = os.environ.get("PARCAE_TEST_DATA")
    if folder and Path(folder).is_dir():
        return Path(folder)
    if os.environ.get("CI"):
        pytest.fail("PARCAE_TEST_DATA must name the folder of test data in CI.")
    pytest.skip("PARCAE_TEST_DATA is not set to the folder of test data.")


def tiny(**changes) -> ModelConfig:
    """A Parcae small enough for brute force, with every switch on."""
    settings = {
        "vocab_size": 96,
        "context_length": 32,
        "width": 48,
        "heads": 3,
        "prelude_layers": 1,
        "core_layers": 2,
        "coda_layers": 1,
        "loop": LoopConfig(mean_loops=4),
    }
    return ModelConfig(**{**settings, **changes})


RDM = {"injection": "concatenation", "mlp": "swiglu", "qk_norm": False, "init": "scaled"}
RDM |= {"readout": False, "prelude_norm": False, "value_embeddings": False, "mlp_width": 64}

KINDS: dict[str, ModelConfig] = {
    "parcae": tiny(),
    "parcae-zoh": tiny(discretisation="zoh"),
    "parcae-wide-state": tiny(state_width=64, state_heads=4),
    "parcae-grouped-heads": tiny(heads=4, kv_heads=2, width=48),
    "parcae-no-prelude": tiny(prelude_layers=0, coda_layers=0),
    "rdm": tiny(**RDM, norm="residual"),
    "rdm-prenorm": tiny(**RDM),
    "rdm-wide-state": tiny(**{**RDM, "readout": True}, state_width=64, state_heads=4),
    "addition": tiny(**{**RDM, "injection": "addition"}),
}


def randomised(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model whose every parameter is away from its special initial value (zeros, identity)."""
    model = create(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class NoHostSync(TorchDispatchMode):
    """Fails where a value is read back from a tensor, and where an operator has an argument with
    elements on another device than `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.calls = device, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.ndim > 0:
                assert x.device.type == self.device, f"{func}: {x.device}"
        return result


@pytest.fixture(autouse=True)
def files_imported_by_one_test():
    """Runs record the files that their process has imported, so the next test forgets them."""
    yield
    registry._imported.clear()
    os.environ.pop(registry.IMPORT_VARIABLE, None)


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request):
    """Where models are decoded token by token, threads would only wait for each other."""
    before = torch.get_num_threads()
    if request.path.parent.name in ("infer", "serving"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved_bytes(loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The result, and the bytes that autograd keeps for its backward."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return loss(), sum(sizes.values())
