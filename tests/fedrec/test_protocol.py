# SPDX-License-Identifier: Apache-2.0
"""Messages and arrays between server and nodes."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, FedProx

from fedrec.protocol import messages
from fedrec.protocol.messages import (
    EvaluateOrder,
    Presence,
    TrainOrder,
    TrainSum,
    pack_arrays,
    pack_order,
    pack_presence,
    pack_sum,
    pack_table,
    read_arrays,
    unpack_order,
    unpack_presence,
    unpack_sum,
    unpack_table,
    writable_arrays,
)
from fedrec.protocol.secure import listed
from fedrec.protocol.serialization import (
    PackedArray,
    for_the_network,
    from_record,
    from_the_network,
    opened,
    packed,
    to_record,
)
from fedrec.protocol.updates import (
    ROWS,
    TRIANGLE,
    WHOLE,
    ClientArrays,
    ItemRequests,
    SparseAccumulator,
    SparseUpdate,
    added,
    apply_changes,
    bytes_of_rows,
    bytes_of_triangle,
    compacted,
    dense_change,
    expanded,
    network_bytes,
)

# Messages: packing and unpacking are inverse, and messages of Flower's own strategies are
# understood.

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


def test_arrays_keep_bits_types_shapes_and_order_in_copies_that_may_be_written():
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    tricky = {"turned": grid.T, "fortran": np.asfortranarray(grid), "every other": grid[:, ::2]}
    record = to_record(ARRAYS | tricky)
    from_record(record)["item.id"][:] = 0
    same(ARRAYS | tricky, from_record(record))


@pytest.mark.parametrize("clients", [None, np.array([], dtype=np.int64), np.array([3, 2**40])])
@pytest.mark.parametrize(
    "step", [None, {"name": "sgd", "epochs": 2, "private-parameters": ["a.*"]}]
)
def test_training_order(clients, step):
    arrays = to_record(ARRAYS)
    content = pack_order(TrainOrder(5, clients, "examples", step), arrays)
    assert content[messages.ARRAYS] is arrays  # shared between messages, not copied
    found, order = writable_arrays(sent(content)), unpack_order(TrainOrder, sent(content))
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
    assert asdict(replace(found, total={})) == asdict(TrainSum({}, 3, 4.5, 12, 1.25, 2))


@pytest.mark.parametrize("clients", [None, np.array([4, 1])])
def test_evaluation_order(clients):
    step = {"name": "sgd", "epochs": 0}
    content = pack_order(EvaluateOrder(7, clients, step), to_record(ARRAYS))
    same(ARRAYS, writable_arrays(sent(content)))
    order = unpack_order(EvaluateOrder, sent(content))
    assert order.round == 7 and order.step == step
    assert order.clients is None if clients is None else order.clients.tolist() == [4, 1]


def test_table_keeps_clients_columns_and_missing_values():
    columns = {"hits@5": np.array([0.5, np.nan]), "rows": np.array([3, 4])}
    clients, found, _ = unpack_table(sent(pack_table(np.array([9, 2]), columns)))
    assert clients.tolist() == [9, 2] and list(found) == list(columns)
    same({name: values.astype(float) for name, values in columns.items()}, found)


@pytest.mark.parametrize("changes", [{"clients": [1, 2]}, {"clients": [[1]]}, {"metric/a": 0.0}])
def test_table_whose_parts_do_not_fit_is_refused(changes):
    content = pack_table(np.array([1]), {"a": np.array([0.0]), "b": np.array([0.0])})
    given = {name: np.array(value) for name, value in changes.items()}
    content["arrays"] = to_record({**from_record(content["arrays"]), **given})
    with pytest.raises(ValueError):
        unpack_table(sent(content))


def test_presence_and_parameters():
    presence = Presence(3, np.array([1, 4]), np.array([], dtype=np.int64))
    found = unpack_presence(sent(pack_presence(presence)))
    assert (found.partition, found.training.tolist(), found.evaluated.tolist()) == (3, [1, 4], [])
    same(ARRAYS, read_arrays(sent(pack_arrays(ARRAYS))))


class _TwoNodes:
    def get_node_ids(self):
        return [2, 3]


@pytest.mark.parametrize(
    ("strategy", "overrides"), [(FedAvg(), {}), (FedProx(proximal_mu=0.5), {"proximal-mu": 0.5})]
)
def test_orders_of_flowers_own_strategies(identity, strategy, overrides):
    messages = list(strategy.configure_train(4, to_record(ARRAYS), ConfigRecord(), _TwoNodes()))
    assert len(messages) == 2 and all(isinstance(message, Message) for message in messages)
    same(ARRAYS, writable_arrays(messages[0].content))
    order = unpack_order(TrainOrder, messages[0].content)
    assert (order.round, order.clients, order.step) == (4, None, None)
    assert order.overrides == overrides
    (message, _) = strategy.configure_evaluate(4, to_record(ARRAYS), ConfigRecord(), _TwoNodes())
    same(ARRAYS, writable_arrays(message.content))
    asked = unpack_order(EvaluateOrder, message.content)
    assert asked.round == 4 and asked.clients is None and asked.step is None


# Serialization of arrays: packing and unpacking are inverse, and other data are refused.

PARTS = [
    PackedArray("a.b", "float32", (2, 3), "numpy.ndarray", b"\x00\xff" * 12),
    PackedArray("é#/", "int64", (), "x", b""),
]


def with_table(table, *contents):
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return listed([header, *contents])


ONE = ["a", "uint8", [4], "x"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        packed(PARTS)[:-1],
        packed(PARTS) + b"x",
        with_table([ONE]),
        with_table([ONE], b"1234", b"5"),
        with_table([ONE, ONE], b"1234", b"1234"),
        with_table([["a", "uint8", 4, "x"]], b"1234"),
        with_table([["a", "uint8", [4]]], b"1234"),
        with_table({"a": 1}, b"1234"),
        with_table(7),
        with_table([[[[[[[]]]]]]], b"1234"),
        with_table(b"[" * 10**6),
        (10**6).to_bytes(4, "little") + b"1234",
    ],
)
def test_what_is_no_packed_record_is_an_error_and_a_record_with_it_is_left_alone(data):
    with pytest.raises(Exception):  # noqa: B017  (of whatever kind)
        opened(data)
    content = RecordDict(
        {"arrays": ArrayRecord({"#packed": Array("uint8", (len(data),), "#packed", data)})}
    )
    assert list(from_the_network(content)["arrays"]) == ["#packed"]


def test_a_message_is_sent_as_one_array_and_unpacked_unchanged():
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(2.5),
        "n": np.zeros((0, 3), np.int64),
    }
    content = RecordDict({"arrays": to_record(arrays), "config": ConfigRecord({"a": 1})})
    shared: dict = {}
    other = RecordDict({"arrays": content["arrays"]})
    for_the_network(content, shared)
    for_the_network(other, shared)
    assert [len(record) for record in content.array_records.values()] == [1]
    assert other["arrays"] is content["arrays"]
    assert type(next(iter(content["arrays"].values()))) is Array
    for_the_network(content)  # a second time changes nothing
    found = from_record(from_the_network(content)["arrays"])
    assert list(found) == list(arrays) and content["config"]["a"] == 1
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    from_the_network(content)  # unpacking twice has no effect either
    assert list(content["arrays"]) == list(arrays)


# Stacked parameters of clients: selection, padding, and serialization.

LISTS = {3: [1, 4], 5: [], 8: [0, 1, 7]}


def requests():
    return ItemRequests.of(
        np.array(list(LISTS)), [np.array(items, dtype=np.int64) for items in LISTS.values()]
    )


def generated():
    rows = np.array([[31.0], [34.0], [80.0], [81.0], [87.0]])
    return ClientArrays(requests(), {"w": np.array([[3.0, 3], [5, 5], [8, 8]])}, {"t": rows})


def told(some):
    lists = np.split(some.items, some.offsets[1:-1])
    return {client: lists[place].tolist() for place, client in enumerate(some.clients.tolist())}


def test_some_clients_in_any_order():
    taken = generated().take(np.array([2, 0]))
    assert told(taken.requests) == {8: [0, 1, 7], 3: [1, 4]}
    assert taken.values["w"][:, 0].tolist() == [8, 3]
    assert taken.rows["t"][:, 0].tolist() == [80, 81, 87, 31, 34]


def test_parts_are_joined_in_the_order_of_clients():
    whole = requests()
    parts = [whole.take(np.array([2])), whole.take(np.array([0, 1]))]
    joined = ItemRequests.joined(parts)
    assert joined.clients.tolist() == [3, 5, 8] and told(joined) == LISTS
    assert ItemRequests.joined([]).clients.tolist() == []


def test_padding():
    padded = generated().padded(4)
    assert padded["t"][..., 0].tolist() == [[31, 34, 0, 0], [0, 0, 0, 0], [80, 81, 87, 0]]
    assert generated().real(4).sum(1).tolist() == [2, 0, 3]


# What arrays have in a message: the shortest of three forms, of which each is undone.

DRAWN = np.random.default_rng(0).normal(size=(50, 50)).astype(np.float32)
SOME = np.array([3, 8, 20])


def with_rows(width):
    table = np.zeros((50, width), np.float32)
    table[SOME] = DRAWN[SOME, :width]
    return table


def outer(rows):
    vector = np.zeros(50, np.float32)
    vector[rows] = DRAWN[0, rows]
    return np.outer(vector, vector)


CASES = {
    "dense": (DRAWN[:, :4], WHOLE, 50 * 4 * 4),
    "zeros": (np.zeros((50, 4), np.float32), ROWS, 0),
    "a vector of zeros": (np.zeros(7), ROWS, 0),
    "some rows": (with_rows(4), ROWS, 3 * (8 + 4 * 4)),
    "one number a row": (with_rows(1), ROWS, 3 * (8 + 4)),
    "products of three items": (outer(SOME), TRIANGLE, 3 * 8 + 6 * 4),
    "products of all items": (DRAWN @ DRAWN.T, TRIANGLE, 50 * 8 + 50 * 51 // 2 * 4),
    "not quite symmetric": (DRAWN @ DRAWN.T + np.eye(50, k=1, dtype=np.float32), WHOLE, 10_000),
    "a number": (np.array(2.5), WHOLE, 8),
    "none": (np.zeros((0, 3)), WHOLE, 0),
    "masked integers": (np.zeros(9, np.uint64), WHOLE, 72),
    "not a number": (np.full((2, 2), np.nan), WHOLE, 32),
}


@pytest.mark.parametrize(("array", "form", "size"), CASES.values(), ids=CASES)
def test_an_array_takes_its_shortest_form_and_comes_back(array, form, size):
    if form == TRIANGLE:
        array = (array + array.T) / 2  # a product of matrices may round its halves differently
    found, data = compacted(array)
    assert (found.split()[0], len(data), network_bytes({"a": array})) == (form, size, size)
    back = expanded(found, data, array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype and back.flags.writeable


def test_bytes_without_the_arrays_are_those_of_the_arrays():
    counts = np.arange(1, 51)
    tables = []
    for count in counts:
        table = np.zeros((50, 3), np.float32)
        table[:count] = 1
        tables.append(table)
    assert bytes_of_rows(counts, 12, 600).tolist() == [network_bytes({"t": t}) for t in tables]
    products = [outer(np.arange(count)) for count in counts]
    expected = [network_bytes({"p": one}) for one in products]
    assert bytes_of_triangle(counts, 4, 10_000).tolist() == expected


FLOAT = np.dtype("float32")
ROW = np.array([1], "<i8").tobytes() + bytes(4)


@pytest.mark.parametrize(
    ("form", "data", "kind", "shape"),
    [
        (f"{ROWS} 1", ROW, FLOAT, (1, 1)),  # a row that is not there
        (f"{ROWS} 2", ROW + ROW, FLOAT, (4, 1)),  # a row twice
        (f"{ROWS} 1", ROW[:-1], FLOAT, (4, 1)),
        (f"{ROWS} 2", ROW, FLOAT, (4, 1)),
        (f"{ROWS} -1", b"", FLOAT, (4, 1)),
        (f"{ROWS} one", ROW, FLOAT, (4, 1)),
        (ROWS, ROW, FLOAT, (4, 1)),
        (f"{ROWS} 0", b"", FLOAT, (2**20, 2**20)),  # more memory than anything that is sent
        (f"{TRIANGLE} 1", ROW, FLOAT, (4, 3)),
        (f"{TRIANGLE} 1", ROW[:-1], FLOAT, (4, 4)),
        (WHOLE, b"123", FLOAT, (1,)),
        (WHOLE, ROW, np.dtype(object), (1,)),
        (WHOLE, b"", FLOAT, (-1, 0)),
        ("other 1", ROW, FLOAT, (3, 1)),
    ],
)
def test_other_bytes_are_refused(form, data, kind, shape):
    with pytest.raises(ValueError):
        expanded(form, data, kind, shape)


# Sums of touched rows equal sums of whole tables.

SHAPE = (50, 3)


@pytest.fixture
def table():
    return np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)


def change(seed):
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(50, 9, replace=False))
    return SparseUpdate(SHAPE, rows, random.normal(size=(9, 3)))


def by_hand(one):
    whole = np.zeros(SHAPE)
    for row, value in zip(one.rows, one.values, strict=True):
        whole[row] += value
    return whole


def test_dense_and_apply(table):
    one = change(3)
    np.testing.assert_allclose(one.dense(), by_hand(one))
    moved = one.apply(table.copy(), 0.5)
    np.testing.assert_allclose(moved, table + 0.5 * by_hand(one), rtol=1e-6)
    assert moved.dtype == np.float32


def test_sums_of_changes():
    one, other = change(3), change(4)
    expected = by_hand(one) + by_hand(other)
    assert isinstance(added(one, other), SparseUpdate)
    np.testing.assert_allclose(dense_change(added(one, other)), expected)
    np.testing.assert_allclose(added(one, by_hand(other)), expected)


def test_only_named_tables_are_changed_in_place(table):
    theta = {"item.id": table, "w": np.ones(2, np.float32)}
    before, weights = table.copy(), theta["w"]
    moved = apply_changes(theta, {"item.id": change(5), "w": np.array([1.0, -1.0])}, 0.5)
    assert moved["item.id"] is table
    assert weights.tolist() == [1, 1]
    assert moved["w"].tolist() == [1.5, 0.5]
    np.testing.assert_allclose(table, before + 0.5 * by_hand(change(5)), rtol=1e-6)


def test_accumulator_adds_repeated_rows_and_grows():
    random, total = np.random.default_rng(2), np.zeros(SHAPE)
    sums = SparseAccumulator(SHAPE)
    for size in (0, 3, 40, 1, 200):
        rows, values = random.integers(0, 45, size), random.normal(size=(size, 3))
        np.add.at(total, rows, values)
        sums.add(rows, values)
    found = sums.total()
    assert (np.diff(found.rows) > 0).all() and found.rows.max() < 45
    np.testing.assert_allclose(found.dense(), total)


@pytest.mark.parametrize("touched", [3, 4, 8])
def test_a_running_sum_becomes_rows_alone_while_fewer_than_half_of_them_changed(touched):
    random = np.random.default_rng(touched)
    table, rows = random.normal(size=(8, 3)).astype(np.float32), random.permutation(8)[:touched]
    values = random.normal(size=(touched, 3))
    sums = SparseAccumulator(table.shape)
    sums.add(rows, values / 2)
    sums.add(rows[::-1].copy(), values[::-1] / 2)
    expected = np.zeros(table.shape)
    expected[rows] = values
    found = sums.change(table)
    assert isinstance(found, SparseUpdate) == (touched < 4)
    assert (found.values if isinstance(found, SparseUpdate) else found).dtype == np.float32
    np.testing.assert_allclose(dense_change(found), expected, rtol=1e-6, atol=1e-7)
