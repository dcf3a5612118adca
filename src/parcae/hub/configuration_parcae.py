"""The configuration of a looped model in transformers."""

import importlib
import math
from os import PathLike
from typing import Literal, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

MAX_LAYER_PASSES = 100_000
"""Each has a module of its own; a file that asks for more is wrong, or meant to take memory."""
POSITIVE = (
    "vocab_size",
    "max_position_embeddings",
    "num_loops",
    "mean_loops",
    "gradient_loops",
    "rms_norm_eps",
    "rope_theta",
)
PACKAGED = "parcae.hub.configuration_parcae"
"""The name of this module, unless it is the copy that a folder has for `trust_remote_code`."""


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

    Values are checked by their annotations, which therefore must not be strings.

    `num_loops` is the depth used unless a call gives another one. Standard names keep their
    meaning: `num_hidden_layers` is the number of layers a token passes, which is the number of
    key-value caches: prelude + coda + `num_loops` x core. The layers with weights of their own are
    `num_prelude_layers`, `num_core_layers` and `num_coda_layers`.

    The `state_*` sizes are those of the core; by default those of the other layers. `mean_loops`,
    `backprop_loops`, `sampler`, `draw_per` and `state_init` are used in training: every sequence
    then has a number of loops of its own, of which the last `backprop_loops` have gradient.
    """

    model_type = "parcae"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
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
    discretisation: Literal["zoh-euler", "zoh"] = "zoh-euler"
    readout: bool = True
    prelude_norm: bool = True
    mlp: Literal["relu2", "swiglu"] = "relu2"
    norm: Literal["pre", "residual"] = "pre"
    rms_norm_eps: float | int = 1e-5
    qk_norm: bool = True
    value_layers: list[int] | tuple[int, ...] | None = None
    rope_theta: float | int = 50_000.0
    init: Literal["scaled-zero", "scaled"] = "scaled-zero"

    mean_loops: float | int = 8
    backprop_loops: int | None = None
    sampler: Literal[
        "poisson",
        "poisson-full",
        "poisson-fill",
        "lognormal-fill",
        "fixed",
        "release-per-batch",
    ] = "poisson"
    draw_per: Literal["sequence", "micro-batch"] = "sequence"
    state_init: Literal["like-init", "zero"] = "like-init"

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
            layers = sum(self.layer_counts)
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
        layers = self.layer_counts
        if min(layers) < 0 or sum(layers) < 1:
            raise ValueError(f"{layers} layers in prelude, core and coda; at least one is needed.")
        for name in POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}: {value}; it must be > 0.")
        missing = [layer for layer in self.value_layers or () if not 0 <= layer < sum(layers)]
        if missing:
            raise ValueError(
                f"value_layers: {missing}; the layers are numbered from 0 to {sum(layers) - 1}."
            )
        if self.num_hidden_layers > MAX_LAYER_PASSES:
            raise ValueError(
                f"num_loops: {self.num_loops} loops of {self.num_core_layers} layers; a token may "
                f"pass {MAX_LAYER_PASSES:,} layers at most."
            )

    def save_pretrained(
        self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs
    ) -> None:
        """Save the configuration, and with it the modelling code; models call it when saved.

        transformers saves the code of a model that was loaded as remote code. For one of the
        package it is generated, so that the folder can be loaded where parcae is not installed.
        """
        if __name__ == PACKAGED:
            importlib.import_module("parcae.hub.remote_code").save_code(self, save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @property
    def num_hidden_layers(self) -> int:
        once = self.num_prelude_layers + self.num_coda_layers
        return once + self.num_loops * self.num_core_layers

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        """Accepted because tools copy it; the number follows from layers and loops."""

    @property
    def layer_counts(self) -> tuple[int, int, int]:
        """Layers with weights of their own, of prelude, core and coda."""
        return self.num_prelude_layers, self.num_core_layers, self.num_coda_layers

    def layer_shape(self, layer: int) -> LayerShape:
        """The shape of a layer, numbered over prelude, core and coda without loops."""
        in_core = 0 <= layer - self.num_prelude_layers < self.num_core_layers
        return self.core_block if in_core else self.block

    @property
    def head_dim(self) -> int:
        return self.block.head_dim

    @head_dim.setter
    def head_dim(self, value: int) -> None:
        if value != self.head_dim:
            raise ValueError(
                f"head_dim: {value}, but hidden_size / num_attention_heads is {self.head_dim}. "
                "Change one of these."
            )

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
