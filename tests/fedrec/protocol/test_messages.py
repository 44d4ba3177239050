# SPDX-License-Identifier: Apache-2.0
"""Messages: packing and unpacking are inverse, and messages of Flower's own strategies are
understood."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, FedProx

from fedrec.protocol import messages
from fedrec.protocol.messages import (
    pack_evaluate,
    pack_parameters,
    pack_presence,
    pack_standard,
    pack_sum,
    pack_table,
    pack_train,
    unpack_evaluate,
    unpack_parameters,
    unpack_presence,
    unpack_sum,
    unpack_table,
    unpack_train,
)
from fedrec.protocol.orders import EvaluateOrder, Presence, TrainOrder, TrainSum
from fedrec.protocol.zero_copy import from_record, to_record

ARRAYS = {
    "item.id": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "half": np.array([1.5, -2], dtype=np.float16),
    "wide": np.array([np.pi]),
    "scalar": np.array(3.25, dtype=np.float32),
    "nothing": np.zeros((0, 4), dtype=np.float32),
}


def same(one, other):
    assert list(one) == list(other)
    for name, array in one.items():
        assert other[name].dtype == array.dtype and other[name].shape == array.shape
        np.testing.assert_array_equal(other[name], array)


def sent(content):
    """The content after Flower's own serialization of each record."""
    return RecordDict(
        {name: type(record).inflate(*parts(record)) for name, record in content.items()}
    )


def parts(record):
    children = record.children
    return (record.deflate(), children) if children else (record.deflate(),)


def test_arrays_keep_bits_types_shapes_and_order():
    record = to_record(ARRAYS)
    assert isinstance(record, ArrayRecord)
    same(ARRAYS, from_record(record))


def test_arrays_in_any_memory_order():
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    tricky = {"turned": grid.T, "fortran": np.asfortranarray(grid), "every other": grid[:, ::2]}
    same(tricky, from_record(to_record(tricky)))


def test_unpacked_arrays_are_copies_that_may_be_written():
    record = to_record(ARRAYS)
    from_record(record)["item.id"][:] = 0
    same(ARRAYS, from_record(record))


@pytest.mark.parametrize("clients", [None, np.array([], dtype=np.int64), np.array([3, 2**40])])
@pytest.mark.parametrize(
    "step", [None, {"name": "sgd", "epochs": 2, "private-parameters": ["a.*"]}]
)
def test_training_order(clients, step):
    arrays = to_record(ARRAYS)
    content = pack_train(arrays, TrainOrder(5, clients, "examples", step))
    assert content[messages.ARRAYS] is arrays  # shared between messages, not copied
    found, order = unpack_train(sent(content))
    same(ARRAYS, found)
    assert (order.round, order.weighting, order.step, order.overrides) == (5, "examples", step, {})
    if clients is None:
        assert order.clients is None
    else:
        assert order.clients.dtype == np.int64 and order.clients.tolist() == clients.tolist()


def test_sum():
    reply = TrainSum({"w": np.array([0.5], np.float32)}, np.int64(3), np.float32(4.5), 12, 1.25, 2)
    found = unpack_sum(sent(pack_sum(reply)))
    same(reply.total, found.total)
    assert (found.clients, found.weight, found.examples, found.loss, found.losses) == (
        3,
        4.5,
        12,
        1.25,
        2,
    )


@pytest.mark.parametrize("clients", [None, np.array([4, 1])])
def test_evaluation_order(clients):
    step = {"name": "sgd", "epochs": 0}
    content = pack_evaluate(to_record(ARRAYS), EvaluateOrder(7, clients, step))
    found, order = unpack_evaluate(sent(content))
    same(ARRAYS, found)
    assert order.round == 7 and order.step == step
    assert order.clients is None if clients is None else order.clients.tolist() == [4, 1]


def test_table_keeps_clients_columns_and_missing_values():
    columns = {"hits@5": np.array([0.5, np.nan]), "rows": np.array([3, 4])}
    clients, found = unpack_table(sent(pack_table(np.array([9, 2]), columns)))
    assert clients.tolist() == [9, 2] and list(found) == list(columns)
    same({name: values.astype(float) for name, values in columns.items()}, found)


@pytest.mark.parametrize(
    ("clients", "columns", "names"),
    [
        ([1, 2], {"a": [0.0], "b": [0.0]}, ["a", "b"]),
        ([1], {"a": [0.0], "b": [0.0]}, ["a"]),
        ([1], {"a": [0.0], "b": [0.0]}, ["a", "a"]),
        ([[1]], {"a": [0.0], "b": [0.0]}, ["a", "b"]),
    ],
)
def test_table_whose_parts_do_not_fit_is_refused(clients, columns, names):
    content = pack_table(np.array([1]), {name: np.array(own) for name, own in columns.items()})
    arrays = {**from_record(content["arrays"]), "clients": np.array(clients)}
    content["arrays"] = to_record(arrays)
    content["config"]["columns"] = names
    with pytest.raises(ValueError):
        unpack_table(sent(content))


def test_presence_and_parameters():
    presence = Presence(3, np.array([1, 4]), np.array([], dtype=np.int64))
    found = unpack_presence(sent(pack_presence(presence)))
    assert (found.partition, found.training.tolist(), found.evaluated.tolist()) == (3, [1, 4], [])
    same(ARRAYS, unpack_parameters(sent(pack_parameters(ARRAYS))))


def test_standard_form_is_what_flower_expects():
    content = pack_standard(ARRAYS, {"num-examples": 7, "loss": 0.5})
    (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
    assert set(arrays) == set(ARRAYS) and dict(metrics) == {"num-examples": 7, "loss": 0.5}
    assert not pack_standard(None, {"num-examples": 7}).array_records


class _TwoNodes:
    def get_node_ids(self):
        return [2, 3]


@pytest.mark.parametrize(
    ("strategy", "overrides"), [(FedAvg(), {}), (FedProx(proximal_mu=0.5), {"proximal-mu": 0.5})]
)
def test_orders_of_flowers_own_strategies(identity, strategy, overrides):
    messages = list(strategy.configure_train(4, to_record(ARRAYS), ConfigRecord(), _TwoNodes()))
    assert len(messages) == 2 and all(isinstance(message, Message) for message in messages)
    found, order = unpack_train(messages[0].content)
    same(ARRAYS, found)
    assert order.round == 4
    assert order.clients is None
    assert order.step is None
    assert order.overrides == overrides
    (message, _) = strategy.configure_evaluate(4, to_record(ARRAYS), ConfigRecord(), _TwoNodes())
    found, asked = unpack_evaluate(message.content)
    same(ARRAYS, found)
    assert asked.round == 4 and asked.clients is None and asked.step is None
