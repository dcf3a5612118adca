"""The loader: every promise about ranks, resuming, mixing and accounting, on small corpora."""

import gc
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import BOS, config, corpus, rows_of, take, two_sources

from parcae.data.loader import Loader, Source, validation_batches
from parcae.data.order import SourcePlan, SourcePosition
from parcae.data.shards import InMemoryDocuments


def test_a_batch_is_a_row_and_its_shift():
    inputs, targets = next(Loader([Source(corpus())], config()))
    assert inputs.shape == targets.shape == (4, 15)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert (inputs[:, 0] == BOS).all()


def test_rows_hold_whole_documents_but_for_the_last():
    documents = corpus()
    known = {tuple(documents.tokens(d).tolist()) for d in range(len(documents.lengths))}
    for batch in take(Loader([Source(documents)], config()), 40):
        for row in batch:
            starts = [i for i, token in enumerate(row) if token == BOS]
            pieces = [row[a:b] for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]
            assert starts[0] == 0
            assert all(piece in known for piece in pieces[:-1])
            assert any(document[: len(pieces[-1])] == pieces[-1] for document in known)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(0, 2**31),
    st.sampled_from(["best-fit", "concatenate"]),
    st.integers(0, 2),
)
def test_resuming_at_any_step_is_bit_identical(step, seed, packing, prefetch):
    settings_ = config(seed=seed, packing=packing, prefetch=prefetch)
    whole = take(Loader(two_sources(), settings_), step + 5)
    first = Loader(two_sources(), settings_)
    assert take(first, step) == whole[:step]
    state = json.loads(json.dumps(first.state_dict()))
    assert take(Loader(two_sources(), settings_, state=state), 5) == whole[step:]

    skipped = Loader(two_sources(), settings_)
    skipped.skip(step)
    assert skipped.state_dict() == state
    assert take(skipped, 5) == whole[step:]


def test_what_was_made_ahead_is_not_in_the_state():
    loader = Loader(two_sources(), config(prefetch=5))
    next(loader)
    time.sleep(0.1)
    assert loader.step == loader.state_dict()["step"] == 1
    loader.close()


