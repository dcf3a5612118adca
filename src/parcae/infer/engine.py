"""Decodes many requests over one model.

    engine = Engine(model, tokenizer)
    engine.generate("def main(", loops=8, max_new_tokens=64).text
    engine.generate_all(["one", "two"], exit="state:0.05")    # decoded together
    for piece in engine.stream("import "):
        print(piece.text, end="")

These use `submit` and `step`, which a server calls itself:

    sequence = engine.submit(engine.request("import ", loops=8))
    while sequence.finish is None:
        engine.step()            # serves all requests; sequence.pieces has the new tokens
    sequence.completion()        # or engine.cancel(sequence) before its end

A request waits until a row of the cache is free, its prompt is read (a prefix that is in the cache
is copied), and then every step adds a token, or several with speculation. Sequences at different
positions and with different numbers of loops share a pass. The text of a request does not depend on
other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, overload

from parcae.config import ConfigError, require
from parcae.data.tokenizer import Tokenizer
from parcae.device import check_compiler
from parcae.infer import DRAFT_TOKENS, MAX_NEW_TOKENS, TEMPERATURE, decode
from parcae.infer.cache import CacheDType, Policy
from parcae.infer.exit import ExitRule
from parcae.infer.layers import without_autocast
from parcae.infer.network import Backend, TorchNetwork, open_network
from parcae.infer.quantise import WeightDType
from parcae.infer.request import DepthPlan, Request, as_ids, check_whole
from parcae.infer.rows import Rows
from parcae.infer.sampling import Sampling, noise, noise_of_device
from parcae.infer.sequence import Completion, Piece, RunningSequence
from parcae.infer.static import StaticDecoder
from parcae.model.base import LanguageModel
from parcae.runs import Checkpoint, open_checkpoint

MAX_BATCH_SIZE = 4096
Prompt = str | Sequence[int]


class Engine:
    """Decodes requests over one model, alone or together, as text or token ids."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        cache: str | Policy = "full",
        weight_dtype: WeightDType = "float32",
        cache_dtype: CacheDType | None = None,
        backend: Backend = "auto",
        max_batch_size: int = 16,
        reuse_prefixes: bool = True,
        compile: bool = False,
        prefill_tokens: int | None = None,
        max_cache_bytes: int | None = None,
    ) -> None:
        """`tokenizer`: for prompts and results as text; without it they are token ids.

        `cache`: which loops share keys and values: "full", "last:K", "first:K" or "shared".

        `weight_dtype`: storage format of matrices: "float32", "int8" or "bfloat16".

        `cache_dtype`: storage format of keys and values: "float32" or "bfloat16", half the size.
        The default is float32 on a CPU, else the model's.

        `backend`: "native" runs passes of a few tokens on a CPU in C++, compiled when first used;
        "torch" uses PyTorch only; "static" is PyTorch as accelerators like it: steps of fixed
        shapes with sampling on the device, and tokens are read back every 8 steps. "auto" is
        "static" on an accelerator; on a CPU it uses the faster of C++ and PyTorch, measured when a
        size of pass is first met, and remembered.

        `compile`: compile the steps of "static" layers, with CUDA graphs on CUDA, which takes a
        minute for every number of loops and of rows. The cache is then allocated at once for all
        rows and the whole context.

        `max_batch_size`: the largest number of requests decoded together; others wait.

        `reuse_prefixes`: copy the start of a prompt from the cache if it is there.

        `prefill_tokens`: the largest number of prompt tokens read per step, so that long prompts do
        not hold up texts that are being decoded; the default is no limit. A prompt is read in one
        piece if loops share slots of the cache, which then depends on how it is split.

        `max_cache_bytes`: the largest size of the cache; the default is what memory allows.
        Requests for which there is no room wait.

        The engine shares the model's weights where it can and copies them where not, so create a
        new engine after training the model further.
        """
        check_whole("max_batch_size", max_batch_size, 1, MAX_BATCH_SIZE)
        if prefill_tokens is not None:
            check_whole("prefill_tokens", prefill_tokens, 1)
        if max_cache_bytes is not None:
            check_whole("max_cache_bytes", max_cache_bytes, 1)
        self.max_batch_size, self.prefill_tokens = max_batch_size, prefill_tokens
        self.tokenizer = tokenizer
        self.config = model.config
        if backend == "auto" and model.device.type != "cpu":
            backend = "static"
        remedy = "Use backend='static', or compile=False."
        require(
            backend == "static" or not compile, "compile", f"not with backend {backend!r}", remedy
        )
        if compile:
            check_compiler(model.device, "compile")
        self.network = open_network(model, weight_dtype, backend)
        self.cache = self.network.model.cache(cache, max_cache_bytes, cache_dtype)
        self.rows = Rows(self.cache, max_batch_size, reuse_prefixes, at_once=compile)
        self.static: StaticDecoder | None = None
        if backend == "static" and isinstance(self.network, TorchNetwork):
            self.static = StaticDecoder(self.network, self.cache, compile)
        self._lock = RLock()
        """Threads may submit, step and cancel concurrently; steps run one at a time."""
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        loops: int | None = None,
        exit: str | ExitRule | None = None,
        draft_loops: int = 0,
        draft_tokens: int = DRAFT_TOKENS,
        temperature: float = TEMPERATURE,
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
        `max_new_tokens`: the largest number of tokens to generate. A text also ends when the
        model's context is full; earlier tokens are never dropped to continue it.
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
        request = Request(
            prompt=tuple(as_ids("prompt", self.encode(prompt))),
            max_new_tokens=max_new_tokens,
            plan=plan,
            sampling=sampling,
            seed=seed,
            stop_tokens=frozenset(as_ids("stop_tokens", stop_tokens)),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=logprobs,
        )
        return request.check(self.config)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """The ids of a prompt: BOS and the ids of a text; ids are returned unchanged."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ConfigError("prompt: text needs a tokenizer. Give the engine one, or ids.")
        return [self.tokenizer.bos, *self.tokenizer.encode(prompt)]

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The continuation of a prompt; the options are those of `request`."""
        return self.complete([self.request(prompt, **options)])[0]

    def generate_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        """The continuations of several prompts, decoded together."""
        return self.complete([self.request(prompt, **options) for prompt in prompts])

    def complete(
        self, requests: Sequence[Request], on_step: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Decode all requests. `on_step` is called after every step with its number of tokens."""
        sequences = self._submit(requests)
        try:
            while not all(s.finish for s in sequences):
                count = self.step()
                if on_step is not None:
                    on_step(count)
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
        """Queue a request; call `step` until its `finish` is set. ConfigError if its cache would
        not fit in memory even alone."""
        return self._submit([request])[0]

    def _submit(self, requests: Sequence[Request]) -> list[RunningSequence]:
        context = self.config.context_length
        draw = noise if self.static is None else noise_of_device
        sequences = [RunningSequence(r, self.tokenizer, context, draw) for r in requests]
        with self._lock:
            self.rows.reserve(requests, len(self._running) + len(self._waiting))
            self._waiting.extend(sequences)
        return sequences

    def cancel(self, *sequences: RunningSequence) -> None:
        """End sequences and free their rows; their `finish` is "cancelled". Those that have ended
        are ignored."""
        with self._lock:
            for sequence in sequences:
                sequence.finish = sequence.finish or "cancelled"
            self._remove_finished()

    @property
    def waiting(self) -> int:
        """The number of requests that have no row yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests that have a row of the cache."""
        return len(self._running)

    def step(self) -> int:
        """Read prompts for which there are rows, then add a token or more to every sequence whose
        prompt had been read. Returns the number of new tokens.

        An exception ends the sequences of the pass that raised it, whose `completion()` raises it;
        others continue.
        """
        with self._lock, without_autocast(self.cache.device):
            before = sum(s.generated for s in self._running)
            decoding = [s for s in self._running if not s.is_reading]
            if self._waiting or len(decoding) < len(self._running):
                self._read_prompts()
            self._decode(decoding)
            count = sum(s.generated for s in self._running) - before
            if any(s.finish for s in self._running):
                self._remove_finished()
            return count

    def _remove_finished(self) -> None:
        for sequence in self._running:
            if sequence.finish:
                self.rows.release(sequence)
        self._running = [s for s in self._running if not s.finish]
        self._waiting = deque(s for s in self._waiting if not s.finish)

    def _read_prompts(self) -> None:
        """Read until all waiting prompts that can have a row are read, or the limit is reached."""
        left = self.prefill_tokens
        while left is None or left > 0:
            self._running += self.rows.assign(self._waiting, self._running)
            reading = [s for s in self._running if s.is_reading]
            if not reading:
                return
            ends = self._ends(reading, left)
            part = reading[: len(ends)]
            if left is not None:
                left -= sum(ends) - sum(s.computed for s in part)
            self._run(part, decode.read_prompts, self.network, self.cache, part, ends)

    def _ends(self, reading: Sequence[RunningSequence], limit: int | None) -> list[int]:
        """Up to where to read the first prompts, with at most `limit` tokens together."""
        if limit is None:
            return [len(s.tokens) for s in reading]
        ends = []
        for sequence in reading:
            unread = len(sequence.tokens) - sequence.computed
            if self.cache.policy.is_exact_for(sequence.request.plan.loops):
                unread = min(unread, limit)
            ends.append(sequence.computed + unread)
            limit -= unread
            if limit <= 0:
                break
        return ends

    def _decode(self, sequences: Sequence[RunningSequence]) -> None:
        sequences = sorted(sequences, key=lambda s: s.row)
        if self.static is not None:
            static = [s for s in sequences if self.static.supports(s.request)]
            sequences = [s for s in sequences if s not in static]
            if static:
                self._run(static, self.static.decode, static)
        for plan in {s.request.plan for s in sequences if s.request.plan.draft_loops}:
            group = [s for s in sequences if s.request.plan == plan]
            self._run(group, decode.speculate, self.network, self.cache, group)
        plain = [s for s in sequences if not s.request.plan.draft_loops]
        if plain:
            self._run(plain, decode.decode, self.network, self.cache, plain)

    def _run(
        self, sequences: Sequence[RunningSequence], function: Callable[..., None], *arguments: Any
    ) -> None:
        """Call a function that computes these sequences; they fail if it does."""
        try:
            function(*arguments)
        except Exception as error:
            for sequence in sequences:
                sequence.fail(error)


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
    `Engine.request`, such as `max_new_tokens`, `loops`, `seed` and `stop_tokens`.

    Every call builds an engine. For several prompts, streams or statistics use `parcae.Engine`.
    """
    if isinstance(model, str | Path):
        model = open_checkpoint(model, device="auto")
    tokenizer = None
    if isinstance(model, Checkpoint):
        model, tokenizer = model.model, model.tokenizer
    engine = Engine(model, tokenizer, max_batch_size=1)
    completion = engine.generate(prompt, **options)
    if isinstance(prompt, str):
        assert completion.text is not None
        return completion.text
    return list(completion.tokens)
