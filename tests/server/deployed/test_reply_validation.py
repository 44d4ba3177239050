# SPDX-License-Identifier: Apache-2.0
"""Validation of replies: those of malicious nodes are rejected, honest ones are accepted."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedrec.evaluation.metrics import Metrics
from fedrec.experiment.tables import EvaluationConfig
from fedrec.privacy.protection import Protection
from fedrec.protocol.messages import (
    pack_sum,
    pack_train,
    unpack_parameters,
    unpack_sum,
)
from fedrec.protocol.orders import EvaluateOrder, TrainOrder, TrainSum
from fedrec.protocol.sparse_update import SparseUpdate, dense_change
from fedrec.protocol.zero_copy import to_record
from fedrec.secure.vector import Form, decoded, encoded, shapes_of
from server.deployed.reply_validation import ReplyValidator, evaluated, of_usual_size
from server.exchange.dropped_replies import DroppedReplies

pytestmark = pytest.mark.usefixtures("identity")
THETA = {"w": np.zeros((4, 2), dtype=np.float32), "b": np.zeros(3, dtype=np.float32)}


def asked(*nodes, clients=(1, 2), protection=None, weighting="uniform", step="sgd"):
    order = TrainOrder(1, np.array(clients), weighting, {"name": step}, protection=protection)
    return [Message(pack_train(to_record(THETA), order), node, "train") for node in nodes]


def total(size=0.1, **changes):
    arrays = {"w": np.full((4, 2), size, np.float32), "b": np.full(3, size, np.float32)}
    usual = {"total": arrays, "clients": 2, "weight": 2.0, "examples": 9, "loss": 1.0, "losses": 2}
    return TrainSum(**(usual | changes))


def with_table(table):
    """A sum with another change of the table."""
    return total(total={"w": table, "b": np.zeros(3, np.float32)})


def with_row(place, drift=0.0):
    values = np.ones((1, 2), np.float32)
    return with_table(SparseUpdate((4, 2), np.array([place]), values, drift))


def through(validator, *sums, theta=THETA, **order):
    """Nodes 2, 3, ... reply with some sums; returns the nodes whose replies are accepted."""
    messages = asked(*range(2, 2 + len(sums)), **order)
    contents = [pack_sum(one) if isinstance(one, TrainSum) else one for one in sums]
    replies = [
        Message(content, reply_to=message)
        for content, message in zip(contents, messages, strict=True)
    ]
    return [reply.metadata.src_node_id for reply in validator.trained(messages, replies, theta)]


def test_honest_sums_pass_dense_and_by_rows():
    rows = SparseUpdate((4, 2), np.array([1, 3]), np.ones((2, 2), np.float32), 0.5)
    by_rows = total(total={"w": rows, "b": np.ones(3, np.float32)})
    nobody = total(0.0, clients=0, weight=0.0, examples=0, loss=0.0, losses=0)
    assert through(ReplyValidator(), total(), by_rows, total(30.0), nobody) == [2, 3, 4, 5]
    weighted = total(weight=9.0)
    assert through(
        ReplyValidator(), weighted, total(weight=90.0, examples=90), weighting="examples"
    ) == [2, 3]


def test_a_sum_of_masked_answers_passes():
    """It says that every client sent the whole vector, counts included."""
    shapes = shapes_of(THETA, None)
    vector = encoded(total(), THETA, shapes, Form(16), nodes=2)
    found = decoded(vector, shapes, Form(16))
    assert found.sent == 2 * vector.nbytes
    assert through(ReplyValidator(), found) == [2]


def drifting(drift):
    """A sum of clients who decay their weights; without any decay its norm is small."""
    rows = SparseUpdate((4, 2), np.array([1]), np.full((1, 2), 0.1, np.float32), drift)
    return total(total={"w": rows, "b": np.full(3, 0.1, np.float32)})


BAD = {
    "wrong shape": with_table(np.zeros((5, 2), np.float32)),
    "transposed": with_table(np.zeros((2, 4), np.float32)),
    "missing": total(total={"w": np.zeros((4, 2), np.float32)}),
    "unknown": total(total={**total().total, "evil": np.zeros(2, np.float32)}),
    "NaN": total(np.nan),
    "infinite": total(np.inf),
    "integers": with_table(np.zeros((4, 2), np.int64)),
    "row outside": with_row(7),
    "row below": with_row(-1),
    "drift": with_row(1, drift=np.nan),
    "others' clients": total(clients=3),
    "minus a client": total(clients=-1),
    "drift beyond any weight decay": drifting(2.5),
    "weight of a crowd": total(weight=1e6),
    "weight of its examples, which was not asked for": total(weight=9.0),
    "less weight than clients": total(weight=1.0),
    "a loss that hides all others": total(loss=1e30),
    "negative weight": total(weight=-1.0),
    "no weight": total(weight=float("nan")),
    "loss": total(loss=float("inf")),
    "examples": total(examples=-5),
    "more bytes than any form has": total(sent=10**6),
    "minus a byte": total(sent=-1),
    "empty": RecordDict(),
    "no metrics": RecordDict({"arrays": ArrayRecord([np.zeros(2)])}),
    "text": RecordDict(
        {"arrays": ArrayRecord([np.zeros(2)]), "metrics": ConfigRecord({"num-clients": "many"})}
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_sum_is_left_out_and_the_others_count(bad):
    assert through(ReplyValidator(), total(), bad, total(0.2)) == [2, 4]


def bounded(validator, *sums, **order):
    """What is left of the sums of nodes 2, 3, ...: norm per weight, examples per client, weight."""
    messages = asked(*range(2, 2 + len(sums)), **order)
    replies = [
        Message(pack_sum(one), reply_to=message)
        for one, message in zip(sums, messages, strict=True)
    ]
    found = [unpack_sum(one.content) for one in validator.trained(messages, replies, THETA)]
    return [(_norm(one) / one.weight, one.examples / one.clients, one.weight) for one in found]


def _norm(one):
    squares = [np.square(dense_change(own, THETA[name])).sum() for name, own in one.total.items()]
    return float(np.sqrt(sum(squares)))


@pytest.mark.parametrize("times", [11, 900, 1e6, 1e39])
def test_a_node_counts_at_most_ten_times_the_usual(times):
    """A node of four with an update of 900 times the norm would determine the model."""
    record = DroppedReplies()
    found = bounded(ReplyValidator(record), total(), total(times * 0.1), total(0.2), total(0.05))
    norms = [norm for norm, *_ in found]
    usual = norms[0]
    np.testing.assert_allclose(norms, [usual, 10 * usual, 2 * usual, usual / 2], rtol=1e-5)
    row = record.columns()
    assert (row["dropped-replies"], row["bounded-replies"]) == (0, 1)
    assert row["dropped-or-bounded"].startswith("node 3: norm of the update")


def test_updates_within_ten_times_the_usual_are_not_touched():
    honest = [total(0.1), total(0.9), total(0.2), total(0.02)]
    messages = asked(2, 3, 4, 5)
    replies = [
        Message(pack_sum(one), reply_to=message)
        for one, message in zip(honest, messages, strict=True)
    ]
    contents = [reply.content for reply in replies]
    found = ReplyValidator().trained(messages, replies, THETA)
    assert [reply.content is content for reply, content in zip(found, contents, strict=True)] == [
        True
    ] * 4


def test_few_replies_are_compared_with_earlier_ones_of_the_same_step():
    ((usual, *_),) = bounded(ReplyValidator(), total())
    assert bounded(ReplyValidator(), total(1e5), total())[0][0] == pytest.approx(10 * usual)
    validator = ReplyValidator()
    bounded(validator, total())
    assert bounded(validator, total(1e5))[0][0] == pytest.approx(10 * usual, rel=1e-5)
    assert bounded(validator, total(1e5), step="counts")[0][0] == pytest.approx(1e6 * usual)


def test_the_size_is_not_revealed_under_differential_privacy():
    """There the strategy bounds each sum; rejecting one by its size would make the release depend
    on the others' data."""
    private = Protection(1.0, 2, ("w", "b"))
    assert through(ReplyValidator(), total(1e5), total(), total(np.nan), protection=private) == [
        2,
        3,
    ]


