"""Scorers: the loss of the scored spans of prompts, at every requested number of loops.

    scorer = open_scorer("runs/a", loops=(1, 4, 8))        # a LoopedScorer, or an HFScorer
    for answers in scorer.score(prompts):
        answers[0].nats[-1]        # of the first alternative's span, after eight loops

`LoopedScorer` scores parcae models: it reads all numbers of loops from one pass and computes what
the alternatives of a question share only once. `HFScorer` (hf_scorer.py) scores transformers
models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ConfigError, require
from parcae.data.tokenizer import Tokenizer
from parcae.device import find_device
from parcae.evaluation.prompts import Answer, Prompt
from parcae.evaluation.shared_prefix import NoCache, PromptBatch, SharedPrefixBatch, prefix_groups
from parcae.evaluation.suites import CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS
from parcae.files import FileError, read_json
from parcae.infer.layers import FoldedModel, without_autocast
from parcae.infer.network import TorchNetwork
from parcae.infer.request import check_whole
from parcae.infer.sampling import NonFiniteLogits, check_logits
from parcae.model import CONFIG_FILE
from parcae.model.base import LanguageModel
from parcae.model.hf_format import is_hf
from parcae.model.initial_state import seeded_state
from parcae.model.looped import LoopedModel
from parcae.model.release_format import is_release
from parcae.model.store import FORMAT
from parcae.runs import open_checkpoint
from parcae.schema import require_range

State = Literal["zero", "like-init"]
Precision = Literal["float32", "bfloat16"]

MAX_LOGITS = 1 << 25
"""Logits in memory at once while predictions are read."""


class Scorer(Protocol):
    name: str
    identity: str
    """Changes with the weights and with everything else that changes an answer."""
    loops: tuple[int, ...]
    """Numbers of loops to score at; (1,) for a model without a loop."""
    is_looped: bool
    mean_loops: int | None
    """In training; None for a model without a loop."""
    draws_state: bool
    """Whether the initial state is random, so that the seed changes every answer."""
    context_length: int
    batch_tokens: int
    bos: int | None
    prefix: tuple[int, ...]
    """Tokens that the tokenizer itself puts before a text, as lm-evaluation-harness keeps them."""

    def at(self, loops: tuple[int, ...]) -> Scorer:
        """The same scorer for other numbers of loops."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def cost(self, prompt: Prompt) -> int:
        """Number of tokens to compute."""
        ...

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """Return an answer for every alternative of every prompt. `seeds` has one entry per prompt,
        for a model whose initial state is random."""
        ...


