"""Decodes many requests over one model.

    engine = Engine(model, tokenizer)
    engine.generate("def main(", loops=8, new_tokens=64).text
    engine.generate_all(["one", "two"], exit="state:0.05")    # decoded together
    for piece in engine.stream("import "):
        print(piece.text, end="")

These use `submit` and `step`: a request waits until a row of the cache is free, its prompt is read
(a prefix that is in the cache is copied), and then every step adds a token, or several with
speculation. The text of a request does not depend on other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, overload

from parcae.config import require
from parcae.data.tokenizer import Tokenizer
from parcae.infer import DEFAULT_TEMPERATURE, speculative
from parcae.infer.batch import Batch, PassOutput, Span
from parcae.infer.cache import Policy
from parcae.infer.exit import ExitRule
from parcae.infer.layers import without_autocast
from parcae.infer.network import Layers, open_network
from parcae.infer.quantise import Weights
from parcae.infer.request import DepthPlan, Request, check_whole
from parcae.infer.rows import Rows
from parcae.infer.sampling import Sampling
from parcae.infer.sequence import Completion, Piece, RunningSequence
from parcae.model.frame import LanguageModel
from parcae.runs import Checkpoint, open_checkpoint

MAX_ROWS = 4096
Prompt = str | Sequence[int]


class Engine:
    """Decodes requests over one model, alone or together, as text or token ids."""

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
        """`tokenizer`: for prompts and results as text; without it they are token ids.

        `cache`: which loops share keys and values: "full", "last:K", "first:K" or "shared".

        `weights`: storage format of matrices: "float32", "int8" or "bfloat16".

        `layers`: "native" runs passes of a few tokens on a CPU in C++, compiled when first used;
        "torch" uses PyTorch only; "auto" uses C++ if it is available and supports the model.

        `rows`: the largest number of requests decoded together; others wait.

        `reuse_prefixes`: copy the start of a prompt from the cache if it is there.

        The engine shares the model's weights where it can and copies them where not, so create a
        new engine after training the model further.
        """
        check_whole("rows", rows, 1, MAX_ROWS)
        self.tokenizer = tokenizer
        self.config = model.config
        self.network = open_network(model, weights, layers)
        self.cache = self.network.model.cache(cache)
        self.rows = Rows(self.cache, rows, reuse_prefixes)
        self._lock = RLock()
        """Threads may submit, step and cancel concurrently; steps run one at a time."""
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []

    def request(
        self,
        prompt: Prompt,
        *,
        new_tokens: int = 128,
        loops: int | None = None,
        exit: str | ExitRule | None = None,
        draft_loops: int = 0,
        draft_tokens: int = 4,
        temperature: float = DEFAULT_TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Collection[int] | None = None,
        logprobs: int | None = None,
    ) -> Request:
        """A valid request; ConfigError for anything invalid.

        `prompt`: text, which is encoded after the tokenizer's BOS, or token ids.
        `new_tokens`: the largest number of tokens to generate. A text also ends when the model's
        context is full; earlier tokens are never dropped to continue it.
        `loops`: loops per token; the default is the mean of training.
        `exit`: when a token may stop earlier, such as "state:0.1", "kl:0.01", "budget:4" or a rule
        of `register_exit_rule`.
        `draft_loops`, `draft_tokens`: loops and tokens of speculative drafts; 0 loops is none.
        `temperature` (0 is greedy; the default is 0.8), `top_k`, `top_p`, `min_p`,
        `repetition_penalty`, `seed`: how tokens are sampled.
        `stop`: strings that end the text. `stop_tokens`: token ids that end it; the default is the
        tokenizer's BOS, which starts the next document, and none without a tokenizer.
        `logprobs`: return log-probabilities of each token and of this many likeliest ones.
        """
        plan = DepthPlan(
            loops=self.config.loop.nominal_loops if loops is None else loops,
            exit=None if exit is None else ExitRule.parse(exit),
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
                f"a cache that shares slots ({self.cache.policy}) cannot hold a draft too",
                "Use cache='full'.",
            )
        if stop:
            has_tokenizer = self.tokenizer is not None
            require(has_tokenizer, "stop", "strings need a tokenizer", "Give the engine one.")
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

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """The ids of a prompt: BOS and the ids of a text; ids are returned unchanged."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            require(False, "prompt", "text needs a tokenizer", "Give the engine one, or ids.")
            raise AssertionError
        return [self.tokenizer.bos, *self.tokenizer.encode(prompt)]

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The continuation of a prompt; the options are those of `request`."""
        return self.complete([self.request(prompt, **options)])[0]

    def generate_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        """The continuations of several prompts, decoded together."""
        return self.complete([self.request(prompt, **options) for prompt in prompts])

    def complete(
        self, requests: Sequence[Request], on_token: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Decode all requests. `on_token` is called after every step with its number of tokens."""
        with self._lock:
            self.rows.reserve(requests, len(self._running) + len(self._waiting))
            sequences = [self.submit(request) for request in requests]
        try:
            while not all(s.finish for s in sequences):
                count = self.step()
                if on_token is not None:
                    on_token(count)
        finally:
            self.cancel(*sequences)
        return [sequence.completion() for sequence in sequences]

    def stream(self, prompt: Prompt | Request, **options: Any) -> Generator[Piece]:
        """Yield one piece per token; the last one has the completion.

        Takes a request, or a prompt and the options of `request`, which are checked at once.
        Closing the generator cancels the request.
        """
        if not isinstance(prompt, Request):
            prompt = self.request(prompt, **options)
        return self._stream(prompt)

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

    def submit(self, request: Request) -> RunningSequence:
        """Queue a request; call `step` until its `finish` is set. ConfigError if the cache does
        not fit in memory."""
        sequence = RunningSequence(request, self.tokenizer, self.config.context_length)
        with self._lock:
            self.rows.reserve([request], len(self._running) + len(self._waiting))
            self._waiting.append(sequence)
        return sequence

    def cancel(self, *sequences: RunningSequence) -> None:
        """Remove sequences from the queue and free their rows; finished ones are ignored."""
        cancelled = {id(s) for s in sequences}
        with self._lock:
            self._waiting = deque(s for s in self._waiting if id(s) not in cancelled)
            for sequence in self._running:
                if id(sequence) in cancelled:
                    self.rows.release(sequence)
            self._running = [s for s in self._running if id(s) not in cancelled]

    def step(self) -> int:
        """Read the prompts for which rows are free, then add a token or more to every running
        sequence. Returns the number of new tokens."""
        with self._lock, without_autocast(self.cache.device):
            return self._step()

    def _step(self) -> int:
        before = sum(s.generated for s in (*self._running, *self._waiting))
        running = list(self._running)
        self._admit()
        self._decode([s for s in running if not s.finish])
        count = sum(s.generated for s in (*self._running, *self._waiting)) - before
        for sequence in self._running:
            if sequence.finish:
                self.rows.release(sequence)
        self._running = [s for s in self._running if not s.finish]
        return count

    def _admit(self) -> None:
        """Read waiting prompts in waves; `Rows.assign` decides which wait to copy a prefix."""
        while self._waiting and self.rows.free:
            wave = self.rows.assign(self._waiting)
            try:
                self._read_prompts(wave)
            finally:  # after an interrupt, unread prompts wait again
                unread = [s for s in wave if s.computed < len(s.request.prompt) and not s.finish]
                for sequence in reversed(unread):
                    self.rows.unassign(sequence)
                    self._waiting.appendleft(sequence)
                self._running.extend(s for s in wave if s not in unread)

    def _read_prompts(self, wave: list[RunningSequence]) -> None:
        spans = [Span(s.row, s.reused, len(s.tokens) - s.reused) for s in wave]
        ids = [token for s in wave for token in s.tokens[s.reused :]]
        batch = Batch(spans, ids, self.cache.device)
        max_loops = [s.request.plan.loops for s in wave]
        output = self.network.forward(batch, self.cache, max_loops, predict=batch.last_indices)
        _accept_next(wave, output)

    def _decode(self, sequences: list[RunningSequence]) -> None:
        sequences = sorted(sequences, key=lambda s: s.row)
        plans = {s.request.plan for s in sequences if s.request.plan.draft_loops}
        for plan in plans:
            group = [s for s in sequences if s.request.plan == plan]
            speculative.decode(self.network, self.cache, group)
        plain = [s for s in sequences if not s.request.plan.draft_loops]
        if plain:
            self._decode_plain(plain)

    def _decode_plain(self, sequences: list[RunningSequence]) -> None:
        spans = [Span(s.row, len(s.tokens) - 1) for s in sequences]
        batch = Batch(spans, [s.tokens[-1] for s in sequences], self.cache.device)
        max_loops = [s.request.plan.loops for s in sequences]
        exits = [s.request.plan.exit for s in sequences]
        output = self.network.forward(batch, self.cache, max_loops, exits if any(exits) else None)
        _accept_next(sequences, output)