def test_a_second_answer_and_one_that_was_not_asked_for_are_refused():
    (message,) = asked(2)
    (foreign,) = asked(9)
    replies = [Message(pack_sum(total()), reply_to=m) for m in (message, message, foreign)]
    assert ReplyValidator().trained([message], replies, THETA) == replies[:1]


def standard(arrays, examples=10):
    return RecordDict(
        {"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": examples})}
    )


@pytest.mark.parametrize(
    ("content", "passes"),
    [
        (standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}), True),
        (standard({"w": np.ones((4, 1), np.float32), "b": np.ones(3, np.float32)}), False),
        (standard({"b": np.ones(3, np.float32), "w": np.ones((4, 2), np.float32)}), False),
        (standard({"w": np.full((4, 2), np.nan, np.float32), "b": np.ones(3, np.float32)}), False),
        (standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}, -1), False),
        (
            standard({"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}, float("nan")),
            False,
        ),
    ],
)
def test_answers_in_flowers_form(content, passes):
    config = ConfigRecord({"server-round": 1})
    message = Message(RecordDict({"arrays": to_record(THETA), "config": config}), 2, "train")
    assert (
        len(ReplyValidator().trained([message], [Message(content, reply_to=message)], THETA))
        == passes
    )


def test_drift_counts_in_the_norm():
    """It moves every row of the table, named or not: with large parameters a small one is a large
    update."""
    theta = {"w": np.full((4, 2), 1e6, np.float32), "b": np.zeros(3, np.float32)}
    for drift, scaled in ((-1.0, 1), (-1e-7, 0)):
        record = DroppedReplies()
        sums = (total(), drifting(drift), total(0.2))
        assert through(ReplyValidator(record), *sums, theta=theta) == [2, 3, 4]
        assert record.columns().get("bounded-replies", 0) == scaled
    private = Protection(1.0, 2, ("w", "b"), noise_scale=1.0)
    assert through(ReplyValidator(), total(), drifting(1e37), protection=private) == [2]


