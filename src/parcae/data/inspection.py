"""Statistics of tokenised documents: their lengths, what packing drops, what rows contain.

    inspection = inspect("shards/", context=512)
    inspection.summary.tokens, inspection.table()
    inspection.save("out/")                       # lengths.png and inspect.json

Packing is measured on the loader's first epoch. In a large corpus only the first blocks are used;
documents are shuffled before they are cut into blocks, so these are a random sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from parcae import console
from parcae.config import require
from parcae.data.order import BLOCK_DOCUMENTS, SAMPLE_BLOCKS, SourcePlan
from parcae.data.packing import BUFFER_DOCUMENTS, Method, Packing, SplitDocuments
from parcae.data.shards import Documents, ShardedDocuments
from parcae.data.sources import Split
from parcae.files import FileError, write_json
from parcae.plotting import DARK_GREY, PALETTE, figure, save
from parcae.schema import require_range

Decode = Callable[[Sequence[int]], str]

BAR_CHARACTERS = 80
LINE_CHARACTERS = 76
DOCUMENTS_PER_ROW = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingFigures:
    """Result of packing. Shares are fractions of all tokens, or of all rows."""

    rows: int
    documents_per_row: float
    utilisation: float
    cropped_share: float
    leftover_share: float
    aligned_share: float
    """Share of the rows that begin at the start of a document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """All statistics; the content of `inspect.json`."""

    documents: int
    tokens: int
    bytes_per_token: float | None
    mean_length: float
    median_length: float
    longest: int
    context_length: int
    documents_longer_than_row: float
    tokens_in_documents_longer_than_row: float
    sampled_documents: int
    best_fit: PackingFigures
    best_fit_split: PackingFigures
    """With documents longer than a row cut into pieces first."""
    concatenate: PackingFigures


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Documents, their statistics, and how to display them."""

    documents: Documents
    summary: Summary
    decode: Decode | None

    def table(self) -> list[dict[str, Any]]:
        """One row per packing method."""
        methods = ("best_fit", "best_fit_split", "concatenate")
        return [
            {"packing": name, **dataclasses.asdict(getattr(self.summary, name))} for name in methods
        ]

    def render_rows(self, count: int) -> list[Text]:
        """The first `count` rows of the first epoch with best fit, as text for a terminal."""
        require(count >= 0, "rows", f"{count} is negative", "Use 0 to show none.")
        plan = _plan(self.documents, self.summary.context_length, "best-fit")
        packing = plan.block(0, 0)
        return [
            render_row(self.documents, packing, row, self.decode, f"row {index}")
            for index, row in enumerate(plan.row_order(0, 0, packing.rows)[:count])
        ]

    def save(self, folder: str | Path) -> Path:
        """Write `inspect.json` and `lengths.png`; return the path of the figure."""
        folder = Path(folder)
        row_tokens = self.summary.context_length + 1
        figure = draw_lengths(self.documents.lengths, row_tokens, folder / "lengths.png")
        write_json(folder / "inspect.json", dataclasses.asdict(self.summary))
        return figure


def inspect(
    data: Documents | str | Path,
    context: int = 512,
    *,
    split: Split = "train",
    decode: Decode | None = None,
    bytes_of_token: np.ndarray | None = None,
) -> Inspection:
    """Measure the documents of a prepared folder, or any `Documents`, for rows of `context` tokens.

    A prepared folder brings its tokenizer. For other documents, `decode` turns ids into text, and
    `bytes_of_token` (bytes of text by id) gives the bytes per token.
    """
    require_range("context", context, at_least=1)
    if isinstance(data, str | Path):
        data = ShardedDocuments.open(data, split)
    if isinstance(data, ShardedDocuments):
        tokenizer = data.tokenizer()
        decode = decode or tokenizer.decode
        if bytes_of_token is None and tokenizer.is_byte_level:
            bytes_of_token = tokenizer.bytes_per_token()
    return Inspection(data, summarise(data, context, bytes_of_token), decode)


def summarise(
    documents: Documents, context: int, bytes_of_token: np.ndarray | None = None
) -> Summary:
    """The statistics of documents for rows of `context` + 1 tokens."""
    lengths = documents.lengths
    plan = _plan(documents, context, "best-fit")
    sample = np.concatenate([plan.documents_of_block(0, block) for block in _sampled(plan)])
    long = lengths > context + 1
    return Summary(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        bytes_per_token=_bytes_per_token(documents, sample, bytes_of_token),
        mean_length=float(lengths.mean()),
        median_length=float(np.median(lengths)),
        longest=int(lengths.max()),
        context_length=context,
        documents_longer_than_row=float(long.mean()),
        tokens_in_documents_longer_than_row=float(lengths[long].sum() / lengths.sum()),
        sampled_documents=len(sample),
        best_fit=_packing_figures(plan),
        best_fit_split=_packing_figures(
            _plan(SplitDocuments(documents, context + 1), context, "best-fit")
        ),
        concatenate=_packing_figures(_plan(documents, context, "concatenate")),
    )


def render_row(
    documents: Documents, packing: Packing, row: int, decode: Decode | None, title: str
) -> Text:
    """A row as a bar that shows the length of its documents, and a few lines per document: its
    tokens in this row, its beginning and its end. The parts of the bar differ without colours too.
    """
    segments = list(packing.row(row))
    count = len(segments)
    head = Text(f"\n{title}", "bold").append(f"  {count} document{'s' * (count != 1)}", "not bold")
    bar, lines = Text(), [head]
    end = 0
    for number, segment in enumerate(segments):
        style = PALETTE[number % len(PALETTE)]
        begin, end = end, end + segment.length
        first, last = (BAR_CHARACTERS * edge // packing.capacity for edge in (begin, end))
        bar.append("█▒"[number % 2] * (last - first), style)
    lines.append(bar)
    for number, (document, start, length) in enumerate(segments[:DOCUMENTS_PER_ROW]):
        name = Text(f"  document {document:,}, {length:,} tokens", "bold")
        rest = int(documents.lengths[document]) - start - length
        if rest:
            name.append(f"  ✂ {rest:,} cropped", "bold red")
        tokens = documents.tokens(document)[start : start + length]
        style = PALETTE[number % len(PALETTE)]
        lines += [name, *(Text(f"    {part}", style) for part in _preview(tokens, decode))]
    if count > DOCUMENTS_PER_ROW:
        lines.append(Text(f"  and {count - DOCUMENTS_PER_ROW} more"))
    return Text("\n").join(lines)


def draw_lengths(lengths: np.ndarray, row_tokens: int, path: Path) -> Path:
    """Draw the distribution of documents and of tokens over document lengths."""
    from matplotlib.ticker import LogLocator

    edges = _length_bins(lengths)
    with figure(width=7.4, height=3.9) as (canvas, axes):
        for name, weights, colour in (
            ("documents", np.ones(len(lengths)), PALETTE[0]),
            ("tokens", lengths.astype(float), PALETTE[1]),
        ):
            heights = 100 * np.histogram(lengths, edges, weights=weights)[0] / weights.sum()
            axes.stairs(heights, edges, fill=True, color=colour, alpha=0.22)
            axes.stairs(heights, edges, color=colour, linewidth=1.8, label=name)
        axes.axvline(row_tokens, color=DARK_GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        left, right = min(edges[0], row_tokens / 2), max(edges[-1], row_tokens * 2)
        middle = np.sqrt(left * right)
        axes.annotate(
            f"row: {row_tokens:,}",
            (row_tokens, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(5 if row_tokens < middle else -5, 0),
            textcoords="offset points",
            ha="left" if row_tokens < middle else "right",
            va="top",
            color=DARK_GREY,
        )
        axes.set(xscale="log", xlim=(left, right), ylim=(0, axes.get_ylim()[1] * 1.1))
        subdivisions = (1.0, 2.0, 5.0) if right < 1000 * left else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subdivisions))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("document length (tokens)")
        axes.set_ylabel("% per bin")
        axes.grid(axis="x", visible=False)
        axes.legend(  # above the axes, so that it covers no bar
            loc="lower right", bbox_to_anchor=(1, 1.075), ncols=2, borderaxespad=0, borderpad=0
        )
        long = lengths > row_tokens
        documents = console.format_items(len(lengths), "document")
        axes.set_title(f"{documents}, {console.format_count(lengths.sum())} tokens", pad=22)
        axes.annotate(
            f"{long.mean():.1%} of the documents, with {lengths[long].sum() / lengths.sum():.1%} "
            "of the tokens, are longer than a row",
            (0, 1.035),
            xycoords="axes fraction",
            color="#555555",
        )
        return save(canvas, path)


def _length_bins(lengths: np.ndarray) -> np.ndarray:
    """Edges of about ten bins per decade, at whole lengths, so that rounding leaves none empty."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    count = int(10 * np.log10((longest + 1) / shortest)) + 2
    starts = np.geomspace(shortest, longest + 1, count).round().astype(np.int64)
    return np.unique([*starts, shortest, longest + 1]) - 0.5


