"""The page of all claims: verdicts first, then each experiment with its numbers and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from parcae.config import ConfigError
from parcae.experiments.experiment import Experiment, Results
from parcae.experiments.verdicts import INCOMPLETE, NOT_RUN, TOY, Claim
from parcae.files import interpreting, write_text
from parcae.tables import markdown_table

INTRODUCTION = """\
# The paper, reproduced

{runs} This page lists the claims of the paper
and a few beyond it, with the rule that decides each and the results so far at small scale.

- **Scale.** {scale} Each section gives the processor time of its runs.
- **Verdicts** follow by rule from the numbers and their spread over seeds
  (`src/parcae/experiments/verdicts.py`); the rules were fixed before the runs, with the
  exceptions named below. *Shown*: the whole 95 % interval of the effect agrees with the claim.
  *Shown weakly*: every seed agrees, but the interval includes zero. *Contradicted*: the whole
  interval disagrees. *Not shown at this scale*: otherwise. Claims about a number of cases are
  *shown* if all agree, *shown weakly* from three quarters on, and *contradicted* up to one quarter.
  A single case or seed shows a claim weakly at best. *Incomplete*: not all runs of the experiment
  exist. The intervals are not corrected for the number of claims: of forty without an effect, one
  or two would look shown or contradicted.
- **Intervals** (±) are Student's, over seeds, from three seeds on; below that the values of all
  seeds are listed. Models that are compared are paired by seed: they are trained on the same
  batches, and at the same depths where these are sampled in the same way.
- **Symbols.** T: loops at test time. mu or mu_rec: mean loops in training. mu_bwd: loops with
  gradient. ρ: spectral radius of A. RDM: recurrent depth model, whose A is not constrained.
  WikiText: perplexity per word.
- **Data.** {data} `--texts builtin` trains
  on the source code of Python's standard library instead, `--data.sources '["FILE"]'` on any text.

`parcae reproduce all` trains what is missing and writes this page;
`parcae reproduce all --redraw --results results --page docs/reproduction.md` writes it from the
committed results, without training.
"""


SCALES = {
    "micro": """Models of about 0.2 million parameters (0.03 to 0.8 million), in one comparison 2.3
  million. Most runs on text take 1,000 steps (a million tokens): 400 or 500 for learning rates and
  mu, 4,000 and 12,000 where data are the question, 2,500 for the largest models; those at
  fixed FLOPs last as long as their budget. A run on a synthetic task takes 4,000 steps, on walks
  2,000. w16 to w128 are models of that width with one layer each in prelude, core and coda.""",
    "paper": "The models, tokens and FLOPs of the paper.",
    "toy": "Models and runs too small to decide anything: this scale shows that everything works.",
}
BUDGET = {"micro": " of 22 (20 were planned; the walks were added)"}
DATA = {
    "micro": """Text experiments train on textbooks and encyclopedia articles that are not part of
  the repository. `--texts FOLDER` names their folder;""",
    "paper": "Text experiments train on the data of the paper's recipes;",
    "toy": "Text experiments train on the source code of Python's standard library;",
}


def write_page(
    catalogue: Mapping[str, Experiment],
    found: Mapping[str, Results],
    page: Path,
    notes: str = "",
    scale: str = "micro",
) -> Path:
    """Write the page, and the figures of experiments with results into a folder beside it.

    `notes`: Markdown between the table of claims and the experiments.
    """
    claims = {
        name: judge(experiment, found.get(name), scale) for name, experiment in catalogue.items()
    }
    introduction = INTRODUCTION.format(
        runs=_count(catalogue, found), scale=SCALES[scale], data=DATA[scale]
    )
    parts = [introduction, _summary(catalogue, claims, found, scale), *([notes] if notes else [])]
    figures = page.with_suffix("")
    for name, experiment in catalogue.items():
        results = found.get(name)
        if results is not None and results.rows:
            with _taking_apart(experiment):
                figure = experiment.draw(results, figures / f"{name}.png")
                link = figure.relative_to(page.parent).as_posix()
                parts.append(_section(experiment, results, claims[name], link))
        else:
            parts.append(
                f"## {experiment.title}\n\n`{name}`, {experiment.in_paper}. Not run yet; "
                f"`parcae reproduce {name} --dry-run` prints its cost.\n\n{experiment.paper}\n"
            )
    write_text(page, "\n".join(parts))
    return page


def _taking_apart(experiment: Experiment) -> AbstractContextManager[None]:
    """Values of a file of results are what an experiment expects, unless the file was edited."""
    remedy = "Was their file edited? PARCAE_DEBUG=1 shows where."
    return interpreting(f"the results of {experiment.name}", remedy, passed_on=(ConfigError,))


def _count(catalogue: Mapping[str, Experiment], found: Mapping[str, Results]) -> str:
    """How many experiments have runs, as a sentence."""
    started = [found[name] for name in catalogue if name in found and found[name].rows]
    complete = sum(len(results.rows) >= results.planned for results in started)
    return f"**{len(started)} of {len(catalogue)} experiments have runs ({complete} complete).**"


def judge(experiment: Experiment, results: Results | None, scale: str) -> list[Claim]:
    """The claims with their verdicts, if all runs exist; the toy scale decides nothing."""
    with _taking_apart(experiment):
        claims = experiment.claims(results or Results((), 0))
    if results is None or not results.rows:
        return [Claim(claim.statement, NOT_RUN) for claim in claims]
    if scale == "toy" or len(results.rows) < results.planned:
        verdict = TOY if scale == "toy" else INCOMPLETE
        return [replace(claim, verdict=verdict) for claim in claims]
    return claims


def _summary(
    catalogue: Mapping[str, Experiment],
    claims: Mapping[str, Sequence[Claim]],
    found: Mapping[str, Results],
    scale: str,
) -> str:
    rows = []
    for name, experiment in catalogue.items():
        results = found.get(name)
        runs = "–" if results is None else f"{len(results.rows)} of {results.planned}"
        for index, claim in enumerate(claims[name]):
            link = f"[{name}](#{_anchor(experiment.title)})" if index == 0 else ""
            rows.append((link, claim.statement, f"*{claim.verdict}*", "" if index else runs))
    minutes = sum(results.core_minutes for results in _once(found))
    lines = [("experiment", "claim", "verdict", "runs"), ("---",) * 4, *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        + f"\nProcessor time so far: {minutes / 60:.1f} core-hours{BUDGET.get(scale, '')}; "
        "runs that several experiments share count once.\n"
    )


def _once(found: Mapping[str, Results]) -> list[Results]:
    """The results without runs that an earlier experiment has."""
    seen: set[str] = set()
    parts = []
    for results in found.values():
        parts.append(Results([row for row in results.rows if row["key"] not in seen], 0))
        seen |= {row["key"] for row in results.rows}
    return parts


def _section(experiment: Experiment, results: Results, claims: Sequence[Claim], link: str) -> str:
    columns, rows = experiment.table(results)
    verdicts = "\n".join(
        f"- *{claim.verdict}*: {claim.statement}." + (f" {claim.evidence}." * bool(claim.evidence))
        for claim in claims
    )
    table = markdown_table(columns, rows) if rows else ""
    return f"""\
## {experiment.title}

`{experiment.name}`, {experiment.in_paper}.

{verdicts}

![{experiment.title}]({link})

**The paper.** {experiment.paper}

**Here.** {len(results.rows)} of {results.planned} runs.

{table}
```console
parcae reproduce {experiment.name}      # {results.core_minutes:.0f} core-minutes
```
"""


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
