"""Exit rules against an oracle that looks at whole predictions, alone and in mixed batches."""

from __future__ import annotations

import pytest
import torch

from conftest import randomised, tiny
from oracles import (
    VOCABULARY,
    Oracle,
    chances_of,
    check_against_oracle,
    follow_with_oracle,
    model_of,
)
from oracles import GreedyEngine as Engine
from parcae.config import ConfigError
from parcae.infer import exit as exit_module
from parcae.infer.exit import ExitMonitor, ExitRule

LOOPS = 6
RULES = ["kl:0.02", "state:0.35", "budget:2"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "shared", "last:2", "first:3"])
@pytest.mark.parametrize("rule", RULES)
def test_exits_equal_the_oracle(rule, policy):
    model = model_of("parcae")
    oracle = Oracle(model, LOOPS, policy=policy, exit=rule)
    engine = Engine(model, cache=policy)
    check_against_oracle(engine, [5, 17, 80], oracle, max_new_tokens=8, exit=rule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rdm", "parcae-wide-state", "parcae-no-prelude"])
def test_exits_of_other_architectures(kind):
    model = model_of(kind)
    oracle = Oracle(model, LOOPS, exit="kl:0.05")
    check_against_oracle(Engine(model), [5, 17, 80], oracle, max_new_tokens=6, exit="kl:0.05")


def test_the_rules_of_these_tests_stop_somewhere_in_between():
    engine = Engine(model_of("parcae"))
    for rule in RULES[:2]:
        loops = engine.generate([5, 17, 80], max_new_tokens=20, loops=LOOPS, exit=rule).loops[1:]
        assert 1 < sum(loops) / len(loops) < LOOPS, (rule, loops)


@pytest.mark.slow
def test_rules_and_loops_of_a_batch_are_independent():
    """Every kind of exit beside tokens without a rule, which loop longest."""
    model = model_of("parcae")
    engine = Engine(model)
    plans = [
        {"exit": "kl:0.02", "loops": 6},
        {"loops": 8},
        {"exit": "state:0.35", "loops": 5},
        {"loops": 1},
        {"exit": "kl:0.005", "loops": 7},
        {"exit": "kl:0.5", "loops": 4},
        {"loops": 4},
        {"exit": "budget:2", "loops": 4},
    ]
    prompts = [[5 + i, 17, 80 - i][: 1 + i % 3] for i in range(len(plans))]
    requests = [
        engine.request(prompt, max_new_tokens=7, logprobs=VOCABULARY, **plan)
        for prompt, plan in zip(prompts, plans, strict=True)
    ]
    for made, prompt, plan in zip(engine.complete(requests), prompts, plans, strict=True):
        follow_with_oracle(made, prompt, Oracle(model, **plan))


def test_what_has_exited_costs_nothing():
    """Tokens that went through a loop are as many as the loops reported; no more, no fewer."""
    engine = Engine(model_of("parcae"), backend="torch")
    ran, loop = 0, engine.network.run_loops

    def counted(h, drive, batch, cache, loops):
        nonlocal ran
        ran += len(h) * len(loops)
        return loop(h, drive, batch, cache, loops)

    engine.network.run_loops = counted  # type: ignore[method-assign]
    rules = ["kl:0.02", None, "state:0.35", "budget:1", "kl:0.1"]
    prompts = [[i + 1, 2 * i + 1, 3][: 1 + i % 3] for i in range(len(rules))]
    requests = [
        engine.request(prompt, max_new_tokens=6, loops=3 + i, exit=rule)
        for i, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
    ]
    made = engine.complete(requests)
    read = sum((len(r.prompt) - 1) * r.plan.loops for r in requests)
    assert ran == read + sum(sum(one.loops) for one in made)


def test_prompts_are_read_at_full_depth():
    model, prompt = model_of("parcae"), [5, 17, 80, 3]
    options = {"loops": LOOPS, "max_new_tokens": 1, "logprobs": VOCABULARY}
    eager = Engine(model).generate(prompt, exit="budget:1", **options)
    assert eager == Engine(model).generate(prompt, **options)
    assert eager.loops == (LOOPS,)


def test_a_large_vocabulary_is_looked_at_once(monkeypatch):
    """From then on the candidates of the first look decide."""
    monkeypatch.setattr(exit_module, "CANDIDATES", 19)
    table = torch.randn(80, 24, generator=torch.Generator().manual_seed(1))  # 4 x 19 < 80
    looks = []

    def head(x):
        looks.append(len(x))
        return x @ table.T

    x = torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(0))
    candidates = (x[0] @ table.T).topk(19).indices
    chances = (x @ table.T).gather(-1, candidates.expand(4, -1, -1)).log_softmax(-1)
    kl = (chances[1:].exp() * (chances[1:] - chances[:-1])).sum(-1)
    thresholds = kl[1] * torch.tensor([1.01, 0.99, 1.01])
    monitor = ExitMonitor([ExitRule("kl", float(t)) for t in thresholds], head, table)
    assert monitor.stopped(1, x[0], x[0], lambda: x[0]) == [False] * 3
    expected = (kl[0] < thresholds).tolist()
    assert monitor.stopped(2, x[0], x[0], lambda: x[1]) == expected
    assert monitor.stopped(3, x[0], x[0], lambda: x[2]) == [True, False, True]
    assert looks == [3]