def _plan(documents: Documents, context: int, method: Method) -> SourcePlan:
    return SourcePlan(
        name="documents",
        order_key="documents",
        lengths=documents.lengths,
        capacity=context + 1,
        buffer=BUFFER_DOCUMENTS,
        block_documents=BLOCK_DOCUMENTS,
        method=method,
        seed=0,
    )


def _sampled(plan: SourcePlan) -> range:
    return range(min(plan.blocks, SAMPLE_BLOCKS))


def _packing_figures(plan: SourcePlan) -> PackingFigures:
    blocks = [plan.block(0, block) for block in _sampled(plan)]
    rows = sum(block.rows for block in blocks)
    require(
        rows > 0,
        "context",
        f"no block of {plan.block_documents:,} documents fills a row of {plan.capacity:,} tokens",
        "Use a shorter context; the loader can use larger blocks.",
    )
    all_tokens = sum(block.all_tokens for block in blocks)
    packed = sum(block.packed_tokens for block in blocks)
    return PackingFigures(
        rows=rows,
        documents_per_row=sum(len(block.documents) for block in blocks) / rows,
        utilisation=packed / sum(block.rows * block.capacity for block in blocks),
        cropped_share=sum(block.cropped_tokens for block in blocks) / all_tokens,
        leftover_share=sum(block.leftover_tokens for block in blocks) / all_tokens,
        aligned_share=sum(block.aligned_rows for block in blocks) / rows,
    )


