# SPDX-License-Identifier: Apache-2.0
"""GPFedRec's server: the graph of four users by hand and against torch_geometric, its state, and
refusals."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict

from fedrec.errors import ExperimentError
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.messages import pack_each
from fedrec.protocol.orders import TrainEach
from fedrec.protocol.zero_copy import from_record
from server.strategy_state import lasting_state
from strategies.base import Aggregate
from strategies.per_client._user_graph import Uploads, edges
from strategies.per_client.gpfedrec import GpfedrecStrategy, GpfedrecStrategyConfig

GUIDED = (
    "model={name='gpfedrec', embedding=4, hidden=[6]}",
    "step={name='gpfedrec', batch-size=8}",
    "split={name='leave-one-out'}",
    "evaluation.fine-tune={epochs=0}",
)
TABLES = np.array([[3.0, 4.0], [4.0, 3.0], [0.0, 2.0], [-1.0, 0.0]], dtype=np.float32)
COSINES = np.array(
    [[1.0, 0.96, 0.8, -0.6], [0.96, 1.0, 0.6, -0.8], [0.8, 0.6, 1.0, 0.0], [-0.6, -0.8, 0.0, 1.0]]
)


def strategy(**settings):
    nobody: Any = None
    made = GpfedrecStrategy(GpfedrecStrategyConfig(**settings), nobody, {"name": "gpfedrec"})
    made._theta = {"item.id": np.zeros((2, 1), dtype=np.float32)}
    return made


def answer(clients, change):
    """A node's reply for clients that touched both of two items."""
    wanted = ItemRequests.of(np.array(clients), [np.arange(2)] * len(clients))
    rows = {"item.id": np.asarray(change, dtype=np.float32).reshape(-1, 1)}
    return TrainEach(
        ClientArrays(wanted, {}, rows), np.ones(len(clients), np.int64), np.ones(len(clients))
    )


def uploads(changes):
    """What is kept of clients 0, 1, ...: a table each, of which rows of zeros were not sent."""
    kept = Uploads(None)
    for client in reversed(range(len(changes))):
        remember(kept, client, np.flatnonzero(changes[client].any(axis=1)), changes[client])
    return kept


def remember(kept, client, rows, table):
    kept.remember(ItemRequests.of(np.array([client]), [rows]), table[rows])


def cosines(tables):
    units = tables / np.linalg.norm(tables, axis=1, keepdims=True)
    return units @ units.T


def test_four_users_by_hand():
    """Two neighbours each: itself and the nearest."""
    changes = uploads(TABLES[:, :, None]).changes
    assert changes is not None
    found = changes.similarities(np.arange(4), np.zeros((2, 1)))
    np.testing.assert_allclose(found, COSINES, atol=1e-6)
    half = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0.5, 0.5]]
    np.testing.assert_array_equal(edges(found, 2), half)
    np.testing.assert_allclose(changes.mean(np.array([0.5, 0, 0.5, 0]), 2)[:, 0], [1.5, 3.0])


def test_cosines_and_means_are_those_of_whole_tables():
    """Of tables that are written out, where each user changed some of the rows."""
    random = np.random.default_rng(1)
    start = random.normal(size=(7, 3)).astype(np.float32)
    moved = random.normal(size=(6, 7, 3)).astype(np.float32)
    moved[random.random((6, 7)) < 0.6] = 0
    changes = uploads(moved).changes
    assert changes is not None
    tables, some = (start + moved).reshape(6, -1).astype(np.float64), np.array([4, 1, 3])
    np.testing.assert_allclose(changes.similarities(some, start), cosines(tables)[some], rtol=1e-5)
    weights = random.dirichlet(np.ones(6), size=2)
    means = (weights @ tables).reshape(2, 7, 3)
    np.testing.assert_allclose(start + changes.mean(weights[0], 7), means[0], rtol=1e-5, atol=1e-6)
    wanted = ItemRequests.of(np.array([1, 4]), [np.array([0, 3, 6]), np.arange(7)])
    rows = start[wanted.items] + changes.means_of_rows(weights, wanted)
    np.testing.assert_allclose(
        rows, np.concatenate([means[0][[0, 3, 6]], means[1]]), rtol=1e-5, atol=1e-6
    )


def test_neighbours_above_the_mean_similarity_by_hand():
    """The mean of the cosines is 5.92 / 16 = 0.37; with none above the mean the most similar
    remains."""
    third = 1 / 3
    wanted = [[third] * 3 + [0], [third] * 3 + [0], [third] * 3 + [0], [0, 0, 0, 1]]
    np.testing.assert_allclose(edges(COSINES, 0), wanted)
    np.testing.assert_array_equal(edges(np.ones((2, 2)), 0), [[1, 0], [1, 0]])


