"""Decoding written as plainly as it can be: one token at a time, a dictionary for a cache."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from conftest import KINDS, randomised, tiny
from parcae.config import LoopConfig
from parcae.data.tokenizer import Tokenizer
from parcae.infer.engine import Engine
from parcae.infer.sequence import Completion
from parcae.model.base import LanguageModel
from parcae.model.blocks import Block, Rope
from parcae.model.looped import LoopedModel

VOCABULARY = 96
NEAR = 1e-4
TRANSFORMER = tiny(
    architecture="transformer",
    injection="none",
    readout=False,
    prelude_norm=False,
    loop=LoopConfig(mean_loops=1),
)
ALL_KINDS = {**KINDS, "transformer": TRANSFORMER}


class GreedyEngine(Engine):
    """An engine whose default temperature is 0, for comparisons with an oracle."""

    def request(self, prompt, *, temperature=0.0, **options):
        return super().request(prompt, temperature=temperature, **options)


@cache
def model_of(kind: str) -> LanguageModel:
    """The same model for all tests of a process; nobody may change it."""
    return randomised(ALL_KINDS[kind]).eval().requires_grad_(False)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        ["def main(): return 'höhe 👩‍👩‍👧 naïve'\n" * 3, "import os, sys\n"], 300
    )


@cache
def text_model() -> LanguageModel:
    """Its vocabulary is padded beyond the tokenizer's."""
    size = tokenizer().vocab_size + 20
    return randomised(tiny(vocab_size=size, context_length=64)).eval().requires_grad_(False)


def true_logits(model: LanguageModel, tokens: Sequence[int], loops: int) -> Tensor:
    """[S, V], by a forward that knows no cache."""
    with torch.no_grad():
        if isinstance(model, LoopedModel):
            output = model(torch.tensor([list(tokens)]), loops=loops, state="zero")
        else:
            output = model(torch.tensor([list(tokens)]))
    return output.logits[0]


def slot(policy: str, loop: int) -> int:
    """Where loop `loop`, counted from 1, leaves its keys and values."""
    if policy == "full":
        return loop
    if policy == "shared":
        return 0
    kind, slots = policy.split(":")
    return loop % int(slots) if kind == "last" else min(loop, int(slots))


