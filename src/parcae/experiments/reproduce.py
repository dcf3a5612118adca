"""`parcae.reproduce`: train what experiments need, measure it, decide, draw, and write one page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcae import console
from parcae.config import ConfigError
from parcae.data.sources import BUILTIN
from parcae.experiments.ablation_ladder import AblationLadder
from parcae.experiments.choose_mu import ChooseMu
from parcae.experiments.discretisation import Discretisation
from parcae.experiments.experiment import RECORDED, Experiment, Results, Row, Run
from parcae.experiments.fixed_or_sampled import FixedOrSampled
from parcae.experiments.isoflop import IsoFlop
from parcae.experiments.lr_robustness import LrRobustness
from parcae.experiments.lr_sweep import LrSweep
from parcae.experiments.main_table import MainTableRate
from parcae.experiments.page import judge, write_page
from parcae.experiments.per_sequence import PerSequence
from parcae.experiments.prelude_norm import PreludeNorm
from parcae.experiments.rdm_comparison import RdmComparison
from parcae.experiments.reasoning import HarderReasoning, Reasoning
from parcae.experiments.release_sampler import ReleaseSampler
from parcae.experiments.scales import Scale, ScaleName
from parcae.experiments.store import Store
from parcae.experiments.test_time import TestTime
from parcae.experiments.tokenizer import Tokenizers
from parcae.experiments.transformer_comparison import TransformerComparison
from parcae.experiments.truncated_sampling import TruncatedSampling
from parcae.experiments.tuned_rates import TunedRates
from parcae.experiments.unified import Unified
from parcae.experiments.walks import Ladder, OneStepPerLoop
from parcae.files import FileError, check_links, interpreting, read_json, read_text, write_text
from parcae.recipe import build, merge
from parcae.schema import suggest
from parcae.sweeps.slurm import SlurmConfig, check_slurm
from parcae.training.plan import DEFAULT_GPU, PEAK_FLOPS, UTILISATION
from parcae.training.schedule import flops_per_step, total_steps

CATALOGUE: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        OneStepPerLoop(),
        Reasoning(),
        TransformerComparison(),
        MainTableRate(),
        TestTime(),
        RdmComparison(),
        LrRobustness(),
        AblationLadder(),
        PerSequence(),
        ReleaseSampler(),
        PreludeNorm(),
        TruncatedSampling(),
        FixedOrSampled(),
        Discretisation(),
        IsoFlop(),
        Unified(),
        Ladder(),
        HarderReasoning(),
        TunedRates(),
        LrSweep(),
        ChooseMu(),
        Tokenizers(),
    )
}
"""All experiments by name; `all` trains in this order."""
CORE_FLOPS = 2.4e10
"""FLOP/s of one core on models of micro scale: the mean over the committed results."""
NOTES = "notes.md"
"""In the folder of results: what is written by hand, for the page."""


@dataclass(frozen=True)
class Reproduction:
    """What is known of each experiment: its measured runs, by its name."""

    scale: ScaleName
    results: Mapping[str, Results]
    page: Path
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM stopped it; the same call continues it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why runs failed, by their keys; the same call starts them again."""

    def table(self) -> list[dict[str, Any]]:
        """One row per claim: experiment, claim, verdict, evidence, runs."""
        return [
            {
                "experiment": name,
                "claim": claim.statement,
                "verdict": claim.verdict,
                "evidence": claim.evidence,
                "runs": len(results.rows),
                "planned_runs": results.planned,
                "core_minutes": results.core_minutes,
            }
            for name, results in self.results.items()
            for claim in judge(CATALOGUE[name], results, self.scale)
        ]


