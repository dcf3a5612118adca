"""Our models in lm-evaluation-harness, under the name `parcae`.

    parcae lm-eval --model parcae --model_args path=out/python,loops=8 --tasks arc_easy

    import parcae.evaluation.harness                # registers the name
    lm_eval.simple_evaluate(model="parcae", model_args="path=out/python,loops=8", tasks=[...])

The harness asks for three things: the log-likelihood of a continuation, that of a whole text, and
text up to a stop string. The first two are scored by the same code as `parcae eval`; requests with
one context are branches of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from parcae import console
from parcae.config import ConfigError, require
from parcae.evaluation.opening import open_scorer
from parcae.evaluation.perplexity import continuations, windows
from parcae.evaluation.prompts import Prompt, Span
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.scoring import Answer, batches
from parcae.infer.engine import Engine

NEW_TOKENS = 256
"""What the harness lets a model say where a task does not care."""
MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for it; the first that is there counts."""


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
        asked: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            asked.setdefault(request.args[0], []).append(number)
        prompts = [
            continuations(context, [requests[number].args[1] for number in numbers], self.scorer)
            for context, numbers in asked.items()
        ]
        self._check_lengths(prompts)
        owners = list(asked.values())
        results = [(0.0, False)] * len(requests)

        def keep(place: int, answers: list[Answer]) -> None:
            for number, answer in zip(owners[place], answers, strict=True):
                results[number] = (-answer.nats[0].sum().item(), answer.is_greedy()[0])
                self._remember("loglikelihood", requests[number], results[number])

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
        left = Counter(owners)

        def keep(place: int, answers: list[Answer]) -> None:
            owner = owners[place]
            totals[owner] -= answers[0].nats[0].sum().item()
            left[owner] -= 1
            if not left[owner]:
                self._remember("loglikelihood_rolling", requests[owner], totals[owner])

        self._score(prompts, keep)
        return totals

    def generate_until(self, requests: list[Any]) -> list[str]:
        engine = self._engine = self._engine or Engine(
            self.scorer.model, self.scorer.tokenizer, rows=self.rows
        )
        times = Counter[str]()
        asked = []
        for request in requests:
            context, options = request.args
            asked.append(self._request(engine, context, options, times[context]))
            times[context] += 1
        with console.progress() as display:
            bar = display.add_task("generating", total=sum(one.new_tokens for one in asked))
            made = engine.complete(asked, lambda tokens: display.advance(bar, tokens))
        texts = [completion.text or "" for completion in made]
        for request, text in zip(requests, texts, strict=True):
            self._remember("generate_until", request, text)
        return texts

    def _request(self, engine: Engine, context: str, options: dict[str, Any], time: int) -> Any:
        """The harness's names for what a request can say; a prompt too long loses its beginning.
        Where tokens are drawn, each prompt has draws of its own, and others each `time`."""
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        limits = [options.pop(name, None) for name in MOST_TOKENS]
        most = int(next((limit for limit in limits if limit is not None), NEW_TOKENS))
        sample = bool(options.pop("do_sample", options.get("temperature", 0)))
        temperature = float(options.pop("temperature", 1.0)) if sample else 0.0
        known = {key: options.pop(key) for key in ("top_p", "top_k", "min_p") if key in options}
        known = known if sample else {}
        known |= {k: options.pop(k) for k in ("repetition_penalty",) if k in options}
        if options:
            raise ConfigError(
                f"generation: {', '.join(sorted(options))} are not known here. Take them out of "
                "the task's generation_kwargs."
            )
        limit = self.scorer.context_length
        room = limit - most
        remedy = "Ask for fewer, such as by --gen_kwargs max_gen_toks=32."
        require(room > 0, "max_gen_toks", f"{most} leave no room in {limit}", remedy)
        tokens = list(engine.encode(context))
        return engine.request(
            tokens[-room:],
            new_tokens=most,
            loops=self.loops,
            exit=self.exit,
            temperature=temperature,
            seed=_seed(context, time),
            stop=until,
            **known,
        )

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        """Like the harness: a context may lose its beginning, which is told, a continuation not."""
        most = self.scorer.context_length
        longest = most + max((prompt.lost for prompt in prompts), default=0)
        problem = f"a continuation of {longest} tokens does not fit the model's {most}"
        require(longest <= most, "context", problem, "Leave its task out.")
        if cut := sum(prompt.is_cut for prompt in prompts):
            console.err.print(
                f"{cut} of {len(prompts)} contexts are longer than the model's {most} tokens and "
                "lose their beginning.",
                style="yellow",
                highlight=False,
            )

    def _score(self, prompts: Sequence[Prompt], keep: Callable[[int, list[Answer]], None]) -> None:
        """`keep` is called for each prompt's place, batch by batch."""
        costs = [self.scorer.cost(prompt) for prompt in prompts]
        with console.progress() as display:
            bar = display.add_task("scoring", total=len(prompts))
            for places in batches(costs, self.scorer.batch_tokens):
                answers = self.scorer.score([prompts[place] for place in places])
                for place, found in zip(places, answers, strict=True):
                    keep(place, found)
                display.advance(bar, len(places))

    def _remember(self, kind: str, request: Any, result: Any) -> None:
        """In the harness's own cache, where it was asked for: a killed run goes on from there."""
        self.cache_hook.add_partial(kind, request.args, result)


def _seed(context: str, time: int) -> int:
    digest = hashlib.sha256(f"{time} {context}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _available(device: str | None) -> str:
    """The harness asks for a GPU unless told otherwise."""
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return "cpu"
    return device
