# SPDX-License-Identifier: Apache-2.0
"""Small tables as arrays: the same text and the same rows as by pandas."""

import numpy as np
import pandas as pd
import pytest

from fedrec.evaluation.column_table import ColumnTable, joined

FRAME = pd.DataFrame(
    {
        "user": ['a "b"', "c,\nd", "é"],
        "count": [3, 0, -7],
        "hits@10": [0.1 + 0.2, np.nan, 1e-17],
        "large": [1e16, np.inf, 100.0],
    },
    index=pd.Index([3, 8, 11], name="client"),
)


def test_text_and_frame_are_those_of_pandas():
    table = ColumnTable.of(FRAME)
    assert table.csv() == FRAME.to_csv() and len(table) == 3
    pd.testing.assert_frame_equal(table.frame(), FRAME)
    assert ColumnTable.of(table) is table


def test_single_precision_is_written_as_the_same_numbers():
    numbers = np.array([0.1, 0.25], dtype=np.float32)
    text = ColumnTable("group", ["old", "new"], {"mrr": numbers}).csv()
    written = [float(line.split(",")[1]) for line in text.splitlines()[1:]]
    assert written == numbers.tolist()


def test_a_column_before_the_others():
    rest = FRAME.drop(columns="user")
    own = ColumnTable.of(rest).after("user", FRAME["user"].to_numpy())
    pd.testing.assert_frame_equal(own.frame(), FRAME)


def test_rows_of_a_list_as_pandas_reads_them():
    rows = [{"round": 1, "loss": 0.5}, {"round": 2, "epsilon": 3.0, "loss": None}]
    found = ColumnTable.of(rows)
    pd.testing.assert_frame_equal(found.frame(), pd.DataFrame(rows), check_names=False)
    assert not ColumnTable.of([]).columns


def test_numbers_are_read_as_they_were_written():
    text = FRAME.to_csv().encode()
    found = ColumnTable.read_csv(text, ["large", "hits@10", "of others"])
    pd.testing.assert_frame_equal(found.frame(), FRAME[["large", "hits@10"]])
    empty = ColumnTable.read_csv(text.partition(b"\n")[0], ["count"])
    assert len(empty) == 0 and not len(empty.columns["count"])


@pytest.mark.parametrize("content", [b"", b"client,mrr\n1,much\n", b"client,mrr\n1\n", b"\xff"])
def test_damaged_tables_are_refused(content):
    with pytest.raises(ValueError):
        ColumnTable.read_csv(content, ["mrr"])


def test_differences_are_those_of_pandas():
    one = pd.DataFrame({"mrr": [0.5, np.nan, 0.25, 1.0]}, index=[7, 2, 3, 9])
    other = pd.DataFrame({"mrr": [0.125, 0.25, 0.75]}, index=[2, 3, 7])
    found = ColumnTable.of(one).difference(ColumnTable.of(other), "mrr")
    assert sorted(found) == sorted((one["mrr"] - other["mrr"]).dropna()) == [-0.25, 0.0]


@pytest.mark.parametrize("columns", [["count", "large"], ["count", "hits@10"]])
def test_rows_of_two_tables_as_pandas_joins_them(columns):
    one, other = FRAME[["count", "hits@10"]], FRAME[columns]
    found = joined(ColumnTable.of(one), ColumnTable.of(other))
    pd.testing.assert_frame_equal(
        found.frame(), pd.concat([one, other]), check_dtype=False, check_index_type=False
    )
