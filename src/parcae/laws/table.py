"""The table of runs: one row per measured loss, as CSV or Parquet.

    model,mean_loops,tokens,flops,effective_params,test_loops,loss
    parcae-140m,2,1763602140,1e18,158482176,2,3.266

Columns beyond these are allowed and kept. Some of them mean something: `seed` and `run` tell apart
runs that are otherwise alike, `role` (`fit` or `held-out`) says which runs a law may learn from,
`budget` which runs share one where FLOPs are not quite equal; `core` and `core_extended` are
scores that the gap to the next larger Transformer is told in.
A table that cannot be right is refused, with the rows and the columns at fault.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError
from parcae.files import FileError, atomic_path, reading, sha256, write_text
from parcae.recipe import suggest

COLUMNS = ("model", "mean_loops", "tokens", "flops", "effective_params", "test_loops", "loss")
NUMBERS = (*COLUMNS[1:], "budget")
TEXTS = ("model", "run")
"""Names, also where they are spelled like numbers."""
IDENTITY = ("model", "mean_loops", "tokens", "flops", "seed", "run")
"""Rows that agree in these belong to one run."""
ROLES = ("fit", "held-out")
SUFFIXES = (".csv", ".parquet")
SHOWN = 6


class TableError(ConfigError):
    """A table that no law should be fitted to. The message names rows, columns and the remedy."""


@dataclass(frozen=True)
class Table:
    """Valid once it exists; columns are arrays of equal length, numbers as float64."""

    columns: Mapping[str, np.ndarray]
    source: str = "table"
    sha256: str = ""
    """Of the file it was read from."""

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.columns["loss"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def models(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(self["model"].tolist()))

    @property
    def run(self) -> np.ndarray:
        """A number for each row's run."""
        keys = [name for name in IDENTITY if name in self]
        numbers: dict[tuple[Any, ...], int] = {}
        columns = ([_same_if_empty(one) for one in self[name].tolist()] for name in keys)
        listed = zip(*columns, strict=True)
        return np.array([numbers.setdefault(key, len(numbers)) for key in listed])


def _same_if_empty(value: Any) -> Any:
    """An empty cell is like another empty cell; NaN is not like NaN."""
    return None if value != value or value == "" else value


def table_from_rows(rows: Sequence[Mapping[str, Any]], source: str = "table") -> Table:
    """A table from records; a key that a record lacks is empty there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    raw = {name: [row.get(name) for row in rows] for name in names}
    return Table(_typed(raw, source), source)


def read_table(path: str | Path) -> Table:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise TableError(f"{path}: not a table this can read. Use one of {', '.join(SUFFIXES)}.")
    raw = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    return Table(_typed(raw, str(path)), str(path), sha256(path))


def write_table(path: str | Path, table: Table) -> Path:
    """Whole or not at all; the suffix decides the format."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise TableError(f"{path}: not a table's name. Use one of {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        arrow = pyarrow.table({name: values.tolist() for name, values in table.columns.items()})
        with atomic_path(path) as temporary:
            pyarrow.parquet.write_table(arrow, temporary)
        return path
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(zip(*(map(_spell, values) for values in table.columns.values()), strict=True))
    write_text(path, text.getvalue())
    return path


def _spell(value: Any) -> str:
    """Numbers with every digit they have; a float keeps a decimal point only if it needs one."""
    if isinstance(value, float | np.floating):
        return (
            str(int(value))
            if float(value).is_integer() and abs(value) < 1e15
            else repr(float(value))
        )
    return "" if value is None else str(value)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with reading(path), path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.reader(stream))
    except UnicodeDecodeError:
        raise FileError(f"{path}: not UTF-8. Convert it.") from None
    except csv.Error as error:
        raise FileError(f"{path}: not CSV ({error}). Write it anew.") from None
    if not rows:
        raise TableError(f"{path}: empty. The first line names the columns {', '.join(COLUMNS)}.")
    names, body = [name.strip() for name in rows[0]], [row for row in rows[1:] if row]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TableError(f"{path}: the column {twice[0]!r} is there twice. Remove one.")
    for number, row in enumerate(body, 1):
        if len(row) != len(names):
            raise TableError(
                f"{path}: row {number} has {len(row)} cells for {len(names)} columns. Mend the row."
            )
    return {name: [row[place].strip() for row in body] for place, name in enumerate(names)}


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    import pyarrow
    import pyarrow.parquet

    with reading(path):
        try:
            return pyarrow.parquet.read_table(path).to_pydict()
        except pyarrow.ArrowInvalid as error:
            raise FileError(f"{path}: not a Parquet file ({error}). Write it anew.") from None


