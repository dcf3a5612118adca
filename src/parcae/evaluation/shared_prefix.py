"""Score alternatives that share a prefix in one pass: the prefix is computed once (tree attention).

A group is a shared prefix and the branches that continue it. Groups lie end to end as one row
of tokens, the prefix first, then branch after branch. Matrix products and norms see plain
tokens; only attention treats them differently:

    tokens of the prefix    attend to the prefix, causally
    tokens of a branch      attend to all of the prefix, and to their own branch causally

All tokens that attend to each other pass through a layer together, so nothing is kept between
layers: there is no cache, and any number of loops can be read from one pass. `PromptBatch` makes
one row of a batch of prompts, and answers of its predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.evaluation.prompts import Answer, Prompt
from parcae.infer.cache import Layout
from parcae.infer.rows import common_prefix


@dataclass(frozen=True)
class PrefixGroup:
    shared: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Groups of one shape are computed together."""
        return (len(self.shared), *map(len, self.branches))

    @property
    def size(self) -> int:
        return sum(self.shape)

    @property
    def ids(self) -> list[int]:
        return [*self.shared, *(token for branch in self.branches for token in branch)]

    @property
    def positions(self) -> list[int]:
        """The position of each token in its own sequence."""
        begin = len(self.shared)
        tails = (range(begin, begin + len(branch)) for branch in self.branches)
        return [*range(begin), *(position for tail in tails for position in tail)]

    def index(self, branch: int, position: int) -> int:
        """Index in the group of the token at `position` of a branch's sequence."""
        if position < len(self.shared):
            return position
        return position + sum(self.shape[1 : branch + 1])


def prefix_group(sequences: Sequence[tuple[int, ...]]) -> PrefixGroup:
    shared = common_prefix(*sequences)
    return PrefixGroup(sequences[0][:shared], tuple(tokens[shared:] for tokens in sequences))


def prefix_groups(prompt: Prompt) -> Iterator[tuple[PrefixGroup, list[list[int]]]]:
    """The groups of a prompt, each with the alternatives of its branches. The last token of a
    scored span is predicted but never read, so answers of one token are one branch, as are equal
    sequences. Sequences that were cut at different positions share nothing."""
    groups: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for index, (tokens, span) in enumerate(zip(prompt.sequences, prompt.spans, strict=True)):
        dropped = prompt.lengths[index] - len(tokens)
        groups.setdefault(dropped, {}).setdefault(tokens[: span.end - 1], []).append(index)
    for group in groups.values():
        together = prefix_group(list(group))
        if len(together.shared) >= max(together.shape[1:]):
            yield together, list(group.values())
        else:  # they share so little that a mask over all of them costs more
            for tokens, alternatives in group.items():
                yield PrefixGroup(tokens, ((),)), [alternatives]


class LayerKV:
    """Keys and values of the current layer."""

    k: Tensor
    v: Tensor


class NoCache:
    """Layer caches of a pass that keeps nothing: the keys and values of one layer suffice."""

    def __init__(self, layout: Layout) -> None:
        kv = LayerKV()
        self.prelude_layers = [kv] * layout.prelude_layers
        self.coda_layers = [kv] * layout.coda_layers
        self._core_layers = [kv] * layout.core_layers

    def core_layers(self, loop: int) -> list[LayerKV]:
        return self._core_layers


@dataclass(frozen=True, eq=False)
class EqualShapeGroups:
    """Groups of one shape, next to each other."""

    start: int
    count: int
    size: int
    shared: int
    mask: Tensor | None
    """Attention mask of the branches [branch tokens, size], added to the scores."""

    def part(self, x_NHE: Tensor) -> Tensor:
        """These groups' tokens [count, H, size, E]."""
        here = x_NHE[self.start : self.start + self.count * self.size]
        return here.unflatten(0, (self.count, self.size)).transpose(1, 2)

    def attend(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
        n = self.shared
        if n > 0:
            out[:, :, :n] = _attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], None, scale)
        if self.mask is not None:
            out[:, :, n:] = _attend(q[:, :, n:], k, v, self.mask, scale)


