"""The table of runs: what is read back, and what is refused with which words."""

from __future__ import annotations

import os

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from parcae.files import FileError
from parcae.laws.table import (
    COLUMNS,
    TableError,
    as_table,
    gap_shares,
    read_table,
    table_from_rows,
    write_table,
)


def row(**changes):
    plain = {"model": "m", "mean_loops": 2, "tokens": 1e9, "flops": 1e18}
    plain |= {"effective_params": 1.5e8, "test_loops": 2, "loss": 3.0}
    return {**plain, **changes}


ROWS = [row(), row(test_loops=4, loss=2.9), row(mean_loops=4, effective_params=1.8e8, loss=2.8)]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_is_written_is_read(tmp_path, suffix):
    rows = [{**one, "note": f"a, {place}", "core": 1.5 + place} for place, one in enumerate(ROWS)]
    rows[1]["loss"] = 2.9000000000000004
    path = write_table(tmp_path / f"runs{suffix}", table_from_rows(rows))
    back = read_table(path)
    assert len(back) == 3
    assert back["model"].tolist() == ["m"] * 3
    assert back["note"].tolist() == ["a, 0", "a, 1", "a, 2"]
    for name in ("loss", "tokens", "flops", "effective_params", "core"):
        assert back[name].tolist() == [one[name] for one in rows]
    assert len(back.sha256) == 64
    assert back.run.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named(name):
    rows = [{key: value for key, value in one.items() if key != name} for one in ROWS]
    with pytest.raises(TableError, match=f"no column {name!r}. Its columns are:"):
        table_from_rows(rows)


def test_a_misspelt_column_is_suggested():
    rows = [{("token" if k == "tokens" else k): v for k, v in one.items()} for one in ROWS]
    with pytest.raises(TableError, match="Did you mean token"):
        table_from_rows(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": float("nan")}, r"'loss' is empty or not finite in row 2\. Remove or correct"),
        ({"loss": ""}, "'loss' is empty or not finite in row 2"),
        ({"tokens": float("inf")}, "'tokens' is empty or not finite in row 2"),
        ({"loss": -1.0}, r"'loss' must be > 0, but is not in row 2\. Correct that row"),
        ({"flops": 0}, "'flops' must be > 0, but is not in row 2"),
        ({"test_loops": 0.5}, "'test_loops' must be >= 1, but is not in row 2"),
        ({"loss": "three"}, r"'loss' is not a number in row 2 \(such as 'three'\)"),
        ({"test_loops": 2}, "rows 1, 2 measure the same run at the same test_loops"),
        ({"effective_params": 2e8}, "rows 1, 2 give 'm' at mean_loops 2 two values"),
    ],
)
def test_a_row_that_cannot_be_right_is_named(changes, message):
    rows = [ROWS[0], {**ROWS[1], **changes}, ROWS[2]]
    with pytest.raises(TableError, match=message):
        table_from_rows(rows)


def test_repeated_runs_are_told_apart_by_seed():
    rows = [row(seed=1), row(seed=2, loss=3.1)]
    assert table_from_rows(rows).run.tolist() == [0, 1]
    with pytest.raises(TableError, match="add a column 'seed' or 'run'"):
        table_from_rows([row(), row(loss=3.1)])


def test_losses_that_are_all_equal_are_refused():
    with pytest.raises(TableError, match="all 3 losses are 3, which determines no law"):
        table_from_rows([row(test_loops=t) for t in (1, 2, 3)])


def test_many_rows_are_not_all_listed():
    rows = [row(test_loops=t, loss=-1.0) for t in range(1, 40)]
    with pytest.raises(TableError, match="rows 1, 2, 3, 4, 5, 6 and 33 more"):
        table_from_rows(rows)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_semicolons_and_tabs_separate_cells_too(tmp_path, separator):
    expected = table_from_rows([{**one, "note": "a, b"} for one in ROWS])
    path = write_table(tmp_path / "runs.csv", expected)
    lines = [separator.join(expected.columns)]
    lines += [
        separator.join(map(str, cells)) for cells in zip(*expected.columns.values(), strict=True)
    ]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    back = read_table(path)
    for name in expected.columns:
        assert back[name].tolist() == expected[name].tolist(), name