def reproduce(
    names: str | Iterable[str] = "all",
    *,
    scale: ScaleName = "micro",
    seeds: int = 3,
    overrides: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    results: str | Path | None = None,
    page: str | Path | None = None,
    texts: str | Path | None = None,
    select: Mapping[str, Any] | None = None,
    workers: int = 1,
    slurm: SlurmConfig | Mapping[str, Any] | None = None,
    redraw: bool = False,
    follow_links: bool = False,
) -> Reproduction:
    """Reproduce experiments of the paper: train their runs, judge their claims, write a page.

    Runs are found by the content of their recipe: what another experiment has trained is not
    trained again, and the same call continues what was interrupted.

    Args:
        names: Experiments by name, or "all".
        scale: `micro` for one machine, `paper` for a cluster, `toy` to see that everything works.
        seeds: Runs of each kind.
        overrides: Settings of all recipes: `{"optimiser": {"muon_lr": 4e-3}}`. One that an
            experiment sets itself is an error.
        out: Folder of runs and data. Default: runs/reproduction-SCALE.
        results: Folder of the measurements. Default: OUT/results.
        page: File of the page; figures go to a folder of its name. Default: OUT/reproduction.md.
        texts: Folder of the corpora, or "builtin" to train on Python's standard library instead.
            Default: PARCAE_TEST_DATA/data/corpora, if that is set.
        select: Train only runs with these labels: `{"lr": 0.064}`. The others stay missing.
        workers: Runs that train at the same time, each on its share of the cores.
        slurm: Submit the runs to Slurm and return: a `SlurmConfig`, or its fields as a dict.
        redraw: Train nothing: judge and draw what `results` holds.
        follow_links: Write through symbolic links that lead out of `out`. Default: such links are
            refused.
    """
    plan = _plan(names, scale, seeds, overrides, texts, select)
    folder = Path(out or Path("runs") / f"reproduction-{scale}")
    check_links(folder, follow_links=follow_links)
    work = _Work(
        store=Store(folder, _texts(texts), follow_links),
        results=Path(results or folder / "results"),
        plan=plan,
    )
    interrupted = False
    if not redraw:
        for name in plan:
            if not work.plan[name] and work.store.texts is None and not work.has(name):
                console.print_text(f"{name} needs the folder of texts: give it with --texts.")
        work.collect()
        runs = [run for run in work.missing() if _is_selected(run, select or {})]
        if slurm is None:
            interrupted = work.store.train(runs, workers, work.add)
        else:
            config = slurm if isinstance(slurm, SlurmConfig) else build(SlurmConfig, slurm)
            check_slurm()
            jobs = work.store.submit(runs, config)
            console.print_text(f"Submitted {console.format_items(len(jobs), 'job')}.")
        work.collect()
    found = {name: work.read(name) for name in CATALOGUE if name in work.plan or work.has(name)}
    written = write_page(
        CATALOGUE,
        found,
        Path(page or folder / "reproduction.md"),
        _read_notes(work.results / NOTES),
        scale,
    )
    chosen = {name: found[name] for name in plan}
    return Reproduction(scale, chosen, written, interrupted, work.store.failures)


