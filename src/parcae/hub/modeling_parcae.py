"""Looped models in transformers: prelude -> core, looped -> coda.

The cache has one slot per (layer, loop). Prelude and coda come first, then the loops of the core in
order, so that the slots of a model do not depend on how deep a call loops:

    prelude i: i        coda i: P + i        core layer i in loop t: P + C + t K + i

`AttentionSlot` is the attention of one slot: it has no parameters, only its index, so that engines
that give each attention module a cache of its own (vLLM) do so for every loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from parcae.model.blocks import GATE_CHANNELS, MLP, QK_NORM_EPS, Rope, rotate
from parcae.model.depth import (
    Depths,
    Schedule,
    fixed,
    lognormal_fill,
    poisson,
    poisson_fill,
    poisson_full,
)
from parcae.model.injection import (
    AdditionInjection,
    ConcatenationInjection,
    DiagonalInjection,
    Injection,
)

from .configuration_parcae import LayerShape, ParcaeConfig

INJECTION_CLASSES: dict[str, type[Injection]] = {
    "diagonal": DiagonalInjection,
    "concatenation": ConcatenationInjection,
    "addition": AdditionInjection,
}
SAMPLER_FUNCTIONS: dict[str, Callable[..., Depths]] = {
    "poisson": poisson,
    "poisson-full": poisson_full,
    "poisson-fill": poisson_fill,
    "lognormal-fill": lognormal_fill,
    "fixed": fixed,
}


def eager_attention_forward(
    module: AttentionSlot,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain products, for "eager": returns the attention weights too."""
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class AttentionSlot(nn.Module):
    """Attention of one layer in one loop, with a cache of its own; it has no parameters."""

    def __init__(self, config: ParcaeConfig, shape: LayerShape, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = shape.heads // shape.kv_heads
        self.scaling = shape.head_dim**-0.5
        self.is_causal = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [B, H, S, E], keys and values [B, K, S, E] to [B, S, H, E] and the weights."""
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation,  # pyright: ignore[reportArgumentType]
            eager_attention_forward,
        )
        return attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )


class ParcaeAttention(nn.Module):
    """Projections of one layer, shared by its slots; some layers add token embeddings to values."""

    def __init__(self, config: ParcaeConfig, shape: LayerShape, gated: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.qk_norm = config.qk_norm
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.value_gate: nn.Linear | None = None
        if gated:
            self.value_gate = nn.Linear(min(GATE_CHANNELS, shape.width), shape.kv_heads, bias=False)
            self.gate_channels = min(GATE_CHANNELS, shape.width)

    def forward(
        self,
        z: Tensor,
        slot: AttentionSlot,
        rope: Rope,
        value_embedding: Tensor | None,
        exits: Exits | None = None,
        **kwargs: Any,
    ) -> Tensor:
        heads = (-1, self.head_dim)
        query, key, value = (
            projection(z).unflatten(-1, heads)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.value_gate is not None and value_embedding is not None:
            gate = 2.0 * torch.sigmoid(self.value_gate(z[..., : self.gate_channels]))
            value = value + gate[..., None] * value_embedding.unflatten(-1, heads)
        query, key = rotate(query, rope), rotate(key, rope)
        if self.qk_norm:
            query, key = (F.rms_norm(x, heads[1:], eps=QK_NORM_EPS) for x in (query, key))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if exits is not None:
            key, value = exits.hold(key, value)
        y, _ = slot(query, key, value, **kwargs)
        return self.o_proj(y.reshape(*z.shape[:-1], -1))


class ParcaeLayer(GradientCheckpointingLayer):
    """A residual block. `pre`: x + f(N(x)). `residual`: N(x + f(N(x)))."""

    def __init__(self, config: ParcaeConfig, shape: LayerShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=config.rms_norm_eps)
        self.self_attn = ParcaeAttention(config, shape, gated=layer in (config.value_layers or ()))
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=config.rms_norm_eps)
        self.mlp = MLP(config, shape)  # pyright: ignore[reportArgumentType]
        attention, mlp = self.self_attn, self.mlp
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.fc):
            _set_role(projection, "projection", shape.width)
        for projection in (attention.o_proj, mlp.proj):
            _set_role(projection, "out", shape.width)
        _set_role(attention.value_gate, "gate")
        self.norm_after_attn: nn.RMSNorm | None = None
        self.norm_after_mlp: nn.RMSNorm | None = None
        if config.norm == "residual":
            self.norm_after_attn = nn.RMSNorm(shape.width, eps=config.rms_norm_eps)
            self.norm_after_mlp = nn.RMSNorm(shape.width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, slot: AttentionSlot, **inputs: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), slot, **inputs)
        if self.norm_after_attn is not None:
            x = self.norm_after_attn(x)
        x = x + self.mlp(self.post_attention_layernorm(x))
        if self.norm_after_mlp is not None:
            x = self.norm_after_mlp(x)
        return x


class Part(nn.Module):
    """Prelude, core or coda: layers, and what only this part has."""

    def __init__(
        self,
        config: ParcaeConfig,
        shape: LayerShape,
        first_layer: int,
        layers: int,
        injection: Injection | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.first_layer = first_layer
        self.layers = nn.ModuleList(
            ParcaeLayer(config, shape, first_layer + i) for i in range(layers)
        )
        self.injection = injection
        self.norm = nn.RMSNorm(shape.width, eps=config.rms_norm_eps) if norm else None

    def forward(
        self,
        x: Tensor,
        slots: Sequence[AttentionSlot],
        value_embeddings: Sequence[Tensor | None],
        **inputs: Any,
    ) -> Tensor:
        for layer, slot, value_embedding in zip(self.layers, slots, value_embeddings, strict=True):
            x = layer(x, slot, value_embedding=value_embedding, **inputs)
        return x if self.norm is None else self.norm(x)


class Exits:
    """Early exit while one token is decoded per row.

    A row that has stopped keeps its state, and in deeper loops it is represented by the keys and
    values of its last loop, as in `parcae.Engine`.
    """

    def __init__(self, rule: str, layers: int) -> None:
        name, _, threshold = rule.partition(":")
        try:
            self.threshold = float(threshold)
        except ValueError:
            self.threshold = math.nan
        if name not in ("state", "budget") or not self.threshold > 0:
            raise ValueError(
                f"exit: {rule!r}. Use 'state:THRESHOLD' or 'budget:LOOPS' with a positive number; "
                "other rules need parcae.Engine."
            )
        self.is_budget = name == "budget"
        self.layers = layers
        self.stopped: Tensor | None = None
        self.last: list[tuple[Tensor, Tensor]] = []
        """Keys and values of the core's layers in the last loop."""
        self.layer = 0

    def hold(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values to cache; called once per layer of the core, in order."""
        if len(self.last) < self.layers:
            self.last.append((key, value))
        else:
            assert self.stopped is not None
            old_key, old_value = self.last[self.layer]
            key = torch.where(self.stopped[:, None, None, None], old_key, key)
            value = torch.where(self.stopped[:, None, None, None], old_value, value)
            self.last[self.layer] = (key, value)
        self.layer = (self.layer + 1) % self.layers
        return key, value

    def observe(self, loops: int, before: Tensor, after: Tensor) -> Tensor:
        """The state after a loop, of which stopped rows do not take part; decides who stops."""
        if self.stopped is None:
            self.stopped = torch.zeros(len(after), dtype=torch.bool, device=after.device)
        after = torch.where(self.stopped[:, None, None], before, after)
        if self.is_budget:
            self.stopped = self.stopped | (loops >= self.threshold)
        else:
            moved = (after - before).float().norm(dim=-1) / after.float().norm(dim=-1)
            self.stopped = self.stopped | (moved[:, -1] < self.threshold)
        return after

    @property
    def all_stopped(self) -> bool:
        return self.stopped is not None and bool(self.stopped.all())


class ParcaePreTrainedModel(PreTrainedModel):
    config: ParcaeConfig
    config_class = ParcaeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ParcaeLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": ParcaeLayer, "attentions": AttentionSlot}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of weights that a checkpoint does not have; those of `parcae.create`."""
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            return  # nothing to fill
        config = self.config
        std = math.sqrt(2 / (5 * config.hidden_size))
        role = getattr(module, "role", "projection")
        orthogonal = config.init == "scaled-zero"
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Injection):
            module.init_weights(std, None)  # pyright: ignore[reportArgumentType]
        elif isinstance(module, nn.Embedding):
            if role == "value":
                nn.init.normal_(module.weight)
            elif orthogonal:
                nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
            else:
                nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Linear):
            width = getattr(module, "layer_width", config.hidden_size)
            std = math.sqrt(2 / (5 * width))
            if role == "gate" or (role == "out" and orthogonal):
                nn.init.zeros_(module.weight)
            elif role == "out":
                once = config.num_prelude_layers + config.num_coda_layers
                depth = once + config.num_core_layers * config.mean_loops
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth))
            elif orthogonal:
                gain = std * math.sqrt(max(module.weight.shape))
                nn.init.orthogonal_(module.weight, gain=gain)
            else:
                nn.init.normal_(module.weight, std=std)


