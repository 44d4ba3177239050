# SPDX-License-Identifier: Apache-2.0
"""The gate: what enemies send counts as nothing, what honest nodes send passes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedrec import wire
from fedrec.live_arrays import to_record
from fedrec.privacy.protection import Protection
from fedrec.row_sum import RowSum
from server.gate import Gate, evaluated

pytestmark = pytest.mark.usefixtures("identity")
THETA = {"w": np.zeros((4, 2), dtype=np.float32), "b": np.zeros(3, dtype=np.float32)}


def asked(*nodes, clients=(1, 2), protection=None):
    order = wire.TrainOrder(1, np.array(clients), "uniform", {"name": "sgd"}, protection=protection)
    return [Message(wire.pack_train(to_record(THETA), order), node, "train") for node in nodes]


def total(size=0.1, **changes):
    arrays = {"w": np.full((4, 2), size, np.float32), "b": np.full(3, size, np.float32)}
    return wire.TrainSum(
        **{"total": arrays, "clients": 2, "weight": 2.0, "examples": 9, "loss": 1.0, "losses": 2, **changes}
    )


def through(gate, *sums, protection=None):
    """Nodes 2, 3, ... answer with some sums; gives the nodes whose answers pass."""
    messages = asked(*range(2, 2 + len(sums)), protection=protection)
    contents = [wire.pack_sum(one) if isinstance(one, wire.TrainSum) else one for one in sums]
    replies = [Message(content, reply_to=message) for content, message in zip(contents, messages, strict=True)]
    return [reply.metadata.src_node_id for reply in gate.trained(messages, replies, THETA)]


def test_honest_sums_pass_dense_and_by_rows():
    rows = RowSum((4, 2), np.array([1, 3]), np.ones((2, 2), np.float32), 0.5)
    by_rows = total(total={"w": rows, "b": np.ones(3, np.float32)})
    nobody = total(0.0, clients=0, weight=0.0, examples=0, loss=0.0, losses=0)
    assert through(Gate(), total(), by_rows, total(30.0), nobody) == [2, 3, 4, 5]


BAD = {
    "wrong shape": total(total={"w": np.zeros((5, 2), np.float32), "b": np.zeros(3, np.float32)}),
    "transposed": total(total={"w": np.zeros((2, 4), np.float32), "b": np.zeros(3, np.float32)}),
    "missing": total(total={"w": np.zeros((4, 2), np.float32)}),
    "unknown": total(total={**total().total, "evil": np.zeros(2, np.float32)}),
    "NaN": total(np.nan),
    "infinite": total(np.inf),
    "integers": total(total={"w": np.zeros((4, 2), np.int64), "b": np.zeros(3, np.float32)}),
    "row outside": total(
        total={"w": RowSum((4, 2), np.array([7]), np.ones((1, 2), np.float32), 0.0), "b": np.zeros(3, np.float32)}
    ),
    "row below": total(
        total={"w": RowSum((4, 2), np.array([-1]), np.ones((1, 2), np.float32), 0.0), "b": np.zeros(3, np.float32)}
    ),
    "drift": total(
        total={"w": RowSum((4, 2), np.array([1]), np.ones((1, 2), np.float32), np.nan), "b": np.zeros(3, np.float32)}
    ),
    "others' clients": total(clients=3),
    "minus a client": total(clients=-1),
    "weight of a crowd": total(weight=1e6),
    "negative weight": total(weight=-1.0),
    "no weight": total(weight=float("nan")),
    "loss": total(loss=float("inf")),
    "examples": total(examples=-5),
    "empty": RecordDict(),
    "no metrics": RecordDict({"arrays": ArrayRecord([np.zeros(2)])}),
    "text": RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "metrics": ConfigRecord({"num-clients": "many"})}),
    "a million times too large": total(1e5),
    "more than floats hold": total(3e38),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_sum_is_left_out_and_the_others_count(bad):
    assert through(Gate(), total(), bad, total(0.2)) == [2, 4]


def test_a_million_times_too_large_is_known_from_earlier_rounds_and_from_one_other_node():
    assert through(Gate(), total(1e5), total()) == [3]
    gate = Gate()
    assert through(gate, total()) == [2] and through(gate, total(1e5)) == [] and through(gate, total(2.0)) == [2]


def test_the_size_says_nothing_under_differential_privacy():
    """There the strategy bounds each sum; leaving one out by its size would make it depend on the others' data."""
    private = Protection(1.0, 2, ("w", "b"))
    assert through(Gate(), total(1e5), total(), total(np.nan), protection=private) == [2, 3]


def test_a_second_answer_and_one_that_was_not_asked_for_are_refused():
    (message,) = asked(2)
    (foreign,) = asked(9)
    replies = [Message(wire.pack_sum(total()), reply_to=m) for m in (message, message, foreign)]
    assert Gate().trained([message], replies, THETA) == replies[:1]


def standard(arrays, examples=10):
    return RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": examples})})


@pytest.mark.parametrize(
    ("content", "passes"),
    [
        (standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}), True),
        (standard({"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}), False),
        (standard({"b": np.ones(3, np.float32), "w": np.ones((4, 2), np.float32)}), False),
        (standard({"w": np.full((4, 2), np.nan, np.float32), "b": np.ones(3, np.float32)}), False),
        (standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}, -1), False),
        (standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}, float("nan")), False),
    ],
)
def test_answers_in_flowers_form(content, passes):
    config = ConfigRecord({"server-round": 1})
    message = Message(RecordDict({"arrays": to_record(THETA), "config": config}), 2, "train")
    assert len(Gate().trained([message], [Message(content, reply_to=message)], THETA)) == passes


def test_metrics_are_of_clients_that_were_asked_for_and_in_range():
    table = pd.DataFrame({"hits@5": [0.5, np.nan]}, index=[4, 7])
    assert evaluated(table, np.array([4, 7, 9]), ranking=True) is table
    for wrong in (
        pd.DataFrame({"hits@5": [0.5]}, index=[8]),
        pd.DataFrame({"hits@5": [0.5, 0.5]}, index=[4, 4]),
        pd.DataFrame({"hits@5": [1e9]}, index=[4]),
        pd.DataFrame({"hits@5": [np.inf]}, index=[4]),
    ):
        with pytest.raises(ValueError):
            evaluated(wrong, np.array([4, 7]), ranking=True)
