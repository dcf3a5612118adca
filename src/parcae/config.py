"""The configuration of a model and of its loop: frozen, and valid once it exists.

What follows from the settings is a property; nothing changes a configuration after it was
constructed. Recipes and command lines are read in `recipe.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from parcae.registry import INJECTIONS, SAMPLERS
from parcae.schema import ConfigError, Settings, require, setting

__all__ = [
    "LOGNORMAL_SIGMA",
    "BlockShape",
    "ConfigError",
    "Curriculum",
    "LoopConfig",
    "ModelConfig",
    "require",
]

LOGNORMAL_SIGMA = 0.5
"""The spread s of the Poisson-lognormal sampler, tau ~ N(log(mean) - s^2/2, s)."""
MAX_LOOPS = 1024
MAX_VOCABULARY = 1 << 21
MAX_CONTEXT = 1 << 20
MAX_WIDTH = 1 << 17
MAX_HEADS = 1 << 13
MAX_LAYERS = 10_000
"""Far beyond any model: a damaged or hostile configuration is refused before it takes memory."""


@dataclass(frozen=True, kw_only=True)
class Curriculum(Settings, table="model.loop.curriculum"):
    """Grow the mean number of loops from 1 over the first `steps` optimiser steps."""

    kind: Literal["linear", "1-sqrt"] = setting("linear", "shape of the growth: linear or 1-sqrt")
    steps: int = setting(1000, "optimiser steps until the full mean is reached", at_least=1)

    def fraction(self, step: int) -> float:
        """Share of the final mean in force at `step`: 0 at the start, 1 from `steps` on."""
        progress = min(max(step, 0) / self.steps, 1.0)
        return progress if self.kind == "linear" else 1.0 - math.sqrt(1.0 - progress)


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Settings, table="model.loop"):
    """How often a sequence goes through the core in training, and how many loops have gradient."""

    mean_loops: float = setting(
        8,
        "mu_rec: mean of the depth distribution, and the depth used unless another is given",
        at_least=1,
        at_most=MAX_LOOPS,
    )
    backprop_loops: int | None = setting(
        None,
        "mu_bwd: last loops with gradient (unset: half of mean_loops, rounded up)",
        at_least=1,
        at_most=MAX_LOOPS,
    )
    sampler: str = setting(
        "poisson",
        "depth distribution: poisson, poisson-full, poisson-fill, lognormal-fill, fixed, "
        "release-per-batch, or a registered one",
        names=SAMPLERS,
    )
    draw_per: Literal["sequence", "micro-batch"] = setting(
        "sequence", "what gets a depth of its own: sequence or micro-batch"
    )
    state_init: Literal["like-init", "zero"] = setting(
        "like-init", "initial state: like-init (truncated normal) or zero"
    )
    curriculum: Curriculum | None = setting(None, "growth of the mean at the start of training")

    def check(self) -> None:
        if self.sampler == "fixed":
            self.require(
                float(self.mean_loops).is_integer(),
                "mean_loops",
                f"the sampler 'fixed' loops a whole number of times, not {self.mean_loops}",
                "Use an integer, or the sampler 'poisson'.",
            )
        if self.sampler in ("poisson-fill", "lognormal-fill") and not self.is_fixed_depth:
            self.require(
                self.curriculum is None,
                "curriculum",
                f"the sampler '{self.sampler}' cannot follow a mean that starts at one loop",
                "Use the sampler 'poisson'.",
            )
            rest = self.mean_loops - self.gradient_loops
            enough = rest > 0 if self.sampler == "lognormal-fill" else rest >= 0
            relation = "below" if self.sampler == "lognormal-fill" else "at most"
            self.require(
                enough,
                "backprop_loops",
                f"the sampler '{self.sampler}' draws the loops before the last "
                f"{self.gradient_loops} around mean_loops - backprop_loops = {rest:g}",
                f"Keep backprop_loops {relation} mean_loops = {self.mean_loops:g}, "
                "or use the sampler 'poisson', which does not couple the two.",
            )

    @property
    def gradient_loops(self) -> int:
        """mu_bwd, with the paper's rule ceil(mu_rec / 2) where it is not set."""
        if self.backprop_loops is not None:
            return self.backprop_loops
        return math.ceil(self.mean_loops / 2)

    @property
    def nominal_loops(self) -> int:
        """The depth a model is used at unless another is asked for."""
        return max(1, round(self.mean_loops))

    @property
    def is_fixed_depth(self) -> bool:
        """A mean of one loop is the paper's fixed-depth baseline: T = 1, nothing is drawn."""
        return self.mean_loops == 1

    @property
    def draws_per_sequence(self) -> bool:
        """Whether the depth of a sequence does not depend on the others in its micro-batch."""
        return self.draw_per == "sequence" or self.is_fixed_depth or self.sampler == "fixed"

    def mean_at(self, step: int) -> float:
        """The mean in force at an optimiser step; a curriculum starts it at one loop."""
        if self.curriculum is None:
            return self.mean_loops
        return max(1.0, self.mean_loops * self.curriculum.fraction(step))


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The shape of one residual block; prelude and coda share one, the core may have its own."""

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings, table="model"):
    """An architecture: prelude -> core, looped -> coda. A Transformer runs the same layers once."""

    architecture: Literal["looped", "transformer"] = setting(
        "looped", "looped, or transformer (the same layers, run once)"
    )
    vocab_size: int = setting(
        32_768, "entries of the vocabulary", at_least=1, at_most=MAX_VOCABULARY
    )
    context_length: int = setting(2048, "longest sequence, tokens", at_least=1, at_most=MAX_CONTEXT)

    width: int = setting(768, "d_e: channels of the residual stream", at_least=1, at_most=MAX_WIDTH)
    heads: int = setting(6, "attention heads of a layer", at_least=1, at_most=MAX_HEADS)
    kv_heads: int | None = setting(
        None, "key-value heads (unset: heads)", at_least=1, at_most=MAX_HEADS
    )
    mlp_width: int | None = setting(
        None, "hidden channels of an MLP (unset: 4 width)", at_least=1, at_most=8 * MAX_WIDTH
    )
    prelude_layers: int = setting(2, "layers before the loop", at_least=0, at_most=MAX_LAYERS)
    core_layers: int = setting(2, "layers in the loop", at_least=0, at_most=MAX_LAYERS)
    coda_layers: int = setting(2, "layers after the loop", at_least=0, at_most=MAX_LAYERS)

    state_width: int | None = setting(
        None, "d_h: channels of the looped state (unset: width)", at_least=1, at_most=MAX_WIDTH
    )
    state_heads: int | None = setting(
        None,
        "attention heads of a core layer (unset: the head dimension stays)",
        at_least=1,
        at_most=MAX_HEADS,
    )
    state_kv_heads: int | None = setting(
        None,
        "key-value heads of a core layer (unset: as for the other layers)",
        at_least=1,
        at_most=MAX_HEADS,
    )
    state_mlp_width: int | None = setting(
        None,
        "hidden channels of a core MLP (unset: as for the other layers)",
        at_least=1,
        at_most=8 * MAX_WIDTH,
    )

    injection: str = setting(
        "diagonal",
        "how the prelude's output enters a loop: diagonal, concatenation, addition, none (only a "
        "Transformer), or a registered one",
        names=INJECTIONS,
    )
    discretisation: Literal["zoh-euler", "zoh"] = setting(
        "zoh-euler", "of the diagonal injection: zoh-euler or zoh"
    )
    readout: bool = setting(True, "C: a matrix from the looped state to the residual stream")
    prelude_norm: bool = setting(True, "normalise the prelude's output")

    mlp: Literal["relu2", "swiglu"] = setting("relu2", "MLP: relu2 or swiglu")
    norm: Literal["pre", "residual"] = setting(
        "pre", "norms of a layer: pre (two) or residual (four, also after attention and MLP)"
    )
    norm_eps: float = setting(1e-5, "added to the mean square before a norm divides", above=0)
    qk_norm: bool = setting(True, "normalise queries and keys")
    value_embeddings: bool = setting(True, "add a token's embedding to the values of some layers")
    value_layers: tuple[int, ...] | None = setting(
        None, "layers with value embeddings (unset: every second, ending with the last)"
    )
    rope_theta: float = setting(50_000.0, "base of the rotary embedding", above=0)
    tied_embeddings: bool = setting(True, "use the token embedding as the unembedding, too")
    init: Literal["scaled-zero", "scaled"] = setting(
        "scaled-zero", "initial weights: scaled-zero (blocks start as the identity) or scaled"
    )

    loop: LoopConfig = setting(LoopConfig, "the loop")

    def check(self) -> None:
        _check_heads("", self.block)
        wrong = [layer for layer in self.value_layers or () if not 0 <= layer < self.layers]
        self.require(
            not wrong,
            "value_layers",
            f"there is no layer {wrong[:1]}",
            f"Layers are numbered 0 to {self.layers - 1}, over prelude, core and coda.",
        )
        if self.architecture == "transformer":
            self._check_transformer()
        else:
            self._check_loop()

    def _check_transformer(self) -> None:
        require(
            self.layers >= 1,
            "model.prelude_layers",
            "a model without layers",
            "prelude, core and coda layers add up to the Transformer's depth; use at least 1.",
        )
        for name, neutral in {
            "injection": "none",
            "readout": False,
            "prelude_norm": False,
            "state_width": None,
            "state_heads": None,
            "state_kv_heads": None,
            "state_mlp_width": None,
        }.items():
            value = getattr(self, name)
            require(
                value == neutral,
                f"model.{name}",
                f"a Transformer has no loop, so {value!r} would mean nothing",
                f"Use {neutral!r}, or architecture = 'looped'.",
            )
        require(
            self.loop.is_fixed_depth,
            "model.loop.mean_loops",
            f"a Transformer runs its layers once, not {self.loop.mean_loops:g} times",
            "Use 1, or architecture = 'looped'.",
        )

    def _check_loop(self) -> None:
        require(
            self.core_layers >= 1,
            "model.core_layers",
            f"a loop over {self.core_layers} layers does nothing",
            "Use at least 1, or architecture = 'transformer' for a model without a loop.",
        )
        require(
            self.injection != "none",
            "model.injection",
            "a looped model must inject the prelude's output into every loop",
            "Use 'diagonal' (Parcae), 'concatenation' (RDM) or 'addition'.",
        )
        state = self.state_width or self.width
        if state != self.width:
            require(
                self.readout,
                "model.readout",
                f"state_width {state} differs from width {self.width}, and nothing maps it back",
                f"Set readout = true (the matrix C), or state_width = {self.width}.",
            )
            require(
                self.injection != "addition",
                "model.injection",
                f"addition needs state_width {state} to equal width {self.width}",
                "Use 'diagonal' or 'concatenation', which project.",
            )
        require(
            self.discretisation == "zoh-euler" or self.injection == "diagonal",
            "model.discretisation",
            f"the injection '{self.injection}' is not discretised",
            "Leave it out, or use injection = 'diagonal'.",
        )
        _check_heads("state_", self.core_block)

    @property
    def layers(self) -> int:
        """Layers with weights of their own, unlooped."""
        return self.prelude_layers + self.core_layers + self.coda_layers

    @property
    def block(self) -> BlockShape:
        """The blocks of prelude and coda, or of the Transformer."""
        return BlockShape(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            mlp_width=self.mlp_width or 4 * self.width,
        )

    @property
    def core_block(self) -> BlockShape:
        """The blocks of the core: those of the prelude, unless the state has its own width."""
        outer = self.block
        width = self.state_width or self.width
        heads = self.state_heads
        if heads is None:
            heads = outer.heads if width == self.width else max(1, width // outer.head_dim)
        same = (width, heads) == (outer.width, outer.heads)
        return BlockShape(
            width=width,
            heads=heads,
            kv_heads=self.state_kv_heads or (outer.kv_heads if same else heads),
            mlp_width=self.state_mlp_width or (outer.mlp_width if same else 4 * width),
        )

    def block_of_layer(self, layer: int) -> BlockShape:
        core = range(self.prelude_layers, self.prelude_layers + self.core_layers)
        looped = self.architecture == "looped" and layer in core
        return self.core_block if looped else self.block

    def has_value_embedding(self, layer: int) -> bool:
        if not self.value_embeddings:
            return False
        if self.value_layers is not None:
            return layer in self.value_layers
        return layer % 2 == (self.layers - 1) % 2


def _check_heads(prefix: str, shape: BlockShape) -> None:
    """`prefix` is "state_" for the core's own keys."""
    fits = shape.width % shape.heads == 0 and shape.head_dim % 2 == 0
    even = [] if fits else [n for n in range(1, shape.width) if shape.width % (2 * n) == 0]
    near = sorted(sorted(even, key=lambda n: abs(n - shape.heads))[:3])
    remedy = f"Try {prefix}heads = {' or '.join(map(str, near)) or '1, with an even width'}."
    require(
        shape.width % shape.heads == 0,
        f"model.{prefix}heads",
        f"{shape.heads} heads do not divide {prefix}width {shape.width}",
        remedy,
    )
    require(
        shape.head_dim % 2 == 0,
        f"model.{prefix}heads",
        f"the head dimension {shape.head_dim} is odd, and rotary embeddings turn pairs",
        remedy,
    )
    require(
        shape.heads % shape.kv_heads == 0,
        f"model.{prefix}kv_heads",
        f"{shape.kv_heads} key-value heads do not divide {shape.heads} heads",
        f"Use a divisor of {shape.heads}.",
    )
