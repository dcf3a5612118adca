"""Write the counts of campaigns into docs/reliability.md.

    PYTHONPATH=src:tests:benchmarks python -m faults.page

results/faults.json, results/fuzz.json and results/soak.json become the tables between the markers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from faults.commands import COMMANDS
from faults.kinds import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "results"


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def matrix(tree: dict[str, Any]) -> str:
    """How often each fault was tried on each command, and what was promised and seen."""
    cells = tree["cells"]
    counts = [(name, *(_cell(cells, command, name) for command in COMMANDS)) for name in FAULTS]
    rows = [(k.name, k.promise, k.how, _seen(cells, k.name)) for k in FAULTS.values()]
    entries = [cell for of_command in cells.values() for cell in of_command.values()]
    tried, failed = (sum(entry[key] for entry in entries) for key in ("tried", "failures"))
    machines = sorted({entry.get("machine", tree["machine"]) for entry in entries})
    return (
        f"{tried:,} tries so far, {failed} failures, on {' and '.join(machines)}; of the events of "
        "most cells a random sample. How often each fault was tried on each command (– where it "
        "cannot happen):\n\n"
        f"{table(('fault', *COMMANDS), counts)}\n"
        f"{table(('fault', 'promised', 'how it is tried', 'seen'), rows)}"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _cell(cells: dict[str, Any], command: str, fault: str) -> str:
    if not FAULTS[fault].commands(COMMANDS[command]):
        return "–"
    cell = cells.get(command, {}).get(fault)
    if cell is None:
        return "not tried"
    return f"{cell['tried']}" + (f" ({cell['failures']} failed)" if cell["failures"] else "")


def _seen(cells: dict[str, Any], fault: str) -> str:
    seen: Counter[str] = Counter()
    for of_command in cells.values():
        seen.update(of_command.get(fault, {}).get("seen", {}))
    return "; ".join(f"{count:,}: {what}" for what, count in seen.most_common())


def fuzz(tree: dict[str, Any]) -> str:
    rows = [
        (name, f"{entry['cases']:,}", entry["failures"], f"{entry['seconds']:.0f}")
        for name, entry in tree["readers"].items()
    ]
    total = sum(entry["cases"] for entry in tree["readers"].values())
    failures = sum(entry["failures"] for entry in tree["readers"].values())
    return (
        f"{total:,} cases, {failures} failures, on {tree['machine']}:\n\n"
        f"{table(('reader', 'cases', 'failures', 'seconds of CPU time'), rows)}"
    )


STATISTIC = {"median": "median", "min": "smallest", "max": "largest"}


def soak(tree: dict[str, Any]) -> str:
    rows, lines = [], []
    for what in ("train", "serve"):
        found = tree.get(what)
        if found is None:
            continue
        minutes = f"{found['seconds'] / 60:.0f} minutes"
        if what == "train":
            done = found["evaluations"]["done"]
            lines.append(f"{minutes} of training: {found['steps']:,} steps, {done} evaluations")
        else:
            texts, wrong = found["texts"], found["wrong texts"]
            lines.append(f"{minutes} of serving: {texts:,} texts, {wrong} of them wrong")
        lines[-1] += f"; {'; '.join(found['problems']) or 'nothing grew'}."
        for name in ("memory", "disk", "checkpoints", "descriptors", "threads"):
            if name in found:
                values = (found[name][quarter] for quarter in ("second quarter", "last quarter"))
                texts = [f"{v / 1e6:.1f} MB" if name in ("memory", "disk") else v for v in values]
                rows.append((what, f"{name}, {STATISTIC[found[name]['of']]}", *texts))
    columns = ("", "", "second quarter", "last quarter")
    return f"On {tree['machine']}. {' '.join(lines)}\n\n{table(columns, rows)}"


PARTS = {"faults": matrix, "fuzz": fuzz, "soak": soak}


def updated(page: str) -> str:
    """The page with the parts between its markers written again."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if (tree := read(name)) and begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n{part(tree)}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
