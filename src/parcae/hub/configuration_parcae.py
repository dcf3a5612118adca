"""The configuration of a looped model in transformers."""

from __future__ import annotations

import math
from typing import NamedTuple

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

MAX_LOOPS = 1_000_000


class LayerShape(NamedTuple):
    """Sizes of one layer: those of prelude and coda, or those of the core."""

    width: int
    heads: int
    kv_heads: int
    mlp_width: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@strict
class ParcaeConfig(PreTrainedConfig):
    """Prelude -> core, looped `num_loops` times -> coda; `num_core_layers=0` is a Transformer.

    `num_loops` is the depth used unless a call gives another one. Standard names keep their
    meaning: `num_hidden_layers` is the number of layers a token passes, which is the number of
    key-value caches: prelude + coda + `num_loops` x core. The layers with weights of their own are
    `num_prelude_layers`, `num_core_layers` and `num_coda_layers`.

    The `state_*` sizes are those of the core; by default those of the other layers. `mean_loops`,
    `backprop_loops`, `sampler`, `draw_per` and `state_init` are used in training: every sequence
    then has a number of loops of its own, of which the last `backprop_loops` have gradient.
    """

    model_type = "parcae"
    keys_to_ignore_at_inference = ("past_key_values",)
    base_model_tp_plan = None
    base_model_pp_plan = None

    vocab_size: int = 32_768
    hidden_size: int = 768
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    num_prelude_layers: int = 2
    num_core_layers: int = 2
    num_coda_layers: int = 2
    num_loops: int = 8

    state_size: int | None = None
    state_num_attention_heads: int | None = None
    state_num_key_value_heads: int | None = None
    state_intermediate_size: int | None = None

    injection: str = "diagonal"
    discretisation: str = "zoh-euler"
    readout: bool = True
    prelude_norm: bool = True
    mlp: str = "relu2"
    norm: str = "pre"
    rms_norm_eps: float = 1e-5
    qk_norm: bool = True
    value_layers: list[int] | tuple[int, ...] | None = None
    rope_theta: float = 50_000.0
    init: str = "scaled-zero"

    mean_loops: float | int = 8
    backprop_loops: int | None = None
    sampler: str = "poisson"
    draw_per: str = "sequence"
    state_init: str = "like-init"

    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    attention_dropout: float | int = 0.0

    def __post_init__(self, **kwargs) -> None:
        kwargs.pop("num_hidden_layers", None)  # follows from the others
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        same = self.state_size in (None, self.hidden_size)
        self.state_size = self.state_size or self.hidden_size
        if self.state_num_attention_heads is None:
            head_dim = self.hidden_size // self.num_attention_heads
            self.state_num_attention_heads = (
                self.num_attention_heads if same else max(1, self.state_size // head_dim)
            )
        same = same and self.state_num_attention_heads == self.num_attention_heads
        if self.state_num_key_value_heads is None:
            self.state_num_key_value_heads = (
                self.num_key_value_heads if same else self.state_num_attention_heads
            )
        if self.state_intermediate_size is None:
            self.state_intermediate_size = self.intermediate_size if same else 4 * self.state_size
        if self.value_layers is None:
            layers = self.num_prelude_layers + self.num_core_layers + self.num_coda_layers
            self.value_layers = list(range((layers - 1) % 2, layers, 2))
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse sizes that do not fit together, before a model is built from them."""
        for shape in (self.block, self.core_block):
            if min(shape) < 1 or shape.width % (2 * shape.heads) or shape.heads % shape.kv_heads:
                raise ValueError(
                    f"{shape}: heads must divide the width into an even head dimension, and "
                    "key-value heads must divide the heads."
                )
        layers = (self.num_prelude_layers, self.num_core_layers, self.num_coda_layers)
        if min(layers) < 0 or sum(layers) < 1:
            raise ValueError(f"{layers} layers in prelude, core and coda; at least one is needed.")
        if not 1 <= self.num_loops <= MAX_LOOPS:
            raise ValueError(f"num_loops: {self.num_loops}; it must be 1 to {MAX_LOOPS}.")
        if self.vocab_size < 1 or self.max_position_embeddings < 1:
            raise ValueError("vocab_size and max_position_embeddings must be >= 1.")

    @property
    def num_hidden_layers(self) -> int:
        once = self.num_prelude_layers + self.num_coda_layers
        return once + self.num_loops * self.num_core_layers

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        """Accepted because tools copy it; the number follows from layers and loops."""

    @property
    def head_dim(self) -> int:
        return self.block.head_dim

    @property
    def width(self) -> int:
        return self.hidden_size

    @property
    def block(self) -> LayerShape:
        return LayerShape(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,  # type: ignore[arg-type]
            self.intermediate_size,  # type: ignore[arg-type]
        )

    @property
    def core_block(self) -> LayerShape:
        return LayerShape(
            self.state_size,  # type: ignore[arg-type]
            self.state_num_attention_heads,  # type: ignore[arg-type]
            self.state_num_key_value_heads,  # type: ignore[arg-type]
            self.state_intermediate_size,  # type: ignore[arg-type]
        )

    @property
    def gradient_loops(self) -> int:
        """Loops with gradient: the last half of the mean unless `backprop_loops` is set."""
        return self.backprop_loops or math.ceil(self.mean_loops / 2)

    def mean_at(self, step: int) -> float:
        """Mean number of loops in training; here it does not grow over the steps."""
        return self.mean_loops


__all__ = ["ParcaeConfig"]
