"""Prefixes are computed once, and what is taken over is never damaged."""

from __future__ import annotations

import pytest

from oracles import VOCABULARY, Oracle, follow_with_oracle, model_of, true_logits
from oracles import GreedyEngine as Engine
from parcae.infer.rows import common_prefix

OPTIONS = {"loops": 3, "max_new_tokens": 4}
BEGIN = [(7 * i + 3) % VOCABULARY for i in range(20)]


def counted(**settings) -> tuple[Engine, list[int]]:
    """An engine, and how many tokens each of its passes began."""
    engine = Engine(model_of("parcae"), backend="torch", **settings)
    passes, begin = [], engine.network.run_prelude

    def count(batch, cache):
        passes.append(len(batch))
        return begin(batch, cache)

    engine.network.run_prelude = count  # type: ignore[method-assign]
    return engine, passes


def fresh(prompt: list[int], **options):
    return Engine(model_of("parcae"), reuse_prefixes=False).generate(prompt, **options)


def test_the_same_prompt_again_costs_its_last_token():
    engine, passes = counted()
    first = engine.generate(BEGIN, **OPTIONS)
    passes.clear()
    again = engine.generate(BEGIN, **OPTIONS)
    assert passes == [1, 1, 1, 1]
    assert (first.reused, again.reused) == (0, 19)
    assert again.tokens == first.tokens


def test_a_text_goes_on_from_where_it_ended():
    engine, passes = counted()
    first = engine.generate(BEGIN, **OPTIONS)
    passes.clear()
    longer = [*BEGIN, *first.tokens, 9, 8]
    made = engine.generate(longer, **OPTIONS)
    assert made.reused == len(BEGIN) + 3  # the last token was chosen, but never read
    assert passes == [3, 1, 1, 1]
    assert made.tokens == fresh(longer, **OPTIONS).tokens


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 8])
def test_a_prefix_of_many_is_read_once(rows):
    engine, passes = counted(max_batch_size=rows)
    prompts = [[*BEGIN, i, i + 1] for i in range(8)]
    made = engine.generate_all(prompts, **OPTIONS)
    read = sum(passes) - 8 * 3
    assert read == len(BEGIN) + 8 * 2
    for prompt, one in zip(prompts, made, strict=True):
        assert one.tokens == fresh(prompt, **OPTIONS).tokens
        logits = true_logits(model_of("parcae"), [*prompt, *one.tokens[:-1]], 3)
        assert one.tokens == tuple(logits[len(prompt) - 1 :].argmax(-1).tolist())


def test_prompts_whose_prefix_is_known_are_read_together():
    engine, passes = counted(max_batch_size=8)
    engine.generate(BEGIN, loops=3, max_new_tokens=1)
    passes.clear()
    engine.generate_all([[*BEGIN, i] for i in range(5)], loops=3, max_new_tokens=1)
    assert passes == [5]


def test_a_row_that_is_busy_may_be_copied_from():
    engine, passes = counted(max_batch_size=3)
    stream = engine.stream(BEGIN, loops=3, max_new_tokens=9)
    begun = [next(stream).token for _ in range(5)]
    passes.clear()
    branch = [*BEGIN, *begun[:2], 1]
    made = engine.generate(branch, **OPTIONS)
    assert made.reused == len(BEGIN) + 2
    begun += [piece.token for piece in stream]
    assert tuple(begun) == fresh(BEGIN, loops=3, max_new_tokens=9).tokens
    assert made.tokens == fresh(branch, **OPTIONS).tokens


def test_a_row_that_was_taken_over_is_not_taken_for_what_it_held():
    engine, _ = counted(max_batch_size=1)
    engine.generate(BEGIN, **OPTIONS)
    other = [*BEGIN[:10], 1, 2]
    assert engine.generate(other, **OPTIONS).reused == 10
    again = engine.generate(BEGIN, **OPTIONS)
    assert again.reused == 10
    assert again.tokens == fresh(BEGIN, **OPTIONS).tokens


@pytest.mark.parametrize(
    "changes",
    [{"loops": 4}, {"exit": "kl:0.1"}],
)
def test_what_was_computed_in_another_way_is_not_reused(changes):
    engine, _ = counted()
    engine.generate(BEGIN, **OPTIONS)
    options = {**OPTIONS, **changes}
    made = engine.generate(BEGIN, **options)
    assert made.reused == 0
    assert made.tokens == fresh(BEGIN, **options).tokens


def test_tokens_that_were_generated_with_early_exits_are_read_again():
    """A prompt is read at full depth; of such a text only the prompt is kept."""
    engine, _ = counted()
    options = {**OPTIONS, "exit": "budget:1"}
    first = engine.generate(BEGIN[:6], **options)
    longer = [*BEGIN[:6], *first.tokens, 5]
    made = engine.generate(longer, logprobs=VOCABULARY, **options)
    assert made.reused == 6
    follow_with_oracle(made, longer, Oracle(model_of("parcae"), 3, exit="budget:1"))


def test_a_cache_that_shares_slots_reuses_nothing():
    """What a prompt leaves there depends on how it was cut."""
    engine, _ = counted(cache="last:2")
    engine.generate(BEGIN, **OPTIONS)
    assert engine.generate(BEGIN, **OPTIONS).reused == 0
    engine.generate(BEGIN, loops=2, max_new_tokens=1)
    assert engine.generate(BEGIN, loops=2, max_new_tokens=1).reused == 19


def test_reuse_can_be_switched_off():
    engine, passes = counted(reuse_prefixes=False)
    engine.generate_all([BEGIN, BEGIN], **OPTIONS)
    assert passes[0] == 40
    assert engine.generate(BEGIN, **OPTIONS).reused == 0


def test_idle_rows_are_given_up_longest_unused_first():
    engine, _ = counted(max_batch_size=2)
    a, b, c = ([i] * 10 for i in (1, 2, 3))
    for prompt in (a, b, a, c):  # c takes the row of b
        engine.generate(prompt, **OPTIONS)
    assert engine.generate(a, **OPTIONS).reused == 9
    assert engine.generate(b, **OPTIONS).reused == 0


def test_common_prefixes():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([2], [1]) == 0
