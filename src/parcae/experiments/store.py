"""Runs by the content of their recipe: what one experiment has trained, another finds.

STORE/
    runs/KEY/        the run folder of a run; KEY is the hash of its recipe
    recipes/KEY.toml, logs/KEY.log
    data/NAME/       texts, tokenised once for all runs with the same vocabulary
    cpu.json         seconds of processor time that runs have taken, by process
    jobs.json        ids of Slurm jobs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from parcae import console
from parcae.config import ConfigError
from parcae.data.preparation import prepare
from parcae.data.shards import MANIFEST
from parcae.data.synthetic import PREFIX
from parcae.data.tokenizer_training import train_tokenizer
from parcae.experiments.experiment import Run
from parcae.files import (
    FileError,
    interpreting,
    lock_folder,
    read_json,
    read_text,
    write_json,
    write_text,
)
from parcae.machine import StopSignals, cpu_seconds
from parcae.recipe import write_toml
from parcae.runs import FINAL_STATUSES, read_result, read_status
from parcae.runs.layout import TOKENIZER_FILE
from parcae.sweeps.launch import LocalWorkers, environments, visible_devices
from parcae.sweeps.slurm import SlurmConfig, job_states, submit
from parcae.sweeps.worker import RunRequest
from parcae.training.settings import Recipe, recipe_to_dict

TEXT_PREFIX = "text:"
TEXTS = {
    "expository": (
        "openstax_textbooks/train.jsonl.gz",
        "wikipedia_vital_leads/leads_en.jsonl.gz",
    ),
    "all": (
        "openstax_textbooks/train.jsonl.gz",
        "wikipedia_vital_leads/leads_en.jsonl.gz",
        "english_novels_100/train.jsonl.gz",
    ),
}
"""Texts by name: files below the folder of texts. WikiText is left out, to be evaluated on."""
HELD_OUT_FRACTION = 0.04
SECONDS_BETWEEN_READINGS = 10.0

Ended = Callable[[Run], None]


def _in_float32(recipe: Recipe) -> Recipe:
    """A recipe for CPUs whose results do not depend on what bfloat16 the CPU has."""
    run = recipe.run
    if run.device == "cpu" and run.precision == "auto":
        run = replace(run, precision="float32")
    return replace(recipe, run=run)


class Store:
    def __init__(self, folder: Path, texts: Path | None = None, follow_links: bool = False) -> None:
        """`texts`: the folder that the files of `TEXTS` are below. `follow_links`: whether runs may
        write through links that lead out of their folders."""
        self.path, self.texts = folder.absolute(), texts
        self.options = ("--follow-links",) if follow_links else ()
        self.failures: dict[str, str] = {}
        """Why runs that `train` has started did not end, by their keys."""

    def folder(self, run: Run) -> Path:
        return self.path / "runs" / run.key

    def has_ended(self, run: Run) -> bool:
        return read_status(self.folder(run)) in FINAL_STATUSES

    def core_minutes(self, run: Run) -> float:
        """Processor time of a run; where it is unknown, the time it took."""
        seconds = self._cpu().get(run.key)
        if seconds is None:
            result = read_result(self.folder(run))
            return 0.0 if result is None else result.seconds / 60
        return sum(seconds.values()) / 60

    def train(self, runs: Iterable[Run], workers: int, ended: Ended) -> bool:
        """Train what has not ended yet in local processes; True if a signal stopped it."""
        to_do = self._prepare(runs)
        if not to_do:
            return False
        by_key = {run.key: run for run in to_do}
        pool = LocalWorkers(workers, environments(workers, visible_devices()))
        with lock_folder(self.path), StopSignals() as stop:
            observer = _Observer(self, pool, by_key, ended)
            pool.run([self._request(run) for run in to_do], observer, stop)
            return stop.asked

    def submit(self, runs: Iterable[Run], config: SlurmConfig) -> list[str]:
        """Submit what has not ended and is in no queue to Slurm; the ids of the new jobs."""
        path = self.path / "jobs.json"
        jobs = read_json(path) if path.exists() else {}
        if not isinstance(jobs, dict) or not all(isinstance(job, str) for job in jobs.values()):
            raise FileError(f"{path}: not an object of texts. Remove it, or correct it.")
        alive = job_states() if jobs else {}
        waiting = [run for run in runs if jobs.get(run.key) not in alive]
        new = {
            run.key: submit(self._request(run), config, self.path / "slurm")
            for run in self._prepare(waiting)
        }
        write_json(path, jobs | new)
        return list(new.values())

    def _prepare(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that have not ended, each once, with their data and recipe files in place."""
        unique = {run.key: run for run in runs}
        to_do = [run for run in unique.values() if not self.has_ended(run)]
        for run in to_do:
            path = self._request(run).recipe
            text = write_toml(recipe_to_dict(_in_float32(self._with_data(run.recipe))))
            if not path.exists() or read_text(path, errors="replace") != text:  # no checksum
                write_text(path, text)
        return to_do

    def _request(self, run: Run) -> RunRequest:
        return RunRequest(
            name=run.key,
            recipe=self.path / "recipes" / f"{run.key}.toml",
            run=self.folder(run),
            log=self.path / "logs" / f"{run.key}.log",
            options=self.options,
        )

    def _with_data(self, recipe: Recipe) -> Recipe:
        source = recipe.data.sources[0]
        if source.startswith(PREFIX) or (Path(source) / MANIFEST).exists():
            return recipe
        if source.startswith(TEXT_PREFIX):
            name = source.removeprefix(TEXT_PREFIX)
            files = [str(file) for file in self._files(name)]
        else:
            name, files = Path(source).name, list(recipe.data.sources)
        shards = self.path / "data" / f"{name}-{recipe.model.vocab_size}"
        if not (shards / MANIFEST).exists():
            self._tokenise(files, recipe.model.vocab_size, shards)
        return replace(recipe, data=replace(recipe.data, sources=(str(shards),), tokenizer=None))

    def _files(self, name: str) -> list[Path]:
        if name not in TEXTS:
            raise ConfigError(f"data.sources: no text is called {name!r}; one of {list(TEXTS)}.")
        if self.texts is None:
            raise ConfigError(
                f"texts: the text {name!r} needs the folder of {TEXTS[name][0]}. Give --texts "
                "FOLDER, or train on other text: --texts builtin (Python's standard library), or "
                "--data.sources '[\"FILE\"]'."
            )
        files = [self.texts / file for file in TEXTS[name]]
        for file in files:
            if not file.exists():
                raise FileError(f"{file}: no such file. Give the folder of texts by --texts.")
        return files

    def _tokenise(self, files: Sequence[str], vocabulary: int, shards: Path) -> None:
        console.print_text(f"Tokenising {', '.join(files)} into {shards} ...")
        tokenizer_file = shards.with_suffix(".tokenizer") / TOKENIZER_FILE
        if not tokenizer_file.exists():
            train_tokenizer(files, vocabulary, document_cap=0).save(tokenizer_file)
        prepare(files, tokenizer_file, shards, validation_fraction=HELD_OUT_FRACTION)

    def _cpu(self) -> dict[str, dict[str, float]]:
        path = self.path / "cpu.json"
        cpu = read_json(path) if path.exists() else {}
        with interpreting(path, "Remove it; times of runs are then those on the clock."):
            return {
                key: {process: float(seconds) for process, seconds in of_run.items()}
                for key, of_run in cpu.items()
            }

    def record_cpu(self, readings: dict[str, tuple[str, float]]) -> None:
        """Processor time so far by run: of a process, by its name."""
        cpu = self._cpu()
        for key, (process, seconds) in readings.items():
            cpu.setdefault(key, {})[process] = seconds
        write_json(self.path / "cpu.json", cpu)


