"""Greedy texts of parcae's engine, as JSON."""

from __future__ import annotations

import json
import sys
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
LOOPS = 6
"""Not the model's default, which is 4."""


def main(checkpoint: str, out: str) -> None:
    model, tokenizer, _ = parcae.open_checkpoint(checkpoint)
    engine = parcae.Engine(model, tokenizer)
    options = {"max_new_tokens": NEW_TOKENS, "loops": LOOPS, "temperature": 0}
    texts = [engine.generate(prompt, **options).text for prompt in PROMPTS]
    content = {"prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "loops": LOOPS, "texts": texts}
    Path(out).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
