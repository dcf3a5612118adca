"""The loader refuses what cannot work: settings, corpora too small, states of something else."""

import json

import numpy as np
import pytest
from loading import BOS, config, corpus, take, two_sources

from parcae.config import ConfigError
from parcae.data.loader import Loader, LoaderConfig, Source, validation_batches
from parcae.data.shards import InMemoryDocuments
from parcae.recipe import build, to_dict


def test_too_small_a_corpus_is_an_error():
    tiny = InMemoryDocuments([[BOS, 1], [BOS, 2]])
    with pytest.raises(ConfigError, match="2 documents with 4 tokens, less than one row of 16"):
        Loader([Source(tiny)], config())
    with pytest.raises(ConfigError, match="0 documents with 0 tokens, less than one row"):
        Loader([Source(InMemoryDocuments([]))], config())
    with pytest.raises(ConfigError, match="do not fill one row"):
        next(validation_batches(tiny, 15, 2))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_blocks_too_small_for_a_row_are_an_error(prefetch):
    short = InMemoryDocuments([[BOS, 1, 2]] * 50)
    loader = Loader([Source(short)], config(block_documents=2, prefetch=prefetch))
    for _ in range(2):
        with pytest.raises(ConfigError, match="block_documents"):
            next(loader)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 5}, "seed"),
        ({"context_length": 16}, "context_length"),
        ({"global_batch": 8}, "global_batch"),
        ({"packing": "concatenate"}, "packing"),
        ({"buffer": 11}, "buffer"),
        ({"block_documents": 51}, "block_documents"),
        ({"split_long": True}, "split_long"),
    ],
)
def test_a_state_of_other_settings_is_refused(changes, named):
    loader = Loader(two_sources(), config())
    take(loader, 3)
    with pytest.raises(ConfigError, match=named):
        Loader(two_sources(), config(**changes), state=loader.state_dict())


def test_a_state_of_other_sources_is_refused():
    web, books = two_sources()
    loader = Loader([web, books], config())
    take(loader, 3)
    state = loader.state_dict()
    other = Source(corpus(200, seed=9), 0.7, "web")
    with pytest.raises(ConfigError, match="fingerprint of source 0"):
        Loader([other, books], config(), state=state)
    with pytest.raises(ConfigError, match="weight of source 0"):
        Loader([Source(web.documents, 0.6, "web"), books], config(), state=state)
    with pytest.raises(ConfigError, match="number of sources"):
        Loader([web], config(), state=state)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("step"),
        lambda state: state.update(step=4),
        lambda state: state.update(version=99),
        lambda state: state.update(sources=None),
        lambda state: state["sources"][0].pop("epoch"),
        lambda state: state["sources"][0].update(block=10**6),
        lambda state: state["sources"][0].update(row=-1),
        lambda state: state["sources"][0].update(row="three"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_lost(damage):
    loader = Loader(two_sources(), config())
    expected = take(Loader(two_sources(), config()), 6)
    assert take(loader, 3) == expected[:3]
    state = loader.state_dict()
    damage(state)
    with pytest.raises(ConfigError, match="loader state"):
        loader.load_state_dict(state)
    assert take(loader, 3) == expected[3:]


def test_a_row_beyond_its_block_is_refused():
    loader = Loader(two_sources(), config())
    take(loader, 3)
    state = loader.state_dict()
    state["sources"][0]["row"] = 10**6
    with pytest.raises(ConfigError, match="damaged"):
        next(Loader(two_sources(), config(), state=state))


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, int])
def test_weights_of_any_library_leave_the_state_plain(number):
    sources = [Source(corpus(), number(2), "a"), Source(corpus(), number(1), "b")]
    plain = [Source(corpus(), 2.0, "a"), Source(corpus(), 1.0, "b")]
    with Loader(sources, config()) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(plain, config(), state=state) as loader:
        assert loader.step == 1


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: config(context_length=0), "data.context_length"),
        (lambda: config(global_batch=0), "data.global_batch"),
        (lambda: config(buffer=0), "data.buffer"),
        (lambda: config(block_documents=0), "data.block_documents"),
        (lambda: config(prefetch=-1), "data.prefetch"),
        (lambda: config(packing="worst-fit"), "data.packing"),
        (
            lambda: config(context_length=16.0),
            "data.context_length: expected a whole number, got 16.0",
        ),
        (
            lambda: config(context_length="a"),
            "data.context_length: expected a whole number, got 'a'",
        ),
        (lambda: config(global_batch=True), "data.global_batch: expected a whole number, got True"),
        (lambda: config(seed=None), "data.seed: expected a whole number, got None"),
        (lambda: config(prefetch=1.5), "data.prefetch: expected a whole number, got 1.5"),
        (lambda: Loader([Source(corpus(), True)], config()), "weight"),
        (lambda: Loader([Source(corpus(), "1")], config()), "weight"),
        (lambda: next(validation_batches(corpus(), 0, 4)), "context_length"),
        (lambda: next(validation_batches(corpus(), -3, 4)), "context_length"),
        (lambda: Loader([], config()), "data.sources"),
        (lambda: Loader([Source(corpus()), Source(corpus())], config()), "not unique"),
        (lambda: Loader([Source(corpus(), 0.0)], config()), "weight"),
        (lambda: Loader([Source(corpus(), float("nan"))], config()), "weight"),
        (lambda: Loader([Source(corpus())], config(), rank=2, world_size=2), "rank"),
        (lambda: Loader([Source(corpus())], config(), world_size=3), "global_batch"),
        (lambda: next(validation_batches(corpus(), 15, 0)), "batch_rows"),
        (lambda: next(validation_batches(corpus(), 15, 4, limit=0)), "limit"),
        (lambda: InMemoryDocuments([[0], []]), "document 1"),
        (lambda: InMemoryDocuments([[-1]]), "negative"),
    ],
)
def test_mistakes_are_named(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


def test_the_config_goes_through_a_recipe():
    assert build(LoaderConfig, to_dict(config(seed=3))) == config(seed=3)


def test_a_state_of_the_older_order_is_refused():
    """Version 1 shuffled by the name of the source, so its position means other rows."""
    state = Loader([Source(corpus())], config()).state_dict() | {"version": 1}
    with pytest.raises(ConfigError, match=r"version: 1, but .* another order"):
        Loader([Source(corpus())], config(), state=state)