def _set_role(module: nn.Module | None, role: str, layer_width: int | None = None) -> None:
    """Note how `_init_weights` fills a module that it meets without its surroundings."""
    if module is not None:
        module.role = role  # type: ignore[assignment]
        if layer_width is not None:
            module.layer_width = layer_width  # type: ignore[assignment]


class ParcaeModel(ParcaePreTrainedModel):
    """The model without its head."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        P, K, C = config.num_prelude_layers, config.num_core_layers, config.num_coda_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): nn.Embedding(config.vocab_size, self._shape(layer).kv_width)
                for layer in config.value_layers or ()
            }
        )
        for table in self.value_embeddings.values():
            _set_role(table, "value")
        self.prelude = Part(config, config.block, 0, P, norm=config.prelude_norm and K > 0)
        self.core: Part | None = None
        self.readout: nn.Linear | None = None
        if K > 0:
            if config.injection not in INJECTION_CLASSES:
                raise ValueError(
                    f"injection: {config.injection!r}; known are {', '.join(INJECTION_CLASSES)}. "
                    "A model with an injection of your own runs in parcae only."
                )
            injection = INJECTION_CLASSES[config.injection](config)  # pyright: ignore
            self.core = Part(config, config.core_block, P, K, injection)
            if config.readout:
                self.readout = nn.Linear(config.core_block.width, config.hidden_size, bias=False)
        self.coda = Part(config, config.block, P + K, C)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.slots = nn.ModuleList(
            self._new_slot(index) for index in range(config.num_hidden_layers)
        )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | Sequence[int] | Tensor | None = None,
        exit: str | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The normalised output of the last layer.

        `num_loops`: loops of all sequences, or without a cache one number for each. By default
        `config.num_loops`, and in training mode numbers drawn for each sequence.
        `exit`: "state:0.1" or "budget:4" stops tokens early while one is decoded at a time.
        """
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("Give input_ids or inputs_embeds.")
            inputs_embeds = cast(Tensor, self.embed_tokens(input_ids))
        elif input_ids is None and self.config.value_layers:
            raise ValueError(
                "inputs_embeds without input_ids: layers add embeddings of the token ids to their "
                "values. Give input_ids."
            )
        if self.core is None:
            num_loops = 1
        depths = self._depths(num_loops, len(inputs_embeds), past_key_values)
        if use_cache and past_key_values is None and isinstance(depths, int):
            past_key_values = DynamicCache(config=self.config_for(depths))
        self._check_cache(past_key_values, depths)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = position_ids[None] + start
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        inputs = {
            "attention_mask": mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
            **kwargs,
        }
        values = self._values(input_ids)
        P, K, C = (
            self.config.num_prelude_layers,
            self.config.num_core_layers,
            self.config.num_coda_layers,
        )
        rope = self._rope(position_ids, self.config.block.head_dim)
        x = self.prelude(inputs_embeds, self._slots(0, P), values[:P], rope=rope, **inputs)
        if self.core is not None:
            core_rope = rope
            if self.config.core_block.head_dim != self.config.block.head_dim:
                core_rope = self._rope(position_ids, self.config.core_block.head_dim)
            exits = None
            if exit is not None and past_key_values is not None and inputs_embeds.shape[1] == 1:
                exits = Exits(exit, K)
            h = self._loop(x, depths, core_rope, values[P : P + K], exits, inputs)
            x = h if self.readout is None else self.readout(h)
        x = self.coda(x, self._slots(P, C), values[P + K :], rope=rope, **inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), past_key_values=past_key_values
        )

    def config_for(self, num_loops: int | Depths | None) -> ParcaeConfig:
        """The configuration with another depth, from which caches are built."""
        config = copy.copy(self.config)
        if num_loops is not None:
            config.num_loops = num_loops if isinstance(num_loops, int) else max(num_loops.loops)
        return config

    def _loop(
        self,
        e: Tensor,
        depths: int | Depths,
        rope: Rope,
        values: Sequence[Tensor | None],
        exits: Exits | None,
        inputs: dict[str, Any],
    ) -> Tensor:
        """The state after the loops of every row, from the prelude's output."""
        core = self.core
        assert core is not None
        assert core.injection is not None
        transition, drive = core.injection.prepare(e)
        h = self._initial_state(e)
        rows = len(e)
        order: Tensor | None = None
        if isinstance(depths, int):
            keep = depths - self.config.gradient_loops
            phases = [(rows, loop >= keep) for loop in range(depths)]
        else:
            schedule = Schedule.of(depths)
            if torch.is_grad_enabled():
                phases = [(active, False) for active in schedule.no_grad_rows]
                phases += [(active, True) for active in schedule.grad_rows]
            else:
                phases = [(active, True) for active in schedule.all_loops]
            order = torch.tensor(schedule.order, device=e.device)
            h = h[order]
            drive, rope, values, inputs = _select(order, drive, rope, values, inputs)
        for loop, (active, with_gradient) in enumerate(phases):
            slots = self._core_slots(loop, inputs["past_key_values"])
            if exits is not None and exits.all_stopped:
                for slot, (key, value) in zip(slots, exits.last, strict=True):
                    inputs["past_key_values"].update(key, value, slot.layer_idx)
                continue
            before, waiting = h[:active], h[active:]
            its_drive, its_rope, its_values, its_inputs = drive, rope, values, inputs
            if active < rows:
                its_drive, its_rope, its_values, its_inputs = _select(
                    slice(active), drive, rope, values, inputs
                )
            with nullcontext() if with_gradient else torch.no_grad():
                x = core.injection.mix(before, transition, its_drive)
                after = core(x, slots, its_values, rope=its_rope, exits=exits, **its_inputs)
            if exits is not None:
                after = exits.observe(loop + 1, before, after)
            h = torch.cat((after, waiting)) if len(waiting) else after
        return h if order is None else h[torch.argsort(order)]

    def _initial_state(self, e: Tensor) -> Tensor:
        """Zeros, and in training what the configuration says."""
        width = self.config.core_block.width
        state = e.new_zeros(*e.shape[:-1], width)
        if self.training and self.config.state_init == "like-init":
            std = math.sqrt(2 / (5 * width))
            with torch.no_grad():
                nn.init.trunc_normal_(state, std=std, a=-3 * std, b=3 * std)
        return state

    def _depths(
        self,
        num_loops: int | Sequence[int] | Tensor | None,
        rows: int,
        cache: Cache | None,
    ) -> int | Depths:
        """One number for all sequences, or `Depths` for mixed ones, which have no cache."""
        config = self.config
        if num_loops is None:
            if not self.training or cache is not None or config.mean_loops == 1:
                return config.num_loops
            seed = int(torch.randint(1 << 62, ()))
            generator = torch.Generator().manual_seed(seed)
            drawn = 1 if config.draw_per == "micro-batch" else rows
            depths = SAMPLER_FUNCTIONS[config.sampler](config, drawn, generator, 0)
            if drawn < rows:
                depths = Depths(depths.loops * rows, depths.gradient_loops * rows)
            return depths
        if isinstance(num_loops, Tensor):
            num_loops = num_loops.tolist()
        if isinstance(num_loops, int):
            if num_loops < 1:
                raise ValueError(f"num_loops: {num_loops}; at least one is needed.")
            return num_loops
        assert num_loops is not None
        if len(num_loops) != rows:
            raise ValueError(f"num_loops: {len(num_loops)} given for {rows} sequences.")
        if len(set(num_loops)) == 1:
            return self._depths(int(num_loops[0]), rows, cache)
        if cache is not None:
            raise ValueError("num_loops: with a cache, one number for all sequences is needed.")
        return Depths.truncated([int(n) for n in num_loops], config.gradient_loops)

    def _check_cache(self, cache: Cache | None, depths: int | Depths) -> None:
        if cache is None or getattr(cache, "layer_class_to_replicate", None) is not None:
            return
        needed = self.config_for(depths).num_hidden_layers
        if len(cache.layers) < needed:
            raise ValueError(
                f"past_key_values: {len(cache.layers)} slots, but num_loops={depths} needs "
                f"{needed}. Build it with DynamicCache(config=model.config_for(num_loops))."
            )

    def _values(self, input_ids: Tensor | None) -> list[Tensor | None]:
        """The value embeddings of every layer with weights of its own, or None."""
        config = self.config
        layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
        tables = self.value_embeddings
        return [tables[str(i)](input_ids) if str(i) in tables else None for i in range(layers)]

    def _rope(self, position_ids: Tensor, head_dim: int) -> Rope:
        exponents = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
        angles = position_ids[..., None, None].float() * self.config.rope_theta**-exponents
        return Rope(angles.cos(), angles.sin())

    def _shape(self, layer: int) -> LayerShape:
        """The shape of a layer, numbered over prelude, core and coda."""
        in_core = 0 <= layer - self.config.num_prelude_layers < self.config.num_core_layers
        return self.config.core_block if in_core else self.config.block

    def _new_slot(self, index: int) -> AttentionSlot:
        once = self.config.num_prelude_layers + self.config.num_coda_layers
        shape = self.config.block if index < once else self.config.core_block
        return AttentionSlot(self.config, shape, index)

    def _slots(self, first: int, count: int) -> list[Any]:
        while len(self.slots) < first + count:
            self.slots.append(self._new_slot(len(self.slots)))
        return [self.slots[index] for index in range(first, first + count)]

    def _core_slots(self, loop: int, cache: Cache | None) -> list[Any]:
        """Without a cache all slots of a layer are the same; those of the configuration suffice."""
        config = self.config
        loop = loop if cache is not None else loop % config.num_loops
        first = config.num_prelude_layers + config.num_coda_layers
        return self._slots(first + loop * config.num_core_layers, config.num_core_layers)


