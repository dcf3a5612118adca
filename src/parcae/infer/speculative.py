"""Shallow loops draft, deep loops verify.

A draft runs prelude, the first d loops and the coda, and guesses a token; then the next, up to k.
Verifying takes all of them from loop d + 1 to T at once. Nothing is computed twice: loop t of a
token depends on loops below t only, so what the draft did is the beginning of what full depth does,
keys and values included. Only the coda's are written again, from the deep state.

Every token is drawn at full depth with the noise of its position; a draft is right if the same
noise drew the same token from the shallow prediction. So the text is that of plain decoding, token
for token, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from parcae.infer.cache import Cache
from parcae.infer.deepen import Begun, Task, deepen
from parcae.infer.network import Network
from parcae.infer.sequence import Sequence
from parcae.infer.work import Part, Work


def decode(network: Network, cache: Cache, sequences: Several[Sequence]) -> None:
    """One round for sequences with the same draft: each gains one token at least."""
    drafted, begun = _draft(network, cache, sequences)
    pairs = list(zip(sequences, drafted, strict=True))
    parts = [Part(s.row, len(s.tokens) - 1, 1 + len(draft)) for s, draft in pairs]
    ids = [token for s, draft in pairs for token in (s.tokens[-1], *draft)]
    limits = [sequences[0].request.plan.loops] * len(sequences)
    work = Work(parts, ids, network.device)
    logits = deepen(network, cache, Task(work=work, limits=limits, begun=begun)).logits.cpu()
    start = 0
    for sequence, draft in pairs:
        _verify(sequence, draft, logits[start : start + 1 + len(draft)])
        start += 1 + len(draft)


def _draft(
    network: Network, cache: Cache, sequences: Several[Sequence]
) -> tuple[list[list[int]], Begun]:
    """Guesses for each sequence, and where they and the token before them stand.

    The last guess is run through the shallow loops too, so that verifying predicts what follows it.
    """
    plan = sequences[0].request.plan
    # A sequence near its end drafts only what it could still use.
    lengths = [min(plan.draft_tokens, s.room - 1) for s in sequences]
    drafted: list[list[int]] = [[] for _ in sequences]
    held = []
    for step in range(max(lengths) + 1):
        going = [i for i, length in enumerate(lengths) if step <= length]
        ids = [drafted[i][-1] if drafted[i] else sequences[i].tokens[-1] for i in going]
        parts = [Part(sequences[i].row, len(sequences[i].tokens) - 1 + step) for i in going]
        guessing = [n for n, i in enumerate(going) if step < lengths[i]]
        task = Task(
            work=Work(parts, ids, network.device),
            limits=[plan.draft_loops] * len(going),
            predict=guessing,
        )
        reached = deepen(network, cache, task)
        held.append(reached.held)
        for n, logits in zip(guessing, reached.logits.cpu(), strict=True):
            sequence, draft = sequences[going[n]], drafted[going[n]]
            draft.append(sequence.choose(logits, tuple(draft)))
    together = torch.cat(held, dim=1)
    if len(sequences) > 1:
        together = together[:, _by_sequence(lengths)]
    return drafted, Begun(plan.draft_loops, together)


def _by_sequence(lengths: Several[int]) -> list[int]:
    """Where what was made step by step stands for each sequence, one after the other."""
    steps = range(max(lengths) + 1)
    made = [(i, step) for step in steps for i, length in enumerate(lengths) if step <= length]
    return sorted(range(len(made)), key=made.__getitem__)


def _verify(sequence: Sequence, draft: list[int], logits: Tensor) -> None:
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