def test_one_liar_does_not_outweigh_all_others():
    """FedAvg weights by examples: a node that claims 9,999 of them would determine the model."""
    honest = [total(weight=float(count), examples=count) for count in (40, 8, 80)]
    liar = total(900.0, weight=9999.0, examples=9999)
    found = bounded(ReplyValidator(), *honest, liar, weighting="examples")
    assert [weight for *_, weight in found] == pytest.approx([40, 8, 80, 400])
    assert [examples for _, examples, _ in found] == pytest.approx([20, 4, 40, 200], abs=0.5)
    norms = [norm for norm, *_ in found]
    assert norms[3] <= 10 * np.median(norms[:3]) * 1.0001


@pytest.mark.parametrize("stated", [9999, 10**6, 10**11])
def test_nor_does_one_in_flowers_form(stated):
    config = ConfigRecord({"server-round": 1})
    messages = [
        Message(RecordDict({"arrays": to_record(THETA), "config": config}), n, "train")
        for n in (2, 3, 4)
    ]
    near = {"w": np.full((4, 2), 0.1, np.float32), "b": np.zeros(3, np.float32)}
    far = {"w": np.full((4, 2), 90.0, np.float32), "b": np.zeros(3, np.float32)}
    sent = zip(messages, (near, near, far), (10, 12, stated), strict=True)
    replies = [Message(standard(own, count), reply_to=message) for message, own, count in sent]
    found = [reply.content for reply in ReplyValidator().trained(messages, replies, THETA)]
    assert len(found) == 3 and (unpack_parameters(found[0])["w"] == near["w"]).all()
    np.testing.assert_allclose(unpack_parameters(found[2])["w"], 1.0, rtol=1e-5)
    assert next(iter(found[2].metric_records.values()))["num-examples"] == 120


def test_rejected_replies_are_recorded_with_node_and_reason():
    record = DroppedReplies(always=True)
    (message,), (foreign,) = asked(2), asked(9)
    replies = [Message(pack_sum(total()), reply_to=m) for m in (message, message, foreign)]
    ReplyValidator(record).trained([message], replies, THETA)
    through(ReplyValidator(record), BAD["NaN"])
    assert record.columns() == {
        "dropped-replies": 3,
        "bounded-replies": 0,
        "dropped-or-bounded": "node 2: a second answer; node 9: not asked for;"
        " node 2: 'w' has a wrong shape or is not finite",
    }
    assert record.columns()["dropped-replies"] == 0


