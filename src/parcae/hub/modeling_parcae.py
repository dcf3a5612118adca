"""Looped models in transformers: prelude -> core, looped -> coda.

The cache has one slot per (layer, loop). Prelude and coda come first, then the loops of the core in
order, so that the slots of a model do not depend on how deep a call loops:

    prelude i: i        coda i: P + i        core layer i in loop t: P + C + t K + i

`AttentionSlot` is the attention of one slot: it has no parameters, only its index, so that engines
that give each attention module a cache of its own (vLLM) do so for every loop.

Names: e is the prelude's output, h the looped state; P, K and C are the layers of prelude, core and
coda; shapes are those of `parcae.model.blocks`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import (
    TransformersKwargs,
    can_return_tuple,
    merge_with_config_defaults,
)
from transformers.utils.output_capturing import capture_outputs

from parcae.hub.early_exit import EarlyExit
from parcae.hub.initial_values import init_module, projection, set_role
from parcae.hub.loops import drawn_depths, given_depths, whole_numbers
from parcae.model.blocks import GATE_CHANNELS, MLP, QK_NORM_EPS, Rope, rotate
from parcae.model.depth import Depths, Schedule
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
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
KNOWN_ARGUMENTS = {
    *TransformersKwargs.__annotations__,
    *("cache_position", "return_dict", "shift_labels", "token_type_ids"),
}
"""Those of transformers, of which this model uses some."""
NumLoops = int | Sequence[int] | Tensor | None
"""Loops of all sequences, or one number for each; None for the default."""


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
        slot_offset: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries [B, H, S, E], keys and values [B, K, S, E] to [B, S, H, E] and the weights.

        `slot_offset`: of the cache, in loops beyond those that have modules.
        """
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx + slot_offset)
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
        self.q_proj = projection(shape.width, shape.width, shape.width)
        self.k_proj = projection(shape.width, shape.kv_width, shape.width)
        self.v_proj = projection(shape.width, shape.kv_width, shape.width)
        self.o_proj = projection(shape.width, shape.width, shape.width, role="out")
        self.gate_channels = min(GATE_CHANNELS, shape.width)
        self.value_gate: nn.Linear | None = None
        if gated:
            self.value_gate = projection(
                self.gate_channels, shape.kv_heads, shape.width, role="gate"
            )

    def forward(
        self,
        z: Tensor,
        slot: AttentionSlot,
        value_embedding: Tensor | None,
        rope: Rope,
        early_exit: EarlyExit | None = None,
        **kwargs: Any,
    ) -> Tensor:
        heads = (-1, self.head_dim)
        query = self.q_proj(z).unflatten(-1, heads)
        key = self.k_proj(z).unflatten(-1, heads)
        value = self.v_proj(z).unflatten(-1, heads)
        if self.value_gate is not None and value_embedding is not None:
            gate = 2.0 * torch.sigmoid(self.value_gate(z[..., : self.gate_channels]))
            value = value + gate[..., None] * value_embedding.unflatten(-1, heads)
        query, key = rotate(query, rope), rotate(key, rope)
        if self.qk_norm:
            query, key = (F.rms_norm(x, heads[1:], eps=QK_NORM_EPS) for x in (query, key))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if early_exit is not None:
            key, value = early_exit.hold(key, value)
        y, _ = slot(query, key, value, **kwargs)
        return self.o_proj(y.reshape(*z.shape[:-1], -1))


