"""A look at tokenised documents: how long they are, what packing does to them, what rows hold.

The figures are those of the loader's first epoch. Of a large corpus only the first blocks are
looked at; documents are shuffled before they are cut into blocks, so these are a random sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.text import Text

from parcae import console
from parcae.config import require
from parcae.data.documents import Documents, SplitDocuments
from parcae.data.packing import BUFFER_DOCUMENTS, Method, Packing
from parcae.data.plan import SourcePlan
from parcae.files import write_json
from parcae.plotting import PALETTE, figure, save

Decode = Callable[[Sequence[int]], str]

SAMPLE_BLOCKS = 8
BLOCK_DOCUMENTS = 16_384
MUCH_CROPPED = 0.3
BAR_CHARACTERS = 80
LINE_CHARACTERS = 76
SHOWN_DOCUMENTS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingFigures:
    """What became of the tokens, as shares."""

    rows: int
    documents_per_row: float
    utilisation: float
    cropped_share: float
    leftover_share: float
    aligned_share: float
    """Rows that start with the start of a document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """All that `inspect` prints; also written as `inspect.json`."""

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


def inspect(
    documents: Documents,
    decode: Decode | None = None,
    context: int = 2048,
    rows: int = 4,
    out_folder: str | Path | None = None,
    bytes_of_token: np.ndarray | None = None,
) -> Summary:
    """Print the figures and `rows` packed rows; draw the lengths into `out_folder`."""
    require(context >= 1, "context", f"{context} is not positive", "Use at least 1.")
    require(rows >= 0, "rows", f"{rows} is negative", "Use 0 to show none.")
    summary = summarise(documents, context, bytes_of_token)
    _print_summary(summary)
    if summary.best_fit.cropped_share > MUCH_CROPPED:
        console.out.print(
            f"Best fit drops {summary.best_fit.cropped_share:.0%} of the tokens here, since "
            "documents are long beside a row. Use a longer context, split_long = true in the "
            "loader, or packing = 'concatenate'.",
            highlight=False,
        )
    plan = _plan(documents, context, "best-fit")
    packing = plan.block(0, 0)
    for number, row in enumerate(plan.row_order(0, 0, packing.rows)[:rows]):
        words = render_row(documents, packing, row, decode, f"row {number}")
        console.out.print(words, no_wrap=True, overflow="ellipsis")
    if out_folder is not None:
        folder = Path(out_folder)
        picture = draw_lengths(documents.lengths, context + 1, folder / "lengths.png")
        write_json(folder / "inspect.json", dataclasses.asdict(summary))
        console.out.print(f"Drew {picture}", soft_wrap=True)
    return summary


def summarise(
    documents: Documents, context: int, bytes_of_token: np.ndarray | None = None
) -> Summary:
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
    """A row as a bar of its documents' shares, and a few lines for each document: how much of it is
    there, how it begins and how it ends. Bars and headings differ without colours too."""
    segments = list(packing.row(row))
    count = len(segments)
    head = Text(f"\n{title}", "bold").append(f"  {count} document{'s' * (count != 1)}", "not bold")
    bar, lines = Text(), [head]
    end = 0
    for number, segment in enumerate(segments):
        style = PALETTE[number % len(PALETTE)]
        begin, end = end, end + segment.length
        first, last = (BAR_CHARACTERS * place // packing.capacity for place in (begin, end))
        bar.append("█▒"[number % 2] * (last - first), style)
    lines.append(bar)
    for number, (document, start, length) in enumerate(segments[:SHOWN_DOCUMENTS]):
        name = Text(f"  document {document:,}, {length:,} tokens", "bold")
        rest = int(documents.lengths[document]) - start - length
        if rest:
            name.append(f"  ✂ {rest:,} cropped", "bold red")
        tokens = documents.tokens(document)[start : start + length]
        style = PALETTE[number % len(PALETTE)]
        lines += [name, *(Text(f"    {part}", style) for part in _shown(tokens, decode))]
    if count > SHOWN_DOCUMENTS:
        lines.append(Text(f"  and {count - SHOWN_DOCUMENTS} more"))
    return Text("\n").join(lines)


def draw_lengths(lengths: np.ndarray, row_tokens: int, path: Path) -> Path:
    """How documents and their tokens are spread over lengths, beside the size of a row."""
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
        axes.axvline(row_tokens, color="#333333", linewidth=1.2, linestyle=(0, (4, 3)))
        left, right = min(edges[0], row_tokens / 2), max(edges[-1], row_tokens * 2)
        middle = np.sqrt(left * right)
        axes.annotate(
            f"a row: {row_tokens:,}",
            (row_tokens, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(5 if row_tokens < middle else -5, 0),
            textcoords="offset points",
            ha="left" if row_tokens < middle else "right",
            va="top",
            color="#333333",
        )
        axes.set(xscale="log", xlim=(left, right), ylim=(0, axes.get_ylim()[1] * 1.1))
        subdivisions = (1.0, 2.0, 5.0) if right < 1000 * left else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subdivisions))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("tokens in the document")
        axes.set_ylabel("% in each bin")
        axes.grid(axis="x", visible=False)
        axes.legend(  # above the axes, where no bar can be
            loc="lower right", bbox_to_anchor=(1, 1.075), ncols=2, borderaxespad=0, borderpad=0
        )
        long = lengths > row_tokens
        axes.set_title(
            f"{len(lengths):,} documents, {console.format_count(lengths.sum())} tokens", pad=22
        )
        axes.annotate(
            f"{long.mean():.1%} of the documents, with {lengths[long].sum() / lengths.sum():.1%} "
            "of the tokens, are longer than a row",
            (0, 1.035),
            xycoords="axes fraction",
            color="#555555",
        )
        return save(canvas, path)


