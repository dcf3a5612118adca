"""Output of `parcae generate`: the text, and a summary of speed, depth and memory."""

from __future__ import annotations

import sys
from typing import Any

from parcae import console
from parcae.infer.engine import Engine
from parcae.infer.request import Request
from parcae.infer.sequence import Meter

VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
"""A byte-level model may write control characters, which a terminal would interpret."""


def write_prompt(prompt: str) -> None:
    bold = console.out.is_terminal and not console.out.no_color
    write_text(prompt, *(("\x1b[1m", "\x1b[0m") if bold else ()))


def write_text(text: str, before: str = "", after: str = "") -> None:
    """Write to standard output at once, without wrapping or changing spaces."""
    if console.out.is_terminal:
        text = text.translate(VISIBLE)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write((before + text + after).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def print_summary(engine: Engine, request: Request, meter: Meter) -> None:
    """Print speed, depth and memory in a few lines on standard error."""
    lines = [_speed(meter), _depth(request, meter), _drafts(meter), _memory(engine, request)]
    text = "\n".join(line for line in lines if line)
    console.err.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
    if meter.completion is not None and meter.completion.logprobs is not None:
        _print_logprobs(engine, meter)


def as_dict(engine: Engine, request: Request, meter: Meter) -> dict[str, Any]:
    """Text and summary for JSON output."""
    completion = meter.completion
    assert completion is not None, "the text has not ended"
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish": completion.finish,
        "loops": list(completion.loops),
        "mean_loops": meter.mean_loops,
        "loops_limit": request.plan.loops,
        "logprobs": None if completion.logprobs is None else _logprob_dicts(engine, meter),
        "prompt_tokens": len(request.prompt),
        "drafted": completion.drafted,
        "accepted": completion.accepted,
        "seconds_to_first_token": meter.first,
        "tokens_per_second": meter.rate,
        "cache_bytes_per_token": engine.cache.bytes_per_token(request.plan.loops),
        "cache_bytes": engine.cache.bytes,
        "weight_bytes": engine.network.weight_bytes,
    }


def token_text(engine: Engine, token: int) -> str:
    """A token's text, quoted and escaped."""
    assert engine.tokenizer is not None
    table = engine.tokenizer.token_bytes
    return quoted(table[token]) if token < len(table) else f"#{token}"


def quoted(token: bytes) -> str:
    """The text of a token in quotes; bytes that are no character alone as '\\xe6'."""
    try:
        return repr(token.decode())
    except UnicodeDecodeError:
        return repr(token)[1:]


def _speed(meter: Meter) -> str:
    count = len(meter.tokens)
    if meter.first is None:
        return "no tokens: the model ended the text immediately"
    parts = [console.format_items(count, "token")]
    if meter.rate is not None:
        parts.append(f"{console.format_number(meter.rate)} tokens/s")
    parts.append(f"the first after {console.format_duration(meter.first)}")
    reused = 0 if meter.completion is None else meter.completion.reused
    if reused:
        parts.append(f"{console.format_items(reused, 'prompt token')} from the cache")
    if meter.completion is None:
        parts.append("interrupted")
    elif meter.completion.finish != "length":
        reasons = {
            "context": "the context is full",
            "stop": "at a stop token or stop string",
        }
        parts.append(reasons[meter.completion.finish])
    return ", ".join(parts)


def _depth(request: Request, meter: Meter) -> str:
    limit, mean = request.plan.loops, meter.mean_loops
    if mean is None:
        return ""
    if set(meter.loops) == {limit}:
        return f"{limit} loop{'s' * (limit != 1)} for every token"
    bars, group = console.sparkline(meter.loops, limit)
    width = console.err.width if console.err.is_terminal else 80
    rows = [bars[start : start + width] for start in range(0, len(bars), width)]
    summary = f"{mean:.2f} of {limit} loops per token"
    if group > 1:
        summary += f", each bar the mean of {group} tokens"
    return "\n".join([summary, *rows])


def _drafts(meter: Meter) -> str:
    completion = meter.completion
    if completion is None or not completion.drafted:
        return ""
    drafted, accepted = completion.drafted, completion.accepted
    return f"{drafted:,} tokens drafted, {accepted:,} accepted ({accepted / drafted:.0%})"


def _memory(engine: Engine, request: Request) -> str:
    cache, network = engine.cache, engine.network
    per_token = console.format_bytes(cache.bytes_per_token(request.plan.loops))
    weights = console.format_bytes(network.weight_bytes)
    reserved = console.format_bytes(cache.bytes)
    differs = cache.dtype != network.model.dtype
    dtype = f" --cache-dtype {str(cache.dtype).removeprefix('torch.')}" if differs else ""
    return (
        f"weights {weights} (--weight-dtype {network.model.weight_dtype}); cache "
        f"{per_token} per token, {reserved} reserved (--cache {cache.policy}{dtype}); "
        f"layers in {network.name(cache.dtype)}"
    )


def _print_logprobs(engine: Engine, meter: Meter) -> None:
    assert meter.completion is not None
    entries = meter.completion.logprobs or ()
    rows = [
        (
            token_text(engine, entry.token),
            f"{entry.logprob:.3f}",
            "  ".join(f"{token_text(engine, t)} {p:.2f}" for t, p in entry.alternatives),
        )
        for entry in entries
    ]
    if entries:
        mean = sum(entry.logprob for entry in entries) / len(entries)
        rows.append(("mean", f"{mean:.3f}", ""))
    columns = ("token", "logprob", "likeliest tokens")
    console.err.print(console.table("Log-probabilities in nats", columns, rows))


def _logprob_dicts(engine: Engine, meter: Meter) -> list[dict[str, Any]]:
    assert meter.completion is not None
    return [
        {
            "token": entry.token,
            "text": token_text(engine, entry.token),
            "logprob": entry.logprob,
            "alternatives": [
                {"token": token, "text": token_text(engine, token), "logprob": logprob}
                for token, logprob in entry.alternatives
            ],
        }
        for entry in meter.completion.logprobs or ()
    ]
