# SPDX-License-Identifier: Apache-2.0
"""Validation of real nodes' replies."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from clients.node import Node
from clients.round import train_clients
from fedrec.evaluation.tables import Metrics
from fedrec.experiment.schema import EvaluationConfig
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import (
    EvaluateOrder,
    Presence,
    TrainEach,
    TrainOrder,
    TrainSum,
    pack_each,
    pack_order,
    pack_sum,
    pack_table,
    read_arrays,
    unpack_each,
    unpack_sum,
)
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import ClientArrays, ItemRequests, SparseUpdate, dense_change
from fedrec.secure.vector import decoded, encoded, shapes_of
from server.deployed.validation import (
    LARGER,
    ReplyValidator,
    _norm_bounds,
    evaluated,
    of_usual_size,
)
from server.evaluation import Evaluator
from server.nodes import DroppedReplies, Roster

pytestmark = pytest.mark.usefixtures("identity")

THETA = {"w": np.zeros((4, 2), dtype=np.float32), "b": np.zeros(3, dtype=np.float32)}


def asked(*nodes, clients=(1, 2), step="sgd", **order):
    if clients is not None:
        order = TrainOrder(1, np.array(clients), step={"name": step}, **order)
        return [Message(pack_order(order, to_record(THETA)), node, "train") for node in nodes]
    config = ConfigRecord({"server-round": 1})  # as Flower's strategies
    content = RecordDict({"arrays": to_record(THETA), "config": config})
    return [Message(content, node, "train") for node in nodes]


def total(size=0.1, **changes):
    arrays = {"w": np.full((4, 2), size, np.float32), "b": np.full(3, size, np.float32)}
    usual = {"total": arrays, "clients": 2, "weight": 2.0, "examples": 9, "loss": 1.0, "losses": 2}
    return TrainSum(**(usual | changes))


def with_table(table):
    """A sum with another change of the table."""
    return total(total={"w": table, "b": np.zeros(3, np.float32)})


def with_row(place):
    return with_table(SparseUpdate((4, 2), np.array([place]), np.ones((1, 2), np.float32)))


def accepted(validator, *replies, theta=THETA, **order):
    """Nodes 2, 3, ... reply; returns the accepted messages."""
    sent = asked(*range(2, 2 + len(replies)), **order)
    contents = [pack_sum(one) if isinstance(one, TrainSum) else one for one in replies]
    answers = [Message(content, reply_to=to) for content, to in zip(contents, sent, strict=True)]
    return validator.trained(sent, answers, theta)


def through(validator, *replies, **order):
    """The nodes 2, 3, ... whose replies are accepted."""
    return [one.metadata.src_node_id for one in accepted(validator, *replies, **order)]


def test_honest_sums_pass_dense_and_by_rows():
    rows = SparseUpdate((4, 2), np.array([1, 3]), np.ones((2, 2), np.float32))
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
    vector = encoded(total(), THETA, shapes, 16, nodes=2)
    found = decoded(vector, shapes, 16)
    assert found.sent == 2 * vector.nbytes
    assert through(ReplyValidator(), found) == [2]


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
    "others' clients": total(clients=3),
    "minus a client": total(clients=-1),
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
    found = [unpack_sum(one.content) for one in accepted(validator, *sums, **order)]
    return [
        (length(one.total) / one.weight, one.examples / one.clients, one.weight) for one in found
    ]


def length(total):
    """Norm of a sum of zeros' changes, whole or by rows."""
    whole = [dense_change(own) for own in total.values()]
    return float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in whole)))


@pytest.mark.parametrize("times", [11, 900, 1e6, 1e39])
def test_a_node_counts_at_most_ten_times_the_usual(times):
    """A node of four with an update of 900 times the norm would determine the model."""
    record = DroppedReplies()
    found = bounded(ReplyValidator(record), total(), total(times * 0.1), total(0.2), total(0.05))
    norms = [norm for norm, *_ in found]
    usual = norms[0]
    np.testing.assert_allclose(norms, [usual, 10 * usual, 2 * usual, usual / 2], rtol=1e-5)
    row = record.after_round(1, None)
    assert (row["dropped-replies"], row["bounded-replies"]) == (0, 1)
    assert row["dropped-or-bounded"].startswith("node 3: norm of the update")


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
    private, sums = Protection(1.0, 2, ("w", "b")), (total(1e5), total(), total(np.nan))
    record = DroppedReplies(always=True)
    assert through(ReplyValidator(record), *sums, protection=private) == [2, 3]
    assert record.after_round(1, {})["bounded-replies"] == 0


ONES = {"w": np.ones((4, 2), np.float32), "b": np.ones(3, np.float32)}