def _length_bins(lengths: np.ndarray) -> np.ndarray:
    """About ten to a decade, each of whole lengths, so that no bin is empty by rounding."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    count = int(10 * np.log10((longest + 1) / shortest)) + 2
    starts = np.geomspace(shortest, longest + 1, count).round().astype(np.int64)
    return np.unique([*starts, shortest, longest + 1]) - 0.5


def _plan(documents: Documents, context: int, method: Method) -> SourcePlan:
    return SourcePlan(
        name="documents",
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
        "Use a shorter one; the loader can take larger blocks.",
    )
    everything = sum(block.all_tokens for block in blocks)
    packed = sum(block.packed_tokens for block in blocks)
    return PackingFigures(
        rows=rows,
        documents_per_row=sum(len(block.documents) for block in blocks) / rows,
        utilisation=packed / sum(block.rows * block.capacity for block in blocks),
        cropped_share=sum(block.cropped_tokens for block in blocks) / everything,
        leftover_share=sum(block.leftover_tokens for block in blocks) / everything,
        aligned_share=sum(block.aligned_rows for block in blocks) / rows,
    )


def _bytes_per_token(
    documents: Documents, sample: np.ndarray, bytes_of_token: np.ndarray | None
) -> float | None:
    """Over tokens that stand for text: BOS and other specials have no bytes."""
    if bytes_of_token is None:
        return None
    text_bytes = text_tokens = 0
    for document in console.track(sample.tolist(), "bytes per token"):
        sizes = bytes_of_token[documents.tokens(document)]
        text_bytes += int(sizes.sum())
        text_tokens += int(np.count_nonzero(sizes))
    return text_bytes / text_tokens if text_tokens else None


def _print_summary(summary: Summary) -> None:
    size = summary.bytes_per_token
    row = summary.context_length + 1
    console.out.print(
        console.table(
            "Documents",
            ["", ""],
            [
                ("documents", f"{summary.documents:,}"),
                ("tokens, with BOS", f"{summary.tokens:,}"),
                ("bytes per token", "not known" if size is None else f"{size:.3f}"),
                ("tokens per document, mean", f"{summary.mean_length:,.1f}"),
                ("tokens per document, median", f"{summary.median_length:,.0f}"),
                ("tokens per document, most", f"{summary.longest:,}"),
                (f"documents above {row:,}", f"{summary.documents_longer_than_row:.1%}"),
                ("  their share of tokens", f"{summary.tokens_in_documents_longer_than_row:.1%}"),
            ],
        )
    )
    sampled = summary.sampled_documents < summary.documents
    note = f", on a sample of {summary.sampled_documents:,} documents" if sampled else ""
    kinds = (summary.best_fit, summary.best_fit_split, summary.concatenate)
    lines = [
        ("rows", [f"{f.rows:,}" for f in kinds]),
        ("documents per row", [f"{f.documents_per_row:.2f}" for f in kinds]),
        ("utilisation", [f"{f.utilisation:.1%}" for f in kinds]),
        ("tokens cropped", [f"{f.cropped_share:.2%}" for f in kinds]),
        ("tokens left over", [f"{f.leftover_share:.2%}" for f in kinds]),
        ("rows not starting at a document", [f"{1 - f.aligned_share:.1%}" for f in kinds]),
    ]
    console.out.print(
        console.table(
            f"Packed into rows of {row:,} tokens{note}",
            ["", "best fit", "best fit, split", "concatenation"],
            [(name, *cells) for name, cells in lines],
        )
    )


def _shown(tokens: np.ndarray, decode: Decode | None) -> list[str]:
    """In one line, or as its beginning and its end."""
    ids = tokens.tolist()
    text = decode(ids) if decode is not None else " ".join(map(str, ids))
    text = "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, "·") for c in text)
    if len(text) <= LINE_CHARACTERS:
        return [text]
    part = LINE_CHARACTERS - 2
    return [f"{text[:part]} …", f"… {text[-part:]}"]
