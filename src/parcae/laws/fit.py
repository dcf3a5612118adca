"""Fit every law to a table of runs, and save the result: `parcae.fit`.

    result = parcae.fit("runs.csv")
    law = result.models["parcae-140m"].laws["training"]
    law.values, law.intervals, law.quality.r_squared
    result.save("out/fit")            # fit.json, summary.md, figures, laws.html

A law that the data do not determine is not fitted; `not_fitted` has the reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError, require
from parcae.files import FileError, read_sealed, write_sealed, write_text
from parcae.laws import DEFAULT_BOOTSTRAP_SAMPLES, DEFAULT_STARTS, forms, isoflop, loop_curves
from parcae.laws.bootstrap import (
    CONFIDENCE,
    BootstrapSamples,
    LawResult,
    Quality,
    assess,
    interval,
    leave_one_budget_out,
)
from parcae.laws.forms import LAWS, Law
from parcae.laws.model_runs import CostModel, ModelRuns, runs_of_model
from parcae.laws.optimise import Search, StartCounts, fit_law
from parcae.laws.table import FitError, GapShare, Table, as_table, gap_shares, is_transformer
from parcae.schema import require_range
from parcae.tables import ShownAsTable

Progress = Callable[[str], None]
"""Called with a description when a step begins."""
STEPS_PER_MODEL = 5
MIN_BOOTSTRAP_SAMPLES = 20
FORMAT = 3
FIT_FILE, SUMMARY_FILE, PAGE_FILE = "fit.json", "summary.md", "laws.html"
SWEEP_FOLDER = "fit"
"""Where the files are in the folder of a sweep."""
DIGITS = 9
"""Significant digits of saved bootstrap samples: far below their spread."""
REMEDY = "Write it again with `parcae fit`."


@dataclass(frozen=True)
class FitSettings:
    """The settings of a fit; the default numbers of starts are those of the paper."""

    starts: int = DEFAULT_STARTS
    unified_starts: int = 2 * DEFAULT_STARTS
    bootstrap_samples: int = DEFAULT_BOOTSTRAP_SAMPLES
    """0 for no intervals."""
    halving: bool = True
    seed: int = 0
    best_of: tuple[str, ...] | None = None
    """Columns of settings of which each point takes the best; None for all that differ."""

    def search(self, starts: int) -> Search:
        return Search(starts=starts, seed=self.seed, halving=self.halving)


@dataclass(kw_only=True)
class ModelLaws:
    """The laws of one model and all else that a prediction needs; this part is read from a file."""

    model: str
    cost: CostModel
    spans: dict[str, tuple[float, float]]
    """Lowest and highest mean_loops, tokens, flops and test_loops of the fitted runs."""
    laws: dict[str, LawResult] = field(default_factory=dict)
    """By name of the law; with the suffix `/frozen` if the training law was frozen."""
    power_laws: dict[str, isoflop.PowerLaw] = field(default_factory=dict)
    """`loops` and `tokens`: optima of the parabolas against FLOPs."""
    warnings: list[str] = field(default_factory=list)
    not_fitted: dict[str, str] = field(default_factory=dict)
    """By law: the reason."""

    def law(self, *names: str) -> LawResult:
        """The first of these laws that was fitted."""
        for name in names:
            if name in self.laws:
                return self.laws[name]
        reason = next((self.not_fitted[name] for name in names if name in self.not_fitted), "")
        reason = sentence_without(self.model, reason) or REMEDY
        raise ConfigError(f"{self.model}: the law {names[0]!r} was not fitted. {reason}")


def sentence_without(model: str, reason: str) -> str:
    """A reason as a sentence that does not begin with the name of its model."""
    text = reason.removeprefix(f"{model}: ")
    return text[:1].upper() + text[1:]


@dataclass(kw_only=True)
class ModelFit(ModelLaws):
    """The laws of one model, the runs they were fitted to, and comparisons with measurements."""

    runs: ModelRuns
    parabolas: dict[str, list[isoflop.Parabola]] = field(default_factory=dict)
    test_time: loop_curves.TestTimeFits | None = None
    conditionings: list[loop_curves.Conditioning] = field(default_factory=list)
    fixed_depth: list[isoflop.FixedDepth] = field(default_factory=list)
    held_out: list[loop_curves.HeldOut] = field(default_factory=list)

    @property
    def power_law_intervals(self) -> dict[str, tuple[float, float]]:
        """90 % intervals of the exponents."""
        return {
            name: interval(law.sample_exponents())
            for name, law in self.power_laws.items()
            if law.samples
        }


@dataclass(frozen=True)
class FitResult(ShownAsTable):
    """All laws fitted to a table of runs."""

    data: Table
    models: dict[str, ModelFit]
    gap_shares: list[GapShare]
    settings: FitSettings

    def table(self) -> list[dict[str, Any]]:
        """One row per model, law and parameter, with its 90 % interval."""
        rows = []
        for model in self.models.values():
            for name, law in model.laws.items():
                intervals = law.intervals
                for parameter, value in law.values.items():
                    low, high = intervals.get(parameter, (None, None))
                    row = {"model": model.model, "law": name, "parameter": parameter}
                    rows.append({**row, "value": value, "low": low, "high": high})
        return rows

    def save(
        self, folder: str | Path, *, figures: bool = True, progress: Progress = lambda _: None
    ) -> list[str]:
        """Write fit.json, summary.md and, with `figures`, the figures and laws.html.

        Returns the names of the files, PNG figures only.
        """
        from parcae.laws.summary import markdown

        folder = Path(folder)
        write_sealed(folder / FIT_FILE, to_plain({"format": FORMAT, **_tree(self)}))
        pages, pictures = [], []
        if figures:
            from parcae.laws.figures import draw_all
            from parcae.laws.page import write_page

            progress("figures")
            pictures = draw_all(self, folder)
            pages = [PAGE_FILE] if write_page(self, folder / PAGE_FILE) else []
        write_text(folder / SUMMARY_FILE, markdown(self, pictures))
        return [FIT_FILE, SUMMARY_FILE, *pages, *pictures]


def fit(
    table: Any,
    *,
    starts: int = DEFAULT_STARTS,
    unified_starts: int | None = None,
    bootstrap_samples: int = DEFAULT_BOOTSTRAP_SAMPLES,
    halving: bool = True,
    seed: int = 0,
    best_of: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
) -> FitResult:
    """Fit all scaling laws to a table of runs.

    `table` is a path (.csv, .parquet, or the folder of a sweep), a list of dicts, a dict of columns
    or a DataFrame. Each law is fitted from `starts` random starts (unified laws from twice as many,
    unless `unified_starts` is given), of which `halving` drops the worse ones early. Intervals
    are 90 % intervals of `bootstrap_samples` bootstrap samples; 0 for no intervals. Where runs of
    the same loops and FLOPs differ in settings, laws are fitted to those of the best setting; a
    list of columns in `best_of` names the settings to choose by, an empty one keeps all runs.
    """
    require_range("starts", starts, f"The default is {DEFAULT_STARTS}.", at_least=1)
    require_range("seed", seed, at_least=0)
    require(
        bootstrap_samples == 0 or bootstrap_samples >= MIN_BOOTSTRAP_SAMPLES,
        "bootstrap_samples",
        f"{bootstrap_samples} are too few for intervals",
        f"Use {MIN_BOOTSTRAP_SAMPLES} or more, or 0 for no intervals.",
    )
    data = as_table(table)
    unified_starts = 2 * starts if unified_starts is None else unified_starts
    columns = None if best_of is None else tuple(best_of)
    settings = FitSettings(starts, unified_starts, bootstrap_samples, halving, seed, columns)
    models = {
        name: fit_model(runs_of_model(data, name, columns), settings, progress)
        for name in looped_models(data)
    }
    if not models:
        raise FitError(f"{data.source}: no looped models, only Transformers. Add looped runs.")
    if not any(model.laws or model.test_time or model.parabolas for model in models.values()):
        reasons = dict.fromkeys(r for model in models.values() for r in model.not_fitted.values())
        listed = " ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
        raise FitError(f"{data.source}: no law can be fitted: {listed}")
    return FitResult(data, models, gap_shares(data), settings)


def looped_models(table: Table) -> list[str]:
    return [name for name in table.models if not is_transformer(name)]


def fit_model(runs: ModelRuns, settings: FitSettings, progress: Progress) -> ModelFit:
    """Fit all laws to the runs of one model, and compare them with its held-out runs."""
    fitted = runs.points.take(runs.fitted)
    columns = {"mean_loops": fitted.mean_loops, "tokens": fitted.tokens}
    columns |= {"flops": runs.flops[runs.fitted], "test_loops": fitted.test_loops}
    spans = {name: (float(v.min()), float(v.max())) for name, v in columns.items() if len(v)}
    model = ModelFit(model=runs.model, cost=runs.cost, spans=spans, runs=runs)
    progress(f"{runs.model}: parabolas")
    _fit_parabolas(model, settings)
    progress(f"{runs.model}: training law")
    with _note_reason(model, "training"):
        _fit_training(model, settings)
    progress(f"{runs.model}: test-time curves")
    with _note_reason(model, "test-time"):
        _fit_test_time(model)
    progress(f"{runs.model}: unified law")
    with _note_reason(model, "unified"):
        _fit_unified(model, settings)
    progress(f"{runs.model}: comparisons")
    training, unified = model.laws.get("training"), model.laws.get("unified")
    if runs.fitted.any():
        model.fixed_depth = isoflop.compare_fixed_depth(runs, training)
    if training is not None:
        model.held_out = loop_curves.predict_held_out(runs, training, unified)
    return model


@contextmanager
def _note_reason(model: ModelFit, *names: str) -> Iterator[None]:
    """Record why these laws were not fitted, instead of raising."""
    try:
        yield
    except FitError as error:
        model.not_fitted.update(dict.fromkeys(names, str(error)))


def _fit_parabolas(model: ModelFit, settings: FitSettings) -> None:
    runs, rows = model.runs, model.runs.training()
    points, budget = runs.points.take(rows), runs.budget[rows]
    model.warnings += runs.mixed_settings()
    for name, where in (("loops", points.mean_loops), ("tokens", points.tokens)):
        with _note_reason(model, f"parabolas in {name}"):
            runs.check_losses()
            parabolas = isoflop.fit_parabolas(where, points.loss, budget)
            model.parabolas[name] = parabolas
            if name == "loops":
                model.warnings += isoflop.parabola_warnings(parabolas)
            with _note_reason(model, f"power law of {name}"):
                law = isoflop.fit_power_law(parabolas)
                if count := settings.bootstrap_samples:
                    samples = isoflop.bootstrap_parabolas(
                        parabolas, where, points.loss, budget, count, settings.seed
                    )
                    law = isoflop.add_samples(law, samples)
                    model.warnings += isoflop.power_law_warnings(name, law)
                model.power_laws[name] = law


def _fit_training(model: ModelFit, settings: FitSettings) -> None:
    runs = model.runs
    runs.check_training()
    rows, search = runs.training(), settings.search(settings.starts)
    law_fit = fit_law(forms.TRAINING, runs.points.take(rows), search)
    left_out = leave_one_budget_out(forms.TRAINING, law_fit.points, runs.budget[rows], search)
    result, messages = assess(law_fit, settings.bootstrap_samples, settings.seed, left_out)
    model.laws["training"] = result
    model.warnings += messages


def _fit_test_time(model: ModelFit) -> None:
    runs = model.runs
    runs.check_test_time()
    model.test_time, messages = loop_curves.analyse_curves(runs)
    model.warnings += messages


def _fit_unified(model: ModelFit, settings: FitSettings) -> None:
    runs = model.runs
    runs.check_training()
    runs.check_test_time()
    points = runs.points.take(runs.fitted)
    if len(np.unique(points.test_loops)) < 3:
        raise FitError(
            f"{model.model}: the grid was measured at fewer than three test_loops, which does not "
            "determine the decay with T. Measure its runs at more."
        )
    if "training" not in model.laws:
        raise FitError(model.not_fitted["training"])
    training = model.laws["training"].values
    search = settings.search(settings.unified_starts)
    end_to_end = runs.curves(runs.held_out() & runs.in_set("end-to-end"), 2)
    for law in reversed(forms.CONDITIONINGS):  # those with a fixed exponent of mu come first
        with _note_reason(model, law.name):
            joint = fit_law(law, points, search, known=_contained(law, model.laws))
            known = _contained(law, model.laws, "/frozen")
            frozen = fit_law(law, points, search, frozen=training, known=known)
            samples = settings.bootstrap_samples if law is forms.UNIFIED else 0
            result, messages = assess(joint, samples, settings.seed)
            model.laws[law.name] = result
            model.laws[f"{law.name}/frozen"], _ = assess(frozen, 0, settings.seed)
            model.conditionings.insert(0, loop_curves.conditioning(joint, frozen, end_to_end))
            model.warnings += messages


def _contained(law: forms.Law, laws: Mapping[str, Any], suffix: str = "") -> list[dict[str, float]]:
    """The fits of laws that are special cases of the one with a learned exponent of mu. Starting
    from them too, it never fits worse than they do."""
    if law is not forms.UNIFIED_GAMMA:
        return []
    exponents = {forms.UNIFIED.name: 1.0, forms.UNIFIED_PLAIN.name: 0.0}
    return [
        {**laws[name + suffix].values, "gamma": gamma}
        for name, gamma in exponents.items()
        if name + suffix in laws
    ]


def _tree(result: FitResult) -> dict[str, Any]:
    """The contents of fit.json."""
    data = result.data
    return {
        "data": {"source": data.source, "sha256": data.sha256, "rows": len(data)},
        "settings": result.settings,
        "confidence": CONFIDENCE,
        "models": {name: _model_tree(model) for name, model in result.models.items()},
        "gap_shares": result.gap_shares,
    }


def _model_tree(model: ModelFit) -> dict[str, Any]:
    return {
        "fitted": {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelLaws)},
        "parabolas": model.parabolas,
        "power_law_intervals": model.power_law_intervals,
        "test_time": None if model.test_time is None else model.test_time.to_json(),
        "conditionings": model.conditionings,
        "fixed_depth": model.fixed_depth,
        "held_out": model.held_out,
    }


def to_plain(value: Any) -> Any:
    """`value` as JSON types: laws by name, arrays as lists, non-finite numbers as null."""
    if isinstance(value, Law):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        tree = {f.name: to_plain(getattr(value, f.name)) for f in fields}
        if isinstance(value, LawResult):
            tree |= {"formula": value.law.formula, "intervals": to_plain(value.intervals)}
        return tree
    if isinstance(value, Mapping):
        return {
            f"{key:g}" if isinstance(key, float) else str(key): to_plain(item)
            for key, item in value.items()
        }
    if isinstance(value, np.ndarray):
        return [to_plain(float(f"{number:.{DIGITS}g}")) for number in value.ravel().tolist()]
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def read_fit(path: str | Path) -> dict[str, ModelLaws]:
    """The models of a fit.json, of the folder that contains it, or of a fitted sweep, by name."""
    path = Path(path)
    if path.is_dir():
        in_sweep = path / SWEEP_FOLDER / FIT_FILE
        path = in_sweep if in_sweep.exists() else path / FIT_FILE
    if not path.exists():
        raise FileError(f"{path}: no such file. Write it with `parcae fit TABLE`.")
    tree = read_sealed(path, REMEDY)
    if tree.get("format") != FORMAT:
        raise FileError(f"{path}: format {tree.get('format')!r}, expected {FORMAT}. {REMEDY}")
    try:
        return {name: _read_model(name, model["fitted"]) for name, model in tree["models"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise FileError(f"{path}: not a fit ({reason}). {REMEDY}") from None


def _read_model(name: str, tree: dict[str, Any]) -> ModelLaws:
    cost = dict(tree["cost"])
    measured = {float(loops): tuple(pair) for loops, pair in cost.pop("measured").items()}
    return ModelLaws(
        model=name,
        cost=CostModel(**cost, measured=measured),
        spans={key: tuple(span) for key, span in tree["spans"].items()},
        laws={key: _read_law(law) for key, law in tree["laws"].items()},
        power_laws={
            key: isoflop.PowerLaw(
                float(law["factor"]),
                float(law["exponent"]),
                tuple(map(float, law["budgets"])),
                tuple((float(factor), float(exponent)) for factor, exponent in law["samples"]),
            )
            for key, law in tree["power_laws"].items()
        },
        warnings=list(tree["warnings"]),
        not_fitted=dict(tree["not_fitted"]),
    )


def _read_law(tree: dict[str, Any]) -> LawResult:
    law, samples = LAWS[tree["law"]], None
    if tree["samples"] is not None:
        columns = tree["samples"]["values"]
        values = {name: np.array(columns[name], dtype=float) for name in law.parameters}
        if any(column.shape != (len(column),) for column in values.values()) or (
            len({len(column) for column in values.values()}) > 1
        ):
            raise ValueError("the bootstrap samples of parameters differ in number")
        samples = BootstrapSamples(values, tree["samples"]["converged"])
    return LawResult(
        law=law,
        values={name: float(tree["values"][name]) for name in law.parameters},
        samples=samples,
        quality=None if tree["quality"] is None else Quality(**tree["quality"]),
        frozen=tuple(tree["frozen"]),
        starts=None if tree["starts"] is None else StartCounts(**tree["starts"]),
        left_out={float(budget): error for budget, error in tree["left_out"].items()},
    )
