"""Time decoding steps of vLLM, for a model given by its configuration and with random weights.

    python decode.py FOLDER OPTIONS CONTEXT ROWS STEPS

FOLDER has a config.json; OPTIONS are more arguments of vllm.LLM, as JSON. Answers every line of
standard input, a number of sequences of at most ROWS, with a list of seconds: of STEPS steps that
each add a token to all sequences, which have CONTEXT tokens at first. Runs in vLLM's environment,
started by benchmarks/vllm_decode.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from itertools import pairwise


def main(folder: str, options: dict, context: int, rows: int, steps: int) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints, too
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=context + steps + 1,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * context,  # all prompts are read in one step
        **options,
    )
    engine, vocabulary = llm.llm_engine, llm.model_config.get_vocab_size()
    sampling = SamplingParams(
        temperature=0, max_tokens=steps + 1, ignore_eos=True, detokenize=False
    )
    chosen = random.Random(0)
    prompts = [
        {"prompt_token_ids": [chosen.randrange(vocabulary) for _ in range(context)]}
        for _ in range(rows)
    ]
    for turn, line in enumerate(sys.stdin):
        count = int(line)
        for row in range(count):
            engine.add_request(f"{turn}-{row}", prompts[row], sampling)
        ends = []  # of the step that reads the prompts, and of those that add a token
        while engine.has_unfinished_requests():
            outputs = engine.step()
            ends.append(time.perf_counter())
            if len(outputs) != count:
                sys.exit(f"a step had {len(outputs)} outputs, not {count}")
        seconds = [after - before for before, after in pairwise(ends)]
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    folder, options, *numbers = sys.argv[1:]
    main(folder, json.loads(options), *map(int, numbers))
