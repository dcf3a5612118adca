"""The table of runs: one row per measured loss, as CSV or Parquet.

    model,mean_loops,tokens,flops,effective_params,test_loops,loss
    parcae-140m,2,1763602140,1e18,158482176,2,3.266

More columns are allowed and kept. Some have a meaning: `seed` and `run` distinguish runs that are
otherwise equal, `set` (`grid`, `curve` or `end-to-end`) says what a run was trained for, `role`
(`fit` or `held-out`) which runs laws are fitted to, `budget` groups runs whose FLOPs are not
exactly equal; `core`, `core_extended` and other names of `SCORES` are scores that `gap_shares`
compares. An inconsistent table raises an error that names the rows and columns.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from parcae.config import ConfigError
from parcae.files import FileError, atomic_path, open_file, reading, sha256, write_text
from parcae.recipe import suggest
from parcae.tables import csv_text

COLUMNS = ("model", "mean_loops", "tokens", "flops", "effective_params", "test_loops", "loss")
NUMBERS = (*COLUMNS[1:], "budget")
SCORES = ("loss", "core", "core_extended", "zero_shot", "wikitext", "lambada")
"""Measured of a model; the scores of suites, beside the loss, may be empty."""
SETS = ("grid", "curve", "end-to-end")
"""What a run was trained for: laws, curves of loss against T at fixed data, or on its own."""
TEXTS = ("model", "run")
"""Columns that hold text, even if it looks like a number."""
RUN_KEYS = ("model", "mean_loops", "tokens", "flops", "seed", "run")
"""Rows with equal values in these columns belong to one run."""
ROLES = ("fit", "held-out")
SUFFIXES = (".csv", ".tsv", ".parquet")
SEPARATORS = (",", ";", "\t")
TABLE_FILE = "runs.csv"
"""Name of the table in the folder of a sweep."""
MAX_LISTED_ROWS = 6
MAX_BYTES, MAX_COLUMNS, MAX_CELLS = 1 << 28, 1000, 2_000_000
"""Of a table in a file: a small one, compressed, can have more cells than fit in memory."""
TRANSFORMER = "transformer"
"""Models whose name starts so are baselines."""
SAME_SIZE = 1.1
"""Factor between the parameters of two models below which they count as of the same size."""
TOKENS_TOLERANCE = 0.01
"""Relative difference below which two models count as trained on the same number of tokens."""


class TableError(ConfigError):
    """An invalid table. The message names the rows, the columns and how to fix them."""


class FitError(ConfigError):
    """Data that do not determine a law. The message says what is missing and what to add."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length, numbers as float64; validated when it is created."""

    columns: Mapping[str, np.ndarray]
    source: str = "table"
    sha256: str = ""
    """Checksum of the file it was read from; empty if it was not read from a file."""

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
        """Names of the models, in order of appearance."""
        return list(dict.fromkeys(self["model"].tolist()))

    @property
    def run(self) -> np.ndarray:
        """The index of each row's run."""
        keys = [name for name in RUN_KEYS if name in self]
        indices: dict[tuple[Any, ...], int] = {}
        columns = ([_none_if_empty(value) for value in self[name].tolist()] for name in keys)
        return np.array(
            [indices.setdefault(key, len(indices)) for key in zip(*columns, strict=True)]
        )


def _none_if_empty(value: Any) -> Any:
    """None for an empty cell or NaN, so that empty cells compare equal."""
    return None if value != value or value == "" else value


def as_table(source: Any) -> Table:
    """A `Table` from any description of one.

    A path to a .csv or .parquet file or to the folder of a sweep, a list of dicts (one per row), a
    dict of columns, or an object with `to_dict("list")` such as a pandas DataFrame.
    """
    if isinstance(source, Table):
        return source
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_dir() and not (path / TABLE_FILE).exists():
            raise FileError(
                f"{path}: no {TABLE_FILE} in this folder. Give a table, or the folder of a sweep "
                "in which a run has finished."
            )
        return read_table(path / TABLE_FILE if path.is_dir() else path)
    if hasattr(source, "to_dict"):
        source = source.to_dict("list")
    if isinstance(source, Mapping):
        columns = {str(name): list(values) for name, values in source.items()}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise TableError(f"table: columns of different length: {lengths}. Make them equal.")
        return Table(_typed(columns, "table"), "table")
    return table_from_rows(list(source))


