"""Decoding on an accelerator: steps with static shapes, from token ids to the next token ids.

A step computes all rows of the cache up to the last that is in use, whether they have a sequence or
not; a mask keeps what does not belong to the step from being written. So its shapes change only
with the number of rows and positions, which are rounded up, and it can be compiled and replayed as
a CUDA graph. Rows at different positions and with different numbers of loops share every call: a
row that has finished looping keeps its state. Tokens are sampled on the device, and only after
several steps the host reads them, looks for stop tokens and strings, and drops what follows those.

Sequences with exit rules, drafts or log-probabilities, which need the host after every pass, are
decoded by `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parcae.infer.batch import attention
from parcae.infer.cache import Cache
from parcae.infer.network import TorchNetwork
from parcae.infer.request import Request
from parcae.infer.sampling import RowSampling, non_finite_logits, sample_rows
from parcae.infer.sequence import RunningSequence

STEPS_PER_CHECK = 8
"""The host reads tokens back every so many steps."""
POSITIONS = 128
"""Positions are rounded up to a multiple of this."""
RECOMPILE_LIMIT = 64
"""Compiled versions of a step: for numbers of rows, positions and loops, and kinds of sampling.
Further combinations run without compilation."""


class DeviceRows(NamedTuple):
    """The state of R rows, as tensors [R] on the device."""

    tokens: Tensor
    """The last token of each row; its keys and values are not in the cache yet."""
    positions: Tensor
    """The position of that token."""
    limits: Tensor
    """The position at which a row stops; 0 for rows without a sequence."""
    loops: Tensor
    """How often each row loops."""


class LayerKV(NamedTuple):
    """The keys and values of one layer and loop: a part of a tensor, which is written as a whole so
    that a compiled step can write in place."""

    kv: Tensor
    """[layers, rows, positions, 2, K, E]"""
    layer: int


class StaticCache:
    """The layers of a cache as a `StaticBatch` reads and writes them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        outer = [LayerKV(cache.outer, i) for i in range(cache.layout.outer_layers)]
        self.prelude_layers = outer[: cache.layout.prelude_layers]
        self.coda_layers = outer[cache.layout.prelude_layers :]

    def core_layers(self, loop: int) -> list[LayerKV]:
        count = self.cache.layout.core_layers
        first = self.cache.policy.slot(loop) * count
        return [LayerKV(self.cache.core, first + i) for i in range(count)]


class StaticBatch:
    """One token of each row, as an `AttentionBatch`."""

    def __init__(self, rows: DeviceRows, length: int) -> None:
        """`length`: positions of the cache that are attended to; masked beyond each row's own."""
        self.length = length
        self.id_tensor = rows.tokens
        # A row that has reached its limit may stand one position beyond the last.
        self.position_tensor = rows.positions.clamp(max=length - 1)
        self.live = rows.positions < rows.limits
        """The rows whose keys and values are written [R]."""
        keys = torch.arange(length, device=rows.tokens.device)
        self.mask = (keys <= self.position_tensor[:, None])[:, None, None]

    def __len__(self) -> int:
        return len(self.id_tensor)

    def write_kv(self, kv: LayerKV, k_NKE: Tensor, v_NKE: Tensor) -> None:
        rows = torch.arange(len(self), device=k_NKE.device)
        at = (torch.full_like(rows, kv.layer), rows, self.position_tensor)
        new = torch.stack((k_NKE, v_NKE), 1).to(kv.kv.dtype)
        kv.kv.index_put_(at, torch.where(self.live[:, None, None, None], new, kv.kv[at]))

    def attend(self, q_NHE: Tensor, kv: LayerKV, scale: float | None = None) -> Tensor:
        seen = kv.kv[kv.layer, : len(self), : self.length]
        k, v = seen.permute(2, 0, 3, 1, 4).unbind()
        return attention(q_NHE[:, :, None], k, v, self.mask, False, scale)[:, :, 0]


