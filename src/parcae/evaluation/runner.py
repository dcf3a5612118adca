"""Scores whatever jobs have not been scored yet, in blocks of items that bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from parcae.evaluation.job import Job, keep
from parcae.evaluation.samples import Samples
from parcae.evaluation.scoring import Scorer, batches

BLOCK_ITEMS = 512
PROBES = 4
"""Items of a job whose cost is looked at to foresee that of all."""

Report = Callable[[Job, int], None]
"""Called with a job and how many of its items are new."""


def run(job: Job, scorer: Scorer, samples: Samples, report: Report) -> None:
    """Batches are planned over all items of a block, done or not, so an interrupted run computes
    the very batches that an uninterrupted one would have."""
    for start in range(0, len(job), BLOCK_ITEMS):
        indices = range(start, min(start + BLOCK_ITEMS, len(job)))
        if all(samples.has(job, index) for index in indices):
            report(job, len(indices))
            continue
        prompts = [job.prompt(index, scorer) for index in indices]
        costs = [scorer.cost(prompt) for prompt in prompts]
        for places in batches(costs, scorer.batch_tokens):
            chosen = [indices[place] for place in places]
            if not all(samples.has(job, index) for index in chosen):
                answers = scorer.score([prompts[place] for place in places], _seeds(job, chosen))
                found = zip(chosen, places, answers, strict=True)
                samples.add(job, {index: keep(job, index, prompts[p], a) for index, p, a in found})
            report(job, len(places))


def estimated_cost(job: Job, scorer: Scorer) -> float:
    """Tokens per item, from a few of them at even distances."""
    count = min(PROBES, len(job))
    probes = [job.prompt(i * len(job) // count, scorer) for i in range(count)]
    return sum(map(scorer.cost, probes)) / count


def _seeds(job: Job, indices: Sequence[int]) -> list[int]:
    """Of the looped state, where it is drawn."""
    return [(job.seed or 0) * 1_000_003 + index for index in indices]


def unfinished(jobs: Sequence[Job], samples: Samples) -> Iterator[Job]:
    for job in jobs:
        if not all(samples.has(job, index) for index in range(len(job))):
            yield job
