"""Shallow loops draft, deep loops verify.

A draft runs prelude, the first d loops and the coda, and guesses a token; then the next, up to k.
Verifying runs all of them at full depth in one pass, which takes little longer than one token does.
Nothing depends on what a draft computed: verifying writes every key and value again. So drafts may
be as rough as is quick, and run on 8-bit weights where those are quicker.

Every token is drawn at full depth with the noise of its position; a draft is right if the same
noise drew the same token from the shallow prediction. So the text is that of plain decoding, token
for token, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from itertools import islice

import numpy as np

from parcae.infer.cache import Cache
from parcae.infer.deepen import Task, deepen
from parcae.infer.network import Network
from parcae.infer.sequence import Sequence
from parcae.infer.work import Part, Work


def decode(network: Network, cache: Cache, sequences: Several[Sequence]) -> None:
    """One round for sequences with the same draft: each gains one token at least."""
    pairs = list(zip(sequences, _draft(network.drafter, cache, sequences), strict=True))
    parts = [Part(s.row, len(s.tokens) - 1, 1 + len(draft)) for s, draft in pairs]
    ids = [token for s, draft in pairs for token in (s.tokens[-1], *draft)]
    limits = [sequences[0].request.plan.loops] * len(sequences)
    task = Task(work=Work(parts, ids, network.device), limits=limits)
    rows = iter(deepen(network, cache, task).rows)
    for sequence, draft in pairs:
        _verify(sequence, draft, list(islice(rows, 1 + len(draft))))


def _draft(network: Network, cache: Cache, sequences: Several[Sequence]) -> list[list[int]]:
    """Guesses for each sequence."""
    plan = sequences[0].request.plan
    # A sequence near its end drafts only what it could still use.
    lengths = [min(plan.draft_tokens, s.room - 1) for s in sequences]
    drafted: list[list[int]] = [[] for _ in sequences]
    for step in range(max(lengths)):
        pairs = zip(sequences, drafted, lengths, strict=True)
        going = [(sequence, draft) for sequence, draft, length in pairs if step < length]
        task = Task(
            work=Work(
                [Part(s.row, len(s.tokens) - 1 + step) for s, _ in going],
                [(draft or s.tokens)[-1] for s, draft in going],
                network.device,
            ),
            limits=[plan.draft_loops] * len(going),
        )
        for (sequence, draft), logits in zip(going, deepen(network, cache, task).rows, strict=True):
            draft.append(sequence.choose(logits, tuple(draft)))
    return drafted


def _verify(sequence: Sequence, draft: list[int], logits: Several[np.ndarray]) -> None:
    """Take tokens at full depth for as long as the draft has foreseen them, and the one after."""
    if sequence.finish:  # nothing could be drawn already while drafting
        return
    sequence.drafted += len(draft)
    for step in range(len(draft) + 1):
        token = sequence.choose(logits[step])
        foreseen = step < len(draft) and token == draft[step]
        sequence.accepted += foreseen
        sequence.accept(token, sequence.request.plan.loops, logits[step])
        if sequence.finish or not foreseen:
            return
