"""Reference implementations, slow and simple: oracles of the tests and baselines of the benchmarks.

`forward` is the model, written plainly: every row of a batch loops to the batch's maximum, and a
mask selects the valid loops; B e and the value embeddings are computed in every loop; the loss has
all logits at once. It uses the weights of a model of `parcae.model`, but none of its code.

`generate` is decoding without a cache: every token recomputes the whole prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.infer import TEMPERATURE
from parcae.infer.request import check_prompt, check_whole
from parcae.infer.sampling import Sampling, pick
from parcae.model.base import LanguageModel
from parcae.model.depth import Depths


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    loops: int | None = None,
    temperature: float = TEMPERATURE,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """The tokens that follow `prompt`, at most `max_new_tokens`, up to the first of `stop_tokens`.

    Every position loops `loops` times from a state of zeros; the default is the mean of training.
    Like the engine, it refuses a prompt that is longer than the context, and ends the text when
    the context is full.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    limit = model.config.context_length
    tokens = check_prompt(prompt, model.config.vocab_size, limit)
    check_whole("max_new_tokens", max_new_tokens, 1)
    loops = model.config.loop.nominal_loops if loops is None else loops
    start, ends = len(tokens), frozenset(stop_tokens)
    for position in range(start, min(start + max_new_tokens, limit + 1)):
        window = torch.tensor([tokens], device=model.device)
        _, x = next(iter(model.readings(window, (loops,), state="zero")))
        token = pick(model.logits(x[0, -1]).cpu(), sampling, seed, position, tokens)
        if token in ends:
            break
        tokens.append(token)
    return tokens[start:]


def forward(
    model: Any, tokens: Tensor, targets: Tensor | None, depths: Depths, state: Tensor
) -> Tensor:
    """The mean loss if targets are given, else the logits [B, S, V]."""
    config = model.config

    def value(layer: int) -> Tensor | None:
        key = str(layer)
        return (
            F.embedding(tokens, model.value_tables[key].weight)
            if key in model.value_tables
            else None
        )

    e = F.embedding(tokens, model.embed.weight)
    for layer, module in enumerate(model.prelude.blocks):
        e = _block(module, e, value(layer), config)
    if config.prelude_norm:
        e = _rms_norm(e, model.prelude.norm.weight, config.norm_eps)

    core = model.loop.core

    def one_loop(h: Tensor) -> Tensor:
        x = _inject(core.injection, h, e, config)
        for index, module in enumerate(core.blocks):
            x = _block(module, x, value(config.prelude_layers + index), config)
        return x

    def masked(h: Tensor, loops: tuple[int, ...]) -> Tensor:
        left = torch.tensor(loops)
        for index in range(max(loops)):
            h = torch.where((index < left)[:, None, None], one_loop(h), h)
        return h

    h = state
    with torch.no_grad():
        h = masked(h, depths.no_grad_loops)
    h = masked(h, depths.gradient_loops)

    x = h if model.coda.readout is None else h @ model.coda.readout.weight.T
    for index, module in enumerate(model.coda.blocks):
        x = _block(module, x, value(config.prelude_layers + config.core_layers + index), config)
    x = _rms_norm(x, model.coda.norm.weight, config.norm_eps)
    logits = x @ (model.embed if model.head is None else model.head).weight.T
    return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _apply_rope(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [B, S, H, E] through complex numbers."""
    length, head_dim = x.shape[1], x.shape[3]
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(length).float(), frequency)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(
        3
    )


def _attention(attn: Any, z: Tensor, value: Tensor | None, config: Any) -> Tensor:
    rows, length, width = z.shape
    shape = attn.shape
    q, k, v = (
        (z @ w.weight.T).view(rows, length, heads, shape.head_dim)
        for w, heads in (
            (attn.q, shape.heads),
            (attn.k, shape.kv_heads),
            (attn.v, shape.kv_heads),
        )
    )
    if value is not None:
        gate = 2 * torch.sigmoid(z[..., : attn.gate.weight.shape[1]] @ attn.gate.weight.T)
        v = v + gate.unsqueeze(-1) * value.view(v.shape)
    q, k = _apply_rope(q, config.rope_theta), _apply_rope(k, config.rope_theta)
    if config.qk_norm:
        eps = torch.finfo(torch.float32).eps
        q, k = _rms_norm(q, None, eps), _rms_norm(k, None, eps)
    k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(rows, length, width) @ attn.out.weight.T


def _mlp(module: Any, x: Tensor, config: Any) -> Tensor:
    hidden = x @ module.fc.weight.T
    if config.mlp == "swiglu":
        half = hidden.shape[-1] // 2
        return (F.silu(hidden[..., :half]) * hidden[..., half:]) @ module.proj.weight.T
    return (0.5 * torch.relu(hidden) ** 2) @ module.proj.weight.T


def _block(module: Any, x: Tensor, value: Tensor | None, config: Any) -> Tensor:
    def norm(layer: Any, x: Tensor) -> Tensor:
        return x if layer is None else _rms_norm(x, layer.weight, config.norm_eps)

    attended = _attention(module.attn, norm(module.norm_attn, x), value, config)
    x = norm(module.norm_after_attn, x + attended)
    return norm(module.norm_after_mlp, x + _mlp(module.mlp, norm(module.norm_mlp, x), config))


def _inject(injection: Any, h: Tensor, e: Tensor, config: Any) -> Tensor:
    if config.injection == "addition":
        return h + e
    if config.injection == "concatenation":
        return torch.cat([h, e], dim=-1) @ injection.W.T
    rate = F.softplus(injection.dt_bias) * torch.exp(injection.log_A)
    gain = F.softplus(injection.dt_bias)
    if config.discretisation == "zoh":
        gain = (1 - torch.exp(-rate)) / torch.exp(injection.log_A)
    return torch.exp(-rate) * h + gain * (e @ injection.B.T)