def test_metrics_are_of_clients_that_were_asked_for_and_in_range():
    table = pd.DataFrame({"hits@5": [0.5, np.nan]}, index=[4, 7])
    assert evaluated(table, np.array([4, 7, 9]), {"hits@5": (0.0, 1.0)}) is table
    for wrong in (
        pd.DataFrame({"hits@5": [0.5]}, index=[8]),
        pd.DataFrame({"hits@5": [0.5, 0.5]}, index=[4, 4]),
        pd.DataFrame({"hits@5": [1e9]}, index=[4]),
        pd.DataFrame({"hits@5": [np.inf]}, index=[4]),
        pd.DataFrame({"hits@5": [-0.1]}, index=[4]),
        pd.DataFrame({"hits@5": [0.5], "rows": [1.0]}, index=[4]),
        pd.DataFrame({"hits@5": [0.5], "group:all": [1.0]}, index=[4]),
        pd.DataFrame({"hits@50": [0.5]}, index=[4]),
        pd.DataFrame({"rows": [1.0]}, index=[4]),
        pd.DataFrame(index=[4]),
    ):
        with pytest.raises(ValueError):
            evaluated(wrong, np.array([4, 7]), {"hits@5": (0.0, 1.0)})


def test_errors_of_ratings_are_bounded_by_everybodys():
    """MAE is pooled over all held-out rows, so a node that claims a billion rows without error
    would determine it."""
    ids = np.arange(4)
    ranges = Metrics("rating", EvaluationConfig()).ranges
    honest = pd.DataFrame(
        {"mae": [0.7, 0.9, 0.8], "rmse": [1.0, 1.1, 1.2], "rows": [5.0, 40.0, 8.0]}, index=ids[:3]
    )
    assert evaluated(honest, ids, ranges) is honest and of_usual_size(honest, ranges).equals(honest)
    for lie in ({"mae": 0.0, "rows": 1e8}, {"mae": 1e8, "rows": 1.0}):
        liar = pd.DataFrame({**lie, "rmse": 0.0}, index=[3])[list(ranges)]
        everybody = pd.concat([honest, evaluated(liar, ids, ranges)])
        assert of_usual_size(everybody, ranges).equals(honest)
    for rows in (-1.0, 0.0, 0.5, np.nan, 1e12):
        with pytest.raises(ValueError):
            evaluated(
                pd.DataFrame({"mae": [0.1], "rmse": [0.1], "rows": [rows]}, index=[3]), ids, ranges
            )
    for error in (np.nan, np.inf, -1.0, 1e30):  # one NaN would be the mean of all
        with pytest.raises(ValueError):
            evaluated(
                pd.DataFrame({"mae": [error], "rmse": [0.1], "rows": [3.0]}, index=[3]),
                ids,
                ranges,
            )


RATED = ("task=rating",)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (("evaluation.ks=[5, 10]",), ["hits@5", "ndcg@5", "hits@10", "ndcg@10", "mrr", "recall@5"]),
        (
            ("evaluation.protocol=reconstruction",),
            ["reconstruction-recall@5", "reconstruction-ndcg@5"],
        ),
        (RATED, ["mae", "rmse", "rows"]),
    ],
)
def test_the_metrics_that_there_are_are_those_of_honest_nodes(tiny_experiment, overrides, names):
    from clients.evaluation import evaluate_clients
    from clients.hosting.node import Node
    from fedrec.experiment.loading import load

    table = tiny_experiment()
    if overrides is RATED:
        del table["positive-above"]
    node = Node(load(table, overrides), 0, 1, None)
    arrays = {name: value.numpy() for name, value in node.initial().items()}
    own = list(evaluate_clients(node, arrays, EvaluateOrder(1, None)).users.columns)
    assert list(node.metrics.ranges) == own and own[: len(names)] == names
