"""Prelude -> loop -> coda. Parcae and the recurrent depth models are configurations of it.

    e      = N(Prelude(embed(s)))                       prelude norm, where configured
    h_t    = Blocks(A_bar h_(t-1) + B_bar e)            t = 1 .. T, the first T - k without gradient
    logits = head(N(Coda(C h_T)))

Every sequence has a depth T of its own and loops exactly that often: rows are sorted by depth,
deepest first, so the rows that still loop are always a prefix of the batch. A sequence's loops
depend on no other sequence and not on the loop's index, so the order changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.utils.checkpoint import checkpoint

from parcae.config import ModelConfig
from parcae.model.base import LanguageModel, LoopRequest, Output, Trajectory
from parcae.model.blocks import BlockWeights, Rope, Stack, Values
from parcae.model.depth import Depths, Schedule, check_loops, sample_rows
from parcae.model.initial_state import draw_state_rows, initial_state
from parcae.model.injection import build_injection

Record = Literal["states", "residuals", "logits"]
RECORDS: tuple[Record, ...] = ("states", "residuals", "logits")


def untraced(function: Any) -> Any:
    """Let `torch.compile(model)` compile the layers that a function calls, not the function itself:
    unrolled loops would take minutes to compile, and again for every number of loops.

    Does what `torch._dynamo.decorators.skip` does, without importing the compiler.
    """
    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True
    return function


class LoopInputs(NamedTuple):
    """The inputs of every loop; they do not depend on the loop, so they are computed once."""

    transition: Tensor | None
    drive: Tensor
    rope: Rope
    values: Values
    weights: Sequence[BlockWeights]
    """What the products of the core's blocks use."""

    def first(self, rows: int) -> LoopInputs:
        values = [None if value is None else _cut(value, rows)[0] for value in self.values]
        return self._replace(drive=_cut(self.drive, rows)[0], values=values)

    def let_rows_vary(self, h: Tensor) -> None:
        """Tell the compiler that the number of rows will change, and only that: code that is
        dynamic in the sequence length too is slower."""
        for x in (h, self.drive, *self.values):
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 0)

    def detach(self) -> LoopInputs:
        values = [None if value is None else value.detach() for value in self.values]
        weights = [weight.detach() for weight in self.weights]
        transition = None if self.transition is None else self.transition.detach()
        return LoopInputs(transition, self.drive.detach(), self.rope, values, weights)