def _select(
    rows: Tensor | slice,
    drive: Tensor,
    rope: Rope,
    values: Sequence[Tensor | None],
    inputs: dict[str, Any],
) -> tuple[Tensor, Rope, Sequence[Tensor | None], dict[str, Any]]:
    """The given rows of everything that has one entry per row; others are broadcast."""

    def select(x: Any) -> Any:
        return x if x is None or len(x) == 1 else x[rows]

    chosen = {**inputs}
    for key in ("attention_mask", "position_ids"):
        chosen[key] = select(inputs[key])
    return drive[rows], Rope(*map(select, rope)), [select(v) for v in values], chosen


class ParcaeForCausalLM(ParcaePreTrainedModel, GenerationMixin):
    """The model with its head: logits, the loss of `labels`, and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        self.model = ParcaeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | Sequence[int] | Tensor | None = None,
        exit: str | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if `labels` are given; see `ParcaeModel.forward`."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            exit=exit,
            **kwargs,
        )
        x = outputs.last_hidden_state
        # -0 is 0: all positions
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """With as many slots as `num_loops` needs: the cache follows the configuration."""
        with_depth = copy.copy(self)
        with_depth.config = self.model.config_for(model_kwargs.get("num_loops"))
        prepare: Any = GenerationMixin._prepare_cache_for_generation  # pyright: ignore
        return prepare(with_depth, generation_config, model_kwargs, *args, **kwargs)


__all__ = ["ParcaeForCausalLM", "ParcaeModel", "ParcaePreTrainedModel"]
