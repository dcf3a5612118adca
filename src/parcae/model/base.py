"""`LanguageModel`, the base class of all models: tokens in, logits or loss out.

A forward returns all its results; nothing is stored on a module between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.model.blocks import Rope, rope_table
from parcae.model.depth import Depths, as_depths, sample
from parcae.model.precision import autocast_dtype, cast_weight, chunked_cross_entropy, wide

IGNORED_TARGET = -100

LoopRequest = int | Sequence[int] | Tensor | Depths | Literal["sample"] | None


def loss_chunk(vocab_size: int) -> int:
    """Positions whose logits are in memory at once while a loss is computed: 16 MiB of logits, but
    64 to 512 positions. That is as fast as any number, and faster than all at once."""
    return min(512, max(64, (1 << 22) // vocab_size))


def mixed_loss_chunk(vocab_size: int, kind: str) -> int:
    """As `loss_chunk`, under autocast: accelerators are faster with larger products, and each chunk
    adds to the gradient of the head."""
    return max(256, loss_chunk(vocab_size)) if kind == "cpu" else 8192


@dataclass(frozen=True)
class Trajectory:
    """States, residuals and logits of every loop, detached, in the caller's order of rows.

    A row that has ended keeps its last state: `states[t]` is the state after min(t, T) loops and
    `logits[t - 1]` its predictions; `residuals[t - 1]` is NaN for t > T.
    """

    states: Tensor | None = None
    """h_0 .. h_T: [T + 1, B, S, d_h]."""
    residuals: Tensor | None = None
    """||h_t - h_(t-1)|| for each position: [T, B, S]."""
    logits: Tensor | None = None
    """Predictions after every loop: [T, B, S, V]."""


@dataclass(frozen=True)
class Output:
    """Logits, or the mean loss if targets were given."""

    logits: Tensor | None
    loss: Tensor | None
    depths: Depths
    """How many loops each sequence ran, and how many of them with gradient."""
    state: Tensor | None = None
    """h_T [B, S, d_h]; None for a Transformer."""
    trajectory: Trajectory | None = None


class LanguageModel(nn.Module, ABC):
    """Embedding, value tables and head; subclasses add the layers and a final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.value_tables = nn.ModuleDict(
            {
                str(layer): nn.Embedding(config.vocab_size, config.block_of_layer(layer).kv_width)
                for layer in range(config.layers)
                if config.has_value_embedding(layer)
            }
        )
        self.head: nn.Linear | None = None
        if not config.tied_embeddings:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @property
    def unembedding(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @abstractmethod
    def compile_layers(self, **options: Any) -> None:
        """Compile the stacks of layers in place; the options are those of `torch.compile`."""

    def compile(self, **options: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`compile_layers`: compiling all loops as one graph would take minutes at every depth."""
        self.compile_layers(**options)

    @abstractmethod
    def activation_checkpointing(self) -> None:
        """Recompute loops in the backward from the states between them: less memory, slower."""

    @abstractmethod
    def draw(self, seed: int, step: int, rows: Sequence[int], length: int) -> dict[str, Any]:
        """Random arguments of `forward` in training (loops, initial states) for the given global
        rows of an optimiser step: a function of (seed, step, row), the same on any process."""

    @abstractmethod
    def readings(
        self,
        tokens: Tensor,
        loops: Collection[int],
        state: Tensor | Literal["zero", "like-init"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (T, input of the head after T loops) for each of `loops`, in increasing order.

        One pass without gradient serves all of them; `loss` and `logits` take what it yields.
        """

    def values(self, tokens: Tensor, first_layer: int, layers: int) -> list[Tensor | None]:
        """The value embeddings of each layer of a stack, or None; the same in all loops."""
        keys = (str(first_layer + i) for i in range(layers))
        dtype = autocast_dtype(tokens.device) or self.embed.weight.dtype
        tables = self.value_tables
        return [tables[k](tokens).to(dtype) if k in tables else None for k in keys]

    def rope(self, length: int, head_dim: int) -> Rope:
        dtype = autocast_dtype(self.device) or wide(self.embed.weight.dtype)
        return rope_table(length, head_dim, self.config.rope_theta, self.device, dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits from the normalised output of the last layer."""
        logits = F.linear(x, self.unembedding)
        return logits.to(wide(logits.dtype))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, computed in chunks, so that all logits are never in memory at once.

        In float32 like the logits. In mixed precision only the head's product is in bfloat16: a
        loss near 8 rounded to it would lie on a grid of 0.03.
        """
        x, targets = x.flatten(0, 1), targets.flatten().long()
        if (dtype := autocast_dtype(x.device)) is not None:
            chunk = mixed_loss_chunk(self.config.vocab_size, x.device.type)
            weight = cast_weight(self.unembedding, dtype)
            return chunked_cross_entropy(x.to(dtype), weight, targets, IGNORED_TARGET, chunk)
        chunk = loss_chunk(self.config.vocab_size)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return F.linear_cross_entropy(
            x.to(wide(x.dtype)),
            self.unembedding.to(wide(x.dtype)),
            targets,
            ignore_index=IGNORED_TARGET,
            options=options,
        )

    def resolve_loops(
        self, loops: LoopRequest, rows: int, generator: torch.Generator | None = None
    ) -> Depths:
        """`Depths` for a request: the mean for None, the given numbers, or a random draw."""
        loop = self.config.loop
        if loops is None:
            loops = loop.nominal_loops
        if isinstance(loops, str):
            if loops != "sample":
                raise ValueError(f'loops: {loops!r}. Give numbers, or "sample" to draw them.')
            source = generator or torch.default_generator
            seed = torch.randint(1 << 62, (), generator=source, device=source.device)
            return sample(loop, rows, torch.Generator().manual_seed(int(seed)))
        return as_depths(loops, rows, loop)

    def check(self, tokens: Tensor, targets: Tensor | None) -> None:
        """Raise TypeError or ValueError for invalid tokens or targets."""
        limit, vocab = self.config.context_length, self.config.vocab_size
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens: an integer tensor [rows, positions] is needed, not {kind}.")
        if tokens.ndim != 2:
            raise ValueError(f"tokens: shape {[*tokens.shape]} is not [rows, positions].")
        if tokens.numel() == 0:
            raise ValueError(f"tokens: empty, shape {[*tokens.shape]}. Give at least one token.")
        if tokens.shape[1] > limit:
            raise ValueError(
                f"tokens: {tokens.shape[1]} positions, but the model's context_length is {limit}. "
                "Shorten the sequence, or build the model with a longer context_length."
            )
        _check_ids("tokens", tokens, vocab, ignored=None)
        if targets is not None:
            integers = isinstance(targets, Tensor) and targets.dtype in (torch.int32, torch.int64)
            if not integers or targets.shape != tokens.shape:
                kind = (
                    f"{targets.dtype} {[*targets.shape]}"
                    if isinstance(targets, Tensor)
                    else targets
                )
                raise ValueError(
                    f"targets: {kind}; they must be integers shaped like tokens, {[*tokens.shape]}."
                )
            _check_ids("targets", targets, vocab, ignored=IGNORED_TARGET)


def _check_ids(name: str, ids: Tensor, vocab: int, ignored: int | None) -> None:
    """On a CPU only: reading values from another device would wait for its queue. Fake tensors, on
    which the memory of a step is traced, have no values."""
    if ids.device.type != "cpu" or type(ids) is not Tensor or torch.compiler.is_compiling():
        return
    wrong = (ids < 0) | (ids >= vocab)
    if ignored is not None:
        wrong &= ids != ignored
    if not wrong.any():
        return
    raise ValueError(
        f"{name}: id {int(ids[wrong][0])} is outside the vocabulary of {vocab} (0 to {vocab - 1}). "
        "Was the text encoded with this model's tokenizer?"
    )