def costs(
    names: str | Iterable[str] = "all",
    *,
    scale: ScaleName = "micro",
    seeds: int = 3,
    overrides: Mapping[str, Any] | None = None,
    texts: str | Path | None = None,
    select: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What `reproduce` would train for the same arguments, one row an experiment.

    A run that an earlier experiment of the list shares counts there. Runs on a CPU have
    `core_hours`, those on a GPU `gpu_hours`, of the GPU that `parcae plan` assumes.
    """
    rows, seen = [], set[str]()
    for name, runs in _plan(names, scale, seeds, overrides, texts, select).items():
        selected = {run.key: run.recipe for run in runs if _is_selected(run, select or {})}
        new = {key: recipe for key, recipe in selected.items() if key not in seen}
        seen |= new.keys()
        flops = {True: 0.0, False: 0.0}
        for recipe in new.values():
            steps = total_steps(recipe) or 0
            flops[recipe.run.device == "cpu"] += steps * flops_per_step(recipe)
        rows.append(
            {
                "experiment": name,
                "title": CATALOGUE[name].title,
                "in_paper": CATALOGUE[name].in_paper,
                "runs": len(new),
                "flops": sum(flops.values()),
                "core_hours": flops[True] / CORE_FLOPS / 3600,
                "gpu_hours": flops[False] / (UTILISATION * PEAK_FLOPS[DEFAULT_GPU]) / 3600,
            }
        )
    return rows


def _plan(
    names: str | Iterable[str],
    scale: ScaleName,
    seeds: int,
    overrides: Mapping[str, Any] | None,
    texts: str | Path | None,
    select: Mapping[str, Any] | None,
) -> dict[str, list[Run]]:
    """All runs of each experiment, of which some are selected; an error names the experiment."""
    if texts == BUILTIN:
        overrides = merge({"data": {"sources": [BUILTIN]}}, overrides or {})
    sizes, plan = Scale(scale, seeds, overrides or {}), {}
    for name in find_experiments(names):
        try:
            plan[name] = list(CATALOGUE[name].runs(sizes))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        if select and not any(_is_selected(run, select) for run in plan[name]):
            labels = sorted({label for run in plan[name] for label in run.labels})
            known = (
                "; ".join(f"{label}={_values(plan[name], label)}" for label in labels) or "no runs"
            )
            wanted = " and ".join(f"{label}={value}" for label, value in select.items())
            raise ConfigError(f"select: {name} has no run with {wanted}. It has: {known}.")
    return plan


def _values(runs: Iterable[Run], label: str) -> str:
    values = dict.fromkeys(str(run.labels[label]) for run in runs if label in run.labels)
    return " | ".join(values)


def _is_selected(run: Run, select: Mapping[str, Any]) -> bool:
    return all(run.labels.get(label) == value for label, value in select.items())


def _read_notes(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return read_text(path)
    except UnicodeDecodeError:
        raise FileError(f"{path}: not UTF-8. Convert it.") from None


def find_experiments(names: str | Iterable[str]) -> list[str]:
    """The names of experiments, checked; "all" stands for every one."""
    given = [names] if isinstance(names, str) else list(names)
    if given == ["all"]:
        return list(CATALOGUE)
    for name in given:
        if name not in CATALOGUE:
            raise ConfigError(
                f"{name}: no such experiment. {suggest(name, list(CATALOGUE))} "
                "`parcae reproduce list` lists all."
            )
    return given


@dataclass
class _Work:
    """The runs that experiments need, and the files of what was measured on them."""

    store: Store
    results: Path
    plan: Mapping[str, Sequence[Run]]

    def file(self, name: str) -> Path:
        return self.results / f"{name}.json"

    def has(self, name: str) -> bool:
        return self.file(name).exists()

    def read(self, name: str) -> Results:
        """The results of the planned runs; of all that are in the file if none are planned."""
        everything, keys = self._read_all(name), {run.key for run in self.plan.get(name, ())}
        rows = [row for row in everything.rows if not keys or row["key"] in keys]
        return Results(rows, len(keys) or everything.planned)

    def _read_all(self, name: str) -> Results:
        path = self.file(name)
        if not path.exists():
            return Results([], 0)
        tree = read_json(path)
        with interpreting(path, "Was it edited?"):
            results = Results(tree["runs"], tree["planned"])
            results.check()
        return results

    def missing(self) -> list[Run]:
        """The runs that an experiment has not measured; their folders may be on another machine."""
        measured = {name: {row["key"] for row in self.read(name).rows} for name in self.plan}
        return [
            run for name, runs in self.plan.items() for run in runs if run.key not in measured[name]
        ]

    def add(self, run: Run) -> None:
        """Measure a run that has ended, for every experiment that needs it."""
        for name, runs in self.plan.items():
            if any(run.key == other.key for other in runs):
                self._measure(name)

    def collect(self) -> None:
        """Measure everything that has ended and is not measured yet."""
        for name in self.plan:
            self._measure(name)

    def _measure(self, name: str) -> None:
        known = {row["key"]: row for row in self._read_all(name).rows}
        shared = self._measured_by_others(name)
        rows: list[Row] = []
        if not self.plan[name] and self.store.texts is not None:
            folder = self.store.path / "data" / name
            rows = list(known.values()) or CATALOGUE[name].measure_texts(self.store.texts, folder)
        for run in self.plan[name]:
            row = known.get(run.key) or shared.get(run.key)
            if row is None and self.store.has_ended(run):
                try:
                    measured = CATALOGUE[name].measure(run, self.store)
                except FileError as error:
                    console.print_text(f"{name}: {error}")
                    continue
                minutes = round(self.store.core_minutes(run), 3)
                row = {"key": run.key, **run.labels, "core_minutes": minutes, **measured}
            if row is not None:
                rows.append({**row, **run.labels})
        keys = {run.key for run in self.plan[name]}
        planned = len(keys) or len(rows)
        if keys:  # runs of other seeds or settings stay in the file
            rows += [row for key, row in known.items() if key not in keys]
        if rows:
            write_text(self.file(name), _format(name, planned, rows))

    def _measured_by_others(self, name: str) -> dict[str, Row]:
        """By key: what the files of other experiments say of runs, which may have been trained on
        another machine, for an experiment that measures no more than any does."""
        if type(CATALOGUE[name]).measure is not Experiment.measure:
            return {}
        needed = ("key", "core_minutes", *RECORDED)
        return {
            row["key"]: {field: row[field] for field in needed}
            for other in CATALOGUE
            if other != name
            for row in self._read_all(other).rows
            if {*needed} <= row.keys()
        }


def _format(name: str, planned: int, rows: Sequence[Row]) -> str:
    """JSON with one run per line, so that a repository shows which runs changed."""
    import json

    lines = ",\n".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows)
    return f'{{"experiment": "{name}", "planned": {planned}, "runs": [\n{lines}\n]}}\n'


def _texts(folder: str | Path | None) -> Path | None:
    if folder is not None and folder != BUILTIN:
        if not Path(folder).is_dir():
            raise FileError(f"{folder}: no such folder. Give the folder of texts by --texts.")
        return Path(folder)
    data = os.environ.get("PARCAE_TEST_DATA")
    return Path(data) / "data" / "corpora" if data and folder is None else None
