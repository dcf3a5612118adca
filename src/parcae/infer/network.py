"""Networks run passes of a model over a cache. `open_network` chooses one.

    output = network.forward(batch, cache, max_loops)      a Network: from token ids to logits

`TorchNetwork` runs any pass with PyTorch operators, on any device, in stages that other code may
call one by one:

    drive = network.run_prelude(batch, cache)                       and B_bar e
    h     = network.run_loops(h, drive, batch, cache, range(1, 9))  loops 1 to 8
    x     = network.run_coda(h, batch, cache)
    network.logits(x)

`NativeNetwork` (native/network.py) runs passes of a few tokens on a CPU in one call of C++, and
`AutoNetwork` gives each pass to one of the two: with `backend="auto"` to the faster one, measured
when a size of pass is first met (native/choice.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from functools import cached_property, partial
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import require
from parcae.infer.batch import AttentionBatch, Batch, LayerCaches, PassOutput, Span
from parcae.infer.cache import Cache, CacheTooLarge, Policy
from parcae.infer.exit import ExitMonitor, ExitRule
from parcae.infer.layers import FoldedModel, Layer, LinearMix, memory_of
from parcae.infer.native.choice import Choices, Passes
from parcae.infer.native.kernels import Kernels, KernelsUnavailable
from parcae.infer.native.network import NativeNetwork
from parcae.infer.quantise import WEIGHT_DTYPES, WeightDType
from parcae.model.base import LanguageModel

Backend = Literal["auto", "native", "torch", "static"]


class Network(Protocol):
    model: FoldedModel

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None = None,
        predict: Sequence[int] | None = None,
    ) -> PassOutput:
        """Loop each span `max_loops` times, or until its exit rule stops it, and predict.

        `exits`: one rule or None per span; spans with a rule must be single tokens.
        `predict`: indices of the tokens whose logits are returned; the default is all.
        """
        ...


class TorchNetwork:
    """Any pass, in PyTorch."""

    def __init__(self, model: FoldedModel) -> None:
        self.model = model

    def name(self, cache_dtype: torch.dtype) -> str:
        return "PyTorch"

    @property
    def drafter(self) -> TorchNetwork:
        """The network for speculative drafts."""
        return self

    @property
    def weight_bytes(self) -> int:
        """Memory of all tables and matrices; shared ones count once."""
        return memory_of(self.model.tensors)

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None = None,
        predict: Sequence[int] | None = None,
    ) -> PassOutput:
        """See `Network.forward`. Spans that have finished looping leave the batch: the remaining
        loops run on the others alone."""
        looping = _LoopingSpans(self, cache, batch, max_loops, exits)
        x, state = looping.run()
        if predict is not None:
            x = x[list(predict)]
        return PassOutput(self.logits(x), state, looping.loops)

    def run_prelude(self, batch: AttentionBatch, cache: LayerCaches) -> Tensor:
        """B_bar e, the input of every loop [N, d_h]; of a Transformer the last layer's output."""
        model = self.model
        x = F.embedding(batch.id_tensor, model.embedding)
        x = self._outer(x, model.prelude, 0, cache.prelude_layers, batch)
        if model.prelude_norm is not None:
            x = model.prelude_norm(x)
        return model.mix.drive(x)

    def initial_state(self, batch: Sized) -> Tensor:
        """h_0 of all tokens: zeros [N, d_h]."""
        width = self.model.config.core_block.width
        return torch.zeros(len(batch), width, dtype=self.model.dtype, device=self.model.device)

    def run_loops(
        self, h: Tensor, drive: Tensor, batch: AttentionBatch, cache: LayerCaches, loops: range
    ) -> Tensor:
        """h after the given loops, counted from 1, of all tokens [N, d_h]."""
        model = self.model
        if not model.core:
            return drive
        phases = model.core_phases[batch.position_tensor]
        values = self._values(batch, model.layout.prelude_layers, len(model.core))
        for loop in loops:
            h = model.mix(h, drive)
            for layer, value, kv in zip(model.core, values, cache.core_layers(loop), strict=True):
                h = layer(h, phases, value, kv, batch)
        return h

    def run_coda(self, h: Tensor, batch: AttentionBatch, cache: LayerCaches) -> Tensor:
        """Readout, coda and final norm: the input of the head [N, d_e]."""
        model = self.model
        x = h if model.readout is None else model.readout(h)
        first = model.layout.prelude_layers + model.layout.core_layers
        return model.final_norm(self._outer(x, model.coda, first, cache.coda_layers, batch))

    def logits(self, x: Tensor) -> Tensor:
        """[N, V] in float32."""
        return self.model.head(x).float()

    def _outer(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        first: int,
        cache: Sequence[Any],
        batch: AttentionBatch,
    ) -> Tensor:
        phases = self.model.outer_phases[batch.position_tensor]
        values = self._values(batch, first, len(layers))
        for layer, value, kv in zip(layers, values, cache, strict=True):
            x = layer(x, phases, value, kv, batch)
        return x

    def _values(self, batch: AttentionBatch, first: int, layers: int) -> list[Tensor | None]:
        """The tokens' value embeddings [N, K, E] for layers that have them."""

        def look_up(layer: int) -> Tensor | None:
            table = self.model.value_tables.get(layer)
            if table is None:
                return None
            head_dim = self.model.config.block_of_layer(layer).head_dim
            return F.embedding(batch.id_tensor, table).unflatten(-1, (-1, head_dim))

        return [look_up(layer) for layer in range(first, first + layers)]


