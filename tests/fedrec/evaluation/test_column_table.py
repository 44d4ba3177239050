# SPDX-License-Identifier: Apache-2.0
"""Small tables as arrays: the same text and the same rows as by pandas."""

import numpy as np
import pandas as pd
import pytest

from fedrec.evaluation.column_table import ColumnTable, joined

FRAME = pd.DataFrame(
    {
        "user": ['a "b"', "c, d", "é"],
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


@pytest.mark.parametrize("columns", [["count", "large"], ["count", "hits@10"]])
def test_rows_of_two_tables_as_pandas_joins_them(columns):
    one, other = FRAME[["count", "hits@10"]], FRAME[columns]
    found = joined(ColumnTable.of(one), ColumnTable.of(other))
    pd.testing.assert_frame_equal(
        found.frame(), pd.concat([one, other]), check_dtype=False, check_index_type=False
    )
