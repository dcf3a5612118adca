"""`parcae eval`: measure a model on suites of tasks, at any number of loops."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from parcae.console import parse_int_list, parse_list
from parcae.device import DEVICE_HELP
from parcae.evaluation.suites import CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS, SEEDS, SUITES
from parcae.evaluation.tasks import BASELINES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parcae.evaluation.run import Progress, Report


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="measure a model: held-out loss, WikiText, LAMBADA, CORE, zero-shot tasks",
        epilog="Writes result.json, samples.jsonl (a line per item) and scores.png. Start an "
        "interrupted evaluation again to resume it.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a model, a run or a checkpoint; or a causal transformers model, by folder "
        "or by its name on the hub",
    )
    parser.add_argument(
        "--suites",
        type=parse_list,
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"one or several of {', '.join(SUITES)} (default: val, or none with --tasks)",
    )
    parser.add_argument(
        "--tasks",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files of own multiple-choice questions, the suite own: JSON lines with question, "
        "choices and answer (default: none)",
    )
    parser.add_argument(
        "--loops",
        type=parse_int_list,
        metavar="T,T,...",
        help="numbers of loops to score at (default: the mean in training)",
    )
    parser.add_argument(
        "--task-data",
        type=Path,
        metavar="FOLDER",
        help="folder of task files, needed by all suites but val (default: none)",
    )
    parser.add_argument(
        "--val-data",
        metavar="FILE",
        help="file of held-out texts for val (default: the rows that the run holds out)",
    )
    parser.add_argument(
        "--separator",
        metavar="LINE",
        help="line that separates the documents of a text file given with --val-data, such as "
        "'<|endoftext|>'; it is dropped (default: none, one document)",
    )
    parser.add_argument(
        "--document-start",
        metavar="REGEX",
        help="regular expression of the lines at which the documents of such a file start "
        "(default: none, one document)",
    )
    parser.add_argument(
        "--text-field",
        metavar="NAME",
        help="JSON key or Parquet column that contains the text in a file given with --val-data "
        "(default: text)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="score at most N items of each task (default: all)"
    )
    parser.add_argument(
        "--seeds",
        type=parse_int_list,
        metavar="N,N,...",
        help=f"seeds of the few-shot examples (default: {','.join(map(str, SEEDS))})",
    )
    parser.add_argument(
        "--baselines",
        choices=BASELINES,
        default="nanochat",
        help="table of chance accuracies, for centred accuracy (default: nanochat, as in "
        "the reference release)",
    )
    parser.add_argument(
        "--state",
        choices=("zero", "like-init"),
        default="zero",
        help="initial state of the loop; like-init is drawn by the seed (default: zero)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help=f"tokens scored at a time (default: {CPU_BATCH_TOKENS} on a CPU, "
        f"{DEVICE_BATCH_TOKENS} on other devices)",
    )
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="N",
        help="tokens the model reads at a time (default: its context length)",
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer of the model (default: tokenizer.json in its folder or its run)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="evaluate a run's checkpoint with the lowest validation loss (default: the newest)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that comes with a transformers model (default: refuse it)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of products with weights; bfloat16 is faster on CPUs with instructions for it and "
        "changes scores slightly (default: float32)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the results (default: CHECKPOINT/evaluation)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="drop earlier results in the folder (default: resume from them)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (default: as tables)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    suites = [name for names in arguments.suites for name in names]

    from parcae import console
    from parcae.evaluation.run import default_folder, evaluate
    from parcae.files import to_json

    with _progress() as report:
        result = evaluate(
            arguments.checkpoint,
            suites or None,
            tasks=arguments.tasks,
            loops=arguments.loops,
            out=arguments.out or default_folder(arguments.checkpoint),
            task_data=arguments.task_data,
            val_data=arguments.val_data,
            separator=arguments.separator,
            document_start=arguments.document_start,
            text_field=arguments.text_field,
            limit=arguments.limit,
            seeds=arguments.seeds,
            baselines=arguments.baselines,
            state=arguments.state,
            tokenizer=arguments.tokenizer,
            best=arguments.best,
            batch_tokens=arguments.batch_tokens,
            context_length=arguments.context_length,
            device=arguments.device,
            trust_remote_code=arguments.trust_remote_code,
            precision=arguments.precision,
            overwrite=arguments.overwrite,
            follow_links=arguments.follow_links,
            progress=report,
        )
    if arguments.loops is not None and not result.looped:
        console.err.print("Not a looped model of parcae: --loops has no effect.", highlight=False)
    if arguments.json:
        print(to_json(result.to_json()), end="")
        return 0

    from parcae.evaluation.tables import notes, published_scores, tables

    for table in tables(result, published_scores(arguments.task_data, arguments.baselines)):
        console.out.print(table)
    lines = notes(result) + [f"wrote {path}" for path in result.files()]
    for line in lines:
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _progress() -> Iterator[Report]:
    """Progress bars on a terminal; elsewhere a line for each task that is scored."""
    from parcae import console

    with console.progress() as display:
        total = display.add_task("all tasks (tokens)", total=None, visible=False)
        current = display.add_task("", total=None, visible=False)

        def report(progress: Progress) -> None:
            if not progress.task:
                depths = ", ".join(map(str, progress.loops))
                line = f"{progress.checkpoint}, T = {depths}" if progress.looped else None
                console.err.print(
                    line or progress.checkpoint, markup=False, highlight=False, soft_wrap=True
                )
                return
            display.update(
                total, completed=progress.tokens_done, total=progress.tokens, visible=True
            )
            display.update(
                current,
                description=progress.task,
                completed=progress.items_done,
                total=progress.items,
                visible=True,
            )
            if progress.items_done == progress.items and not console.err.is_terminal:
                items = console.format_items(progress.items, *progress.unit)
                line = f"{progress.task}: {items} scored"
                console.err.print(line, markup=False, highlight=False)

        yield report