def _typed(raw: Mapping[str, list[Any]], source: str) -> dict[str, np.ndarray]:
    missing = [name for name in COLUMNS if name not in raw]
    if missing:
        have = ", ".join(raw) or "none"
        near = suggest(missing[0], list(raw)) if raw else ""
        raise TableError(
            f"{source}: no column {missing[0]!r}. Its columns are: {have}. "
            f"Add it, or rename one. {near}".strip()
        )
    return {
        name: _numbers(name, values, source)
        if name in NUMBERS
        else _text(values)
        if name in TEXTS
        else _plain(values)
        for name, values in raw.items()
    }


def _plain(values: list[Any]) -> np.ndarray:
    """Numbers where all are; else text."""
    try:
        return np.array([np.nan if value in ("", None) else float(value) for value in values])
    except (TypeError, ValueError):
        return _text(values)


def _text(values: list[Any]) -> np.ndarray:
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


def _numbers(name: str, values: list[Any], source: str) -> np.ndarray:
    numbers, wrong = np.full(len(values), np.nan), []
    for place, value in enumerate(values):
        try:
            numbers[place] = float(value) if value not in ("", None) else np.nan
        except (TypeError, ValueError):
            wrong.append(place)
    if wrong:
        raise TableError(
            f"{source}: {name!r} is no number in {_rows(wrong)} (such as {values[wrong[0]]!r}). "
            "Write numbers like 1e18 or 2.95."
        )
    return numbers


def _check(table: Table) -> None:
    source = table.source
    if not len(table):
        raise TableError(f"{source}: no rows. Add one for each measured loss.")
    for name in (name for name in NUMBERS if name in table):
        values = table[name]
        _refuse(table, ~np.isfinite(values), f"{name!r} is empty or not finite", "Remove or mend")
        _refuse(table, values <= 0, f"{name!r} is not positive", "Correct")
    nameless = np.array([not name.strip() for name in table["model"].tolist()])
    _refuse(table, nameless, "'model' is empty", "Name")
    for name in ("mean_loops", "test_loops"):
        _refuse(table, table[name] < 1, f"{name!r} is below 1", "Correct")
    if "role" in table:
        wrong = np.array([role not in ROLES for role in table["role"].tolist()])
        _refuse(table, wrong, f"'role' is neither {' nor '.join(ROLES)}", "Correct")
    _check_repeats(table)
    _check_sizes(table)
    if len(table) > 1 and np.ptp(table["loss"]) == 0:
        raise TableError(
            f"{source}: all {len(table)} losses are {table['loss'][0]:g}, so nothing can be learnt "
            "from them. Check how they were measured."
        )


def _check_repeats(table: Table) -> None:
    seen: dict[tuple[int, float], int] = {}
    again = []
    for place, key in enumerate(zip(table.run.tolist(), table["test_loops"].tolist(), strict=True)):
        if seen.setdefault(key, place) != place:
            again += [seen[key], place]
    if again:
        raise TableError(
            f"{table.source}: {_rows(sorted(set(again)))} measure the same run at the same "
            "test_loops. Remove repeats; for repeated runs add a column 'seed' or 'run'."
        )


def _check_sizes(table: Table) -> None:
    """A model's N(mu) is a function of mu."""
    first: dict[tuple[str, float], int] = {}
    sizes = table["effective_params"]
    for place, key in enumerate(
        zip(table["model"].tolist(), table["mean_loops"].tolist(), strict=True)
    ):
        other = first.setdefault(key, place)
        if abs(sizes[place] / sizes[other] - 1) > 1e-6:
            raise TableError(
                f"{table.source}: {_rows([other, place])} give {key[0]!r} at mean_loops "
                f"{key[1]:g} two values of 'effective_params'. Give each size a name of its own."
            )


def _refuse(table: Table, wrong: np.ndarray, problem: str, remedy: str) -> None:
    if wrong.any():
        places = np.flatnonzero(wrong).tolist()
        what = "that row" if len(places) == 1 else "those rows"
        raise TableError(f"{table.source}: {problem} in {_rows(places)}. {remedy} {what}.")


def _rows(places: Iterable[int]) -> str:
    """Counted from 1, without the line of names."""
    numbers = [place + 1 for place in places]
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"row {shown}" if len(numbers) == 1 else f"rows {shown}{more}"
