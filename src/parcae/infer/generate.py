"""`parcae.generate`: ids in, ids out, over the engine, with the signature of the plain sampler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from parcae.infer.engine import Engine
from parcae.model.frame import LanguageModel


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    depths: int | None = None,
    temperature: float = 1.0,
    stop: Collection[int] = (),
    **options: Any,
) -> list[int]:
    """The tokens that follow `prompt`, without it: at most `new_tokens`, fewer if one of `stop` is
    drawn or the context is full. Further options are those of `Engine.request`.

    The text is that of `parcae.infer.plain.generate`, which recomputes everything for every token.
    For several prompts, text, streams and statistics use `parcae.Engine`.
    """
    made = Engine(model, rows=1).generate(
        list(prompt),
        new_tokens=new_tokens,
        loops=depths,
        temperature=temperature,
        stop_tokens=stop,
        **options,
    )
    return list(made.tokens)
