"""Many requests over one model: prompts are read, tokens decoded, rows shared out.

    engine = Engine(model, tokenizer)
    engine.generate("def main(", loops=8, new_tokens=64).text
    engine.generate_all(["one", "two"], exit="state:0.05")    # together; the texts are the same
    for piece in engine.stream("import "):
        print(piece.text, end="")

`submit` and `step` are underneath: a request waits until a row of the cache is free, its prompt is
read (what another row has of it is copied, not computed), and from then on every step gives it a
token, or several where it speculates. A request's text depends on nothing but itself.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as Several
from threading import RLock
from typing import Any, Literal, get_args

import torch

from parcae.config import require
from parcae.data.tokenizer import Tokenizer
from parcae.infer import speculative
from parcae.infer.cache import Policy
from parcae.infer.deepen import Reached, Task, deepen
from parcae.infer.exit import ExitRule
from parcae.infer.extrapolate import Extrapolation
from parcae.infer.native.build import NoKernels
from parcae.infer.native.kernels import Kernels
from parcae.infer.network import Network, exactly
from parcae.infer.quantise import WEIGHTS, Weights
from parcae.infer.request import Completion, DepthPlan, Piece, Request, Start, check_whole
from parcae.infer.rows import Rows
from parcae.infer.sampling import Sampling
from parcae.infer.sequence import Sequence
from parcae.infer.work import Part, Work
from parcae.model.frame import LanguageModel

MOST_ROWS = 4096
Prompt = str | Several[int]


Layers = Literal["auto", "native", "torch"]


class Engine:
    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        cache: str | Policy = "full",
        weights: Weights = "float32",
        layers: Layers = "auto",
        rows: int = 16,
        reuse_prefixes: bool = True,
    ) -> None:
        """`rows`: how many requests are decoded together at most; the others wait.

        `layers`: "native" runs passes of a few tokens through C++ that is compiled when it is first
        used, on CPUs; "torch" does without; "auto" takes the first if it can be had.

        The model's weights are shared where they can be used as they are and copied where not: a
        model that has been trained on needs a new engine.
        """
        check_whole("rows", rows, 1, MOST_ROWS)
        self.tokenizer = tokenizer
        self.config = model.config
        options = ", ".join(WEIGHTS)
        require(weights in WEIGHTS, "weights", f"{weights!r} is not an option", f"Use {options}.")
        self.network = Network(model, weights, kernels(layers, weights, model.device))
        self.cache = self.network.cache(Policy.parse(cache))
        self.rows = Rows(self.cache, rows, reuse_prefixes)
        self._lock = RLock()
        """Several threads may submit, step and cancel; a step is one thread's at a time."""
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def request(
        self,
        prompt: Prompt,
        *,
        new_tokens: int = 128,
        loops: int | None = None,
        exit: str | ExitRule | None = None,
        start: Start = "zero",
        extrapolation: Extrapolation = "none",
        draft_loops: int = 0,
        draft_tokens: int = 4,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Several[str] = (),
        stop_tokens: Collection[int] | None = None,
        logprobs: int | None = None,
    ) -> Request:
        """A checked request. Text is encoded after the tokenizer's BOS; ids are taken as they are.

        `loops` left out is the mean the model was trained with. `stop_tokens` left out are the
        tokenizer's BOS, with which the next document would begin, and none without a tokenizer.
        """
        plan = DepthPlan(
            loops=self.config.loop.nominal_loops if loops is None else loops,
            exit=None if exit is None else ExitRule.parse(exit),
            start=start,
            extrapolation=extrapolation,
            draft_loops=draft_loops,
            draft_tokens=draft_tokens,
        )
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        if draft_loops:
            require(
                self.cache.policy.is_exact_for(plan.loops),
                "draft_loops",
                f"a cache that shares slots ({self.cache.policy}) cannot hold draft and text apart",
                "Use cache='full'.",
            )
        if stop:
            found = self.tokenizer is not None
            require(found, "stop", "strings need a tokenizer", "Give the engine one.")
        if stop_tokens is None:
            stop_tokens = () if self.tokenizer is None else (self.tokenizer.bos,)
        return Request.checked(
            self.config,
            self.encode(prompt),
            new_tokens=new_tokens,
            plan=plan,
            sampling=sampling,
            seed=seed,
            stop_tokens=stop_tokens,
            stop=stop,
            logprobs=logprobs,
        )

    def encode(self, prompt: Prompt) -> Several[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            require(False, "prompt", "text needs a tokenizer", "Give the engine one, or ids.")
            raise AssertionError
        return [self.tokenizer.bos, *self.tokenizer.encode(prompt)]

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """What follows a prompt; the options are those of `request`."""
        return self.complete([self.request(prompt, **options)])[0]

    def generate_all(self, prompts: Several[Prompt], **options: Any) -> list[Completion]:
        """What follows each of several prompts, decoded together."""
        return self.complete([self.request(prompt, **options) for prompt in prompts])

    def complete(
        self, requests: Several[Request], on_token: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """All of them, in their order; `on_token` hears how many tokens each step made."""
        with self._lock:
            self.rows.reserve(requests, len(self._running) + len(self._waiting))
            sequences = [self.submit(request) for request in requests]
        try:
            while not all(s.finish for s in sequences):
                made = self.step()
                if on_token is not None:
                    on_token(made)
        finally:
            self.cancel(*sequences)
        return [sequence.completion() for sequence in sequences]

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Piece]:
        """Token by token; the last piece carries the completion. Mistakes are told at once, and
        closing it ends the request."""
        return self._stream(self.request(prompt, **options))

    def _stream(self, request: Request) -> Generator[Piece]:
        sequence = self.submit(request)
        try:
            while True:
                while sequence.pieces:
                    yield sequence.pieces.popleft()
                if sequence.finish:
                    sequence.check()
                    return
                self.step()
        finally:
            self.cancel(sequence)

    def submit(self, request: Request) -> Sequence:
        """Wait for a row; `step` until its `finish` is set. Refused where memory is short."""
        sequence = Sequence(request, self.tokenizer, self.config.context_length)
        with self._lock:
            self.rows.reserve([request], len(self._running) + len(self._waiting))
            self._waiting.append(sequence)
        return sequence

    def cancel(self, *sequences: Sequence) -> None:
        """Forget sequences that nobody waits for any more."""
        gone = {id(s) for s in sequences}
        with self._lock:
            self._waiting = deque(s for s in self._waiting if id(s) not in gone)
            for sequence in self._running:
                if id(sequence) in gone:
                    self.rows.release(sequence)
            self._running = [s for s in self._running if id(s) not in gone]

    def step(self) -> int:
        """Read what prompts there is room for, then give every running sequence its next token,
        or more. Returns how many tokens were made."""
        with self._lock, exactly(self.network.device):
            return self._step()

    def _step(self) -> int:
        before = sum(s.made for s in (*self._running, *self._waiting))
        running = list(self._running)
        self._admit()
        self._decode([s for s in running if not s.finish])
        made = sum(s.made for s in (*self._running, *self._waiting)) - before
        for sequence in self._running:
            if sequence.finish:
                self.rows.release(sequence)
        self._running = [s for s in self._running if not s.finish]
        return made

    def _admit(self) -> None:
        """Prompts that begin like one that is just being read wait for it, and copy."""
        while self._waiting and self.rows.free:
            wave = self.rows.seat(self._waiting)
            try:
                self._read_prompts(wave)
            finally:  # what an interrupt has left unread is read another time
                unread = [s for s in wave if s.computed < len(s.request.prompt) and not s.finish]
                for sequence in reversed(unread):
                    self.rows.unseat(sequence)
                    self._waiting.appendleft(sequence)
                self._running.extend(s for s in wave if s not in unread)

    def _read_prompts(self, wave: list[Sequence]) -> None:
        for extrapolation, group in by_extrapolation(wave):
            parts = [Part(s.row, s.reused, len(s.tokens) - s.reused) for s in group]
            ids = [token for s in group for token in s.tokens[s.reused :]]
            work = Work(parts, ids, self.network.device)
            task = Task(
                work=work,
                limits=[s.request.plan.loops for s in group],
                extrapolation=extrapolation,
                predict=work.last_tokens,
            )
            reached = deepen(self.network, self.cache, task)
            self._take(group, reached, work.last_tokens)

    def _decode(self, sequences: list[Sequence]) -> None:
        sequences = sorted(sequences, key=lambda s: s.row)
        plans = {s.request.plan for s in sequences if s.request.plan.draft_loops}
        for plan in plans:
            group = [s for s in sequences if s.request.plan == plan]
            speculative.decode(self.network, self.cache, group)
        plain = [s for s in sequences if not s.request.plan.draft_loops]
        for extrapolation, group in by_extrapolation(plain):
            self._decode_once(group, extrapolation)

    def _decode_once(self, sequences: list[Sequence], extrapolation: Extrapolation) -> None:
        plans = [s.request.plan for s in sequences]
        exits = [plan.exit for plan in plans]
        parts = [Part(s.row, len(s.tokens) - 1) for s in sequences]
        task = Task(
            work=Work(parts, [s.tokens[-1] for s in sequences], self.network.device),
            limits=[plan.loops for plan in plans],
            rules=exits if any(exits) else None,
            extrapolation=extrapolation,
            start=self._start(sequences),
        )
        self._take(sequences, deepen(self.network, self.cache, task), range(len(sequences)))

    def _start(self, sequences: list[Sequence]) -> torch.Tensor | None:
        """Where states begin, if not all at zero."""
        begins = [s.state if s.request.plan.start == "previous" else None for s in sequences]
        if all(state is None for state in begins):
            return None
        zero = torch.zeros(self.config.core_block.width, device=self.network.device)
        return torch.stack([zero if state is None else state for state in begins])

    def _take(self, sequences: list[Sequence], reached: Reached, places: Several[int]) -> None:
        """The next token of each; `places` are those of their last ones in the pass."""
        each = zip(sequences, places, reached.loops, reached.rows, strict=True)
        for sequence, place, loops, logits in each:
            if sequence.request.plan.start == "previous":
                sequence.state = reached.state[place]
            sequence.accept(sequence.choose(logits), loops, logits)


def kernels(layers: Layers, weights: Weights, device: torch.device) -> Kernels | None:
    """The C++ layers, where they are wanted and can be had."""
    known = layers in get_args(Layers)
    require(known, "layers", f"{layers!r} is not an option", "Use auto, native or torch.")
    fits = device.type == "cpu" and weights != "bfloat16"
    if layers == "torch" or (layers == "auto" and not fits):
        return None
    require(fits, "layers", "native ones are for float32 and int8 on a CPU", "Use layers='auto'.")
    try:
        return Kernels()
    except NoKernels as problem:
        require(layers == "auto", "layers", f"native ones: {problem}", "Use layers='torch'.")
        if weights == "int8":
            words = f"int8 saves memory but no time without the C++ layers: {problem}."
            warnings.warn(words, stacklevel=3)
        return None


def by_extrapolation(sequences: list[Sequence]) -> list[tuple[Extrapolation, list[Sequence]]]:
    """A pass reads all its states in one way."""
    kinds: set[Extrapolation] = {s.request.plan.extrapolation for s in sequences}
    return [(k, [s for s in sequences if s.request.plan.extrapolation == k]) for k in kinds]
