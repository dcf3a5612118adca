"""Parcae models in lm-evaluation-harness, under the name `parcae`.

    parcae lm-eval --model parcae --model_args path=out/python,loops=8 --tasks arc_easy

    import parcae.evaluation.harness                # registers the name
    lm_eval.simple_evaluate(model="parcae", model_args="path=out/python,loops=8", tasks=[...])

The harness asks for the log-likelihood of a continuation, the log-likelihood of a whole text, and
generated text up to a stop string. The first two are scored by the code of `parcae eval`; requests
with the same context are scored together.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from parcae import console
from parcae.config import ConfigError, require
from parcae.device import is_available
from parcae.evaluation.prompts import Answer, Prompt, Span, continuations, windows
from parcae.evaluation.scorer import LoopedScorer, is_transformers_model, open_scorer
from parcae.evaluation.shared_prefix import batches
from parcae.infer.engine import Engine

MAX_NEW_TOKENS = 256
"""The harness's default for tasks that set no limit."""
LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the limit in tasks; the first that is set counts."""


@register_model("parcae")
class ParcaeLM(LM):
    def __init__(
        self,
        path: str,
        loops: int | None = None,
        tokenizer: str | None = None,
        best: bool = False,
        batch_tokens: int | None = None,
        exit: str | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: int | None = None,
    ) -> None:
        """`batch_size`: texts generated together. `batch_tokens`: tokens scored at a time. `exit`:
        early exit rule for generated text."""
        super().__init__()
        if is_transformers_model(path):  # nothing of it is opened here
            raise ConfigError(
                f"{path}: not a parcae model. Use --model hf for transformers models."
            )
        scorer = open_scorer(
            path,
            None if loops is None else [int(loops)],
            tokenizer=tokenizer,
            best=best,
            batch_tokens=batch_tokens,
            device=_available(device),
        )
        assert isinstance(scorer, LoopedScorer)
        self.scorer = scorer
        self.exit = exit
        self.rows = int(batch_size) if str(batch_size or "").isdigit() else 8
        self._engine: Engine | None = None

    @property
    def loops(self) -> int:
        (depth,) = self.scorer.loops
        return depth

    @property
    def tokenizer_name(self) -> str:
        return self.scorer.tokenizer.sha256

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        by_context: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_context.setdefault(request.args[0], []).append(index)
        prompts = [
            continuations(context, [requests[index].args[1] for index in indices], self.scorer)
            for context, indices in by_context.items()
        ]
        self._check_lengths(prompts)
        owners = list(by_context.values())
        results = [(0.0, False)] * len(requests)

        def keep(prompt: int, answers: list[Answer]) -> None:
            for index, answer in zip(owners[prompt], answers, strict=True):
                results[index] = (-answer.nats[0].sum().item(), answer.is_greedy()[0])
                self._cache("loglikelihood", requests[index], results[index])

        self._score(prompts, keep)
        return results

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        bos, context = self.scorer.bos, self.scorer.context_length
        assert bos is not None
        prompts, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.scorer.encode(request.args[0])
            for window, scored in windows(tokens, bos, context):
                count = len(window)
                prompts.append(Prompt((window,), (Span(count - scored, count),), (count,)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        remaining = Counter(owners)

        def keep(prompt: int, answers: list[Answer]) -> None:
            owner = owners[prompt]
            totals[owner] -= answers[0].nats[0].sum().item()
            remaining[owner] -= 1
            if not remaining[owner]:
                self._cache("loglikelihood_rolling", requests[owner], totals[owner])

        self._score(prompts, keep)
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        engine = self._engine = self._engine or Engine(
            self.scorer.model, self.scorer.tokenizer, max_batch_size=self.rows
        )
        repeats = Counter[str]()
        generations = []
        for request in requests:
            context, options = request.args
            generations.append(self._generation(engine, context, options, repeats[context]))
            repeats[context] += 1
        with console.progress() as display:
            total = sum(generation.max_new_tokens for generation in generations)
            bar = display.add_task("generating", total=total)
            completions = engine.complete(generations, lambda n: display.advance(bar, n))
        texts = [completion.text or "" for completion in completions]
        for request, text in zip(requests, texts, strict=True):
            self._cache("generate_until", request, text)
        return texts

    def _generation(
        self, engine: Engine, context: str, options: dict[str, Any], repeat: int
    ) -> Any:
        """The engine's request for one of the harness. A prompt that is too long is cut on the
        left. The seed of sampling depends on the context and on `repeat`."""
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        limits = [options.pop(name, None) for name in LIMIT_NAMES]
        max_new_tokens = int(next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS))
        sample = bool(options.pop("do_sample", options.get("temperature", 0)))
        temperature = float(options.pop("temperature", 1.0)) if sample else 0.0
        known = {key: options.pop(key) for key in ("top_p", "top_k", "min_p") if key in options}
        known = known if sample else {}
        known |= {k: options.pop(k) for k in ("repetition_penalty",) if k in options}
        if options:
            raise ConfigError(
                f"generation_kwargs: {', '.join(sorted(options))}: not supported. Remove it from "
                "the task."
            )
        limit = self.scorer.context_length
        room = limit - max_new_tokens
        problem = f"{max_new_tokens} leave no room for a prompt in a context of {limit} tokens"
        require(room > 0, "max_gen_toks", problem, "Use --gen_kwargs max_gen_toks=32.")
        tokens = list(engine.encode(context))
        return engine.request(
            tokens[-room:],
            max_new_tokens=max_new_tokens,
            loops=self.loops,
            exit=self.exit,
            temperature=temperature,
            seed=_seed(context, repeat),
            stop=until,
            **known,
        )

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        """As in the harness, a context may be cut, with a warning; a continuation may not."""
        limit = self.scorer.context_length
        longest = limit + max((prompt.lost for prompt in prompts), default=0)
        problem = f"a continuation of {longest} tokens does not fit the model's {limit}"
        require(longest <= limit, "context", problem, "Omit its task.")
        if cut := sum(prompt.is_cut for prompt in prompts):
            console.err.print(
                f"{cut} of {len(prompts)} contexts are longer than the model's {limit} tokens and "
                "are cut on the left.",
                style="yellow",
                highlight=False,
            )

    def _score(self, prompts: Sequence[Prompt], keep: Callable[[int, list[Answer]], None]) -> None:
        """Call `keep` with the index and the answers of each prompt, batch by batch."""
        costs = [self.scorer.cost(prompt) for prompt in prompts]
        with console.progress() as display:
            bar = display.add_task("scoring", total=len(prompts))
            for batch in batches(costs, self.scorer.batch_tokens):
                answers = self.scorer.score([prompts[index] for index in batch])
                for index, of_prompt in zip(batch, answers, strict=True):
                    keep(index, of_prompt)
                display.advance(bar, len(batch))

    def _cache(self, kind: str, request: Any, result: Any) -> None:
        """Write to the harness's own cache, if it is used: a killed run resumes from it."""
        self.cache_hook.add_partial(kind, request.args, result)


def _seed(context: str, repeat: int) -> int:
    digest = hashlib.sha256(f"{repeat} {context}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _available(device: str | None) -> str:
    """The harness's default device is cuda, also where there is none."""
    if device is None or (device.startswith("cuda") and not is_available("cuda")):
        return "auto"
    return device
