"""The commands that faults are tried on: their input, arguments, and how to continue after a fault.

Each is as small as it can be and still writes every kind of file. Functions with heavy imports run
in the children of `faults.server`, with the folder of a cell as working directory: input is in
`in`, output goes to `out`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
LAMBADA = "in/tasks/language_understanding/lambada_openai.jsonl"
RUN_STEPS = 6
CHECKPOINT_EVERY = 2


@dataclass(frozen=True)
class Command:
    """One row of the matrix."""

    name: str
    arguments: tuple[str, ...]
    prepare: str
    """The function that writes `in`."""
    again: Callable[[Path], tuple[str, ...]] | None = None
    """From the folder of a cell: the arguments that continue after a fault; the same by default."""
    unfinished: tuple[str, ...] = ()
    """Files of `out` that grow while the command runs."""
    unchecked: tuple[str, ...] = ()
    """Input without a checksum: another bit is other data."""
    trains: bool = False
    serves: bool = False

    def continued(self, cell: Path) -> tuple[str, ...]:
        return self.arguments if self.again is None else self.again(cell)


def _train_again(cell: Path) -> tuple[str, ...]:
    started = (cell / "out/run/metrics.jsonl").exists()
    return ("train", "--resume", "out/run") if started else TRAIN


TRAIN = ("train", "in/recipe.toml", "--out", "out/run")
SWEEP = (
    "sweep",
    "in/recipe.toml",
    "--out",
    "out/sweep",
    "--mean-loops",
    "1,2",
    "--utilisation",
    "0.4",
)
SWEEP += ("--device-flops", "1e12", "--budget.steps", "3")
REPRODUCE = ("reproduce", "prelude-norm", "--scale", "toy", "--seeds", "1", "--out", "out/store")
REPRODUCE += ("--data.sources", '["in/text.jsonl"]', "--run.checkpoint_every", "2")
PREPARE = ("data", "prepare", "in/text.jsonl", "--tokenizer", "in/tokenizer.json")
PREPARE += ("--out", "out/shards", "--shard-tokens", "300", "--validation-fraction", "0.2")
EVAL = ("eval", "in/run", "--out", "out/evaluation", "--suites", "val,lambada")
EVAL += ("--task-data", "in/tasks", "--loops", "1,2", "--batch-tokens", "64")
RUN_FILES = ("*/metrics.jsonl", "*/result.json", "*/progress.json", "*.log", "*/recipe.toml")

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "data prepare",
            PREPARE,
            "write_corpus",
            unfinished=("shards/progress.json",),
            unchecked=("in/text.jsonl", "in/tokenizer.json"),
        ),
        Command(
            "tokenizer train",
            ("tokenizer", "train", "in/text.jsonl", "--size", "300", "--out", "out/tokenizer.json"),
            "write_corpus",
            unchecked=("in/text.jsonl",),
        ),
        Command(
            "train",
            TRAIN,
            "write_recipe",
            again=_train_again,
            unfinished=RUN_FILES,
            unchecked=("in/text.jsonl", "in/recipe.toml"),
            trains=True,
        ),
        Command(
            "sweep",
            SWEEP,
            "write_recipe",
            again=lambda cell: (*SWEEP, "--retry"),
            unfinished=(*RUN_FILES, "sweep/runs.*", "sweep/failed.json"),
            unchecked=("in/text.jsonl", "in/recipe.toml"),
            trains=True,
        ),
        Command(
            "fit",
            ("fit", "in/runs.csv", "--out", "out/fit", "--starts", "2", "--bootstrap-samples", "0"),
            "write_table",
            unchecked=("in/runs.csv",),
        ),
        Command(
            "eval",
            EVAL,
            "write_run",
            unfinished=("evaluation/samples.jsonl", "evaluation/settings.json"),
            unchecked=(LAMBADA,),
        ),
        Command(
            "reproduce",
            REPRODUCE,
            "write_corpus",
            unfinished=(*RUN_FILES, "store/cpu.json", "store/results/*", "store/reproduction*"),
            unchecked=("in/text.jsonl",),
            trains=True,
        ),
        Command(
            "import",
            ("import", "in/release", "out/model"),
            "write_release",
            unchecked=("in/release/*",),
        ),
        Command("export", ("export", "in/run", "out/exported"), "write_run"),
        Command("serve", ("serve", "model=in/run", "--port", "0"), "write_run", serves=True),
    )
}


# In the children of the server.


def run(arguments: Sequence[str], nan_step: int | None = None) -> int:
    """`parcae` with these arguments; the runs of sweeps and experiments train in this process.

    What takes long and touches no file is left out: figures are empty files, laws are fitted by a
    few iterations, and neither the speed of the device nor the time of a sweep is measured.
    `nan_step`: the step of every run whose gradients are not numbers; negative: from this step on.
    """
    from parcae.cli import main

    _train_here()
    _compute_little()
    if nan_step is not None:
        _break_gradients(nan_step)
    return main(list(arguments))


def _train_here() -> None:
    from parcae.cli import main
    from parcae.runs import read_status
    from parcae.sweeps import launch
    from parcae.sweeps.worker import RunRequest
    from shortcuts import EndedProcess

    def train(
        request: RunRequest, _environment: Mapping[str, str] | None = None, processes: int = 1
    ) -> EndedProcess:
        new = read_status(request.run) == "new"
        given = [str(request.recipe), "--out"] if new else ["--resume"]
        request.log.parent.mkdir(parents=True, exist_ok=True)
        return EndedProcess(main(["train", *given, str(request.run)]))

    launch.start_process = train  # type: ignore[assignment]
    launch.POLL_SECONDS = 0


def _compute_little() -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    from parcae.sweeps import run
    from parcae.sweeps.estimate import Estimate
    from parcae.training import trainer
    from shortcuts import fit_roughly

    def save(self: Figure, out: Any, format: str, **_options: Any) -> None:
        if format == "png":
            Image.new("RGB", (1, 1)).save(out, format="png")
        elif hasattr(out, "write"):
            out.write("<svg></svg>")
        else:
            Path(out).write_text("<svg></svg>")

    Figure.savefig = save  # type: ignore[assignment]
    trainer.peak_flops = lambda *_: 1e12
    run.estimate = lambda *_: Estimate({}, "not estimated")
    fit_roughly()


def _break_gradients(at: int) -> None:
    import torch

    from parcae.training.learner import Learner

    clip = Learner._clip

    def broken(self: Learner) -> float:
        if self.step == at or (at < 0 and self.step >= -at):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return clip(self)

    Learner._clip = broken


def write_corpus() -> None:
    from parcae.data.tokenizer import Tokenizer

    texts = [
        " ".join(WORDS[(i + j) % len(WORDS)] for j in range(9 + 7 * i % 23)) for i in range(48)
    ]
    Path("in").mkdir()
    lines = "".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts))
    Path("in/text.jsonl").write_text(lines)
    Tokenizer.train(texts, 300).save("in/tokenizer.json")


def recipe() -> dict[str, Any]:
    from parcae.recipe import merge
    from training.runs import TREE

    changes = {
        "data": {"sources": [os.path.abspath("in/text.jsonl")]},
        "budget": {"steps": RUN_STEPS},
        "run": {
            "checkpoint_every": CHECKPOINT_EVERY,
            "validate_every": 3,
            "telemetry_every": 3,
            "keep_last": 2,
        },
    }
    return merge(TREE, changes)


def write_recipe() -> None:
    from parcae.recipe import write_toml

    write_corpus()
    Path("in/recipe.toml").write_text(write_toml(recipe()))


def write_run() -> None:
    """A finished run, and a small LAMBADA."""
    write_recipe()
    assert run(TRAIN) == 0
    Path("out/run").rename("in/run")
    Path("out").rmdir()
    path = Path(LAMBADA)
    path.parent.mkdir(parents=True)
    rows = [{"context": " ".join(WORDS[i : i + 3]), "continuation": WORDS[i + 3]} for i in range(5)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_table() -> None:
    from parcae.experiments.paper_runs import paper_table
    from parcae.laws.table import write_table

    write_table("in/runs.csv", paper_table(("140m",)))


def write_release() -> None:
    from fuzz import targets

    folder = Path("in/release")
    folder.mkdir(parents=True)
    targets.write_release(folder)
    write = targets.tokenizer()
    write.save(folder / "tokenizer.json")


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
