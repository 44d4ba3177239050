# SPDX-License-Identifier: Apache-2.0
"""The text of a growing table, against pandas on the whole table."""

import math

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrec.runs import incremental_csv
from fedrec.runs.incremental_csv import IncrementalCsv

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.sampled_from(["a", 'b,"', "", "nan"]),
)
ROWS = st.lists(st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES), min_size=1, max_size=6)


def whole(rows):
    return pd.DataFrame(rows).to_csv(index=False)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_after_each_row_the_text_is_that_of_the_whole_table(rows):
    table = IncrementalCsv()
    for end in range(1, len(rows) + 1):
        assert table.text(rows[:end]) == whole(rows[:end])


def test_rounds_with_metrics_now_and_then_are_not_written_twice(monkeypatch):
    rows = [
        {"round": n, "loss": math.pi / n} | ({"hits@10": 1 / n} if n % 3 == 1 else {})
        for n in range(1, 30)
    ]
    table, formatted = IncrementalCsv(), []
    original = incremental_csv.csv_lines

    def counted(lines):
        lines = list(lines)
        formatted.append(len(lines))
        return original(lines)

    monkeypatch.setattr(incremental_csv, "csv_lines", counted)
    for end in range(1, len(rows) + 1):
        text = table.text(rows[:end])
    assert sum(formatted) == 1 + len(rows)  # with the header
    assert text == whole(rows)


def test_other_or_fewer_rows_start_from_the_beginning():
    table, rows = IncrementalCsv(), [{"round": n, "loss": 0.5} for n in range(4)]
    table.text(rows)
    assert table.text(rows[:2]) == whole(rows[:2])
    other = [{"round": 7, "loss": 1.5}, *rows]
    assert table.text(other) == whole(other)
    assert table.text([]) == whole([])
    assert table.text(rows) == table.text(rows) == whole(rows)
