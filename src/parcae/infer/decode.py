"""How sequences gain tokens: prompts are read, then tokens are decoded, plainly or speculatively.

Speculation: a draft runs prelude, the first d loops and the coda to guess a token, then the next,
up to k. Verification runs all guesses at full depth in one pass, which takes little longer than one
token. It writes every key and value again, so nothing of a draft remains but its guesses, and
drafts can run on int8 weights where those are faster.

Every token is drawn at full depth with the noise of its position; a guess is accepted if the same
noise drew the same token from the shallow prediction. So the text equals that of plain decoding,
token for token, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from parcae.infer.batch import Batch, PassOutput, Span
from parcae.infer.cache import Cache
from parcae.infer.network import AnyNetwork
from parcae.infer.sequence import RunningSequence, choose_all


def read_prompts(
    network: AnyNetwork, cache: Cache, sequences: Sequence[RunningSequence], ends: Sequence[int]
) -> None:
    """Compute each prompt from where it is up to `ends`, at full depth; a prompt that is complete
    gives its sequence the first token."""
    spans = [
        Span(s.row, s.computed, end - s.computed) for s, end in zip(sequences, ends, strict=True)
    ]
    ids = [
        token
        for s, span in zip(sequences, spans, strict=True)
        for token in s.tokens[span.first : span.end]
    ]
    batch = Batch(spans, ids, cache.device)
    complete = [i for i, s in enumerate(sequences) if ends[i] == len(s.tokens)]
    predict = [batch.last_indices[i] for i in complete]
    max_loops = [s.request.plan.loops for s in sequences]
    output = network.forward(batch, cache, max_loops, predict=predict)
    for sequence, end in zip(sequences, ends, strict=True):
        sequence.computed = end
    _accept_next([sequences[i] for i in complete], [output.loops[i] for i in complete], output)


def decode(network: AnyNetwork, cache: Cache, sequences: Sequence[RunningSequence]) -> None:
    """Add a token to each sequence; those that stop early leave the pass."""
    spans = [Span(s.row, len(s.tokens) - 1) for s in sequences]
    batch = Batch(spans, [s.tokens[-1] for s in sequences], cache.device)
    max_loops = [s.request.plan.loops for s in sequences]
    exits = [s.request.plan.exit for s in sequences]
    output = network.forward(batch, cache, max_loops, exits if any(exits) else None)
    _accept_next(sequences, output.loops, output)


def _accept_next(
    sequences: Sequence[RunningSequence], loops: Sequence[int], output: PassOutput
) -> None:
    """Choose the next token of each sequence from the logits of its last token."""
    rows = output.logit_rows
    tokens = choose_all(sequences, rows)
    for sequence, token, ran, logits in zip(sequences, tokens, loops, rows, strict=True):
        sequence.accept(token, ran, logits)


def speculate(network: AnyNetwork, cache: Cache, sequences: Sequence[RunningSequence]) -> None:
    """Draft and verify once, for sequences with the same plan: each gains at least one token."""
    pairs = list(zip(sequences, _draft(network.drafter, cache, sequences), strict=True))
    spans = [Span(s.row, len(s.tokens) - 1, 1 + len(draft)) for s, draft in pairs]
    ids = [token for s, draft in pairs for token in (s.tokens[-1], *draft)]
    max_loops = [sequences[0].request.plan.loops] * len(sequences)
    output = network.forward(Batch(spans, ids, cache.device), cache, max_loops)
    rows = iter(output.logit_rows)
    for sequence, draft in pairs:
        _verify(sequence, draft, list(islice(rows, 1 + len(draft))))


def _draft(
    network: AnyNetwork, cache: Cache, sequences: Sequence[RunningSequence]
) -> list[list[int]]:
    """Guesses for each sequence."""
    plan = sequences[0].request.plan
    # A sequence near its end drafts only as many tokens as may still follow.
    lengths = [min(plan.draft_tokens, s.room - 1) for s in sequences]
    drafts: list[list[int]] = [[] for _ in sequences]
    for step in range(max(lengths)):
        triples = zip(sequences, drafts, lengths, strict=True)
        active = [(sequence, draft) for sequence, draft, length in triples if step < length]
        batch = Batch(
            [Span(s.row, len(s.tokens) - 1 + step) for s, _ in active],
            [(draft or s.tokens)[-1] for s, draft in active],
            cache.device,
        )
        output = network.forward(batch, cache, [plan.draft_loops] * len(active))
        for (sequence, draft), logits in zip(active, output.logit_rows, strict=True):
            draft.append(sequence.choose(logits, tuple(draft)))
    return drafts


def _verify(sequence: RunningSequence, draft: list[int], logits: Sequence[np.ndarray]) -> None:
    """Accept tokens at full depth as long as they equal the draft, and the one after."""
    if sequence.finish:  # the logits of the draft were not finite
        return
    sequence.drafted += len(draft)
    for step in range(len(draft) + 1):
        token = sequence.choose(logits[step])
        guessed = step < len(draft) and token == draft[step]
        sequence.accepted += guessed
        sequence.accept(token, sequence.request.plan.loops, logits[step])
        if sequence.finish or not guessed:
            return