class Core(nn.Module):
    """One loop: inject, then run the blocks. This is what is compiled."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.injection = build_injection(config)
        self.blocks = Stack(config, config.prelude_layers, config.core_layers)

    @property
    def is_compiled(self) -> bool:
        return self._compiled_call_impl is not None

    def forward(self, h: Tensor, inputs: LoopInputs) -> Tensor:
        x = self.injection.mix(h, inputs.transition, inputs.drive).to(h.dtype)
        return self.blocks(x, inputs.rope, inputs.values, inputs.weights)


class Loop(nn.Module):
    """All loops of a batch. One module, so that sharded weights are gathered once for all loops."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.core = Core(config)
        self.checkpointed = False
        """Keep only the state between loops and compute the rest again in the backward."""

    @untraced
    def forward(
        self,
        h: Tensor,
        e: Tensor,
        schedule: Schedule,
        rope: Rope,
        values: Values,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """h_T of every row, from h_0; rows are in the schedule's order."""
        inputs = self._inputs(e, rope, values)
        if not torch.is_grad_enabled():
            return self._run(h, schedule.all_loops, inputs, recorder)
        if schedule.no_grad_rows:
            looping, waiting = _cut(h, schedule.no_grad_rows[0])
            with torch.no_grad():
                given = inputs.first(len(looping)).detach()
                looping = self._run(looping, schedule.no_grad_rows, given, recorder)
            h = torch.cat((looping, waiting))
        if inputs.drive.requires_grad and not h.requires_grad:
            # The first loop with gradient is then traced like the others. Detached first: it may
            # be the caller's tensor.
            h = h.detach().requires_grad_()
        return self._run(h, schedule.grad_rows, inputs, recorder)

    @torch.no_grad()
    def iterate(self, h: Tensor, e: Tensor, rope: Rope, values: Values) -> Iterator[Tensor]:
        """Yield h_1, h_2, ... endlessly, each computed on demand."""
        inputs = self._inputs(e, rope, values)
        while True:
            h = self._step(h, inputs)
            yield h

    def _inputs(self, e: Tensor, rope: Rope, values: Values) -> LoopInputs:
        weights = self.core.blocks.weights()
        return LoopInputs(*self.core.injection.prepare(e), rope, values, weights)

    @untraced
    def _step(self, h: Tensor, inputs: LoopInputs) -> Tensor:
        if self.core.is_compiled:
            inputs.let_rows_vary(h)
        if self.checkpointed and torch.is_grad_enabled():
            return _checkpoint(self.core, h, inputs)
        return self.core(h, inputs)

    @untraced
    def _run(
        self, h: Tensor, active: Sequence[int], inputs: LoopInputs, recorder: Recorder | None
    ) -> Tensor:
        """One pass of the core per entry of `active`, on that many leading rows."""
        finished: list[Tensor] = []
        for rows in active:
            if rows < len(h):
                h, ended = _cut(h, rows)
                finished.append(ended)
                inputs = inputs.first(rows)
            h = self._step(h, inputs)
            if recorder is not None:
                recorder.observe(h)
        return torch.cat([h, *reversed(finished)]) if finished else h


def _checkpoint(core: Core, h: Tensor, inputs: LoopInputs) -> Tensor:
    again = checkpoint(core, h, inputs, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, again)


def _cut(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The first `rows` rows and the others. Not views, on which compiled code would specialise;
    nothing writes to either part in place, so sharing memory is safe."""
    return torch.unsafe_split_with_sizes(x, [rows, len(x) - rows])


class Recorder:
    """Records the states of one forward by row and by the row's number of loops."""

    def __init__(self, h: Tensor, depths: Depths) -> None:
        self.loops = depths.loops
        self.done = torch.zeros(len(h), dtype=torch.long, device=h.device)
        self.states = h.new_zeros(max(self.loops) + 1, *h.shape)
        self.states[0] = h.detach()

    def observe(self, h: Tensor) -> None:
        """Record the states of the leading rows after one more loop."""
        self.done[: len(h)] += 1
        rows = torch.arange(len(h), device=h.device)
        self.states[self.done[: len(h)], rows] = h.detach()

    def finish(self) -> Tensor:
        """The states; rows that have ended keep their last one."""
        for row, loops in enumerate(self.loops):
            self.states[loops + 1 :, row] = self.states[loops, row]
        return self.states

    def residuals(self) -> Tensor:
        moved = (self.states[1:] - self.states[:-1]).float().norm(dim=-1)
        for row, loops in enumerate(self.loops):
            moved[loops:, row] = torch.nan
        return moved


class Prelude(nn.Module):
    """e = N(Blocks(x)); the norm is optional."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = Stack(config, 0, config.prelude_layers)
        self.norm: nn.RMSNorm | None = None
        if config.prelude_norm:
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)

    def forward(self, x: Tensor, rope: Rope, values: Values) -> Tensor:
        x = self.blocks(x, rope, values)
        return x if self.norm is None else self.norm(x)


class Coda(nn.Module):
    """N(Blocks(C h)); the readout C is optional."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.readout: nn.Linear | None = None
        if config.readout:
            self.readout = nn.Linear(config.core_block.width, config.width, bias=False)
        first_layer = config.prelude_layers + config.core_layers
        self.blocks = Stack(config, first_layer, config.coda_layers)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)

    def forward(self, h: Tensor, rope: Rope, values: Values) -> Tensor:
        x = h if self.readout is None else self.readout(h).to(h.dtype)
        return self.norm(self.blocks(x, rope, values))


class LoopedModel(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.prelude = Prelude(config)
        self.loop = Loop(config)
        self.coda = Coda(config)

    def compile_layers(self, **options: Any) -> None:
        for part in (self.prelude, self.loop.core, self.coda):
            part.compile(**options)

    def activation_checkpointing(self) -> None:
        self.loop.checkpointed = True

    def draw(self, seed: int, step: int, rows: Sequence[int], length: int) -> dict[str, Any]:
        return {
            "loops": sample_rows(self.config.loop, seed, step, rows),
            "state": draw_state_rows(self.config, seed, step, rows, length, self.device),
        }

    @untraced
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        loops: LoopRequest = None,
        state: Tensor | Literal["zero", "like-init"] | None = None,
        generator: torch.Generator | None = None,
        trajectory: bool | Collection[Record] = False,
    ) -> Output:
        """Logits [B, S, V] after the given loops, or the mean loss if targets are given.

        `loops`: a number for all sequences, or one for each (list or tensor), or `Depths` to say
        how many carry gradient (else `loop.gradient_loops`), or "sample" to draw them from the
        generator. Left out, it is the mean the model was trained with.
        `state`: the initial state [B, S, d_h], "zero", or "like-init", drawn from the generator;
        left out, it is what the model is configured with.
        `trajectory`: True, or some of "states", "residuals", "logits", to see every loop.
        """
        self.check(tokens, targets)
        wanted = self.resolve_loops(loops, len(tokens), generator)
        schedule = Schedule.of(wanted)
        h = self._initial_state(state, tokens, generator)
        order = None if schedule.is_sorted else torch.tensor(schedule.order, device=tokens.device)
        if order is not None:
            tokens, h = tokens[order], h[order]
            targets = None if targets is None else targets[order]

        e = self.encode(tokens)
        records = _records(trajectory)
        recorder = Recorder(h, schedule.depths) if records else None
        h = self.loop(h, e, schedule, *self._core_inputs(tokens), recorder)
        x = self.decode(h, tokens)

        logits = loss = None
        if targets is None:
            logits = self.logits(x)
        else:
            loss = self.loss(x, targets)
        seen = self._trajectory(recorder, tokens, records) if recorder else None
        if order is not None:
            place = torch.argsort(order)
            h = h[place]
            logits = None if logits is None else logits[place]
            seen = _reorder(seen, place)
        return Output(logits=logits, loss=loss, depths=wanted, state=h, trajectory=seen)

    @torch.no_grad()
    def iterate(
        self,
        tokens: Tensor,
        state: Tensor | Literal["zero", "like-init"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield h_1, h_2, ... of all sequences endlessly, without gradient.

        Only the current state is kept. `state` and `generator` are those of a forward.
        """
        self.check(tokens, None)
        h = self._initial_state(state, tokens, generator)
        return self.loop.iterate(h, self.encode(tokens), *self._core_inputs(tokens))

    @torch.no_grad()
    def readings(
        self,
        tokens: Tensor,
        loops: Collection[int],
        state: Tensor | Literal["zero", "like-init"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        wanted = {check_loops(count) for count in loops}
        states = self.iterate(tokens, state, generator)
        for depth, h in zip(range(1, max(wanted, default=0) + 1), states, strict=False):
            if depth in wanted:
                yield depth, self.decode(h, tokens)

    def encode(self, tokens: Tensor) -> Tensor:
        """e: the output of the prelude, an input of every loop."""
        rope = self.rope(tokens.shape[1], self.config.block.head_dim)
        values = self.values(tokens, 0, self.config.prelude_layers)
        return self.prelude(self.embed(tokens), rope, values)

    def decode(self, h: Tensor, tokens: Tensor) -> Tensor:
        """The output of the coda for a state: the input of the head."""
        first_layer = self.config.prelude_layers + self.config.core_layers
        rope = self.rope(tokens.shape[1], self.config.block.head_dim)
        return self.coda(h, rope, self.values(tokens, first_layer, self.config.coda_layers))

    def _core_inputs(self, tokens: Tensor) -> tuple[Rope, list[Tensor | None]]:
        config = self.config
        values = self.values(tokens, config.prelude_layers, config.core_layers)
        return self.rope(tokens.shape[1], config.core_block.head_dim), values

    def _initial_state(
        self, state: Any, tokens: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        dtype = self.embed.weight.dtype
        return initial_state(state, self.config, tokens.shape, generator, self.device, dtype)

    def _trajectory(self, recorder: Recorder, tokens: Tensor, records: set[Record]) -> Trajectory:
        states = recorder.finish()
        logits = None
        if "logits" in records:
            with torch.no_grad():
                logits = torch.stack([self.logits(self.decode(h, tokens)) for h in states[1:]])
        return Trajectory(
            states=states if "states" in records else None,
            residuals=recorder.residuals() if "residuals" in records else None,
            logits=logits,
        )


def _records(trajectory: bool | Collection[Record]) -> set[Record]:
    if isinstance(trajectory, str):
        wanted = {trajectory}
    else:
        wanted = set(RECORDS if trajectory is True else trajectory or ())
    if unknown := wanted - set(RECORDS):
        raise ValueError(f"trajectory: {sorted(unknown)}. Known: {', '.join(RECORDS)}.")
    return cast("set[Record]", wanted)


def _reorder(trajectory: Trajectory | None, place: Tensor) -> Trajectory | None:
    if trajectory is None:
        return None
    parts = (trajectory.states, trajectory.residuals, trajectory.logits)
    return Trajectory(*(None if part is None else part[:, place] for part in parts))