class LoopedScorer:
    """Score a parcae model: looped, or a Transformer."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        loops: Sequence[int] | None = None,
        *,
        name: str = "model",
        identity: str = "",
        state: State = "zero",
        batch_tokens: int | None = None,
        context: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        """`loops` defaults to the mean number of loops in training, `context` to the model's
        context length. `precision` is that of products with weights."""
        self.model = model
        self.network = TorchNetwork(FoldedModel.of(model, precision))
        self.is_looped = isinstance(model, LoopedModel)
        requested = loops or (model.config.loop.nominal_loops,)
        self.loops = tuple(sorted({check_whole("loops", depth, 1) for depth in requested}))
        self.mean_loops = model.config.loop.nominal_loops if self.is_looped else None
        if not self.is_looped:
            self.loops = (1,)
        self.first_loops = self.loops[0]
        default = CPU_BATCH_TOKENS if model.device.type == "cpu" else DEVICE_BATCH_TOKENS
        self.batch_tokens = default if batch_tokens is None else batch_tokens
        require_range("batch_tokens", self.batch_tokens, at_least=1)
        self.name = name
        self.draws_state = self.is_looped and state == "like-init"
        self.identity = f"{identity} {state}"
        if precision != "float32":  # earlier results are taken up if they have the same identity
            self.identity += f" {precision}"
        limit = model.config.context_length
        self.context_length = limit if context is None else context
        fits = self.context_length <= limit
        require(fits, "context", f"{context} is more than the model's {limit}", "Use fewer tokens.")
        self.tokenizer = tokenizer
        self.bos: int | None = tokenizer.bos
        self.prefix: tuple[int, ...] = (tokenizer.bos,)

    def at(self, loops: tuple[int, ...]) -> LoopedScorer:
        other = copy(self)
        other.loops = loops
        return other

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def cost(self, prompt: Prompt) -> int:
        return sum(group.size for group, _ in prefix_groups(prompt))

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        batch = PromptBatch(prompts)
        with torch.no_grad(), without_autocast(self.model.device):
            predictions = self._predict(batch, seeds)
        columns = (torch.stack(column) for column in zip(*predictions, strict=True))
        return batch.answers(*columns)

    def _predict(
        self, batch: PromptBatch, seeds: Sequence[int] | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Losses and likeliest tokens [targets], at each depth."""
        network = self.network
        device = network.model.device
        tokens = SharedPrefixBatch(batch.groups, device)
        no_cache = NoCache(network.model.layout)
        targets = torch.tensor(batch.targets, device=device)
        predictors = torch.tensor(batch.predictors, device=device)
        drive = network.run_prelude(tokens, no_cache)
        h = self._initial_state(batch, drive, seeds)
        predictions, done = [], 0
        for depth in self.loops:
            h = network.run_loops(h, drive, tokens, no_cache, range(done + 1, depth + 1))
            done = depth
            x = network.run_coda(h, tokens, no_cache)[predictors]
            predictions.append(self._read(x, targets, depth))
        return predictions

    def _read(self, x: Tensor, targets: Tensor, loops: int) -> tuple[Tensor, Tensor]:
        """NaN where the model diverges. At the first of the requested numbers of loops this is an
        error; some models diverge with more loops than they were trained with."""
        try:
            return read_predictions(self.network.logits, x, targets, self.model.config.vocab_size)
        except NonFiniteLogits as error:
            if loops == self.first_loops:
                raise NonFiniteLogits(f"at {loops} loops, {error}") from None
        return torch.full(targets.shape, torch.nan, dtype=torch.float64), torch.full_like(
            targets, -1, device="cpu"
        )

    def _initial_state(
        self, batch: PromptBatch, drive: Tensor, seeds: Sequence[int] | None
    ) -> Tensor:
        """Zero, or drawn by the seed of the prompt: all its alternatives start alike."""
        zeros = self.network.initial_state(drive)
        if not self.draws_state:
            return zeros
        remedy = "Give one seed per prompt."
        require(seeds is not None, "seeds", "state like-init needs them", remedy)
        assert seeds is not None
        states = []
        for owner, group in zip(batch.owners, batch.groups, strict=True):
            positions = group.positions
            state = seeded_state(max(positions) + 1, zeros.shape[1], seeds[owner])
            states.append(state[torch.tensor(positions)])
        return torch.cat(states).to(zeros)