class _LoopingSpans:
    """The spans of one pass of a `TorchNetwork` that still loop."""

    def __init__(
        self,
        network: TorchNetwork,
        cache: Cache,
        batch: Batch,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None,
    ) -> None:
        self.network, self.cache, self.whole_batch = network, cache, batch
        self.max_loops = max_loops
        self.monitor: ExitMonitor | None = None
        if exits is not None and any(exits):
            if len(batch) > len(batch.spans):
                raise ValueError(
                    "exits: rules need spans of one token; prompts are read at full depth."
                )
            self.monitor = ExitMonitor(exits, network.logits, network.model.unembedding)
        self.loops = [0] * len(max_loops)
        """How many loops each span of the whole batch ran."""
        self.coda_outputs: dict[int, Tensor] = {}
        """The output of the coda for spans that stopped after a prediction was made."""
        self.batch = batch
        self.spans = list(range(len(max_loops)))
        self.tokens = list(range(len(batch)))
        """Which spans and tokens of the whole batch still loop."""

    def run(self) -> tuple[Tensor, Tensor]:
        """The output of the coda [N, d_e] and the final states [N, d_h]."""
        drive = self.network.run_prelude(self.batch, self.cache)
        h = self.network.initial_state(self.batch)
        final, loop = h, 0
        while self.spans:
            # Without a rule, no span stops before the smallest of their limits.
            limit = min(self.max_loops[span] for span in self.spans)
            end = limit if self.monitor is None else loop + 1
            before = h
            h = self.network.run_loops(h, drive, self.batch, self.cache, range(loop + 1, end + 1))
            loop = end
            stopped = self._stopped(loop, before, h)
            if all(stopped) and len(stopped) == len(self.loops):
                final = h
            elif any(stopped):
                leaving = self.batch.indices_of({i for i, stop in enumerate(stopped) if stop})
                final[[self.tokens[index] for index in leaving]] = h[leaving]
            for index, stop in enumerate(stopped):
                if stop:
                    self._finish(index, loop)
            if any(stopped):
                kept = self._keep([i for i, stop in enumerate(stopped) if not stop])
                h, drive = h[kept], drive[kept]
        return self._read(final), final

    def _stopped(self, loop: int, before: Tensor, h: Tensor) -> list[bool]:
        ended = [self.max_loops[span] <= loop for span in self.spans]
        if self.monitor is None:
            return ended
        run_coda = partial(self.network.run_coda, h, self.batch, self.cache)
        stops = self.monitor.stopped(loop, before, h, run_coda)
        return [stop or end for stop, end in zip(stops, ended, strict=True)]

    def _finish(self, index: int, loop: int) -> None:
        span = self.spans[index]
        self.loops[span] = loop
        if self.monitor is not None and self.monitor.reading is not None:
            self.coda_outputs[span] = self.monitor.reading[index]
        if loop < self.max_loops[span]:
            at = self.batch.spans[index]
            self.cache.settle(at.row, at.first, loop, self.max_loops[span])

    def _keep(self, indices: list[int]) -> list[int]:
        """Continue with these spans only; returns the indices of their tokens."""
        tokens = self.batch.indices_of(set(indices))
        self.spans = [self.spans[index] for index in indices]
        self.tokens = [self.tokens[index] for index in tokens]
        if self.monitor is not None:
            self.monitor.keep(indices)
        if indices:
            self.batch = self.batch.select(indices)
        return tokens

    def _read(self, states: Tensor) -> Tensor:
        """The output of the coda, which is known already for spans in `coda_outputs`."""
        batch = self.whole_batch
        unread = [span for span in range(len(batch.spans)) if span not in self.coda_outputs]
        if len(unread) == len(batch.spans):
            return self.network.run_coda(states, batch, self.cache)
        x = states.new_empty(len(batch), self.network.model.config.width)
        if unread:  # with exit rules all spans are single tokens, so spans and tokens agree
            x[unread] = self.network.run_coda(states[unread], batch.select(unread), self.cache)
        for span, output in self.coda_outputs.items():
            x[span] = output
        return x


