"""Greedy texts of parcae's engine, and its speed with 1, 8 and 32 texts at a time, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import parcae

PROMPTS = [
    "import os",
    "def main(",
    "class Reader:",
    "for line in",
    "return",
    "x = 1",
    "if name",
    "    self.",
    "# This",
    "try:",
    "with open(",
    "raise ValueError(",
    "from typing",
    "while True",
    "print(",
    "def __init__",
    "@property",
    "assert",
    "lambda x",
    "    ",
]
NEW_TOKENS = 96


def main(checkpoint: str, out: str) -> None:
    model, tokenizer, _ = parcae.open_checkpoint(checkpoint)
    engine = parcae.Engine(model, tokenizer)
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 0}
    texts = [engine.generate(prompt, **options).text for prompt in PROMPTS]
    speed = {}
    for clients in (1, 8, 32):
        prompts = (PROMPTS * 2)[:clients]
        engine.generate_all(prompts, **options)
        start = time.perf_counter()
        done = engine.generate_all(prompts, **options)
        speed[clients] = sum(len(text.tokens) for text in done) / (time.perf_counter() - start)
    content = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "texts": texts, "speed": speed}
    Path(out).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