class ParcaeLayer(GradientCheckpointingLayer):
    """A residual block. `pre`: x + f(N(x)). `residual`: N(x + f(N(x)))."""

    def __init__(self, config: ParcaeConfig, layer: int) -> None:
        super().__init__()
        shape, eps = config.layer_shape(layer), config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(shape.width, eps=eps)
        self.self_attn = ParcaeAttention(config, shape, gated=layer in (config.value_layers or ()))
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=eps)
        self.mlp = MLP(config, shape)  # pyright: ignore[reportArgumentType]
        set_role(self.mlp.fc, "projection", shape.width)
        set_role(self.mlp.proj, "out", shape.width)
        self.norm_after_attn: nn.RMSNorm | None = None
        self.norm_after_mlp: nn.RMSNorm | None = None
        if config.norm == "residual":
            self.norm_after_attn = nn.RMSNorm(shape.width, eps=eps)
            self.norm_after_mlp = nn.RMSNorm(shape.width, eps=eps)

    def forward(
        self, x: Tensor, slot: AttentionSlot, value_embedding: Tensor | None, **inputs: Any
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), slot, value_embedding, **inputs)
        if self.norm_after_attn is not None:
            x = self.norm_after_attn(x)
        x = x + self.mlp(self.post_attention_layernorm(x))
        if self.norm_after_mlp is not None:
            x = self.norm_after_mlp(x)
        return x


class ParcaeStack(nn.Module):
    """Layers in sequence, and the norm after the prelude: the prelude or the coda."""

    def __init__(
        self, config: ParcaeConfig, first_layer: int, layers: int, norm: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ParcaeLayer(config, first_layer + i) for i in range(layers))
        self.norm: nn.RMSNorm | None = None
        if norm:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        slots: Sequence[AttentionSlot],
        value_embeddings: Sequence[Tensor | None],
        **inputs: Any,
    ) -> Tensor:
        for layer, slot, value_embedding in zip(self.layers, slots, value_embeddings, strict=True):
            # positional, because reentrant checkpointing keeps the gradient of such tensors only
            x = layer(x, slot, value_embedding, **inputs)
        return x if self.norm is None else self.norm(x)