def _bytes_per_token(
    documents: Documents, sample: np.ndarray, bytes_of_token: np.ndarray | None
) -> float | None:
    """Mean bytes of the tokens that have any; special tokens have none."""
    if bytes_of_token is None:
        return None
    text_bytes = text_tokens = 0
    for document in console.track(sample.tolist(), "bytes per token"):
        tokens = documents.tokens(document)
        if (largest := int(tokens.max())) >= len(bytes_of_token):
            raise FileError(
                f"document {document}: token {largest:,} is not in the vocabulary of "
                f"{len(bytes_of_token):,}. A shard is damaged: prepare the data again."
            )
        sizes = bytes_of_token[tokens]
        text_bytes += int(sizes.sum())
        text_tokens += int(np.count_nonzero(sizes))
    return text_bytes / text_tokens if text_tokens else None


def _preview(tokens: np.ndarray, decode: Decode | None) -> list[str]:
    """The text in one line if it fits, else its beginning and its end."""
    ids = tokens.tolist()
    text = decode(ids) if decode is not None else " ".join(map(str, ids))
    text = "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "·") for c in text)
    if len(text) <= LINE_CHARACTERS:
        return [text]
    part = LINE_CHARACTERS - 2
    return [f"{text[:part]} …", f"… {text[-part:]}"]
