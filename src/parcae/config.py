"""What a model is and how deep it loops: frozen, and valid once it exists.

Nothing rewrites a configuration after it was built; what follows from it is a property.
Every error names the key and says what to do. Recipes and flags are read in `recipe.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

Architecture = Literal["looped", "transformer"]
Injection = Literal["diagonal", "concatenation", "addition", "none"]
Discretisation = Literal["zoh-euler", "zoh"]
Sampler = Literal["poisson", "poisson-full", "poisson-fill", "lognormal-fill", "fixed"]
StateInit = Literal["like-init", "zero"]

LOGNORMAL_SIGMA = 0.5
"""The spread s of the Poisson-lognormal sampler, tau ~ N(log(mean) - s^2/2, s)."""


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key and the remedy."""


def require(condition: bool, key: str, problem: str, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {problem}. {remedy}")


def check_types(owner: Any, prefix: str) -> None:
    """Options and plain types, also where a configuration is made by hand."""
    accepted = {int: (int,), float: (int, float), bool: (bool,), int | None: (int, type(None))}
    for name, hint in get_type_hints(type(owner)).items():
        value, key = getattr(owner, name), f"{prefix}{name}"
        if get_origin(hint) is Literal:
            remedy = f"Use one of {', '.join(map(repr, get_args(hint)))}."
            require(value in get_args(hint), key, f"{value!r} is not an option", remedy)
        elif hint in accepted:
            fits = isinstance(value, accepted[hint]) and isinstance(value, bool) == (hint is bool)
            require(fits, key, f"{value!r} has the wrong type", f"It must be {hint}.")


def check_positive(owner: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None:
            remedy = "Use at least 1."
            require(math.isfinite(value), f"{prefix}{name}", f"{value} is not finite", remedy)
            require(value >= 1, f"{prefix}{name}", f"{value} is not positive", remedy)


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Grow the mean number of loops from 1 over the first `steps` optimiser steps."""

    kind: Literal["linear", "1-sqrt"] = "linear"
    steps: int = 1000

    def __post_init__(self) -> None:
        check_types(self, "model.loop.curriculum.")
        check_positive(self, "model.loop.curriculum.", "steps")

    def fraction(self, step: int) -> float:
        """Share of the final mean in force at `step`: 0 at the start, 1 from `steps` on."""
        progress = min(max(step, 0) / self.steps, 1.0)
        return progress if self.kind == "linear" else 1.0 - math.sqrt(1.0 - progress)


MOST_LOOPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How often a sequence goes through the core in training, and how much of it learns."""

    mean_loops: float = 8
    """mu_rec: the mean of the depth distribution, and the depth used when none is asked for."""
    backprop_loops: int | None = None
    """mu_bwd: at most this many of a sequence's last loops learn; ceil(mean_loops / 2) if unset."""
    sampler: Sampler = "poisson"
    draw_per: Literal["sequence", "micro-batch"] = "sequence"
    state_init: StateInit = "like-init"
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        check_types(self, "model.loop.")
        check_positive(self, "model.loop.", "mean_loops", "backprop_loops")
        require(
            self.mean_loops <= MOST_LOOPS,
            "model.loop.mean_loops",
            f"{self.mean_loops:g} loops never end",
            f"Use at most {MOST_LOOPS:,}.",
        )
        if self.sampler == "fixed":
            require(
                float(self.mean_loops).is_integer(),
                "model.loop.mean_loops",
                f"the sampler 'fixed' loops a whole number of times, not {self.mean_loops}",
                "Use an integer, or the sampler 'poisson'.",
            )
        if self.sampler in ("poisson-fill", "lognormal-fill") and not self.is_fixed_depth:
            require(
                self.curriculum is None,
                "model.loop.curriculum",
                f"the sampler '{self.sampler}' cannot follow a mean that starts at one loop",
                "Use the sampler 'poisson'.",
            )
            rest = self.mean_loops - self.gradient_loops
            enough = rest > 0 if self.sampler == "lognormal-fill" else rest >= 0
            relation = "below" if self.sampler == "lognormal-fill" else "at most"
            require(
                enough,
                "model.loop.backprop_loops",
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
class ModelConfig:
    """An architecture: prelude -> core, looped -> coda. A Transformer runs the same layers once."""

    architecture: Architecture = "looped"
    vocab_size: int = 32_768
    context_length: int = 2048

    width: int = 768
    """d_e: the width of the residual stream in prelude and coda."""
    heads: int = 6
    kv_heads: int | None = None
    mlp_width: int | None = None
    prelude_layers: int = 2
    core_layers: int = 2
    coda_layers: int = 2

    state_width: int | None = None
    """d_h: the width of the looped state; the same as `width` if unset."""
    state_heads: int | None = None
    state_kv_heads: int | None = None
    state_mlp_width: int | None = None

    injection: Injection = "diagonal"
    discretisation: Discretisation = "zoh-euler"
    readout: bool = True
    """C: a matrix from the looped state back to the residual stream."""
    prelude_norm: bool = True

    mlp: Literal["relu2", "swiglu"] = "relu2"
    norm: Literal["pre", "residual"] = "pre"
    norm_eps: float = 1e-5
    qk_norm: bool = True
    value_embeddings: bool = True
    value_layers: tuple[int, ...] | None = None
    """Which layers have one; every second layer, ending with the last, if unset."""
    rope_theta: float = 50_000.0
    tied_embeddings: bool = True
    init: Literal["scaled-zero", "scaled"] = "scaled-zero"

    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        check_types(self, "model.")
        check_positive(self, "model.", "vocab_size", "context_length", "width", "heads", "kv_heads")
        check_positive(self, "model.", "mlp_width", "state_width", "state_heads", "state_kv_heads")
        check_positive(self, "model.", "state_mlp_width")
        for name in ("prelude_layers", "coda_layers"):
            value = getattr(self, name)
            require(value >= 0, f"model.{name}", f"{value} is negative", "Use 0 or more.")
        require(
            0 < self.norm_eps < math.inf,
            "model.norm_eps",
            f"{self.norm_eps} is not a positive number",
            "Try 1e-5.",
        )
        require(
            0 < self.rope_theta < math.inf,
            "model.rope_theta",
            f"{self.rope_theta} is not positive",
            "Try 50000.",
        )
        _check_heads("", self.block)
        wrong = [layer for layer in self.value_layers or () if not 0 <= layer < self.layers]
        require(
            not wrong,
            "model.value_layers",
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
    even = [n for n in range(1, shape.width) if shape.width % (2 * n) == 0]
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
