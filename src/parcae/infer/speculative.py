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
from parcae.infer.network import Given, Network, joined
from parcae.infer.sequence import Sequence
from parcae.infer.work import Part, Work


def decode(network: Network, cache: Cache, sequences: Several[Sequence]) -> None:
    """One round for sequences with the same draft: each gains one token at least."""
    plan = sequences[0].request.plan
    drafted, states, givens = _draft(network, cache, sequences)
    parts = [
        Part(s.row, len(s.tokens) - 1, 1 + len(draft))
        for s, draft in zip(sequences, drafted, strict=True)
    ]
    h, given = _by_sequence(drafted, states, givens)
    work = Work(parts, network.device)
    h = network.loop(h, given, work, cache, range(plan.draft_loops + 1, plan.loops + 1))
    logits = network.logits(network.read(h, given, work, cache)).cpu()
    start = 0
    for sequence, draft in zip(sequences, drafted, strict=True):
        _verify(sequence, draft, logits[start : start + 1 + len(draft)])
        start += 1 + len(draft)


def _draft(
    network: Network, cache: Cache, sequences: Several[Sequence]
) -> tuple[list[list[int]], list[Tensor], list[Given]]:
    """Guesses for each sequence; and for each step the states and inputs of those that took it.

    The last guess is run through the shallow loops too, so that verifying predicts what follows it.
    """
    plan = sequences[0].request.plan
    # A sequence near its end drafts only what it could still use.
    lengths = [min(plan.draft_tokens, s.room - 1) for s in sequences]
    drafted: list[list[int]] = [[] for _ in sequences]
    states, givens = [], []
    for step in range(max(lengths) + 1):
        going = [i for i, length in enumerate(lengths) if step <= length]
        last = [drafted[i][-1] if drafted[i] else sequences[i].tokens[-1] for i in going]
        parts = [Part(sequences[i].row, len(sequences[i].tokens) - 1 + step) for i in going]
        work = Work(parts, network.device)
        given = network.begin(torch.tensor(last, device=network.device), work, cache)
        h = network.initial_state(given)
        h = network.loop(h, given, work, cache, range(1, plan.draft_loops + 1))
        states.append(h)
        givens.append(given)
        guessing = [n for n, i in enumerate(going) if step < lengths[i]]
        if guessing:
            x = network.read(h, given, work, cache)
            logits = network.logits(x).cpu()
            for n in guessing:
                sequence, draft = sequences[going[n]], drafted[going[n]]
                draft.append(sequence.choose(logits[n], tuple(draft)))
    return drafted, states, givens


def _by_sequence(
    drafted: list[list[int]], states: list[Tensor], givens: list[Given]
) -> tuple[Tensor, Given]:
    """From step by step to sequence by sequence."""
    counts = [1 + len(draft) for draft in drafted]
    steps = [[i for i, count in enumerate(counts) if step < count] for step in range(len(states))]
    starts = [sum(len(before) for before in steps[:step]) for step in range(len(steps))]
    order = [
        starts[step] + steps[step].index(i)
        for i, count in enumerate(counts)
        for step in range(count)
    ]
    h, given = torch.cat(states), joined(givens)
    if order == list(range(len(order))):
        return h, given
    index = torch.tensor(order, device=h.device)
    return h[index], given.only(index)


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