def table_from_rows(rows: Sequence[Mapping[str, Any]], source: str = "table") -> Table:
    """A table from one dict per row; a key missing in a row is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    raw = {name: [row.get(name) for row in rows] for name in names}
    return Table(_typed(raw, source), source)


def read_table(path: str | Path) -> Table:
    """Read a .csv, .tsv or .parquet file; CSV cells are separated by commas, semicolons or tabs."""
    path = _table_path(path)
    raw = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    return Table(_typed(raw, str(path)), str(path), sha256(path))


def write_table(path: str | Path, table: Table) -> Path:
    """Write a .csv, .tsv or .parquet file atomically."""
    path = _table_path(path)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        arrow = pyarrow.table({name: values.tolist() for name, values in table.columns.items()})
        with atomic_path(path) as temporary:
            pyarrow.parquet.write_table(arrow, temporary)
        return path
    text = io.StringIO()
    separator = "\t" if path.suffix == ".tsv" else ","
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerow(map(csv_text, table.columns))
    writer.writerows(zip(*(map(_cell, values) for values in table.columns.values()), strict=True))
    write_text(path, text.getvalue())
    return path


def _table_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise TableError(f"{path}: unknown table format. Use one of {', '.join(SUFFIXES)}.")
    return path


def _cell(value: Any) -> str:
    """The text of a CSV cell: all digits of a number, without a trailing .0."""
    if isinstance(value, float | np.floating):
        whole = float(value).is_integer() and abs(value) < 1e15
        return str(int(value)) if whole else repr(float(value))
    if isinstance(value, str):
        return csv_text(value)
    return "" if value is None else str(value)


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with open_file(path, MAX_BYTES) as content:
            stream = io.TextIOWrapper(content, newline="", encoding="utf-8-sig")
            separator = _separator(stream.readline())
            stream.seek(0)
            rows, cells = [], 0
            for row in csv.reader(stream, delimiter=separator):
                rows.append(row)
                _check_size(path, len(row), cells := cells + len(row))
    except UnicodeDecodeError:
        raise FileError(f"{path}: not encoded as UTF-8. Convert it.") from None
    except csv.Error as error:
        raise FileError(f"{path}: not a CSV file ({error}). Write it again.") from None
    if not rows:
        raise TableError(
            f"{path}: empty. The first line must name the columns {', '.join(COLUMNS)}."
        )
    names, body = [name.strip() for name in rows[0]], [row for row in rows[1:] if row]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise TableError(f"{path}: the column {repeated[0]!r} appears twice. Remove one.")
    for number, row in enumerate(body, 1):
        if len(row) != len(names):
            raise TableError(
                f"{path}: row {number} has {len(row)} cells for {len(names)} columns. Fix that row."
            )
    return {name: [row[index].strip() for row in body] for index, name in enumerate(names)}


def _separator(header: str) -> str:
    """The separator that finds the most known columns in the first line; a comma if none does."""

    def known(separator: str) -> int:
        names = {name.strip().strip('"') for name in header.split(separator)}
        return len(names & set(COLUMNS))

    return max(SEPARATORS, key=known)


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    import pyarrow
    import pyarrow.parquet

    with reading(path):
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
            columns = metadata.num_columns
            _check_size(path, columns, rows * max(1, columns))
            if (size := sum(group.total_byte_size for group in groups)) > MAX_BYTES:
                raise FileError(f"{path}: {size:,} bytes; at most {MAX_BYTES:,} are read.")
            is_text = pyarrow.types.is_string, pyarrow.types.is_large_string
            for field in schema:
                if pyarrow.types.is_nested(field.type) or "binary" in str(field.type):
                    raise FileError(
                        f"{path}: {field.name!r} is of the type {field.type!s:.100}. Give a "
                        "number or a text in each cell."
                    )
            texts = [field.name for field in schema if any(is_(field.type) for is_ in is_text)]
            table = pyarrow.parquet.read_table(path, read_dictionary=texts)
            return {name: _cells(table[name]) for name in table.column_names}
        except (FileNotFoundError, PermissionError, FileError):
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # also text of wrong bytes
            reason = " ".join(str(error).split())[:300]
            raise FileError(f"{path}: not a Parquet file ({reason}). Write it again.") from None


def _check_size(path: Path, columns: int, cells: int) -> None:
    if columns > MAX_COLUMNS:
        raise FileError(f"{path}: {columns:,} columns; at most {MAX_COLUMNS:,} are read.")
    if cells > MAX_CELLS:
        raise FileError(f"{path}: more than {MAX_CELLS:,} cells. Give a part of the table.")


def _cells(column: Any) -> list[Any]:
    """The values of a column; a text that a small file repeats is in memory once."""
    cells: list[Any] = []
    for chunk in column.chunks:
        if not hasattr(chunk, "dictionary"):
            cells += chunk.to_pylist()
            continue
        texts = [*chunk.dictionary.to_pylist(), None]
        cells += [texts[-1 if index is None else index] for index in chunk.indices.to_pylist()]
    return cells


def _typed(raw: Mapping[str, list[Any]], source: str) -> dict[str, np.ndarray]:
    missing = [name for name in COLUMNS if name not in raw]
    if missing:
        present = ", ".join(raw) or "none"
        hint = suggest(missing[0], list(raw)) if raw else ""
        raise TableError(
            f"{source}: no column {missing[0]!r}. Its columns are: {present}. "
            f"Add it, or rename one. {hint}".strip()
        )
    return {name: _column(name, values, source) for name, values in raw.items()}


def _column(name: str, values: list[Any], source: str) -> np.ndarray:
    """A column of unknown meaning has numbers if every value is one (NaN for empty cells)."""
    if name in (*NUMBERS, *SCORES):
        return _numbers(name, values, source)
    if name in TEXTS:
        return _text(values)
    try:
        return np.array([np.nan if value in ("", None) else float(value) for value in values])
    except (TypeError, ValueError):
        return _text(values)


def _text(values: list[Any]) -> np.ndarray:
    empty = (value is None or value != value for value in values)
    cells = ["" if none else str(value) for none, value in zip(empty, values, strict=True)]
    return np.array(cells, dtype=object)


def _numbers(name: str, values: list[Any], source: str) -> np.ndarray:
    numbers, wrong = np.full(len(values), np.nan), []
    for index, value in enumerate(values):
        try:
            numbers[index] = float(value) if value not in ("", None) else np.nan
        except (TypeError, ValueError):
            wrong.append(index)
    if wrong:
        raise TableError(
            f"{source}: {name!r} is not a number in {_rows(wrong)} (such as {values[wrong[0]]!r}). "
            "Write numbers like 1e18 or 2.95, with a decimal point and no separator of thousands."
        )
    return numbers


def _check(table: Table) -> None:
    source = table.source
    if not len(table):
        raise TableError(f"{source}: no rows. Add one for each measured loss.")
    for name in (name for name in NUMBERS if name in table):
        values = table[name]
        _refuse(
            table, ~np.isfinite(values), f"{name!r} is empty or not finite", "Remove or correct"
        )
        _refuse(table, values <= 0, f"{name!r} must be > 0, but is not", "Correct")
    unnamed = np.array([not name.strip() for name in table["model"].tolist()])
    _refuse(table, unnamed, "'model' is empty", "Name the model of")
    for name in ("mean_loops", "test_loops"):
        _refuse(table, table[name] < 1, f"{name!r} must be >= 1, but is not", "Correct")
    for name, known in (("role", ROLES), ("set", SETS)):
        if name in table:
            wrong = np.array([value not in known for value in table[name].tolist()])
            _refuse(table, wrong, f"{name!r} is none of {', '.join(known)}", "Correct")
    _check_repeats(table)
    _check_sizes(table)
    if len(table) > 1 and np.ptp(table["loss"]) == 0:
        raise TableError(
            f"{source}: all {len(table)} losses are {table['loss'][0]:g}, which determines "
            "no law. Check how they were measured."
        )


def _check_repeats(table: Table) -> None:
    first: dict[tuple[int, float], int] = {}
    repeated = []
    for index, key in enumerate(zip(table.run.tolist(), table["test_loops"].tolist(), strict=True)):
        if first.setdefault(key, index) != index:
            repeated += [first[key], index]
    if repeated:
        raise TableError(
            f"{table.source}: {_rows(sorted(set(repeated)))} measure the same run at the same "
            "test_loops. Remove repeats; for repeated runs add a column 'seed' or 'run'."
        )


def _check_sizes(table: Table) -> None:
    """Check that effective_params is a function of model and mean_loops."""
    first: dict[tuple[str, float], int] = {}
    sizes = table["effective_params"]
    for index, key in enumerate(
        zip(table["model"].tolist(), table["mean_loops"].tolist(), strict=True)
    ):
        other = first.setdefault(key, index)
        if abs(sizes[index] / sizes[other] - 1) > 1e-6:
            raise TableError(
                f"{table.source}: {_rows([other, index])} give {key[0]!r} at mean_loops "
                f"{key[1]:g} two values of 'effective_params'. Give each size its own name."
            )


def _refuse(table: Table, wrong: np.ndarray, problem: str, remedy: str) -> None:
    if wrong.any():
        indices = np.flatnonzero(wrong).tolist()
        rows = "that row" if len(indices) == 1 else "those rows"
        raise TableError(f"{table.source}: {problem} in {_rows(indices)}. {remedy} {rows}.")


def _rows(indices: Iterable[int]) -> str:
    """`row 3` or `rows 3, 4`, counted from 1 without the line of column names."""
    numbers = [str(index + 1) for index in indices]
    listed, rest = ", ".join(numbers[:MAX_LISTED_ROWS]), len(numbers) - MAX_LISTED_ROWS
    more = f" and {rest} more" if rest > 0 else ""
    return f"row {listed}" if len(numbers) == 1 else f"rows {listed}{more}"


def is_transformer(model: str) -> bool:
    """Whether a model is a Transformer baseline, by its name."""
    return model.lower().startswith(TRANSFORMER)


@dataclass(frozen=True)
class GapShare:
    """The share of the gap between two Transformers that a looped model closes."""

    looped: str
    transformer: str
    larger: str
    score: str
    share: float


def gap_shares(table: Table) -> list[GapShare]:
    """Shares for every looped model with a Transformer of the same size and number of tokens."""
    sizes = {name: _best_row(table, name, None)[1] for name in table.models if is_transformer(name)}
    transformers = sorted(
        (name for name, size in sizes.items() if np.isfinite(size)), key=lambda name: sizes[name]
    )
    shares = []
    for smaller, larger in pairwise(transformers):
        for looped in table.models:
            if is_transformer(looped) or not _same_size(table, looped, smaller):
                continue
            baselines = [_best_row(table, name, None)[0] for name in (smaller, larger)]
            tokens = float(table["tokens"][baselines[0]])
            row = _best_row(table, looped, tokens)[0]
            for score in (score for score in SCORES if score in table and row >= 0):
                own, small, large = (float(table[score][at]) for at in (row, *baselines))
                if np.isfinite([own, small, large]).all() and small != large:
                    share = (own - small) / (large - small)
                    shares.append(GapShare(looped, smaller, larger, score, share))
    return shares


def _same_size(table: Table, looped: str, transformer: str) -> bool:
    """Whether two names end in the same size, or `parameters` differ by less than `SAME_SIZE`."""
    if looped.partition("-")[2] == transformer.partition("-")[2]:
        return True
    if "parameters" not in table:
        return False
    own, other = (table["parameters"][table["model"] == name][0] for name in (looped, transformer))
    return bool(abs(np.log(own / other)) < np.log(SAME_SIZE))


def _best_row(table: Table, model: str, tokens: float | None) -> tuple[int, float]:
    """The row of lowest loss at T = mu (with about `tokens`) and its N; -1 if there is none.

    Only rows with scores are considered if there are any.
    """
    wanted = np.array([name == model for name in table["model"].tolist()])
    wanted &= table["test_loops"] == np.maximum(1, np.round(table["mean_loops"]))
    if tokens is not None:
        wanted &= np.abs(table["tokens"] / tokens - 1) < TOKENS_TOLERANCE
    if "core" in table and np.isfinite(table["core"][wanted]).any():
        wanted &= np.isfinite(table["core"])
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return -1, float("nan")
    best = int(rows[table["loss"][rows].argmin()])
    return best, float(table["effective_params"][best])