class Oracle:
    """A looped model that decodes over a dictionary {(stage, layer, slot): {position: (k, v)}}."""

    def __init__(
        self,
        model: LanguageModel,
        loops: int,
        policy: str = "full",
        exit: str | None = None,
    ) -> None:
        assert isinstance(model, LoopedModel)
        self.model, self.loops, self.policy, self.exit = model, loops, policy, exit
        self.kept: dict[tuple, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        self.length = 0
        self.ran = 0
        """Loops of the last token."""

    @torch.no_grad()
    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V]; the tokens see each other loop by loop."""
        states, inputs = self._begin(tokens)
        for loop in range(1, self.loops + 1):
            states = self._loop(states, inputs, loop)
        x = self._read(states, inputs)
        self.length += len(tokens)
        self.ran = self.loops
        return torch.stack(x)

    @torch.no_grad()
    def decode(self, token: int) -> Tensor:
        """Logits [V] after one more token, which may exit."""
        (h,), inputs = self._begin([token])
        history, predictions, loop = [h], [], 0
        while True:
            loop += 1
            (h,) = self._loop([history[-1]], inputs, loop)
            history.append(h)
            (logits,) = self._read([h], inputs)
            predictions.append(logits.double().log_softmax(-1))
            if loop == self.loops or self._exits(history, predictions):
                break
        core = len(self.model.loop.core.blocks)
        for later in range(loop + 1, self.loops + 1):
            for layer in range(core):
                here = self.kept["core", layer, slot(self.policy, loop)][self.length]
                self.kept["core", layer, slot(self.policy, later)][self.length] = here
        self.length += 1
        self.ran = loop
        return logits

    def _exits(self, history: list[Tensor], predictions: list[Tensor]) -> bool:
        if self.exit is None:
            return False
        kind, number = self.exit.split(":")
        if kind == "budget":
            return len(predictions) >= int(number)
        if kind == "state":
            change = (history[-1] - history[-2]).norm() / history[-1].norm()
            return float(change) < float(number)
        if len(predictions) < 2:
            return False
        p, q = predictions[-1], predictions[-2]
        assert kind == "kl"
        return float((p.exp() * (p - q)).sum()) < float(number)

    def _begin(self, tokens: Sequence[int]) -> tuple[list[Tensor], list[tuple]]:
        model, config = self.model, self.model.config
        inputs = []
        ids = [torch.tensor([[token]]) for token in tokens]
        x = [model.embed(token)[0, 0] for token in ids]
        x = self._stack("prelude", model.prelude.blocks, x, ids, 0, 0)
        for token, e in zip(ids, x, strict=True):
            e = e if model.prelude.norm is None else model.prelude.norm(e)
            inputs.append((token, model.loop.core.injection.prepare(e[None, None])))
        return [torch.zeros(config.core_block.width) for _ in tokens], inputs

    def _loop(self, states: list[Tensor], inputs: list[tuple], loop: int) -> list[Tensor]:
        core = self.model.loop.core
        x = [
            core.injection.mix(h[None, None], *given)[0, 0]
            for h, (_, given) in zip(states, inputs, strict=True)
        ]
        ids = [token for token, _ in inputs]
        first = self.model.config.prelude_layers
        return self._stack("core", core.blocks, x, ids, first, slot(self.policy, loop))

    def _read(self, states: list[Tensor], inputs: list[tuple]) -> list[Tensor]:
        coda, config = self.model.coda, self.model.config
        x = [h if coda.readout is None else coda.readout(h) for h in states]
        first = config.prelude_layers + config.core_layers
        x = self._stack("coda", coda.blocks, x, [token for token, _ in inputs], first, 0)
        return [self.model.logits(coda.norm(each)) for each in x]

    def _stack(self, stage, blocks, x: list[Tensor], ids, first: int, slot: int) -> list[Tensor]:
        for layer, block in enumerate(blocks):
            values = [self.model.values(token, first + layer, 1)[0] for token in ids]
            x = self._block(block, x, values, self.kept[stage, layer, slot])
        return x

    def _block(self, block: Block, x: list[Tensor], values: list, kept: dict) -> list[Tensor]:
        shape, queries = block.attn.shape, []
        for i, each in enumerate(x):
            place = self.length + i
            table = self.model.rope(place + 1, shape.head_dim)
            rope = Rope(table.cos[place:], table.sin[place:])
            z = block.norm_attn(each)[None, None]
            q, k, v = block.attn.project(z, rope, values[i])
            queries.append(q[0, :, 0])
            kept[place] = (k[0, :, 0], v[0, :, 0])
        return [self._rest(block, each, queries[i], kept, i) for i, each in enumerate(x)]

    def _rest(self, block: Block, x: Tensor, q: Tensor, kept: dict, i: int) -> Tensor:
        shape, heads = block.attn.shape, []
        for head in range(shape.heads):
            group = head // (shape.heads // shape.kv_heads)
            seen = [kept[place] for place in range(self.length + i + 1)]
            scores = [float(q[head] @ k[group]) / math.sqrt(shape.head_dim) for k, _ in seen]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(-1).float()
            heads.append(weights @ torch.stack([v[group] for _, v in seen]))
        x = x + block.attn.out(torch.cat(heads))
        x = x if block.norm_after_attn is None else block.norm_after_attn(x)
        x = x + block.mlp(block.norm_mlp(x))
        return x if block.norm_after_mlp is None else block.norm_after_mlp(x)


def chances_of(completion: Completion, vocabulary: int = VOCABULARY) -> Tensor:
    """Log-probabilities [n, V] of a completion that was asked for all of them."""
    assert completion.logprobs is not None
    table = torch.full((len(completion.tokens), vocabulary), math.nan)
    for row, entry in zip(table, completion.logprobs, strict=True):
        for token, chance in entry.alternatives:
            row[token] = chance
    return table


def check_against_oracle(engine: Engine, prompt: Sequence[int], oracle: Oracle, **options) -> None:
    """The engine's predictions are the oracle's, which is given the engine's tokens."""
    made = engine.generate(prompt, loops=oracle.loops, logprobs=VOCABULARY, **options)
    follow_with_oracle(made, prompt, oracle)


def follow_with_oracle(made: Completion, prompt: Sequence[int], oracle: Oracle) -> None:
    expected, loops = [oracle.prompt(prompt)[-1]], [oracle.ran]
    for token in made.tokens[:-1]:
        expected.append(oracle.decode(token))
        loops.append(oracle.ran)
    assert list(made.loops) == loops
    wanted = torch.stack(expected).log_softmax(-1)
    torch.testing.assert_close(chances_of(made), wanted, atol=1e-4, rtol=0)


def flips(
    model: LanguageModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], loops: int
) -> int:
    """0 if two greedy texts are the same, 1 if they part where the model cannot decide; they must
    not part elsewhere."""
    if tuple(a) == tuple(b):
        return 0
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert at is not None, f"one text is longer: {a} and {b}"
    logits = true_logits(model, [*prompt, *a[:at]], loops)[-1]
    gap = float(logits.max() - min(logits[a[at]], logits[b[at]]))
    assert gap < NEAR, f"token {at} of {a} and {b}: {gap} apart"
    return 1