def test_means_are_those_of_torch_geometric():
    torch = pytest.importorskip("torch")
    geometric = pytest.importorskip("torch_geometric")
    random = np.random.default_rng(0)
    changes = random.normal(size=(9, 5, 2)).astype(np.float32)
    start = random.normal(size=(5, 2)).astype(np.float32)
    tables = (start + changes).reshape(9, -1)
    weights = edges(cosines(tables.astype(np.float64)), 3)
    user, neighbour = np.nonzero(weights)
    layer = geometric.nn.SimpleConv(aggr="mean")
    index = torch.from_numpy(np.stack([neighbour, user]))
    wanted = torch.from_numpy(tables)
    requests = ItemRequests.of(np.arange(9), [np.arange(5)] * 9)
    for layers in (1, 2):
        wanted = layer(wanted, index)
        server = strategy(neighbours=3, layers=layers)
        server._theta, server._uploads = {"item.id": start}, uploads(changes)
        found = server.sent(requests).rows["item.guide"].reshape(9, -1)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_guidance_and_the_shared_step_are_those_of_the_hand_computed_graph():
    """Both items touched by all, one number each: the four users' tables of above."""
    server = strategy(neighbours=2, optimiser="sgd", server_lr=1.0)
    for some in ([0, 2], [1, 3]):
        updates = answer(some, TABLES[some])
        server.apply(server._theta, Aggregate({}, 2, 2, 1, updates))
    server._theta = {"item.id": np.zeros((2, 1), dtype=np.float32)}
    everybody = ItemRequests.of(np.array([0, 1, 2, 3, 7]), [np.arange(2)] * 5)
    guide = server.sent(everybody).rows["item.guide"].reshape(5, 2)
    wanted = [[3.5, 3.5], [3.5, 3.5], [1.5, 3.0], [-0.5, 1.0], [0, 0]]  # nobody knows 7
    np.testing.assert_allclose(guide, wanted, rtol=1e-6)
    rows = server.sent(ItemRequests.of(np.array([2, 7]), [np.array([1]), np.arange(2)]))
    np.testing.assert_allclose(rows.rows["item.guide"][:, 0], [3.0, 0.0, 0.0])
    np.testing.assert_allclose(rows.rows["item.id"], 0.0)


def test_the_shared_embeddings_move_along_the_mean_guidance(identity):
    server = strategy(neighbours=2, optimiser="sgd", server_lr=0.5)
    server._open = {0, 1, 2, 3}
    asked = Message(RecordDict(), 1, MessageType.TRAIN)
    reply = Message(pack_each(answer([0, 1, 2, 3], TABLES)), reply_to=asked)
    moved, metrics = server.aggregate_train(1, [reply])
    assert moved is not None and metrics is not None
    np.testing.assert_allclose(from_record(moved)["item.id"][:, 0], [1.0, 1.375], rtol=1e-6)
    assert metrics["num-clients"] == 4 and metrics["num-examples"] == 4


def test_uploads_are_kept_by_who_was_heard_last_and_survive_a_checkpoint():
    kept = Uploads(2)
    for client in (4, 9, 4, 1):
        remember(kept, client, np.array([1]), np.full((2, 2), client, dtype=np.float32))
    again = Uploads(2)
    again.restore(kept.state())
    changes = again.changes
    assert changes is not None and changes.clients.tolist() == [1, 4]
    np.testing.assert_array_equal(changes.values, [[1, 1], [4, 4]])
    remember(again, 7, np.array([0]), np.zeros((1, 2), dtype=np.float32))
    changes = again.changes
    assert changes is not None and changes.clients.tolist() == [1, 7]
    again.restore({})
    assert again.changes is None


def test_later_uploads_leave_the_state_as_it_is_without_a_second_copy():
    server = strategy()
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    remember(server._uploads, 4, np.arange(3), table)
    state = lasting_state(server)
    assert not state["uploads/changes"].flags.writeable
    remember(server._uploads, 4, np.array([1]), -table)
    np.testing.assert_array_equal(state["uploads/changes"], table)


@dataclass
class Tables:
    """What `Uploads` keeps, as whole tables `[items, d]` in float64."""

    limit: int | None
    kept: dict[int, np.ndarray] = field(default_factory=dict)

    def remember(self, requests, values, items):
        ends = requests.offsets[1:-1]
        pairs = zip(np.split(requests.items, ends), np.split(values, ends), strict=True)
        for client, (rows, change) in zip(requests.clients.tolist(), pairs, strict=True):
            self.kept.pop(client, None)
            self.kept[client] = np.zeros((items, values.shape[1]))
            self.kept[client][rows] = change
            if self.limit is not None and len(self.kept) > self.limit:
                del self.kept[next(iter(self.kept))]

    def ordered(self):
        return np.array([self.kept[client] for client in sorted(self.kept)])


