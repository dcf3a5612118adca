"""The model under bfloat16 autocast: what is rounded, what is not, and what runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import KINDS, randomised, tiny
from parcae.model.attention import QUERY_BLOCK, attention
from parcae.model.precision import cast_weight, chunked_cross_entropy


def bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def run(model, mixed, loops=(5, 3, 2), length=7):
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(96, (2, len(loops), length), generator=generator)
    targets[0, 1] = -100
    model.zero_grad()
    with bfloat16(mixed):
        output = model(tokens, targets, loops=list(loops), state="zero")
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["parcae", "parcae-grouped-heads", "rdm-wide-state"])
def test_gradients_are_those_of_float32_up_to_rounding(kind):
    model = randomised(KINDS[kind])
    (exact, gradients), (rounded, ours) = run(model, False), run(model, True)
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=5e-3)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("kind", ["parcae", "rdm", "addition"])
def test_the_state_and_the_injection_are_not_rounded(kind):
    seen = []
    model = randomised(KINDS[kind])
    mix = model.loop.core.injection.mix
    model.loop.core.injection.mix = lambda *inputs: (
        seen.append((*inputs, mix(*inputs))) or seen[-1][-1]
    )
    output, _ = run(model, True)
    assert output.state.dtype == torch.float32
    for h, transition, _, x in seen:
        assert {h.dtype, transition.dtype, x.dtype} == {torch.float32}


def test_a_decay_close_to_one_still_contracts():
    """1 - 2^-10 would be 1 in bfloat16, and the state would keep what it began with."""
    model = randomised(tiny(core_layers=1, prelude_layers=0, coda_layers=0))
    injection = model.loop.core.injection
    with torch.no_grad():
        injection.log_A.fill_(0.0)
        injection.dt_bias.fill_(torch.tensor(2**-10).expm1().log())  # softplus of it is 2^-10
    with bfloat16():
        transition, drive = injection.prepare(torch.zeros(1, 1, model.config.width))
        h = torch.ones(1, 1, model.config.width)
        for _ in range(1024):
            h = injection.mix(h, transition, drive)
    assert torch.allclose(h, torch.full_like(h, 0.3679), atol=1e-3)  # 1 / e


class Casts(TorchDispatchMode):
    """Counts how often each tensor is cast to bfloat16; kept, so that no memory is reused."""

    def __init__(self):
        super().__init__()
        self.kept, self.times = [], Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.kept.append(args[0])
            self.times[args[0].data_ptr(), args[0].shape] += 1
        return out


def test_nothing_is_cast_twice_in_a_forward():
    model = randomised(KINDS["parcae"])
    tokens = torch.randint(96, (2, 7))
    with Casts() as casts, bfloat16():
        model(tokens, tokens, loops=4, state="zero")
    assert set(casts.times.values()) == {1}
    weights = [
        x.shape for x in casts.kept if x.shape == model.loop.core.blocks[0].mlp.fc.weight.shape
    ]
    assert len(weights) == model.config.layers  # though the core runs four times


class Kernels(TorchFunctionMode):
    """Checks what PyTorch's fused kernels of accelerators demand: norms whose weight has the dtype
    of the input, and attention without a mask, in 16 bits."""

    def __init__(self):
        super().__init__()
        self.norms = self.attentions = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm:
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            assert weight is None or weight.dtype == args[0].dtype
            self.norms += 1
        if func is F.scaled_dot_product_attention:
            assert {x.dtype for x in args} == {torch.bfloat16}
            assert kwargs == {"is_causal": True, "enable_gqa": True}
            self.attentions += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_norms_and_attention_run_as_fused_kernels(kind):
    """No CPU has the fused norm, so what it demands is checked; likewise flash attention's."""
    model = randomised(KINDS[kind])
    with Kernels() as kernels:
        run(model, True)
        assert kernels.norms
        heads = [torch.empty(1, n, 8, 16, device="meta", dtype=torch.bfloat16) for n in (4, 2, 2)]
        assert attention(*heads).shape == heads[0].shape
    assert kernels.attentions == 1  # on the CPU it is ours


@pytest.mark.parametrize("length", [5, QUERY_BLOCK, 2 * QUERY_BLOCK + 3])
def test_attention_is_that_of_float32_up_to_rounding(length):
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(2, n, length, 16, generator=generator).bfloat16() for n in (4, 2, 2, 4)
    )

    def run(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = attention(*inputs)
        return [y, *torch.autograd.grad(y, inputs, g.to(dtype))]

    for ours, exact in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() < 0.01 * exact.norm()


@pytest.mark.slow
def test_attention_follows_the_contract_of_operators():
    q, k, v = (torch.randn(2, 9, 8).bfloat16().requires_grad_() for _ in range(3))
    torch.library.opcheck(torch.ops.parcae.bfloat16_attention.default, (q, k, v))


@pytest.mark.parametrize("chunk", [4, 64])
def test_loss_and_its_gradients_are_those_of_all_logits_at_once(chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(30, 8, generator=generator).requires_grad_()
    targets = torch.randint(30, (11,), generator=generator)
    targets[[0, 6]] = -100
    loss = chunked_cross_entropy(x, cast_weight(weight, torch.bfloat16), targets, -100, chunk)
    logits = F.linear(x.double(), weight.double())
    exact = F.cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    for ours, theirs in zip(
        torch.autograd.grad(2 * loss, (x, weight)),
        torch.autograd.grad(2 * exact, (x, weight)),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).norm() < 0.01 * theirs.double().norm()
    with torch.no_grad():
        assert chunked_cross_entropy(x, cast_weight(weight, x.dtype), targets, -100, chunk) == loss


def test_checkpointed_loops_give_the_same_bits():
    plain, checkpointed = randomised(KINDS["parcae"]), randomised(KINDS["parcae"])
    checkpointed.activation_checkpointing()
    (_, ours), (_, theirs) = run(checkpointed, True), run(plain, True)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_compiled_step_has_no_graph_break():
    """`fullgraph` raises at a break."""
    torch._dynamo.reset()
    counters.clear()
    config = tiny(prelude_layers=0, core_layers=1, coda_layers=0)
    eager, compiled = randomised(config), randomised(config)
    compiled.compile_layers(backend="aot_eager", fullgraph=True)
    loops = [5, 4, 3, 2]
    (ours, gradients), (theirs, expected) = run(compiled, True, loops), run(eager, True, loops)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=5e-3)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < 0.1 * gradient.norm(), name
    assert counters["stats"]["unique_graphs"] <= 5  # as in float32
