"""Table "Compression ratio": bytes per token of our tokenizer at several sizes, beside others.

No model is trained. Other tokenizers are the files TEXTS/tokenizers/NAME.json, and those of the
models that the test data holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.data.tokenizer_training import compare_tokenizers, train_tokenizer
from parcae.experiments.experiment import Experiment, Results, Row, Run, Table
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, always
from parcae.runs.layout import TOKENIZER_FILE

TRAINING = "openstax_textbooks/train.jsonl.gz"
HELD_OUT = {
    "textbooks": "openstax_textbooks/valid.jsonl.gz",
    "encyclopedia": "wikipedia_vital_leads/leads_en.jsonl.gz",
    "novels": "english_novels_100/valid.jsonl.gz",
}
"""Texts that are compressed, by name; our tokenizers have seen none of them."""
SIZES = (512, 1024, 2048, 8192, 32_768)
CHARACTERS = 25_000_000
OTHERS = "../../fixtures/*/tokenizer.json"
OURS = "ours"


class Tokenizers(Experiment):
    name = "tokenizer"
    title = "Compression of the tokenizer"
    in_paper = "the appendix on the tokenizer"
    paper = (
        "Bytes per token on FineWeb-Edu, held out: GPT-2 (50,257 entries) 4.63, GPT-4 (100,277) "
        "4.76, the paper's (32,768, trained on 2 billion characters of that text) 4.65."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        return iter(())

    def measure_texts(self, texts: Path, folder: Path) -> list[Row]:
        rows = []
        for size in SIZES:
            started, file = time.process_time(), folder / f"size-{size}" / TOKENIZER_FILE
            if not file.exists():
                train_tokenizer([texts / TRAINING], size, characters=CHARACTERS).save(file)
            rows.append(compression(f"{OURS}, {size:,}", file, texts, started))
        for file in sorted((*texts.glob("tokenizers/*.json"), *texts.glob(OTHERS))):
            name = file.parent.name if file.name == TOKENIZER_FILE else file.stem
            rows.append(compression(name, file, texts, time.process_time()))
        return rows

    def claims(self, results: Results) -> list[Claim]:
        ours = [row for row in results.rows if row["tokenizer"].startswith(OURS)]
        others = [row for row in results.rows if row not in ours]
        cases, texts = [], []
        for other in others:
            smaller = [row for row in ours if row["vocabulary"] <= other["vocabulary"]]
            if smaller:
                best = max(smaller, key=lambda row: row["vocabulary"])
                a, b = (row["bytes_per_token"]["textbooks"] for row in (best, other))
                cases.append(a > b)
                texts.append(
                    f"{a:.2f} with {best['vocabulary']:,} entries against {b:.2f} with "
                    f"{other['vocabulary']:,} ({other['tokenizer']})"
                )
        return [
            Claim(
                "A tokenizer trained on such text compresses it better than one at least as large "
                "that was trained on other text",
                always(cases),
                "; ".join(texts),
            )
        ]

    def table(self, results: Results) -> Table:
        rows = [
            (
                row["tokenizer"].replace(OURS, "trained on textbooks"),
                f"{row['vocabulary']:,}",
                *(f"{row['bytes_per_token'][text]:.2f}" for text in HELD_OUT),
            )
            for row in sorted(results.rows, key=lambda row: row["vocabulary"])
        ]
        return ("tokenizer", "entries", *HELD_OUT), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(width=5.4) as (canvas, panel):
            for index, text in enumerate(HELD_OUT):
                for ours, marker in ((True, "o-"), (False, "s")):
                    rows = [r for r in results.rows if r["tokenizer"].startswith(OURS) is ours]
                    panel.plot(
                        [row["vocabulary"] for row in rows],
                        [row["bytes_per_token"][text] for row in rows],
                        marker,
                        color=plotting.colour(index),
                        label=text if ours else None,
                    )
            panel.set(xscale="log", xlabel="entries", ylabel="bytes per token")
            panel.set_title("Bytes per token; squares: other tokenizers")
            panel.legend()
            return plotting.save(canvas, path)


def compression(name: str, file: Path, texts: Path, started: float) -> Row:
    """The row of a tokenizer; `started`: processor time, from which its cost is counted."""
    found = compare_tokenizers([file], [texts / path for path in HELD_OUT.values()])
    ratios = [round(source.bytes_per_token[0], 4) for source in found.sources]
    return {
        "key": f"tokenizer {name}",
        "tokenizer": name,
        "vocabulary": found.tokenizers[0].vocab_size,
        "bytes_per_token": dict(zip(HELD_OUT, ratios, strict=False)),
        "seed": 0,
        "core_minutes": round((time.process_time() - started) / 60, 3),
    }