def standard(arrays, examples=10):
    return RecordDict(
        {"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": examples})}
    )


@pytest.mark.parametrize(
    ("content", "passes"),
    [
        (standard(ONES), True),
        (standard({**ONES, "w": ONES["w"][:, :1]}), False),
        (standard({"b": ONES["b"], "w": ONES["w"]}), False),
        (standard({**ONES, "w": np.full((4, 2), np.nan, np.float32)}), False),
        (standard(ONES, -1), False),
        (standard(ONES, float("nan")), False),
    ],
)
def test_answers_in_flowers_form(content, passes):
    assert len(accepted(ReplyValidator(), content, clients=None)) == passes


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
    near = {"w": np.full((4, 2), 0.1, np.float32), "b": np.zeros(3, np.float32)}
    far = {"w": np.full((4, 2), 90.0, np.float32), "b": np.zeros(3, np.float32)}
    sent = standard(near, 10), standard(near, 12), standard(far, stated)
    found = [one.content for one in accepted(ReplyValidator(), *sent, clients=None)]
    assert len(found) == 3 and (read_arrays(found[0])["w"] == near["w"]).all()
    np.testing.assert_allclose(read_arrays(found[2])["w"], 1.0, rtol=1e-5)
    assert next(iter(found[2].metric_records.values()))["num-examples"] == 120


def test_rejected_replies_are_recorded_with_node_and_reason():
    record = DroppedReplies(always=True)
    (message,), (foreign,) = asked(2), asked(9)
    replies = [Message(pack_sum(total()), reply_to=m) for m in (message, message, foreign)]
    ReplyValidator(record).trained([message], replies, THETA)
    through(ReplyValidator(record), BAD["NaN"])
    assert record.after_round(1, None) == {
        "dropped-replies": 3,
        "bounded-replies": 0,
        "dropped-or-bounded": "node 2: duplicate reply; node 9: unrequested;"
        " node 2: 'w' has a wrong shape or is not finite",
    }
    assert record.after_round(1, None)["dropped-replies"] == 0


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
    false = []
    for rows in (-1.0, 0.0, 0.5, np.nan, 1e12):
        false.append({"mae": 0.1, "rmse": 0.1, "rows": rows})
    for error in (np.nan, np.inf, -1.0, 1e30):  # one NaN would be the mean of all
        false.append({"mae": error, "rmse": 0.1, "rows": 3.0})
    for row in false:
        with pytest.raises(ValueError):
            evaluated(pd.DataFrame(row, index=[3]), ids, ranges)


def test_metrics_of_real_nodes_count_only_where_they_are_valid(load_tiny):
    """Node 3 claims a metric above its range, and node 4 clients of another node."""
    record = DroppedReplies(always=True)
    nobody = np.empty(0, dtype=np.int64)
    presences = tuple(Presence(place, nobody, np.array([place])) for place in range(3))
    claims = {2: (0, 0.5), 3: (1, 7.0), 4: (0, 1.0)}

    def ask(messages):
        for message in messages:
            client, value = claims[message.metadata.dst_node_id]
            table = pack_table(np.array([client]), dict.fromkeys(ranges, np.array([value])))
            yield Message(table, reply_to=message)

    federation = SimpleNamespace(
        untrusted=True, roster=Roster((2, 3, 4), presences), dropped=record, ask=ask
    )
    evaluator = Evaluator(load_tiny(), federation)
    ranges = evaluator.metrics.ranges
    found = evaluator.evaluate(to_record(THETA), 1, np.arange(3))
    assert found.users.index.tolist() == [0] and (found.users.to_numpy() == 0.5).all()
    assert record.after_round(1, None)["dropped-replies"] == 2


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
    from clients.node import Node
    from fedrec.experiment.schema import load

    table = tiny_experiment()
    if overrides is RATED:
        del table["positive-above"]
    node = Node(load(table, overrides), 0, 1, None)
    arrays = {name: value.numpy() for name, value in node.initial().items()}
    own = list(evaluate_clients(node, arrays, EvaluateOrder(1, None)).users.columns)
    assert list(node.metrics.ranges) == own and own[: len(names)] == names


# Validation of single clients' updates, by node and client.

EACH_VALIDATION_THETA = {"t": np.zeros((5, 2), np.float32), "b": np.zeros(3, np.float32)}


def updates(clients, sizes=1.0, items=(1, 3), **changes):
    """Updates of some clients that touch the same items."""
    count = len(clients)
    sizes = np.broadcast_to(np.asarray(sizes, np.float32), count)
    requests = ItemRequests.of(np.array(clients), [np.array(items)] * count)
    values = {"b": np.repeat(sizes[:, None], 3, axis=1)}
    rows = {"t": np.repeat(np.repeat(sizes, len(items))[:, None], 2, axis=1)}
    made = {"updates": ClientArrays(requests, values, rows)}
    made |= {"examples": np.ones(count, np.int64), "losses": np.ones(count)}
    return TrainEach(**{**made, **changes})


