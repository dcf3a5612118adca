"""Loss on rows of tokens after every requested number of loops; the suite `val` on a run.

    totals = totals_by_loops(model, batches, loops=(1, 4, 8), bytes_of_token=table)
    losses = totals.finish()
    losses[8].loss, losses[8].perplexity, losses[8].bits_per_byte

A batch passes the prelude once and loops as often as the largest number says; only the requested
states are decoded. Several processes add their sums, by `dist.all_reduce(totals.counts)` (float64
on the CPU), before anything is divided.

Loss and perplexity are over all targets, BOS included, as in training. Bits per byte are over the
targets that stand for text: neither the nats nor the bytes of BOS and other special tokens count.
So they can be compared with those of whole texts (`parcae.evaluation.perplexity`).

Nothing here switches the mode of a model, so a compiled model is not compiled again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from parcae.config import ConfigError, require
from parcae.data.loader import Batch, held_out_batches, with_held_out_rows
from parcae.data.shards import MANIFEST, ShardedDocuments, fingerprint, read_manifest
from parcae.data.synthetic import task_of
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.jobs import Record, state_seed, without_diverged
from parcae.evaluation.metrics import bits_per_byte, perplexity
from parcae.evaluation.scorer import LoopedScorer, Scorer
from parcae.files import FileError, nan_to_none
from parcae.model.base import IGNORED_TARGET, LanguageModel
from parcae.model.depth import check_loops
from parcae.model.initial_state import seeded_state
from parcae.runs import find_tokenizer, read_recipe_table
from parcae.runs.checkpoints import last_state
from parcae.runs.layout import RECIPE_FILE, shard_folders

BATCH_ROWS = 8
"""Rows of an item of `val`: the loss is computed for all of them together."""
VAL_REMEDY = "Give a file of held-out texts with `val_data`."


@dataclass(frozen=True)
class Loss:
    """The loss after one number of loops."""

    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """Over the targets that stand for text; None without a table of bytes or such targets."""


LossByLoops = dict[int, Loss]


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over tokens, which several processes can add."""

    loops: tuple[int, ...]
    counts: Tensor
    """[nats for each of `loops` ..., nats of text ..., tokens, bytes] in float64; bytes are NaN if
    unknown."""

    @property
    def tokens(self) -> int:
        return int(self.counts[-2])

    def __add__(self, other: Totals) -> Totals:
        if self.loops != other.loops:
            raise ValueError(f"cannot add totals at loops {self.loops} and {other.loops}.")
        return Totals(self.loops, self.counts + other.counts)

    def finish(self) -> LossByLoops:
        nats, text_nats, tokens, size = self.split()
        require(
            tokens > 0,
            "batches",
            "they have no token to measure the loss on",
            "Give at least one batch with a target that is not ignored.",
        )
        by_loops = zip(self.loops, nats, text_nats, strict=True)
        return {loops: _finish(n, text, tokens, size) for loops, n, text in by_loops}

    def split(self) -> tuple[list[float], list[float], float, float]:
        """Nats and nats of text for each of `loops`, tokens, bytes."""
        *nats, tokens, size = self.counts.tolist()
        return nats[: len(self.loops)], nats[len(self.loops) :], tokens, size