class AutoNetwork:
    """Passes that C++ can run, in C++, if that is faster or not measured; others in PyTorch."""

    def __init__(self, model: FoldedModel, kernels: Kernels) -> None:
        self.model, self.kernels = model, kernels
        self.native, self.torch = NativeNetwork(model, kernels), TorchNetwork(model)
        self._choices: dict[torch.dtype, Choices] = {}
        """By the dtype of the cache, which PyTorch converts if it is not the model's."""

    def name(self, cache_dtype: torch.dtype) -> str:
        """What decodes a single text."""
        native = f"C++ ({self.kernels.target})"
        is_native = self._prefers_native(1, cache_dtype)
        return native if is_native else f"PyTorch, measured faster than {native}"

    @cached_property
    def drafter(self) -> AutoNetwork:
        """The network for speculative drafts: int8 matrices are faster."""
        if self.model.weight_dtype != "float32":
            return self
        return AutoNetwork(self.model.to_int8(), self.kernels)

    @property
    def weight_bytes(self) -> int:
        """Memory of all tables and matrices, including those of drafts; shared ones count once."""
        models = [self.model]
        if "drafter" in self.__dict__:
            models.append(self.drafter.model)
        return memory_of(tensor for model in models for tensor in model.tensors)

    def choose(
        self, batch: Batch, cache: Cache, exits: Sequence[ExitRule | None] | None
    ) -> Network:
        """The network that runs a pass."""
        supported = self.native.supports(batch, exits)
        is_native = supported and self._prefers_native(len(batch), cache.dtype)
        return self.native if is_native else self.torch

    def _prefers_native(self, tokens: int, dtype: torch.dtype) -> bool:
        if not self.kernels.measured:
            return True
        if dtype not in self._choices:
            shape = f"{self.model.config}, {self.model.weight_dtype}"
            converted = "" if dtype == self.model.dtype else f", cache in {dtype}"
            self._choices[dtype] = self.kernels.choices(shape + converted)
        try:
            return self._choices[dtype].prefers_native(tokens, partial(self._passes, dtype))
        except CacheTooLarge:  # for the measurement; the pass itself may need less
            return True

    def _passes(self, dtype: torch.dtype, tokens: int) -> Passes:
        """Passes with one loop in C++ and in PyTorch, for time measurements."""
        position = min(15, self.model.config.context_length - 1)
        cache = Cache(self.model.layout, Policy.parse("full"), dtype, self.model.device)
        cache.reserve(tokens, position + 1, 1)
        for part in (cache.outer, cache.core):
            part.zero_()
        spans = [Span(row, position) for row in range(tokens)]
        batch, loops = Batch(spans, [0] * tokens, self.model.device), [1] * tokens
        return (
            lambda: self.native.forward(batch, cache, loops),
            lambda: self.torch.forward(batch, cache, loops),
        )

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None = None,
        predict: Sequence[int] | None = None,
    ) -> PassOutput:
        """See `Network.forward`."""
        return self.choose(batch, cache, exits).forward(batch, cache, max_loops, exits, predict)


AnyNetwork = TorchNetwork | AutoNetwork
"""What an engine decodes with."""


def open_network(
    model: LanguageModel, weight_dtype: WeightDType = "float32", backend: Backend = "auto"
) -> AnyNetwork:
    """The network of a model. `backend`: "native", "torch", "static" (PyTorch, as `StaticDecoder`
    needs it), or "auto" for C++ if it is available and supports the model."""
    options = ", ".join(WEIGHT_DTYPES)
    require(
        weight_dtype in WEIGHT_DTYPES,
        "weight_dtype",
        f"{weight_dtype!r} is not an option",
        f"Use {options}.",
    )
    kernels = available_kernels(backend, weight_dtype, model.device)
    folded = FoldedModel.of(model, weight_dtype)
    if kernels is not None and isinstance(folded.mix, LinearMix):
        return AutoNetwork(folded, kernels)
    injection = f"C++ does not have the injection {model.config.injection!r}"
    require(backend != "native", "backend", injection, "Use backend='auto'.")
    return TorchNetwork(folded.with_real_phases() if backend == "static" else folded)


def available_kernels(
    backend: Backend, weight_dtype: WeightDType, device: torch.device
) -> Kernels | None:
    """The C++ kernels, or None if they are not wanted or, with "auto", not available."""
    known = backend in get_args(Backend)
    require(known, "backend", f"{backend!r} is not an option", "Use auto, native, torch or static.")
    fits = device.type == "cpu" and weight_dtype != "bfloat16"
    if backend in ("torch", "static") or (backend == "auto" and not fits):
        return None
    reason = "'native' needs float32 or int8 weights on a CPU"
    require(fits, "backend", reason, "Use backend='auto'.")
    try:
        return Kernels(measured=backend == "auto")
    except KernelsUnavailable as problem:
        remedy = "Use backend='torch'."
        require(backend == "auto", "backend", f"'native' is not available: {problem}", remedy)
        if weight_dtype == "int8":
            message = f"int8 saves memory but no time without the C++ layers: {problem}."
            warnings.warn(message, stacklevel=4)
        return None
