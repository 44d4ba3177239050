# SPDX-License-Identifier: Apache-2.0
"""The record of dropped replies: columns of rounds.csv, and a sentence at the end."""

from server.exchange.dropped_replies import DroppedReplies


def test_a_simulation_has_no_columns_until_a_reply_is_dropped():
    record = DroppedReplies()
    assert record.columns() == {} and record.report(1) == ([], {})
    record.dropped(7, "no answer in time")
    assert record.columns()["dropped-replies"] == 1
    assert record.columns() == {
        "dropped-replies": 0,
        "bounded-replies": 0,
        "dropped-or-bounded": "",
    }


def test_the_end_of_a_run_states_the_totals_also_of_a_resumed_one():
    record = DroppedReplies(always=True)
    for reason in ("first", "second"):
        record.dropped(7, f"{reason}\n  long {'x' * 1000}")
    record.bounded(8, "norm of the update")
    row = record.columns()
    assert row["dropped-or-bounded"].startswith("node 7: first long x") and "\n" not in str(row)
    assert len(row["dropped-or-bounded"]) < 800
    resumed = DroppedReplies(always=True)
    resumed.restore(record.memory())
    resumed.dropped(None, "its metrics: in the final evaluation")
    (line,), table = resumed.report(3)
    assert line.startswith("Replies of nodes: 3 dropped or missing, 1 scaled down, in 1 of 3 round")
    assert "node 7 2, node 8 1" in line and table["dropped"] == 3


def test_in_mode_secure_nothing_is_recorded():
    """A node can fail only if a client of it was drawn."""
    record = DroppedReplies(always=True, secret=True)
    untouched = record.memory()["totals"].tobytes()
    record.dropped(7, "no answer in time")
    record.bounded(7, "norm of the update")
    assert record.columns() == {} and record.report(1) == ([], {})
    assert record.memory()["totals"].tobytes() == untouched