def test_tab_separated_files_have_a_suffix_of_their_own(tmp_path):
    path = write_table(tmp_path / "runs.tsv", table_from_rows(ROWS))
    assert path.read_text().startswith("model\tmean_loops\t")
    assert read_table(path)["loss"].tolist() == [3.0, 2.9, 2.8]


def test_a_decimal_comma_is_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(";".join(COLUMNS) + "\nm;2;1e9;1e18;1,5e8;2;3,0\n")
    with pytest.raises(TableError, match=r"not a number in row 1 .*with a decimal point"):
        read_table(path)


def test_a_set_must_be_one_and_a_score_a_number():
    with pytest.raises(TableError, match="'set' is none of grid, curve, end-to-end in row 1"):
        table_from_rows([row(set="iso"), row(set="grid", test_loops=3, loss=2.0)])
    with pytest.raises(TableError, match="'core' is not a number in row 1"):
        table_from_rows([row(core="14,04"), row(core="", test_loops=3, loss=2.0)])


def test_models_of_a_sweep_are_matched_by_their_parameters():
    """Names of a sweep end in the number of parameters, which differs between architectures."""
    models = {"looped-88k": (88e3, 12.0), "transformer-85k": (85e3, 10.0)}
    models |= {"transformer-180k": (180e3, 14.0)}
    rows = [
        row(model=name, mean_loops=1, test_loops=1, parameters=size, effective_params=size)
        | {"core": core, "loss": 4 - core / 10}
        for name, (size, core) in models.items()
    ]
    shares = {gap.score: gap.share for gap in gap_shares(table_from_rows(rows))}
    assert shares["core"] == pytest.approx(0.5)


def test_a_role_must_be_one(tmp_path):
    with pytest.raises(TableError, match=r"'role' is none of fit, held-out in row 1"):
        table_from_rows([row(role="train"), row(role="fit", test_loops=3, loss=2.0)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty. The first line must name the columns"),
        (",".join(COLUMNS) + "\n", "no rows"),
        (",".join(COLUMNS) + "\nm,2,1e9\n", "row 1 has 3 cells for 7 columns"),
        (",".join([*COLUMNS, "loss"]) + "\n", "the column 'loss' appears twice"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    path = tmp_path / "runs.csv"
    path.write_text(content)
    with pytest.raises(TableError, match=message):
        read_table(path)


def test_a_folder_without_a_table_is_named(tmp_path):
    with pytest.raises(FileError, match=rf"{tmp_path}: no runs\.csv in this folder"):
        as_table(tmp_path)


@pytest.mark.slow
def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(TableError, match=r"Use one of \.csv, \.tsv, \.parquet"):
        read_table(tmp_path / "runs.xlsx")
    (tmp_path / "runs.parquet").write_bytes(b"nothing")
    with pytest.raises(FileError, match="not a Parquet file"):
        read_table(tmp_path / "runs.parquet")
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not encoded as UTF-8"):
        read_table(tmp_path / "runs.csv")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss": np.zeros(3_000_000)}, "more than 2,000,000 cells"),
        ({str(index): [1.0] for index in range(1001)}, "1,001 columns; at most 1,000 are read"),
        (
            {"loss": [[1.0] * 9]},
            "'loss' is of the type list<.*Give a number or a text in each cell",
        ),
        ({"note": [b"bytes"]}, "'note' is of the type binary"),
    ],
    ids=["rows", "columns", "lists", "bytes"],
)
def test_a_parquet_file_with_more_than_a_table_has(tmp_path, columns, message):
    pq.write_table(pyarrow.table(columns), tmp_path / "runs.parquet", compression="zstd")
    assert (tmp_path / "runs.parquet").stat().st_size < 400_000
    with pytest.raises(FileError, match=message):
        read_table(tmp_path / "runs.parquet")


def test_a_parquet_file_of_long_texts(tmp_path, monkeypatch):
    """A few kilobytes of file can be one cell of a gigabyte."""
    monkeypatch.setattr("parcae.laws.table.MAX_BYTES", 1 << 20)
    columns = {"note": ["a" * (2 << 20)]}
    pq.write_table(pyarrow.table(columns), tmp_path / "runs.parquet", compression="zstd")
    assert (tmp_path / "runs.parquet").stat().st_size < 10_000
    with pytest.raises(FileError, match="bytes; at most 1,048,576 are read"):
        read_table(tmp_path / "runs.parquet")


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("," * 1001, None, "1,002 columns; at most 1,000 are read"),
        (2001 * ("," * 999 + "\n"), None, "more than 2,000,000 cells"),
        ("", 6 << 30, "at most 268,435,456 are read"),
    ],
    ids=["columns", "rows", "bytes"],
)
def test_a_csv_file_with_more_than_a_table_has(tmp_path, text, size, message):
    (tmp_path / "runs.csv").write_text(text)
    if size is not None:
        os.truncate(tmp_path / "runs.csv", size)
    with pytest.raises(FileError, match=message):
        read_table(tmp_path / "runs.csv")