def each_through(replies, asked):
    """The clients that count, by node."""
    theta, orders = to_record(EACH_VALIDATION_THETA), {}
    for node, clients in asked.items():
        order = TrainOrder(1, np.array(clients), each=True)
        orders[node] = Message(pack_order(order, theta), node, "train")
    sent = [Message(pack_each(replies[node]), reply_to=order) for node, order in orders.items()]
    good = ReplyValidator().trained(list(orders.values()), sent, EACH_VALIDATION_THETA)
    return {one.metadata.src_node_id: unpack_each(one.content) for one in good}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_client_that_is_not_finite_is_left_out_alone(bad):
    found = each_through({7: updates([1, 2, 3], [1, bad, 1])}, {7: [1, 2, 3]})
    assert found[7].clients.tolist() == [1, 3]
    assert np.isfinite(found[7].updates.rows["t"]).all()


def test_impossible_counts_cost_their_client():
    wrong = updates([1, 2, 3], examples=np.array([1, -1, 1]), losses=np.array([1.0, 1.0, 1e9]))
    assert each_through({7: wrong}, {7: [1, 2, 3]})[7].clients.tolist() == [1]


def test_a_much_larger_update_counts_as_ten_times_the_usual():
    sent = {7: updates([1, 2, 3], [1, 500, 1]), 8: updates([4])}
    found = each_through(sent, {7: [1, 2, 3], 8: [4]})
    assert found[7].updates.values["b"][:, 0] == pytest.approx([1, 10, 1], rel=1e-5)
    assert found[7].updates.rows["t"][:, 0] == pytest.approx([1, 1, 10, 10, 1, 1], rel=1e-5)
    assert found[8].updates.values["b"][:, 0] == pytest.approx([1])


def with_arrays(values=None, rows=None):
    made = updates([1, 2])
    own = made.updates
    arrays = ClientArrays(own.requests, values or own.values, rows or own.rows)
    return updates([1, 2], updates=arrays)


@pytest.mark.parametrize(
    "reply",
    [
        updates([1, 9]),
        updates([2, 1]),
        updates([1, 1]),
        updates([1, 2], items=(1, 5)),
        updates([1, 2], items=(-1, 3)),
        updates([1, 2], items=(3, 3)),
        updates([1, 2], items=(3, 1)),
        updates([1, 2], examples=np.ones(3, np.int64)),
        with_arrays(values={"b": np.zeros((2, 4), np.float32)}),
        with_arrays(values={"b": np.zeros((2, 3), np.int64)}),
        with_arrays(values={"c": np.zeros((2, 3), np.float32)}),
        with_arrays(values={"t": np.zeros((2, 5, 2), np.float32)}),
        with_arrays(rows={"t": np.zeros((3, 2), np.float32)}),
    ],
)
def test_other_clients_rows_or_parameters_cost_the_whole_reply(reply):
    assert list(each_through({7: reply, 8: updates([3])}, {7: [1, 2], 8: [3]})) == [8]


# One large node.

NODES = 6
ITEM = 3


@pytest.fixture
def sums(load_tiny):
    """Each node's sum over its clients as whole arrays, and their number."""
    made = []
    for index in range(NODES):
        node = Node(load_tiny(), index, NODES, None)
        arrays = {name: value.numpy() for name, value in node.initial().items()}
        reply = train_clients(node, arrays, TrainOrder(1, node.training))
        total = {name: dense_change(value) for name, value in reply.total.items()}
        made.append((total, reply.clients))
    return made


def test_it_may_put_ten_times_the_usual_norm_of_all_its_clients_into_one_item(sums):
    """Its sum passes unchanged up to that, and moves one item more than all honest clients move any
    item together."""
    sizes = {node: length(total) / clients for node, (total, clients) in enumerate(sums)}
    usual = sorted(sizes.values())[(NODES - 1) // 2]
    most = LARGER * usual
    assert _norm_bounds({**sizes, 0: 0.999 * most}, deque()).keys() <= sizes.keys() - {0}
    above = _norm_bounds({**sizes, 0: 2 * LARGER * max(sizes.values())}, deque())
    assert above[0] <= 0.5
    moved = most * sums[0][1]
    honest = sum(total["item.id"] for total, _ in sums[1:])
    assert moved / np.linalg.norm(honest, axis=1).max() == pytest.approx(29, rel=0.05)
