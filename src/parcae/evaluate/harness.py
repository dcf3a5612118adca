"""Our models in lm-evaluation-harness, under the name `parcae`.

    parcae lm-eval --model parcae --model_args path=out/python,loops=8 --tasks arc_easy

    import parcae.evaluate.harness                # registers the name
    lm_eval.simple_evaluate(model="parcae", model_args="path=out/python,loops=8", tasks=[...])

The harness asks for three things: the log-likelihood of a continuation, that of a whole text, and
text up to a stop string. The first two are scored by the same code as `parcae eval`; requests with
one context are branches of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from parcae import console
from parcae.config import ConfigError, require
from parcae.evaluate.opening import open_scorer
from parcae.evaluate.ours import LoopedScorer
from parcae.evaluate.prompts import Prompt, Span
from parcae.evaluate.rolling import continuations, windows
from parcae.evaluate.scoring import Answer, batches
from parcae.infer.engine import Engine

NEW_TOKENS = 256
"""What the harness lets a model say where a task does not care."""


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
        """`batch_size` is how many texts are generated together; scoring goes by `batch_tokens`.
        `exit` is a rule of early exit, for generated text."""
        super().__init__()
        scorer = open_scorer(
            path,
            None if loops is None else [int(loops)],
            tokenizer=tokenizer,
            best=best,
            batch_tokens=batch_tokens,
            device=_available(device),
        )
        if not isinstance(scorer, LoopedScorer):
            raise ConfigError(f"{path}: not a model of ours. The harness's own --model hf is.")
        self.scorer = scorer
        self.exit = exit
        self.rows = int(batch_size) if str(batch_size or "").isdigit() else 8
        self._engine: Engine | None = None

    @property
    def loops(self) -> int:
        (depth,) = self.scorer.depths
        return depth

    @property
    def tokenizer_name(self) -> str:
        return self.scorer.tokenizer.sha256

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        asked: dict[str, list[str]] = {}
        for request in requests:
            context, continuation = request.args
            asked.setdefault(context, []).append(continuation)
        prompts = [continuations(context, texts, self.scorer) for context, texts in asked.items()]
        found: dict[tuple[str, str], tuple[float, bool]] = {}
        for (context, texts), answers in zip(asked.items(), self._score(prompts), strict=True):
            for text, answer in zip(texts, answers, strict=True):
                found[context, text] = (-answer.nats[0].sum().item(), answer.is_greedy()[0])
        results = [found[request.args] for request in requests]
        self._remember("loglikelihood", requests, results)
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
        for owner, (answer,) in zip(owners, self._score(prompts), strict=True):
            totals[owner] -= answer.nats[0].sum().item()
        self._remember("loglikelihood_rolling", requests, totals)
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        engine = self._engine = self._engine or Engine(
            self.scorer.model, self.scorer.tokenizer, rows=self.rows
        )
        asked = [self._request(engine, *request.args) for request in requests]
        with console.progress() as display:
            bar = display.add_task("generating", total=sum(one.new_tokens for one in asked))
            made = engine.complete(asked, lambda tokens: display.advance(bar, tokens))
        texts = [completion.text or "" for completion in made]
        self._remember("generate_until", requests, texts)
        return texts

    def _request(self, engine: Engine, context: str, options: dict[str, Any]) -> Any:
        """The harness's names for what a request can say; a prompt too long loses its beginning."""
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        most = int(options.pop("max_gen_toks", options.pop("max_new_tokens", NEW_TOKENS)))
        sample = bool(options.pop("do_sample", options.get("temperature", 0)))
        temperature = float(options.pop("temperature", 1.0)) if sample else 0.0
        known = {key: options.pop(key) for key in ("top_p", "top_k", "min_p") if key in options}
        known = known if sample else {}
        if options:
            raise ConfigError(
                f"generation: {', '.join(sorted(options))} are not known here. Take them out of "
                "the task's generation_kwargs."
            )
        limit = self.scorer.context_length
        room = limit - most
        require(room > 0, "max_gen_toks", f"{most} leave no room in {limit}", "Ask for fewer.")
        tokens = list(engine.encode(context))
        return engine.request(
            tokens[-room:],
            new_tokens=most,
            loops=self.loops,
            exit=self.exit,
            temperature=temperature,
            stop=until,
            **known,
        )

    def _score(self, prompts: Sequence[Prompt]) -> list[list[Answer]]:
        found: dict[int, list[Answer]] = {}
        costs = [self.scorer.cost(prompt) for prompt in prompts]
        with console.progress() as display:
            bar = display.add_task("scoring", total=len(prompts))
            for places in batches(costs, self.scorer.batch_tokens):
                answers = self.scorer.score([prompts[place] for place in places])
                found.update(zip(places, answers, strict=True))
                display.advance(bar, len(places))
        return [found[place] for place in range(len(prompts))]

    def _remember(self, kind: str, requests: Sequence[Any], results: Sequence[Any]) -> None:
        """In the harness's own cache, where it was asked for."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, request.args, result)


def _available(device: str | None) -> str:
    """The harness asks for a GPU unless told otherwise."""
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return "cpu"
    return device