class _Observer:
    """Prints a line for each run that starts or ends, and reads processor times meanwhile."""

    def __init__(
        self, store: Store, pool: LocalWorkers, runs: dict[str, Run], ended: Ended
    ) -> None:
        self.store, self.pool, self.runs, self._ended = store, pool, runs, ended
        self.left = len(runs)
        self._read_at = 0.0

    def started(self, request: RunRequest, attempt: int) -> None:
        console.print_text(f"started   {self._describe(request)}")

    def ended(self, request: RunRequest, failure: str | None) -> None:
        run = self.runs[request.name]
        self.left -= 1
        if failure is not None:
            self.store.failures[run.key] = failure
            console.print_text(f"failed    {self._describe(request)}: {failure} See {request.log}")
        if self.store.has_ended(run):
            minutes = self.store.core_minutes(run)
            console.print_text(
                f"ended     {self._describe(request)}, {minutes:.1f} core-minutes; {self.left} left"
            )
            self._ended(run)

    def waiting(self) -> None:
        if time.monotonic() < self._read_at + SECONDS_BETWEEN_READINGS:
            return
        self._read_at = time.monotonic()
        readings = {
            active.request.name: (f"{active.process.pid}-{start}", seconds)
            for active in self.pool.active
            if (reading := cpu_seconds(active.process.pid)) is not None
            for start, seconds in (reading,)
        }
        if readings:
            self.store.record_cpu(readings)

    def _describe(self, request: RunRequest) -> str:
        labels = self.runs[request.name].labels
        return f"{request.name}  " + " ".join(f"{k}={v}" for k, v in labels.items())
