"""The plain sampler: every token recomputes the whole prefix. Slow, short, and hard to get wrong.

generate(model, tokenizer.encode("def "), new_tokens=64, depths=8, temperature=0.8, seed=1)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch

from parcae.config import ConfigError, require
from parcae.infer.sampling import Sampling, pick
from parcae.model.frame import LanguageModel


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    depths: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> list[int]:
    """The tokens that follow `prompt`: at most `new_tokens`, fewer if one of `stop` is drawn.

    The prompt and the stop token are not part of what is returned. Every position loops `depths`
    times, the mean the model was trained with if left out, from a state of zeros.

    The noise of a token depends on (seed, its position) only, so a seed gives the same text.
    A context that is full slides: the model is given the last `context_length` tokens, counted
    from position 0 anew, and forgets what came before.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    tokens = check_prompt(prompt, model.config.vocab_size)
    require(new_tokens >= 1, "new_tokens", f"{new_tokens} is not positive", "Use at least 1.")
    loops = model.config.loop.nominal_loops if depths is None else depths
    start, ends = len(tokens), frozenset(stop)
    for position in range(start, start + new_tokens):
        window = torch.tensor([tokens[-model.config.context_length :]], device=model.device)
        _, x = next(iter(model.readings(window, (loops,), state="zero")))
        token = pick(model.logits(x[0, -1]).cpu(), sampling, seed, position, tokens)
        if token in ends:
            break
        tokens.append(token)
    return tokens[start:]


def check_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    several = isinstance(prompt, Iterable)
    require(several, "prompt", f"{prompt!r} is not a list of ids", "Give one, or a text.")
    tokens = [_as_id(token) for token in prompt]
    require(
        len(tokens) > 0,
        "prompt",
        "it is empty",
        "Give at least one token, such as the tokenizer's BOS.",
    )
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    require(
        not wrong,
        "prompt",
        f"id {wrong[:1]} is outside the vocabulary of {vocab_size}",
        "Was the text encoded with this model's tokenizer?",
    )
    return tokens


def _as_id(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"prompt: {token!r} is not an id. Give whole numbers.") from None
