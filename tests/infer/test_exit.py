"""Exit rules against an oracle that looks at whole predictions, alone and in mixed batches."""

from __future__ import annotations

import pytest
import torch

from oracles import VOCABULARY, Oracle, check_against_oracle, follow_with_oracle, model_of
from parcae.config import ConfigError
from parcae.infer import exit as exit_module
from parcae.infer.engine import Engine
from parcae.infer.exit import ExitRule, Watch

LOOPS = 6
RULES = ["kl:0.02", "entropy:0.02", "state:0.35", "budget:2"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "shared", "last:2", "first:3"])
@pytest.mark.parametrize("rule", RULES)
def test_exits_equal_the_oracle(rule, policy):
    model = model_of("parcae")
    oracle = Oracle(model, LOOPS, policy=policy, exit=rule)
    engine = Engine(model, cache=policy)
    check_against_oracle(engine, [5, 17, 80], oracle, new_tokens=8, exit=rule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rdm", "parcae-wide-state", "parcae-no-prelude"])
@pytest.mark.parametrize("extrapolation", ["aitken", "anderson"])
def test_exit_start_and_extrapolation_together(kind, extrapolation):
    model = model_of(kind)
    options = {"exit": "kl:0.05", "start": "previous", "extrapolation": extrapolation}
    oracle = Oracle(model, LOOPS, **options)
    check_against_oracle(Engine(model), [5, 17, 80], oracle, new_tokens=6, **options)


def test_the_rules_of_these_tests_stop_somewhere_in_between():
    engine = Engine(model_of("parcae"))
    for rule in RULES[:3]:
        loops = engine.generate([5, 17, 80], new_tokens=20, loops=LOOPS, exit=rule).loops[1:]
        assert 1 < sum(loops) / len(loops) < LOOPS, (rule, loops)


@pytest.mark.slow
def test_rules_loops_and_starts_of_a_batch_do_not_know_each_other():
    """Every kind of exit beside tokens without a rule, that end later than all that are watched."""
    model = model_of("parcae")
    engine = Engine(model)
    plans = [
        {"exit": "kl:0.02", "loops": 6},
        {"loops": 8},
        {"exit": "state:0.35", "loops": 5},
        {"loops": 1},
        {"exit": "entropy:0.05", "loops": 7, "start": "previous"},
        {"exit": "kl:0.5", "loops": 4, "extrapolation": "aitken"},
        {"loops": 4, "extrapolation": "anderson"},
        {"exit": "budget:2", "loops": 4},
    ]
    prompts = [[5 + i, 17, 80 - i][: 1 + i % 3] for i in range(len(plans))]
    requests = [
        engine.request(prompt, new_tokens=7, logprobs=VOCABULARY, **plan)
        for prompt, plan in zip(prompts, plans, strict=True)
    ]
    for made, prompt, plan in zip(engine.complete(requests), prompts, plans, strict=True):
        follow_with_oracle(made, prompt, Oracle(model, **plan))


def test_what_has_exited_costs_nothing():
    """Tokens that went through a loop are as many as the loops reported; no more, no fewer."""
    engine = Engine(model_of("parcae"), layers="torch")
    ran, loop = 0, engine.network.loop

    def counted(h, drive, work, cache, loops):
        nonlocal ran
        ran += len(h) * len(loops)
        return loop(h, drive, work, cache, loops)

    engine.network.loop = counted  # type: ignore[method-assign]
    rules = ["kl:0.02", None, "state:0.35", "budget:1", "entropy:0.1"]
    prompts = [[i + 1, 2 * i + 1, 3][: 1 + i % 3] for i in range(len(rules))]
    requests = [
        engine.request(prompt, new_tokens=6, loops=3 + i, exit=rule)
        for i, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
    ]
    made = engine.complete(requests)
    read = sum((len(r.prompt) - 1) * r.plan.loops for r in requests)
    assert ran == read + sum(sum(one.loops) for one in made)


def test_prompts_are_read_at_full_depth():
    model, prompt = model_of("parcae"), [5, 17, 80, 3]
    options = {"loops": LOOPS, "new_tokens": 1, "logprobs": VOCABULARY}
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
    watch = Watch([ExitRule("kl", float(t)) for t in thresholds], head, table)
    assert watch.finished(1, x[0], x[0], lambda: x[0]) == [False] * 3
    expected = (kl[0] < thresholds).tolist()
    assert watch.finished(2, x[0], x[0], lambda: x[1]) == expected
    assert watch.finished(3, x[0], x[0], lambda: x[2]) == [True, False, True]
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
    watch = Watch([rule], lambda x: x, torch.zeros(1))
    still = torch.ones(1, 4)
    assert watch.finished(3, still, still, lambda: still) == [False]