def drawn(random, clients, items, width):
    """Requests of some of the clients, and changes: some of nothing, some zero, some the same."""
    chosen = np.flatnonzero(random.random(clients) < random.random())
    if not len(chosen):
        chosen = np.array([random.integers(clients)])
    popular = random.random(items) < random.random()  # nobody changes the others
    shares = random.choice([0.0, 0.3, 0.9, 1.0], size=len(chosen))
    lists = [np.flatnonzero(popular & (random.random(items) < share)) for share in shares]
    requests = ItemRequests.of(chosen, lists)
    values = random.normal(size=(len(requests.items), width)).astype(np.float32)
    values *= random.choice([0.0, 1.0], p=[0.1, 0.9], size=(len(values), 1)).astype(np.float32)
    if random.random() < 0.2:
        values[:] = values[:1]
    return requests, values


def check_a_random_history(seed):
    """Uploads of a few rounds, and all that the server computes from them, against whole tables."""
    random = np.random.default_rng(seed)
    clients, items, width = (int(random.integers(1, most)) for most in (40, 30, 12))
    limit = int(random.integers(1, clients + 1)) if random.random() < 0.5 else None
    kept, tables = Uploads(limit), Tables(limit)
    for _ in range(random.integers(1, 5)):
        requests, values = drawn(random, clients, items, width)
        kept.remember(requests, values)
        tables.remember(requests, values, items)
        if random.random() < 0.3:
            state = kept.state()
            kept = Uploads(limit)
            kept.restore(state)
            assert all(np.array_equal(one, state[name]) for name, one in kept.state().items())
    assert kept.state()["clients"].tolist() == list(tables.kept)
    changes, wanted = kept.changes, tables.ordered()
    assert changes is not None and changes.clients.tolist() == sorted(tables.kept)
    start = random.normal(size=(items, width)).astype(np.float32)
    some = random.permutation(len(wanted))[: random.integers(1, len(wanted) + 1)]
    similar = cosines((start + wanted).reshape(len(wanted), -1))[some]
    np.testing.assert_allclose(changes.similarities(some, start), similar, rtol=1e-4, atol=1e-5)
    weights = random.random((len(some), len(wanted))) * (random.random(len(wanted)) < 0.7)
    means = np.einsum("au,uid->aid", weights, wanted)
    np.testing.assert_allclose(changes.mean(weights[0], items), means[0], rtol=1e-4, atol=1e-4)
    lists = [np.flatnonzero(random.random(items) < random.random()) for _ in some]
    found = changes.means_of_rows(weights, ItemRequests.of(np.arange(len(some)), lists))
    rows = np.concatenate([own[rows] for own, rows in zip(means, lists, strict=True)])
    np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-4)


def test_random_histories_are_those_of_whole_tables():
    for seed in range(100):
        check_a_random_history(seed)


def test_no_plan_of_privacy_covers_it(run_tiny):
    privacy = "privacy={clip-norm=1.0, noise-multiplier=1.0}"
    with pytest.raises(ExperimentError, match="keeps each client's item embeddings"):
        run_tiny(*GUIDED, "strategy={name='gpfedrec'}", privacy)


@pytest.mark.parametrize(
    "wrong",
    [
        ("strategy={name='gpfedrec'}", "step={name='sgd'}"),
        ("strategy={name='reptile'}",),
        ("strategy={name='gpfedrec'}", "evaluation.fine-tune={epochs=1}"),
    ],
)
def test_it_works_with_its_own_step_and_without_fine_tuning_alone(run_tiny, wrong):
    with pytest.raises(ExperimentError, match="gpfedrec"):
        run_tiny(*GUIDED, *wrong)


def test_users_who_changed_nothing_are_like_the_shared_table():
    changes = uploads(np.zeros((2, 3, 2), dtype=np.float32)).changes
    assert changes is not None
    start = np.ones((3, 2), dtype=np.float32)
    np.testing.assert_allclose(changes.similarities(np.array([1]), start), [[1.0, 1.0]])
    wanted = ItemRequests.of(np.array([1]), [np.arange(3)])
    assert not changes.means_of_rows(np.array([[0.5, 0.5]]), wanted).any()
    assert not changes.mean(np.array([0.5, 0.5]), 3).any()