def decode_step(
    network: TorchNetwork,
    cache: Cache,
    rows: DeviceRows,
    sampling: RowSampling,
    seen: Tensor | None,
    loops: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each row [R], the position it is at, and whether its logits were finite.

    `loops` is the largest number of any row. Rows that are not live keep token and position.
    """
    batch, layers = StaticBatch(rows, length), StaticCache(cache)
    live = batch.live
    drive = network.run_prelude(batch, layers)
    h = network.initial_state(batch)
    for loop in range(1, loops + 1):
        batch.live = live & (rows.loops >= loop)
        looped = network.run_loops(h, drive, batch, layers, range(loop, loop + 1))
        h = torch.where(batch.live[:, None], looped, h)
    batch.live = live
    logits = network.logits(network.run_coda(h, batch, layers))
    chosen = sample_rows(logits, sampling, rows.positions + 1, seen)
    return (
        torch.where(live, chosen, rows.tokens),
        rows.positions + live,
        logits.amax(-1).isfinite(),
    )


class StaticDecoder:
    """Decodes the sequences of an engine in static steps."""

    def __init__(
        self, network: TorchNetwork, cache: Cache, compile: bool = False, **options: Any
    ) -> None:
        """`options`: of `torch.compile`."""
        self.network, self.cache = network, cache
        cache.zeroed = True
        self._step: Callable[..., tuple[Tensor, Tensor, Tensor]] = decode_step
        self._compiled = compile
        self._fixed: Tensor | None = None
        if compile:
            if cache.device.type == "cuda":
                options.setdefault("mode", "reduce-overhead")
            self._step = torch.compile(  # pyright: ignore[reportCallIssue]
                decode_step,
                fullgraph=True,
                dynamic=False,
                recompile_limit=RECOMPILE_LIMIT,
                **options,
            )

    @staticmethod
    def supports(request: Request) -> bool:
        plan = request.plan
        return plan.exit is None and not plan.draft_loops and request.logprobs is None

    def decode(self, sequences: Sequence[RunningSequence]) -> None:
        """Add up to `STEPS_PER_CHECK` tokens to each sequence."""
        steps = min(STEPS_PER_CHECK, max(sequence.room for sequence in sequences))
        by_row = {sequence.row: sequence for sequence in sequences}
        tokens, finite = self.run(by_row, steps)
        for row, sequence in by_row.items():
            for step in range(min(steps, sequence.room)):
                if not finite[step][row]:
                    sequence.fail(non_finite_logits())
                if sequence.finish:
                    break
                sequence.accept(tokens[step][row], sequence.request.plan.loops)

    def run(
        self, by_row: dict[int, RunningSequence], steps: int
    ) -> tuple[list[list[int]], list[list[bool]]]:
        """The next tokens [steps, R], and whether their logits were finite. The host waits for the
        device once, at the end."""
        count = min(1 << max(by_row).bit_length(), self.cache.rows)
        sequences = [by_row.get(row) for row in range(count)]
        last = max(len(s.tokens) for s in by_row.values()) - 1 + steps
        length = min(-(-last // POSITIONS) * POSITIONS, self.cache.capacity)
        loops = max(s.request.plan.loops for s in by_row.values())
        rows, sampling, seen = self._rows(sequences), self._sampling(sequences), None
        if sampling.penalties:
            seen = self._seen(sequences)
        if self._compiled:
            self._fix_addresses()
        tokens, finite = [], []
        for _ in range(steps):
            if self._compiled:
                torch.compiler.cudagraph_mark_step_begin()
            arguments = (self.network, self.cache, rows, sampling, seen, loops, length)
            try:
                chosen, positions, fine = self._step(*arguments)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # pyright: ignore[reportAttributeAccessIssue]
                chosen, positions, fine = decode_step(*arguments)  # a new shape after many others
            # Copies: a CUDA graph overwrites its results.
            rows = rows._replace(tokens=chosen.clone(), positions=positions.clone())
            tokens.append(rows.tokens)
            finite.append(fine.clone())
            if seen is not None:
                seen = seen.scatter(1, rows.tokens[:, None], True)
        both = torch.stack((torch.stack(tokens), torch.stack(finite).long())).tolist()
        return both[0], both[1]

    def _rows(self, sequences: Sequence[RunningSequence | None]) -> DeviceRows:
        def column(values: Iterator[int]) -> Tensor:
            return torch.tensor(list(values), device=self.cache.device)

        return DeviceRows(
            tokens=column(0 if s is None else s.tokens[-1] for s in sequences),
            positions=column(0 if s is None else len(s.tokens) - 1 for s in sequences),
            limits=column(0 if s is None else len(s.tokens) - 1 + s.room for s in sequences),
            loops=column(0 if s is None else s.request.plan.loops for s in sequences),
        )

    def _sampling(self, sequences: Sequence[RunningSequence | None]) -> RowSampling:
        settings = [None if s is None else (s.request.sampling, s.request.seed) for s in sequences]
        return RowSampling.of(settings, self.network.model.config.vocab_size, self.cache.device)

    def _seen(self, sequences: Sequence[RunningSequence | None]) -> Tensor:
        seen = torch.zeros(len(sequences), self.network.model.config.vocab_size, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                seen[row, list(set(sequence.tokens))] = True
        return seen.to(self.cache.device)

    def _fix_addresses(self) -> None:
        """Tell the compiler that weights and cache stay where they are: a CUDA graph would copy
        them before every replay."""
        if self._fixed is self.cache.core:
            return
        self._fixed = self.cache.core
        for tensor in (self.cache.outer, self.cache.core, *self.network.model.constants):
            torch._dynamo.mark_static_address(tensor)