def test_a_state_can_be_loaded_into_a_running_loader():
    loader = Loader(two_sources(), config(prefetch=3))
    start = loader.state_dict()
    first = [rows_of(next(loader)) for _ in range(6)]
    loader.load_state_dict(start)
    assert take(loader, 6) == first


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_are_disjoint_and_together_are_one(world_size):
    settings_ = config(global_batch=12)
    alone = take(Loader(two_sources(), settings_), 20)
    ranks = [
        take(Loader(two_sources(), settings_, rank, world_size), 20) for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        for i, row in enumerate(whole):
            assert ranks[i % world_size][step][i // world_size] == row
        assert sum(len(rank[step]) for rank in ranks) == len(whole)


def test_a_state_of_two_ranks_resumes_on_three():
    settings_ = config(global_batch=6)
    alone = take(Loader(two_sources(), settings_), 10)
    old = Loader(two_sources(), settings_, rank=1, world_size=2)
    take(old, 4)
    for rank in range(3):
        new = Loader(two_sources(), settings_, rank, 3, state=old.state_dict())
        assert take(new, 6) == [step[rank::3] for step in alone[4:]]


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_prefetching_does_not_change_the_data(prefetch):
    without = take(Loader(two_sources(), config()), 60)
    assert take(Loader(two_sources(), config(prefetch=prefetch)), 60) == without


def test_shares_are_exact_to_within_a_row_at_every_step():
    web = 0
    for step, batch in enumerate(take(Loader(two_sources(), config()), 100), 1):
        web += sum(max(row) < 100_001 for row in batch)
        assert abs(web - 0.7 * 4 * step) < 1


def test_no_rank_sees_one_source_only():
    even = [Source(s.documents, 1.0, s.name) for s in two_sources()]
    steps = take(Loader(even, config(), rank=0, world_size=2), 50)
    web = sum(max(row) < 100_001 for step in steps for row in step)
    assert 25 < web < 75


def test_a_source_is_read_the_same_alone_and_mixed():
    web = two_sources()[0]
    alone = [row for step in take(Loader([web], config()), 30) for row in step]
    mixed = [row for step in take(Loader(two_sources(), config()), 30) for row in step]
    from_web = [row for row in mixed if max(row) < 100_001]
    assert from_web == alone[: len(from_web)]


def epoch_rows(plan: SourcePlan, epoch: int):
    for row in plan.rows(SourcePosition(epoch=epoch)):
        if row.position_after.epoch > epoch:
            return
        yield row


def plan_of(documents, **changes) -> SourcePlan:
    settings_ = config(**changes)
    return SourcePlan(
        name="documents",
        order_key="documents",
        lengths=documents.lengths,
        capacity=settings_.row_tokens,
        buffer=settings_.buffer,
        block_documents=settings_.block_documents,
        method=settings_.packing,
        seed=settings_.seed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@pytest.mark.parametrize("count", [49, 50, 51, 74, 75, 76, 333])
def test_an_epoch_reads_every_token_once_or_counts_it(packing, count):
    documents = corpus(count)
    plan = plan_of(documents, packing=packing)
    blocks = [plan.block(0, block) for block in range(plan.blocks)]
    members = np.concatenate([plan.documents_of_block(0, b) for b in range(plan.blocks)])
    assert sorted(members.tolist()) == list(range(count))
    sizes = [len(plan.documents_of_block(0, b)) for b in range(plan.blocks)]
    assert max(sizes) - min(sizes) <= 1

    places = Counter(
        (document, start + i)
        for row in epoch_rows(plan, 0)
        for document, start, length in row.packing.row(row.row)
        for i in range(length)
    )
    assert max(places.values()) == 1
    dropped = sum(block.cropped_tokens + block.leftover_tokens for block in blocks)
    assert len(places) + dropped == documents.lengths.sum()


def test_the_state_counts_what_was_dropped():
    documents = corpus()
    plan = plan_of(documents)
    loader = Loader([Source(documents)], config(global_batch=1))
    while loader.position.sources[0].epoch < 2:
        next(loader)
    position = loader.position.sources[0]
    rows_before = position.rows_read - position.row
    read = rows_before * 16 + position.tokens_dropped
    assert read == 2 * documents.lengths.sum() + sum(
        plan.block(2, block).all_tokens for block in range(position.block)
    )


def test_epochs_reshuffle():
    plan = plan_of(corpus())
    first, second = (
        np.concatenate([plan.documents_of_block(epoch, b) for b in range(plan.blocks)])
        for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second)
    assert (first == second).mean() < 0.1
    rows = [[row.packing.documents[0] for row in epoch_rows(plan, epoch)] for epoch in (0, 1)]
    assert rows[0] != rows[1]


def test_seeds_differ():
    assert take(Loader([Source(corpus())], config(seed=1)), 3) != take(
        Loader([Source(corpus())], config(seed=2)), 3
    )


def test_rows_of_a_block_are_not_in_packing_order():
    plan = plan_of(corpus())
    order = plan.row_order(0, 0, plan.block(0, 0).rows)
    assert sorted(order) == list(range(len(order)))
    assert order != sorted(order)


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_documents_shorter_than_everything(longest):
    documents = InMemoryDocuments([[BOS] + [7] * (longest - 1)] * 200)
    for batch in take(Loader([Source(documents)], config()), 20):
        assert all(row[0] == BOS for row in batch)


def test_documents_longer_than_everything():
    documents = corpus(30, longest=60)
    long = InMemoryDocuments([np.tile(documents.tokens(d), 40)[:900] for d in range(20)])
    for batch in take(Loader([Source(long)], config()), 20):
        assert all(row[0] == BOS for row in batch)


def test_split_long_reads_what_would_be_dropped():
    long = InMemoryDocuments([[BOS, *range(1, 151)]])
    settings_ = config(global_batch=10, split_long=True)
    rows = rows_of(next(Loader([Source(long)], settings_)))
    assert all(row[0] == BOS for row in rows)
    assert sorted(token for row in rows for token in row[1:]) == list(range(1, 151))
    held_out = [row for b in validation_batches(long, 15, 4) for row in rows_of(b)]
    assert sorted(held_out) == sorted(rows)
    assert len(list(validation_batches(long, 15, 1, split_long=False))) == 1


def test_a_corpus_smaller_than_a_step_repeats():
    documents = InMemoryDocuments([[BOS, *range(1, 16)]])
    batch = next(Loader([Source(documents)], config()))
    assert rows_of(batch) == [(BOS, *range(1, 16))] * 4


def test_large_ids_survive():
    documents = InMemoryDocuments([[BOS, *range(70_000, 70_015)]])
    assert next(Loader([Source(documents)], config())).targets.max() == 70_014


class FailingDocuments(InMemoryDocuments):
    """A disk that fails once some documents were read, until it is mended."""

    reads_left = 30

    def tokens(self, document):
        self.reads_left -= 1
        if self.reads_left == 0:
            raise OSError("input/output error")
        return super().tokens(document)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_of_the_store_comes_out_and_no_batch_is_lost(prefetch):
    lists = [corpus().tokens(d) for d in range(300)]
    expected = take(Loader([Source(InMemoryDocuments(lists))], config()), 20)
    loader = Loader([Source(FailingDocuments(lists))], config(prefetch=prefetch))
    seen, errors = [], 0
    while len(seen) < 20:
        try:
            seen.append(rows_of(next(loader)))
        except OSError:
            errors += 1
    loader.close()
    assert errors == 1
    assert seen == expected


@pytest.mark.slow
def test_a_forgotten_loader_leaves_no_thread():
    loader = Loader([Source(corpus())], config(prefetch=3))
    next(loader)
    del loader
    gc.collect()
    assert not any(thread.name == "parcae-prefetch" for thread in threading.enumerate())


@pytest.mark.slow
def test_a_program_that_stops_early_ends():
    program = (
        "from parcae.data.shards import InMemoryDocuments\n"
        "from parcae.data.loader import Loader, LoaderConfig, Source\n"
        "documents = InMemoryDocuments([[0, 1, 2, 3]] * 100)\n"
        "loader = Loader([Source(documents)], LoaderConfig(context_length=7, global_batch=2))\n"
        "print(next(loader).inputs.shape)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True, capture_output=True)


def test_validation_rows_are_fixed_and_spread():
    documents = corpus()
    all_rows = [
        row for b in validation_batches(documents, 15, 7, split_long=False) for row in rows_of(b)
    ]
    again = [
        row for b in validation_batches(documents, 15, 64, split_long=False) for row in rows_of(b)
    ]
    assert all_rows == again
    assert all(row[0] == BOS for row in all_rows)
    few = [rows_of(b) for b in validation_batches(documents, 15, 4, limit=10, split_long=False)]
    assert [len(batch) for batch in few] == [4, 4, 2]
    picked = [all_rows.index(row) for batch in few for row in batch]
    assert picked == [i * len(all_rows) // 10 for i in range(10)]


def load_and_log(path, prefetch):
    """Load from where the log ends, and write every batch to it, until killed or done."""
    with open(path, "a+") as log:
        log.seek(0)
        whole = [line for line in log.read().splitlines(keepends=True) if line.endswith("\n")]
        log.seek(0)
        log.truncate(sum(map(len, whole)))
        state = json.loads(whole[-1])["state"] if whole else None
        loader = Loader(two_sources(), config(prefetch=prefetch), state=state)
        while loader.step < 400:
            rows = rows_of(next(loader))
            log.write(json.dumps({"rows": rows, "state": loader.state_dict()}) + "\n")
            log.flush()


def steps_in(log) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_lost_or_repeated(tmp_path):
    expected = take(Loader(two_sources(), config()), 400)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "parcae.data.loader"])
    rng = np.random.default_rng(0)
    log, steps_at_kill = tmp_path / "log.jsonl", set()
    for attempt in range(100):
        child = context.Process(target=load_and_log, args=(log, attempt % 3))
        child.start()
        kill_at = steps_in(log) + rng.integers(0, 50)
        while child.is_alive() and steps_in(log) < kill_at:
            time.sleep(rng.uniform(0, 0.002))
        if child.is_alive():
            child.kill()
            child.join()
            steps_at_kill.add(steps_in(log))
        if child.exitcode == 0:
            break
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [[tuple(row) for row in line["rows"]] for line in lines] == expected
    assert len(steps_at_kill - {0, 400}) >= 5


def test_the_order_follows_from_seed_and_documents_not_from_names():
    first = Loader([Source(corpus(), name="0:books")], config())
    renamed = Loader([Source(corpus(), name="3:texts")], config())
    state = first.state_dict()
    assert take(first, 20) == take(renamed, 20)
    renamed.load_state_dict(state)
    other = Loader([Source(corpus(seed=9), name="0:books")], config())
    assert other.plans[0].order_key != first.plans[0].order_key


def test_a_source_given_twice_is_shuffled_twice():
    loader = Loader([Source(corpus(), name="a"), Source(corpus(), name="b")], config())
    one, other = loader.plans
    assert one.documents_of_block(0, 0).tolist() != other.documents_of_block(0, 0).tolist()