@pytest.mark.parametrize("text", [*RULES, "kl:0", "state:1e-3"])
def test_rules_are_spelled_as_they_are_read(text):
    assert ExitRule.parse(str(ExitRule.parse(text))) == ExitRule.parse(text)


WRONG = ["kl:x", "foo:1", "kl:-1", "kl:nan", "kl:inf", "kl", "", "budget:0", "budget:1.5", 5]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_rules(wrong):
    engine = Engine(model_of("parcae"))
    with pytest.raises(ConfigError, match="exit: "):
        engine.generate([1], exit=wrong)
    assert engine.cache.bytes == 0


def test_a_threshold_of_zero_never_exits():
    rule = ExitRule("state", 0.0)
    monitor = ExitMonitor([rule], lambda x: x, torch.zeros(1))
    still = torch.ones(1, 4)
    assert monitor.stopped(3, still, still, lambda: still) == [False]


@pytest.fixture
def registered():
    """Register rules for one test."""
    before = dict(exit_module.EXIT_RULES._registered)
    yield exit_module.register_exit_rule
    exit_module.EXIT_RULES._registered.clear()
    exit_module.EXIT_RULES._registered.update(before)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_registered_rules_equal_the_built_in_ones(registered, backend):
    """One on states, one on predictions, written as a user would; also beside other requests."""

    def small_steps(step, threshold):
        change = (step.state - step.previous_state).norm(dim=-1)
        return change < threshold * step.state.norm(dim=-1)

    @registered("same-prediction", predictions=True)
    def same_prediction(step, threshold):
        if step.previous_log_probs is None:
            return torch.zeros(len(step.state), dtype=torch.bool)
        p, q = step.log_probs, step.previous_log_probs
        return (p.exp() * (p - q)).sum(-1) < threshold

    registered("small-steps", small_steps)
    engine = Engine(model_of("parcae"), backend=backend)
    pairs = {"small-steps:0.35": "state:0.35", "same-prediction:0.02": "kl:0.02"}
    options = {"loops": LOOPS, "max_new_tokens": 9, "logprobs": VOCABULARY}
    expected = [
        Engine(model_of("parcae")).generate([5, 17, 80], exit=rule, **options)
        for rule in pairs.values()
    ]
    requests = [engine.request([5, 17, 80], exit=rule, **options) for rule in pairs]
    for made, alone, built_in in zip(
        engine.complete(requests),
        [engine.generate([5, 17, 80], exit=rule, **options) for rule in pairs],
        expected,
        strict=True,
    ):
        assert made.tokens == alone.tokens == built_in.tokens
        assert made.loops == alone.loops == built_in.loops
        torch.testing.assert_close(chances_of(made), chances_of(built_in), atol=1e-4, rtol=0)


def test_a_rule_sees_every_loop_of_the_tokens_that_are_left(registered):
    steps = []

    def stop_first_after_two(step, threshold):
        steps.append((step.loop, len(step.state), step.log_probs, threshold))
        stops = torch.zeros(len(step.state), dtype=torch.bool)
        stops[0] = step.loop == 2
        return stops

    registered("mine", stop_first_after_two)
    engine = Engine(model_of("parcae"))
    made = engine.generate_all([[1], [2]], max_new_tokens=2, loops=4, exit="mine:0.5")
    assert [completion.loops for completion in made] == [(4, 2), (4, 4)]
    assert steps == [(loop, 2 if loop < 3 else 1, None, 0.5) for loop in (1, 2, 3, 4)]


def test_rules_that_cannot_be_registered_or_used(registered):
    with pytest.raises(ConfigError, match="built-in exit rule"):
        registered("kl", lambda step, threshold: step.state[:, 0] > 0)
    with pytest.raises(ConfigError, match="not a valid"):
        registered("a:b", lambda step, threshold: step.state[:, 0] > 0)
    registered("floats", lambda step, threshold: step.state[:, 0])
    with pytest.raises(TypeError, match=r"'floats': must return a boolean tensor \[1\]"):
        Engine(model_of("parcae")).generate([1], max_new_tokens=3, loops=3, exit="floats:1")


@pytest.mark.parametrize("policy", ["shared", "last:2", "first:3"])
def test_exits_where_one_core_layer_shares_slots(policy):
    """A token that stops early has no slot left to fill where its last loop wrote the only one."""
    model = randomised(tiny(core_layers=1))
    oracle = Oracle(model, 4, policy=policy, exit="budget:2")
    engine = Engine(model, cache=policy, backend="torch")
    check_against_oracle(engine, [5, 17, 80], oracle, max_new_tokens=6, exit="budget:2")
