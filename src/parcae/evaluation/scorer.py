"""Our models as scorers: every depth from one pass, and what alternatives share computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from parcae.config import require
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.branches import Branches, Bundle, Scratch, bundles
from parcae.evaluation.prompts import Prompt
from parcae.evaluation.scoring import Answer, read_predictions
from parcae.infer.network import Network, exactly
from parcae.infer.request import check_whole
from parcae.infer.sampling import BrokenLogits
from parcae.model.frame import LanguageModel
from parcae.model.init import draw_state
from parcae.model.looped import LoopedModel

BATCH_TOKENS = {"cpu": 1024}
"""What one pass of a layer makes of them stays in a core's cache."""
BATCH_TOKENS_ON_DEVICE = 32_768


class LoopedScorer:
    """A model of ours, looped or not."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        depths: Sequence[int] | None = None,
        *,
        name: str = "model",
        identity: str = "",
        state: Literal["zero", "like-init"] = "zero",
        batch_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        """`depths` left out is the mean number of loops in training, `context` the model's own."""
        self.model = model
        self.network = Network(model)
        self.is_looped = isinstance(model, LoopedModel)
        wanted = depths or (model.config.loop.nominal_loops,)
        self.depths = tuple(sorted({check_whole("loops", depth, 1) for depth in wanted}))
        if not self.is_looped:
            self.depths = (1,)
        size = BATCH_TOKENS.get(model.device.type, BATCH_TOKENS_ON_DEVICE)
        self.batch_tokens = size if batch_tokens is None else batch_tokens
        least = "Use at least 1."
        require(self.batch_tokens >= 1, "batch_tokens", f"{batch_tokens} is too few", least)
        self.name = name
        self.draws_state = self.is_looped and state == "like-init"
        self.identity = f"{identity} {state}"
        most = model.config.context_length
        self.context_length = most if context is None else context
        fits = self.context_length <= most
        require(fits, "context", f"{context} is more than the model's {most}", "Use fewer.")
        self.tokenizer = tokenizer
        self.bos: int | None = tokenizer.bos
        self.opening: tuple[int, ...] = (tokenizer.bos,)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def cost(self, prompt: Prompt) -> int:
        return sum(held.size for held, _ in bundles(prompt))

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        sheet = Sheet(prompts)
        with torch.no_grad(), exactly(self.network.device):
            readings = self._readings(sheet, seeds)
        return sheet.sort_out(*(torch.stack(column) for column in zip(*readings, strict=True)))

    def _readings(self, sheet: Sheet, seeds: Sequence[int] | None) -> list[tuple[Tensor, Tensor]]:
        """Nats and likeliest tokens at each depth."""
        network = self.network
        device = network.device
        work: Any = Branches(sheet.bundles, device)
        scratch: Any = Scratch(network.layout)
        targets = torch.tensor(sheet.targets, device=device)
        predictors = torch.tensor(sheet.predictors, device=device)
        drive = network.begin(work, scratch)
        h = self._initial_state(sheet, drive, seeds)
        readings, done = [], 0
        for depth in self.depths:
            h = network.loop(h, drive, work, scratch, range(done + 1, depth + 1))
            done = depth
            x = network.read(h, work, scratch)[predictors]
            readings.append(self._read(x, targets, depth))
        return readings

    def _read(self, x: Tensor, targets: Tensor, loops: int) -> tuple[Tensor, Tensor]:
        """Some models diverge when they loop on: then a depth is lost, but not those before it."""
        try:
            return read_predictions(self.network.logits, x, targets, self.model.config.vocab_size)
        except BrokenLogits as error:
            if loops == self.depths[0]:
                raise BrokenLogits(f"at {loops} loops, {error}") from None
        return torch.full(targets.shape, torch.nan, dtype=torch.float64), torch.full_like(
            targets, -1, device="cpu"
        )

    def _initial_state(self, sheet: Sheet, drive: Tensor, seeds: Sequence[int] | None) -> Tensor:
        """Where it is drawn, a prompt's seed and a position decide: alternatives start alike."""
        if not self.draws_state:
            return torch.zeros_like(drive)
        require(seeds is not None, "seeds", "the state is drawn", "Give one for each prompt.")
        assert seeds is not None
        width = drive.shape[1]
        drawn = []
        for owner, held in zip(sheet.owners, sheet.bundles, strict=True):
            generator = torch.Generator().manual_seed(seeds[owner])
            positions = held.positions
            shape = (max(positions) + 1, width)
            whole = draw_state(shape, generator, torch.device("cpu"), torch.float32)
            drawn.append(whole[torch.tensor(positions)])
        return torch.cat(drawn).to(drive)


class Sheet:
    """A batch of prompts as one row of tokens, and where each answer is read."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        found = [
            (held, owner, branches)
            for owner, prompt in enumerate(prompts)
            for held, branches in bundles(prompt)
        ]
        found.sort(key=lambda one: one[0].shape)  # neighbours of one shape are computed at once
        self.bundles: list[Bundle] = [held for held, _, _ in found]
        self.owners = [owner for _, owner, _ in found]
        self.alternatives = [len(prompt.sequences) for prompt in prompts]
        self.predictors: list[int] = []
        self.targets: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        """Owner, alternative and number of tokens, in the order of the targets."""
        start = 0
        for held, owner, branches in found:
            for branch, places in enumerate(branches):
                for place in places:
                    self._add(prompts[owner], owner, place, start, held, branch)
            start += held.size

    def _add(
        self, prompt: Prompt, owner: int, place: int, start: int, held: Bundle, branch: int
    ) -> None:
        begin, end = prompt.spans[place]
        self.predictors += [start + held.place(branch, at - 1) for at in range(begin, end)]
        self.targets += prompt.sequences[place][begin:end]
        self._spans.append((owner, place, end - begin))

    def sort_out(self, nats: Tensor, likeliest: Tensor) -> list[list[Answer]]:
        """Numbers [depths, targets] back to the alternatives they belong to."""
        answers: list[dict[int, Answer]] = [{} for _ in self.alternatives]
        expected = torch.tensor(self.targets)
        start = 0
        for owner, place, count in self._spans:
            here = slice(start, start + count)
            answers[owner][place] = Answer(nats[:, here], likeliest[:, here], expected[here])
            start += count
        return [[found[place] for place in range(len(found))] for found in answers]