def test_a_repeated_text_of_a_parquet_file_is_in_memory_once(tmp_path):
    cells = {name: np.ones(1000) for name in COLUMNS}
    cells |= {"loss": np.arange(1000) + 1.0, "test_loops": np.arange(1000) + 1.0}
    table = pyarrow.table({**cells, "model": ["m"] * 1000, "note": ["y" * 1000, None] * 500})
    pq.write_table(table, tmp_path / "runs.parquet")
    notes = read_table(tmp_path / "runs.parquet")["note"].tolist()
    assert len(set(map(id, notes[::2]))) == 1
    assert notes[:2] == ["y" * 1000, ""]


def test_a_name_is_no_formula_in_a_spreadsheet(tmp_path):
    path = write_table(tmp_path / "runs.csv", table_from_rows([row(model="=1+1", delta=-1.5)]))
    assert path.read_text().splitlines()[1].startswith("'=1+1,2,")
    assert path.read_text().endswith(",-1.5\n")


def test_numbers_keep_every_digit(tmp_path):
    loss = float(np.nextafter(3.0, 4.0))
    rows = [row(loss=loss), row(test_loops=5, loss=2.0)]
    back = read_table(write_table(tmp_path / "a.csv", table_from_rows(rows)))
    assert back["loss"][0] == loss


def test_empty_cells_do_not_tear_a_run_apart(tmp_path):
    table = table_from_rows([{**one, "seed": ""} for one in ROWS])
    assert table.run.tolist() == [0, 0, 1]
    with pytest.raises(TableError, match="rows 1, 2 measure the same run"):
        table_from_rows([row(seed=""), row(seed="", loss=2.5)])


def test_names_may_be_spelled_like_numbers_but_not_be_empty():
    assert table_from_rows([row(model="140", run=3), ROWS[2]]).models == ["140", "m"]
    with pytest.raises(TableError, match=r"'model' is empty in row 2\. Name the model of that row"):
        table_from_rows([row(), row(model=" ", loss=2.5)])


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("", "'budget' is empty or not finite"),
        ("big", "'budget' is not a number"),
        (-1, "must be > 0"),
    ],
)
def test_a_budget_is_a_number_in_every_row(budget, message):
    with pytest.raises(TableError, match=message):
        table_from_rows([{**one, "budget": 1e18} for one in ROWS[:2]] + [row(budget=budget)])


def test_a_file_that_only_looks_like_csv_is_refused(tmp_path):
    (tmp_path / "runs.csv").write_text('model,loss\n"' + "x" * 200_000 + '",1\n')
    with pytest.raises(FileError, match="not a CSV file"):
        read_table(tmp_path / "runs.csv")


class Frame:
    """Like a pandas DataFrame: `to_dict("list")` gives columns, missing values are NaN."""

    def __init__(self, columns):
        self.columns = columns

    def to_dict(self, orient):
        assert orient == "list"
        return self.columns


def test_rows_columns_frames_and_files_are_the_same_table(tmp_path):
    rows = [{**one, "run": name} for one, name in zip(ROWS, ("a", "a", ""), strict=True)]
    expected = table_from_rows(rows)
    columns = {name: [one[name] for one in rows] for name in rows[0]}
    frame = {**columns, "run": ["a", "a", float("nan")]}
    path = write_table(tmp_path / "runs.csv", expected)
    for source in (rows, columns, Frame(frame), path, str(path), tmp_path, expected):
        table = as_table(source)
        assert table.run.tolist() == expected.run.tolist()
        for name in expected.columns:
            assert table[name].tolist() == expected[name].tolist(), name


def test_columns_of_different_length_are_refused():
    columns = {name: [one[name] for one in ROWS] for name in ROWS[0]}
    with pytest.raises(TableError, match="columns of different length"):
        as_table({**columns, "loss": [3.0]})
