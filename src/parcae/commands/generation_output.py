"""What a person sees of a text while it is made, and what it cost afterwards."""

from __future__ import annotations

import sys
from typing import Any

from parcae import console
from parcae.infer.engine import Engine
from parcae.infer.meter import Meter
from parcae.infer.request import Request

VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
"""A model of bytes may write any of them; a terminal would obey control characters."""


def write_prompt(prompt: str) -> None:
    bold = console.out.is_terminal and not console.out.no_color
    write_text(prompt, *(("\x1b[1m", "\x1b[0m") if bold else ()))


def write_text(text: str, before: str = "", after: str = "") -> None:
    """At once and as it is: neither wrapped, nor are tabs or spaces touched."""
    if console.out.is_terminal:
        text = text.translate(VISIBLE)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write((before + text + after).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def tell(engine: Engine, request: Request, meter: Meter) -> None:
    """A few lines on standard error."""
    lines = [_speed(meter), _depth(request, meter), _drafts(meter), _memory(engine, request)]
    text = "\n".join(line for line in lines if line)
    console.err.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
    if meter.completion is not None and meter.completion.logprobs is not None:
        _tell_logprobs(engine, meter)


def as_tree(engine: Engine, request: Request, meter: Meter) -> dict[str, Any]:
    """The same for a program."""
    made = meter.completion
    assert made is not None, "the text has not ended"
    return {
        "text": made.text,
        "tokens": list(made.tokens),
        "finish": made.finish,
        "loops": list(made.loops),
        "mean_loops": meter.mean_loops,
        "loops_limit": request.plan.loops,
        "logprobs": None if made.logprobs is None else _logprob_tree(engine, meter),
        "prompt_tokens": len(request.prompt),
        "drafted": made.drafted,
        "accepted": made.accepted,
        "seconds_to_first_token": meter.first,
        "tokens_per_second": meter.rate,
        "cache_bytes_per_token": engine.cache.bytes_per_token(request.plan.loops),
        "cache_bytes": engine.cache.bytes,
        "weight_bytes": engine.network.weight_bytes,
    }


def spelled(engine: Engine, token: int) -> str:
    """A token's text, with quotes and escapes."""
    assert engine.tokenizer is not None
    table = engine.tokenizer.token_bytes
    return repr(table[token].decode(errors="replace")) if token < len(table) else f"#{token}"


def _speed(meter: Meter) -> str:
    count = len(meter.tokens)
    if meter.first is None:
        return "no token: the model ended the text at once"
    words = [f"{count:,} token" + "s" * (count != 1)]
    if meter.rate is not None:
        words.append(f"{console.format_number(meter.rate)} tokens/s")
    first = meter.first
    waited = console.format_duration(first)
    words.append(f"the first after {waited}")
    reused = 0 if meter.completion is None else meter.completion.reused
    if reused:
        words.append(f"{reused:,} of the prompt known from before")
    if meter.completion is None:
        words.append("interrupted")
    elif meter.completion.finish != "length":
        words.append({"context": "the context is full", "stop": "ended"}[meter.completion.finish])
    return ", ".join(words)


def _depth(request: Request, meter: Meter) -> str:
    limit, mean = request.plan.loops, meter.mean_loops
    if mean is None:
        return ""
    if set(meter.loops) == {limit}:
        return f"{limit} loop{'s' * (limit != 1)} for every token"
    bars, group = console.sparkline(meter.loops, limit)
    width = console.err.width if console.err.is_terminal else 80
    rows = [bars[start : start + width] for start in range(0, len(bars), width)]
    words = f"{mean:.2f} of {limit} loops per token"
    if group > 1:
        words += f", each bar the mean of {group} tokens"
    return "\n".join([words, *rows])


def _drafts(meter: Meter) -> str:
    made = meter.completion
    if made is None or not made.drafted:
        return ""
    share = made.accepted / made.drafted
    return f"{made.drafted:,} tokens drafted, {made.accepted:,} accepted ({share:.0%})"


def _memory(engine: Engine, request: Request) -> str:
    cache, network = engine.cache, engine.network
    per_token = console.format_bytes(cache.bytes_per_token(request.plan.loops))
    layers = "PyTorch" if network.native is None else "C++"
    weights = console.format_bytes(network.weight_bytes)
    reserved = console.format_bytes(cache.bytes)
    return (
        f"weights {weights} (--weights {network.weights}); cache "
        f"{per_token} per token, {reserved} reserved (--cache {cache.policy}); "
        f"layers in {layers}"
    )


def _tell_logprobs(engine: Engine, meter: Meter) -> None:
    assert meter.completion is not None
    seen = meter.completion.logprobs or ()
    rows = [
        (
            spelled(engine, one.token),
            f"{one.logprob:.3f}",
            "  ".join(f"{spelled(engine, t)} {p:.2f}" for t, p in one.alternatives),
        )
        for one in seen
    ]
    if seen:
        rows.append(("mean", f"{sum(one.logprob for one in seen) / len(seen):.3f}", ""))
    view = console.table("Log-probabilities, in nats", ("token", "it", "likeliest"), rows)
    console.err.print(view)


def _logprob_tree(engine: Engine, meter: Meter) -> list[dict[str, Any]]:
    assert meter.completion is not None
    return [
        {
            "token": one.token,
            "text": spelled(engine, one.token),
            "logprob": one.logprob,
            "alternatives": [
                {"token": token, "text": spelled(engine, token), "logprob": chance}
                for token, chance in one.alternatives
            ],
        }
        for one in meter.completion.logprobs or ()
    ]