@torch.no_grad()
def totals_by_loops(
    model: LanguageModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    loops: Sequence[int],
    bytes_of_token: Tensor | None = None,
    state: Tensor | Literal["zero", "like-init"] = "zero",
    device: str | torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Totals:
    """The sums over all targets of the batches, of which there may be none, at each of `loops`.

    `batches`: (inputs, targets) [rows, positions]; targets of -100 do not count.
    `bytes_of_token`: how many bytes of text each id stands for.
    `state`: the initial state: zero, drawn from the generator, or a tensor [rows, positions, d_h].
    `device`: where batches are moved to (default: the model's device).
    A Transformer has no loop and is measured at 1.
    """
    requested = tuple(sorted({check_loops(count) for count in loops}))
    require(len(requested) > 0, "loops", "empty", "Give at least one number of loops.")
    device = model.device if device is None else torch.device(device)
    table = None if bytes_of_token is None else bytes_of_token.to(device)
    counts = torch.zeros(2 * len(requested) + 2, dtype=torch.float64)
    if table is None:
        counts[-1] = torch.nan
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        model.check(inputs, targets)
        tokens = (targets != IGNORED_TARGET).sum()
        counts[-2] += int(tokens)
        special = None
        if table is not None:
            counts[-1] += _count_bytes(targets, table)
            special = (targets != IGNORED_TARGET) & (table[targets.clamp(min=0).long()] == 0)
        for index, (_, x) in enumerate(model.readings(inputs, requested, state, generator)):
            if tokens > 0:
                nats = model.loss(x, targets).item() * int(tokens)
                counts[index] += nats
                counts[len(requested) + index] += nats - _special_nats(model, x, targets, special)
    return Totals(requested, counts)


def _count_bytes(targets: Tensor, table: Tensor) -> Tensor:
    ids = targets[targets != IGNORED_TARGET].long()
    if ids.numel() and int(ids.max()) >= len(table):
        raise ValueError(
            f"bytes_of_token: {len(table)} entries, but a target has id {int(ids.max())}. "
            "Give the table of the tokenizer that made the targets."
        )
    return table[ids].sum().cpu()


def _special_nats(
    model: LanguageModel, x: Tensor, targets: Tensor, special: Tensor | None
) -> float:
    """Nats of the targets that stand for no text, such as BOS."""
    count = 0 if special is None else int(special.sum())
    if special is None or not count:
        return 0.0
    return model.loss(x[special][None], targets[special][None]).item() * count


def _finish(nats: float, text_nats: float, tokens: float, size: float) -> Loss:
    loss = nats / tokens
    known = not math.isnan(size) and size > 0
    return Loss(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=bits_per_byte(text_nats, size) if known else None,
    )


class HeldOutRows:
    """The suite `val` on a run: the rows its training validates on. An item is a batch of rows."""

    name = "val"
    unit = ("batch of rows", "batches of rows")
    seed = None

    def __init__(
        self, batches: Callable[[], Iterator[Batch]], bytes_of_token: Tensor | None = None
    ) -> None:
        """`batches` returns the same batches whenever it is called."""
        self.batches, self.bytes_of_token = batches, bytes_of_token
        self.rows: list[int] = []
        """Rows of each batch."""
        self.positions = 0
        digest = hashlib.sha256()
        for batch in batches():
            rows, self.positions = batch.inputs.shape
            self.rows.append(rows)
            for tokens in batch:
                digest.update(tokens.to(torch.int64).numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def cost(self, scorer: Scorer) -> float:
        return sum(self.rows) * self.positions / len(self)

    def score(
        self, scorer: Scorer, is_done: Callable[[int], bool]
    ) -> Iterator[tuple[int, Mapping[int, Record]]]:
        assert isinstance(scorer, LoopedScorer)
        for index, batch in enumerate(self.batches()):
            yield 1, {} if is_done(index) else {index: self._record(index, batch, scorer)}

    def _record(self, index: int, batch: Batch, scorer: LoopedScorer) -> Record:
        state: Tensor | Literal["zero"] = "zero"
        if scorer.draws_state:
            first = sum(self.rows[:index])
            width = scorer.model.config.core_block.width
            seeds = (state_seed(self.seed, first + row) for row in range(self.rows[index]))
            state = torch.stack([seeded_state(self.positions, width, seed) for seed in seeds])
        nats, text_nats, tokens, size = totals_by_loops(
            scorer.model, [batch], scorer.loops, self.bytes_of_token, state
        ).split()
        record = {
            "rows": self.rows[index],
            "nats": nats,
            "text_nats": text_nats,
            "tokens": int(tokens),
            "bytes": None if math.isnan(size) else int(size),
        }
        return without_diverged(record, [i for i, n in enumerate(nats) if not math.isfinite(n)])

    def describe(self, records: Sequence[Record]) -> dict[str, Any]:
        return {"rows": sum(self.rows), "fingerprint": self.fingerprint}

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]:
        nats, text_nats = (
            sum(record[kind][depth_index] for record in records) for kind in ("nats", "text_nats")
        )
        tokens = sum(record["tokens"] for record in records)
        sizes = [record["bytes"] for record in records]
        loss = _finish(nats, text_nats, tokens, math.nan if None in sizes else sum(sizes))
        return nan_to_none(asdict(loss))


def open_held_out_rows(run: Path | None, limit: int | None, scorer: Scorer) -> HeldOutRows:
    """The rows that the recipe of a run holds out, or `limit` of them."""
    if run is None or not (run / RECIPE_FILE).exists() or not isinstance(scorer, LoopedScorer):
        raise ConfigError(f"val: {scorer.name} is not a run: no rows are held out. {VAL_REMEDY}")
    recipe, state = read_recipe_table(run), last_state(run)
    recorded = recipe if state is None else state["recipe"]  # which has a checksum
    try:
        sources = recipe["data"]["sources"]  # they may have been moved
        data, context = recorded["data"], recorded["model"]["context_length"]
        rows = recorded["run"]["validation_rows"] if limit is None else limit
        packing, split_long = data["packing"], data["split_long"]
        held_out = state and [source["validation"] for source in state["sources"]]
    except (KeyError, TypeError) as error:
        raise FileError(f"{run / RECIPE_FILE}: {error} is missing. {VAL_REMEDY}") from None
    if task := task_of(sources):
        return HeldOutRows(lambda: task.held_out(rows, BATCH_ROWS))
    tokenizer = Tokenizer.load(find_tokenizer(run))
    folders = shard_folders(run, sources)
    for source, folder in zip(sources, folders, strict=True):
        if not (folder / MANIFEST).exists():
            raise FileError(
                f"{source}: no such folder of shards. {run} holds out rows of it. If it was moved, "
                f"write its new path into data.sources of {run / RECIPE_FILE}, or score a file of "
                "held-out texts with `val_data`."
            )
        if read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
            raise FileError(f"{folder}: its tokenizer is not that of {run}. {VAL_REMEDY}")
    documents = [fingerprint(read_manifest(folder), "validation") for folder in folders]
    if held_out not in (None, documents):
        raise FileError(
            f"{run / RECIPE_FILE}: the held-out documents of data.sources are not those of the "
            f"run. {VAL_REMEDY}"
        )
    folders = with_held_out_rows(folders, context)
    if not folders:
        raise FileError(f"{run}: its data holds out less than one row. {VAL_REMEDY}")
    for folder in folders:
        ShardedDocuments.open(folder, "validation", verify=True)

    def batches() -> Iterator[Batch]:
        return held_out_batches(folders, context, BATCH_ROWS, rows, packing, split_long)

    table = torch.as_tensor(tokenizer.bytes_per_token()) if tokenizer.is_byte_level else None
    return HeldOutRows(batches, table)