def _accept_next(sequences: list[RunningSequence], output: PassOutput) -> None:
    """Choose the next token of each sequence from the logits of its last token."""
    each = zip(sequences, output.loops, output.logit_rows, strict=True)
    for sequence, loops, logits in each:
        sequence.accept(sequence.choose(logits), loops, logits)


@overload
def generate(
    model: LanguageModel | Checkpoint | str | Path, prompt: str, **options: Any
) -> str: ...
@overload
def generate(
    model: LanguageModel | Checkpoint | str | Path, prompt: Sequence[int], **options: Any
) -> list[int]: ...
def generate(
    model: LanguageModel | Checkpoint | str | Path,
    prompt: Prompt,
    **options: Any,
) -> str | list[int]:
    """The continuation of a prompt: text for text, token ids for token ids, without the prompt.

    `model` is a model, a checkpoint of `open_checkpoint`, or the path of a run or checkpoint; text
    needs a checkpoint or path, which has a tokenizer. Further options are those of
    `Engine.request`, such as `new_tokens`, `loops`, `seed` and `stop_tokens`.

    Every call builds an engine. For several prompts, streams or statistics use `parcae.Engine`.
    """
    if isinstance(model, str | Path):
        model = open_checkpoint(model)
    tokenizer = None
    if isinstance(model, Checkpoint):
        model, tokenizer = model.model, model.tokenizer
    engine = Engine(model, tokenizer, rows=1)
    completion = engine.generate(prompt, **options)
    if isinstance(prompt, str):
        assert completion.text is not None
        return completion.text
    return list(completion.tokens)