def read_predictions(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Losses of the targets [N] and the likeliest tokens [N], a few predictions at a time."""
    nats, likeliest = [], []
    rows = max(MAX_LOGITS // vocabulary, 1)
    for part, expected in zip(x.split(rows), targets.split(rows), strict=True):
        predicted = logits(part).float()
        check_logits(predicted)
        losses = F.cross_entropy(predicted, expected, reduction="none").cpu().double()
        if not losses.isfinite().all():
            raise NonFiniteLogits("logits: minus infinity for a scored token.")
        nats.append(losses)
        likeliest.append(predicted.argmax(-1).cpu())
    return torch.cat(nats), torch.cat(likeliest)


def open_scorer(
    model: str | Path | LanguageModel,
    loops: Sequence[int] | None = None,
    *,
    state: State = "zero",
    tokenizer: str | Path | Tokenizer | None = None,
    best: bool = False,
    batch_tokens: int | None = None,
    context: int | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    precision: Precision = "float32",
) -> Scorer:
    """Return the scorer of a model: a parcae model, run or checkpoint by its folder, a transformers
    model by its folder or its name on the hub, or a parcae model in memory with its tokenizer.

    `loops`: numbers of loops to score at (default: the mean in training). `context`: tokens read at
    a time (default: the model's context length). `device`: default auto (CUDA where it
    is available, else the CPU), or where the model is.
    `trust_remote_code`: run the Python code that comes with a transformers model. `precision`: that
    of products with weights, for a parcae model.
    """
    known = get_args(Precision)
    require(precision in known, "precision", f"{precision!r}", f"Known: {', '.join(known)}.")
    if context is not None:
        require_range("context", context, at_least=2)
    if device is not None or not isinstance(model, LanguageModel):
        device = find_device("auto" if device is None else device)
    options: dict[str, Any] = {
        "state": state,
        "batch_tokens": batch_tokens,
        "context": context,
        "precision": precision,
    }
    if isinstance(model, LanguageModel):
        remedy = "Give it by tokenizer=, as a Tokenizer or a path."
        require(tokenizer is not None, "tokenizer", "a model in memory needs one", remedy)
        require(not best, "best", "a model in memory has no checkpoints", "Omit it.")
        assert tokenizer is not None
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.load(tokenizer)
        moved = model if device is None else model.to(device)
        identity = f"{fingerprint(model)} {tokenizer.sha256}"
        return LoopedScorer(moved, tokenizer, loops, identity=identity, **options)
    require(
        not isinstance(tokenizer, Tokenizer),
        "tokenizer",
        "a Tokenizer goes with a model in memory",
        "Give a path.",
    )
    assert not isinstance(tokenizer, Tokenizer)
    if is_transformers_model(model):
        if (loops and tuple(loops) != (1,)) or state != "zero":
            key = "state" if state != "zero" else "loops"
            raise ConfigError(
                f"{key}: {model} is not a model of parcae. transformers runs it at the depth and "
                "from the state of its own configuration. Omit this setting."
            )
        require(tokenizer is None, "tokenizer", f"{model} brings its own", "Omit this setting.")
        its_own = f"{model} is not a model of parcae, and runs in its own"
        require(precision == "float32", "precision", its_own, "Omit this setting.")
        require(not best, "best", f"{model} is not a run", "Omit this setting.")
        assert device is not None
        return _open_transformers_model(
            str(model), device, batch_tokens, context, trust_remote_code
        )
    require(
        not trust_remote_code,
        "trust_remote_code",
        f"{model} is not a transformers model",
        "Omit this setting.",
    )
    if not Path(model).exists():
        raise FileError(
            f"{model}: no such folder. Give the folder of a model, a run or a checkpoint, or the "
            "full name of a model on the hub, such as openai-community/gpt2."
        )
    checkpoint = open_checkpoint(model, tokenizer=tokenizer, best=best)
    return LoopedScorer(
        checkpoint.model.to(device),
        checkpoint.tokenizer,
        loops,
        name=str(checkpoint.folder),
        identity=f"{fingerprint(checkpoint.model)} {checkpoint.tokenizer.sha256}",
        **options,
    )


def _open_transformers_model(
    name: str,
    device: str | torch.device,
    batch_tokens: int | None,
    context: int | None,
    trust_remote_code: bool,
) -> Scorer:
    from parcae.evaluation.hf_scorer import HFScorer, tokenizer_fingerprint

    options = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    scorer = HFScorer.open(
        name, device, trust_remote_code=trust_remote_code, context_length=context, **options
    )
    scorer.identity = f"{fingerprint(scorer.model)} {tokenizer_fingerprint(scorer.tokenizer)}"
    return scorer


def is_transformers_model(name: str | Path) -> bool:
    """Whether this is a name such as owner/model and not a path (where a folder `owner` exists, a
    mistyped path is more likely), or the folder of a model that parcae did not write."""
    path = Path(name)
    if not path.exists():
        is_name = isinstance(name, str) and name.count("/") == 1 and name[0] not in "./"
        return is_name and not path.parent.is_dir()
    if not (path / CONFIG_FILE).is_file():
        return False
    config = read_json(path / CONFIG_FILE)
    is_ours = isinstance(config, dict) and config.get("format") == FORMAT
    return not (is_ours or is_release(config) or is_hf(config))


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all weights, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