class ParcaeCore(ParcaeStack):
    """One loop: the injection of the prelude's output, then the layers."""

    def __init__(self, config: ParcaeConfig, first_layer: int, layers: int) -> None:
        super().__init__(config, first_layer, layers)
        if config.injection not in INJECTION_CLASSES:
            raise ValueError(
                f"injection: {config.injection!r}; known are {', '.join(INJECTION_CLASSES)}. "
                "A model with an injection of your own runs in parcae only."
            )
        self.injection = INJECTION_CLASSES[config.injection](config)  # pyright: ignore

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, h: Tensor, transition: Tensor, drive: Tensor, *args: Any, **inputs: Any
    ) -> Tensor:
        x = self.injection.mix(h, transition, drive)
        return super().forward(x, *args, **inputs).to(h.device)  # layers may be on several


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

    def _init_weights(self, module: nn.Module) -> None:
        init_module(module, self.config)

    @property
    def supports_pp_plan(self) -> bool:
        """Engines ask where layers are to be split over processes."""
        raise ValueError(
            "Pipeline parallelism: a token passes the core several times, so layers cannot be "
            "split over processes in order. Start several servers instead."
        )

    def _resize_token_embeddings(
        self,
        new_num_tokens: int,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the value embeddings too; they are looked up by the same ids."""
        embeddings = super()._resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        size = len(cast(Tensor, embeddings.weight))
        for table in cast(ParcaeModel, self.base_model).value_embeddings.values():
            self._get_resized_embeddings(
                cast(nn.Embedding, table), size, mean_resizing=mean_resizing
            )
        return embeddings


class CoreRows(NamedTuple):
    """Inputs of the core; each has one entry per row, or one for all rows."""

    drive: Tensor
    values: list[Tensor | None]
    rope: Rope
    mask: Tensor | None
    """As the caller gave it: [rows, positions], or prepared."""
    position_ids: Tensor

    def select(self, rows: Tensor | slice) -> CoreRows:
        def of(x: Any) -> Any:
            return x if x is None or len(x) == 1 else x[rows]

        return CoreRows(
            self.drive[rows],
            [of(value) for value in self.values],
            Rope(*map(of, self.rope)),
            of(self.mask),
            of(self.position_ids),
        )


class ParcaeModel(ParcaePreTrainedModel):
    """The model without its head."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__(config)
        P, K, C = config.layer_counts
        _check_heads(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.value_embeddings = nn.ModuleDict()
        for layer in config.value_layers or ():
            table = nn.Embedding(config.vocab_size, config.layer_shape(layer).kv_width)
            set_role(table, "value")
            self.value_embeddings[str(layer)] = table
        self.prelude = ParcaeStack(config, 0, P, norm=config.prelude_norm and K > 0)
        self.core: ParcaeCore | None = None
        self.readout: nn.Linear | None = None
        if K > 0:
            self.core = ParcaeCore(config, P, K)
            if config.readout:
                self.readout = nn.Linear(config.core_block.width, config.hidden_size, bias=False)
        self.coda = ParcaeStack(config, P + K, C)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.slots = nn.ModuleList(
            AttentionSlot(config, config.block if index < P + C else config.core_block, index)
            for index in range(config.num_hidden_layers)
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
        num_loops: NumLoops = None,
        exit: str | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The normalised output of the last layer.

        `num_loops`: loops of all sequences, or without a cache one number for each. By default
        `config.num_loops`, and in training mode numbers drawn for each sequence.
        `exit`: "state:0.1" or "budget:4" stops tokens early while one is decoded at a time.
        Other arguments are those of transformers and of attention functions from outside.
        """
        given = [name for name, value in kwargs.items() if value is not None]
        unknown = [name for name in given if name not in KNOWN_ARGUMENTS]
        if unknown and self.config._attn_implementation in ATTENTION:
            raise TypeError(
                f"{', '.join(unknown)}: unknown arguments. The model's own are num_loops and exit."
            )
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("Give input_ids or inputs_embeds.")
            inputs_embeds = cast(Tensor, self.embed_tokens(input_ids))
        elif input_ids is None and self.config.value_layers:
            input_ids = self._ids_of(inputs_embeds)
        depths = self._depths(num_loops, len(inputs_embeds), past_key_values)
        if use_cache and past_key_values is None and isinstance(depths, int):
            past_key_values = DynamicCache(config=self.config_for(depths))
        self._check_cache(past_key_values, depths)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = position_ids[None] + start
        P, K, C = self.config.layer_counts
        slots, values = list(self.slots), self._values(input_ids)
        rope = self._rope(position_ids, self.config.block.head_dim)
        mask = self._causal_mask(inputs_embeds, attention_mask, position_ids, past_key_values)
        inputs = {
            "attention_mask": mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            **kwargs,
        }
        x = self.prelude(inputs_embeds, slots[:P], values[:P], rope=rope, **inputs)
        if self.core is not None:
            core_rope = rope
            if self.config.core_block.head_dim != self.config.block.head_dim:
                core_rope = self._rope(position_ids, self.config.core_block.head_dim)
            transition, drive = self.core.injection(x)
            rows = CoreRows(drive, values[P : P + K], core_rope, attention_mask, position_ids)
            h = self._initial_state(x).to(drive.device)
            if isinstance(depths, int):
                h = self._loop(h, transition, rows, depths, exit, inputs)
            else:
                h = self._loop_rows(h, transition, rows, depths, kwargs)
            x = h if self.readout is None else self.readout(h)
        x = self.coda(x, slots[P : P + C], values[P + K :], rope=rope, **inputs)
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
        h: Tensor,
        transition: Tensor,
        rows: CoreRows,
        loops: int,
        exit: str | None,
        inputs: dict[str, Any],
    ) -> Tensor:
        """The state after loops of all rows: with gradient in the last ones, with a cache or not.

        Early exit is for single tokens: it fills the cache of loops that it skips.
        """
        assert self.core is not None
        P, K, C = self.config.layer_counts
        cache: Cache | None = inputs["past_key_values"]
        early_exit = None
        if exit is not None and cache is not None and h.shape[1] == 1:
            early_exit = EarlyExit(exit, K)
        for loop in range(loops):
            if early_exit is not None and early_exit.all_stopped:
                early_exit.fill(cast(Cache, cache), P + C + loop * K)
                continue
            slots, offset = self._core_slots(loop)
            with self._gradient(loop >= loops - self.config.gradient_loops):
                after = self.core(
                    *(h, transition, rows.drive, slots, rows.values),
                    rope=rows.rope,
                    slot_offset=offset,
                    early_exit=early_exit,
                    **inputs,
                )
            h = after if early_exit is None else early_exit.observe(loop + 1, h, after)
        return h

    def _loop_rows(
        self,
        h: Tensor,
        transition: Tensor,
        rows: CoreRows,
        depths: Depths,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The state after the loops of rows with depths of their own; without a cache.

        Rows are sorted by depth, deepest first, so that each loop runs on the first ones.
        """
        assert self.core is not None
        schedule = Schedule.of(depths)
        phases = [(active, False) for active in schedule.no_grad_rows]
        phases += [(active, True) for active in schedule.grad_rows]
        if not torch.is_grad_enabled():
            phases = [(active, True) for active in schedule.all_loops]
        order = torch.tensor(schedule.order)
        h, rows = h[order], rows.select(order)
        masks: dict[int, Any] = {}
        for loop, (active, with_gradient) in enumerate(phases):
            first = rows.select(slice(active))
            if active not in masks:  # those of some attention functions cannot be indexed
                masks[active] = self._causal_mask(h[:active], first.mask, first.position_ids, None)
            slots, _ = self._core_slots(loop)
            with self._gradient(with_gradient):
                after = self.core(
                    *(h[:active], transition, first.drive, slots, first.values),
                    rope=first.rope,
                    attention_mask=masks[active],
                    position_ids=first.position_ids,
                    **kwargs,
                )
            h = torch.cat((after, h[active:])) if active < len(h) else after
        return h[torch.argsort(order)]

    def _core_slots(self, loop: int) -> tuple[list[nn.Module], int]:
        """The slots of the core in a loop, and how far behind them those of the cache are.

        There are modules for the loops of the configuration; a call may have more.
        """
        P, K, C = self.config.layer_counts
        built = (len(self.slots) - P - C) // K
        first = P + C + loop % built * K
        return list(self.slots)[first : first + K], (loop - loop % built) * K

    def _gradient(self, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext() if enabled else torch.no_grad()

    def _initial_state(self, e: Tensor) -> Tensor:
        """Zeros, and in training what the configuration says."""
        width = self.config.core_block.width
        state = e.new_zeros(*e.shape[:-1], width)
        if self.training and self.config.state_init == "like-init":
            std = math.sqrt(2 / (5 * width))
            with torch.no_grad():
                nn.init.trunc_normal_(state, std=std, a=-3 * std, b=3 * std)
        return state

    def _depths(self, num_loops: NumLoops, rows: int, cache: Cache | None) -> int | Depths:
        """One number for all sequences, or `Depths` for mixed ones, which have no cache."""
        config = self.config
        if self.core is None:
            return 1
        if num_loops is None:
            draws = self.training and cache is None and config.mean_loops != 1
            return drawn_depths(rows, config) if draws else config.num_loops
        depths = given_depths(num_loops, rows, config)
        if isinstance(depths, Depths) and cache is not None:
            raise ValueError("num_loops: with a cache, one number for all sequences is needed.")
        return depths

    def _check_cache(self, cache: Cache | None, depths: int | Depths) -> None:
        if cache is None or getattr(cache, "layer_class_to_replicate", None) is not None:
            return
        needed = self.config_for(depths).num_hidden_layers
        if len(cache.layers) < needed:
            raise ValueError(
                f"past_key_values: {len(cache.layers)} slots, but num_loops={depths} needs "
                f"{needed}. Build it with DynamicCache(config=model.config_for(num_loops))."
            )

    @torch.no_grad()
    def _ids_of(self, inputs_embeds: Tensor) -> Tensor:
        """The ids of embedded tokens, by which value embeddings are looked up."""
        table = self.embed_tokens.weight.float()
        closeness = inputs_embeds.float() @ table.T - table.square().sum(-1) / 2
        input_ids = closeness.argmax(-1)
        if not torch.equal(self.embed_tokens(input_ids), inputs_embeds):
            raise ValueError(
                "inputs_embeds: not embeddings of tokens, but layers add embeddings of the token "
                "ids to their values. Give input_ids too."
            )
        return input_ids

    def _values(self, input_ids: Tensor | None) -> list[Tensor | None]:
        """The value embeddings of every layer with weights of its own, or None."""
        tables = self.value_embeddings
        layers = sum(self.config.layer_counts)
        return [tables[str(i)](input_ids) if str(i) in tables else None for i in range(layers)]

    def _rope(self, position_ids: Tensor, head_dim: int) -> Rope:
        exponents = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
        angles = position_ids[..., None, None].float() * self.config.rope_theta**-exponents
        return Rope(angles.cos(), angles.sin())

    def _causal_mask(
        self, x: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Cache | None
    ) -> Any:
        """The mask in the form that the attention function needs; None for a causal one."""
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=mask,
            past_key_values=cache,
            position_ids=position_ids,
        )


def _check_heads(config: ParcaeConfig) -> None:
    """Refuse what vLLM would compute wrongly: its caches have one shape, that of the other layers.

    It sets this attention function before it builds a model.
    """
    shapes = [(s.heads, s.kv_heads, s.head_dim) for s in (config.block, config.core_block)]
    if config._attn_implementation == "vllm" and config.num_core_layers and len(set(shapes)) > 1:
        raise ValueError(
            f"vLLM needs the same heads in all layers; (heads, key-value heads, head dimension) "
            f"are {shapes[0]} and in the core {shapes[1]}. Serve this model with parcae."
        )


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
        num_loops: NumLoops = None,
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
        logits = self.lm_head(_kept(outputs.last_hidden_state, logits_to_keep))
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

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Keep the ids of an embedded prompt, where both are given: values need them."""
        prepare: Any = super().prepare_inputs_for_generation  # pyright: ignore
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        embedded = inputs.get("inputs_embeds")
        if embedded is not None and input_ids.shape[1] >= embedded.shape[1]:
            inputs["input_ids"] = input_ids[:, -embedded.shape[1] :]
        return inputs

    def config_for(self, num_loops: int | None) -> ParcaeConfig:
        """The configuration with another depth, from which caches are built."""
        return self.model.config_for(num_loops)

    def _prepare_generation_config(
        self, generation_config: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Loops and exit of a generation configuration are arguments, unless the call has them."""
        prepare: Any = super()._prepare_generation_config  # pyright: ignore
        prepared, arguments = prepare(generation_config, **kwargs)
        for name in ("num_loops", "exit"):
            value = prepared.__dict__.pop(name, None)
            if value is not None:
                arguments[name] = value
        if arguments.get("num_loops") is not None:
            numbers = whole_numbers(arguments["num_loops"])
            if not isinstance(numbers, int) and len(set(numbers)) == 1:
                numbers = numbers[0]
            arguments["num_loops"] = numbers
        return prepared, arguments

    def _get_candidate_generator(
        self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """An assistant has its own loops: its default, or those of its generation configuration."""
        get: Any = super()._get_candidate_generator  # pyright: ignore
        others = {k: v for k, v in model_kwargs.items() if k not in ("num_loops", "exit")}
        return get(*args, model_kwargs=others, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """With as many slots as `num_loops` needs: the cache follows the configuration."""
        model, num_loops = self, model_kwargs.get("num_loops")
        if isinstance(num_loops, int) and num_loops != self.config.num_loops:
            model = copy.copy(self)
            model.config = self.config_for(num_loops)
        prepare: Any = GenerationMixin._prepare_cache_for_generation  # pyright: ignore
        return prepare(model, generation_config, model_kwargs, *args, **kwargs)


def _kept(x: Tensor, positions: int | Tensor) -> Tensor:
    """The last positions (0: all), these positions of all rows or of each row, or those marked."""
    if isinstance(positions, int):
        return x[:, -positions:]  # -0 is 0
    if positions.ndim == 1:
        return x[:, positions]
    if positions.dtype == torch.bool:
        return x[positions]
    return x.take_along_dim(positions[..., None], dim=1)


__all__ = ["ParcaeForCausalLM", "ParcaeModel", "ParcaePreTrainedModel"]
