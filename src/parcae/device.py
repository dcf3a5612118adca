"""Where a model runs: the device that a name such as `auto` or `cuda:1` means on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parcae.schema import ConfigError, require

if TYPE_CHECKING:
    import torch

TRAINING_DEVICES = ("cuda", "mps", "cpu")
INFERENCE_DEVICES = ("cuda", "cpu")
"""In the order in which `auto` prefers them. MPS has no float64, in which exit rules, scores and
traces are computed."""
WITHOUT_BFLOAT16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}
WITHOUT_BFLOAT16 |= {"AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA."""
DEVICE_HELP = (
    "where the model runs: auto, cpu, cuda or cuda:N (default: auto, which is cuda if available)"
)


def find_device(
    wanted: str | torch.device = "auto",
    *,
    auto: Sequence[str] = INFERENCE_DEVICES,
    key: str = "device",
) -> torch.device:
    """The device of this name; `auto` is the first one of the list that is available.

    ConfigError if it cannot be used; `key` is what the message calls the setting.
    """
    import torch

    if wanted == "auto":
        wanted = next(name for name in auto if is_available(name))
    elif str(wanted) in TRAINING_DEVICES:
        usable = " or ".join(name for name in TRAINING_DEVICES if is_available(name))
        problem = f"no {wanted} device is available"
        require(is_available(str(wanted)), key, problem, f"Use auto or {usable}.")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{key}: {wanted} cannot be used here ({reason}). Use cpu.") from None


def is_available(name: str) -> bool:
    """Whether PyTorch can use a device of the type cuda, mps or cpu."""
    import torch

    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    return name not in available or available[name]()


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 (those with AMX have AVX512-BF16,
    too), and the environment lets PyTorch and oneDNN use them."""
    import torch

    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL"))
    allowed = limit.upper() not in WITHOUT_BFLOAT16
    used = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and used and torch.cpu.get_capabilities().get("avx512_bf16", False)


def check_compiler(device: torch.device, key: str) -> None:
    """ConfigError if `torch.compile` lacks the C++ compiler that it needs on a CPU.

    Otherwise the first step would fail, long after data was prepared.
    """
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (RuntimeError, OSError):
        problem = "torch.compile found no C++ compiler that works"
        raise ConfigError(f"{key}: {problem}. Install g++, set CXX, or use false.") from None