class SharedPrefixBatch:
    """The attention of one pass over groups, as an `AttentionBatch`."""

    def __init__(self, groups: Sequence[PrefixGroup], device: torch.device) -> None:
        self.ids = [token for group in groups for token in group.ids]
        self.positions = [position for group in groups for position in group.positions]
        self.id_tensor = torch.tensor(self.ids, device=device)
        self.position_tensor = torch.tensor(self.positions, device=device)
        self._groups = list(_same_shape(groups, device))

    def write_kv(self, kv: LayerKV, k_NKE: Tensor, v_NKE: Tensor) -> None:
        kv.k, kv.v = k_NKE, v_NKE

    def attend(self, q_NHE: Tensor, kv: LayerKV, scale: float | None = None) -> Tensor:
        out = torch.empty_like(q_NHE)
        for group in self._groups:
            q, k, v = group.part(q_NHE), group.part(kv.k), group.part(kv.v)
            group.attend(group.part(out), q, k, v, scale)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _same_shape(groups: Sequence[PrefixGroup], device: torch.device) -> Iterator[EqualShapeGroups]:
    start = 0
    for shape, group in groupby(groups, key=lambda group: group.shape):
        count, size = len(list(group)), sum(shape)
        yield EqualShapeGroups(start, count, size, shape[0], _mask(shape, device))
        start += count * size


def _mask(shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    shared, size = shape[0], sum(shape)
    if size == shared:
        return None
    own = torch.block_diag(*(torch.ones(n, n, device=device).tril() for n in shape[1:]))
    seen = torch.cat((own.new_ones(size - shared, shared), own), dim=1)
    return torch.zeros_like(seen).masked_fill(seen == 0, -torch.inf)


class PromptBatch:
    """A batch of prompts as one row of tokens, and where each answer is read."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        parts = [
            (group, owner, branches)
            for owner, prompt in enumerate(prompts)
            for group, branches in prefix_groups(prompt)
        ]
        parts.sort(key=lambda part: part[0].shape)  # neighbours of one shape are computed together
        self.groups: list[PrefixGroup] = [group for group, _, _ in parts]
        self.owners = [owner for _, owner, _ in parts]
        """The index of the prompt of each group."""
        self.predictors: list[int] = []
        """Positions in the row whose prediction is scored."""
        self.targets: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        """Prompt, alternative and number of tokens, in the order of the targets."""
        self._prompts = len(prompts)
        start = 0
        for group, owner, branches in parts:
            for branch, alternatives in enumerate(branches):
                for alternative in alternatives:
                    self._add(prompts[owner], owner, alternative, start, group, branch)
            start += group.size

    def _add(
        self,
        prompt: Prompt,
        owner: int,
        alternative: int,
        start: int,
        group: PrefixGroup,
        branch: int,
    ) -> None:
        begin, end = prompt.spans[alternative]
        self.predictors += [start + group.index(branch, at - 1) for at in range(begin, end)]
        self.targets += prompt.sequences[alternative][begin:end]
        self._spans.append((owner, alternative, end - begin))

    def answers(self, nats: Tensor, likeliest: Tensor) -> list[list[Answer]]:
        """Values [loops, targets], given back to the alternatives they belong to."""
        answers: list[dict[int, Answer]] = [{} for _ in range(self._prompts)]
        expected = torch.tensor(self.targets)
        start = 0
        for owner, alternative, count in self._spans:
            span = slice(start, start + count)
            answers[owner][alternative] = Answer(nats[:, span], likeliest[:, span], expected[span])
            start += count
        return [[by_index[index] for index in range(len(by_index))] for by_index in answers]


def batches(costs: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts that are scored together, by falling cost, so that prompts of a batch are
    of similar length and a lack of memory shows at once. Each batch costs at most `max_tokens`,
    unless a single prompt costs more."""
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if batch and total + costs[index] > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += costs[index]
    if batch:
        yield batch
