# SPDX-License-Identifier: Apache-2.0
"""Private state, secrets and uploads that a node keeps."""

import sqlite3
import stat
from contextlib import closing

import numpy as np
import pytest

from clients.node import Node
from clients.participation import Limits, Participation
from clients.round import train_clients
from clients.storage import PrivateState, SessionSecrets
from fedrec.errors import ClientError, RunError
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import SparseUpdate

# Private state: by client and round, readable by its owner only.


@pytest.fixture
def state(tmp_path):
    return PrivateState(tmp_path / "private" / "node-0.sqlite")


def put(state, client, round_, value, keep=10):
    state.save_all([([client], {"own": np.array([[value]], np.float32)})], round_, keep=keep)


def got(state, client, before):
    found = state.load(client, before)
    return found["own"].item() if found else None


def rounds(state, client):
    with closing(sqlite3.connect(state.file)) as connection:
        return [
            row[0]
            for row in connection.execute(
                "SELECT round FROM state WHERE client=? ORDER BY 1", (client,)
            )
        ]


def test_a_round_reads_the_newest_of_the_earlier_rounds(state):
    for round_ in (1, 3, 7):
        put(state, 5, round_, round_)
    assert [got(state, 5, before) for before in (1, 2, 3, 4, 7, 8, 100)] == [None, 1, 1, 3, 3, 7, 7]
    assert got(state, 6, 100) is None


def test_writing_a_round_replaces_it_and_the_later_ones(state):
    for round_ in (1, 2, 3):
        put(state, 5, round_, round_)
        put(state, 6, round_, round_)
    put(state, 5, 2, 20)
    assert rounds(state, 5) == [1, 2] and got(state, 5, 100) == 20
    assert rounds(state, 6) == [1, 2, 3]


def test_the_state_of_the_last_rounds_remains(state):
    """Also for a client in few rounds: every state that one of the last rounds read can be read
    again."""
    for round_ in (1, 3, 8, 9, 14):
        put(state, 7, round_, round_, keep=4)
    assert rounds(state, 7) == [9, 14]  # rounds 11 to 14 remain, and 11 ended with the entry of 9
    assert [got(state, 7, before) for before in (12, 15)] == [9, 14]


@pytest.mark.parametrize("filled", [[], [2], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_rows_alone_come_back_as_a_whole_table_and_are_small(state, filled):
    table = np.zeros((1000, 300), dtype=np.float32)
    table[filled] = np.random.default_rng(0).normal(size=(len(filled), 300))
    rows = SparseUpdate(table.shape, np.array(filled, dtype=np.int64), table[filled])
    other = SparseUpdate(table.shape, np.array([], dtype=np.int64), table[[]])
    none = np.zeros((2, 0, 3))
    state.save_all([([1, 2], {"none": none, "table": [rows, other]})], 1, keep=2)
    found = state.load(1, 2)
    np.testing.assert_array_equal(found["table"], table)
    assert found["table"].dtype == np.float32 and found["none"].shape == (0, 3)
    assert not state.load(2, 2)["table"].any()
    assert state.file.stat().st_size < table.nbytes / 4


def test_only_the_arrays_that_are_named_are_loaded(state):
    arrays = {"table": np.ones((2, 2, 2)), "own": np.array([[1.0], [3.0]])}
    state.save_all([([1, 3], arrays), ([4], {"own": np.ones((1, 2))})], 1, keep=2)
    alike, alone = state.load_all([3, 2, 4, 1], 2, ["own", "other"])
    assert alike[0] == [0, 3] and list(alike[1]) == ["own"]
    np.testing.assert_array_equal(alike[1]["own"], [[3.0], [1.0]])
    assert alone[0] == [2] and alone[1]["own"].shape == (1, 2)


def test_only_the_newest_entries_of_a_client_remain(state):
    for round_ in range(1, 8):
        put(state, 5, round_, round_, keep=3)
    put(state, 6, 1, 1, keep=3)
    assert rounds(state, 5) == [5, 6, 7] and rounds(state, 6) == [1]


def test_arrays_keep_names_bits_and_shapes(state):
    arrays = {
        "layer1.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
        "scalar": np.array(np.pi),
    }
    state.save_all([([1], {name: value[None] for name, value in arrays.items()})], 1, keep=2)
    found = PrivateState(state.file).load(1, 2)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_the_file_is_for_its_owner_only_and_is_not_made_by_reading(state):
    assert state.load(1, 5) == {} and not state.file.exists()
    put(state, 1, 1, 1)
    assert state.file.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_changes_nothing(state):
    put(state, 1, 1, 1)
    put(state, 1, 2, 2)
    with pytest.raises(RunError, match="cannot be used"):
        # fails in the second of its three commands, as a client is written twice
        state.save_all([([1, 1], {"own": np.zeros((2, 1))})], 1, keep=2)
    assert rounds(state, 1) == [1, 2] and got(state, 1, 2) == 1


def test_a_file_of_an_earlier_version_is_an_error(state):
    put(state, 1, 1, 1)
    with closing(sqlite3.connect(state.file)) as connection:
        connection.execute("ALTER TABLE state DROP COLUMN layout")
    for use in (lambda: state.load(1, 2), lambda: put(state, 1, 2, 1)):
        with pytest.raises(RunError, match="start a new run"):
            use()


def pages(state):
    with closing(sqlite3.connect(state.file)) as connection:
        return connection.execute("PRAGMA page_size").fetchone()[0]


# Session secrets outlive a process, each step is taken once, and secrets of finished sessions are
# deleted.

ONE, TWO = b"1" * 16, b"2" * 16
SECRETS = {"mask-seed": b"\x00secret-of-sixteen", "place": b"\x01"}


@pytest.fixture(params=["disk", "memory"])
def reopened(request, tmp_path):
    """Opens the secrets as another process would; in memory there is only one process."""
    if request.param == "disk":
        return lambda: SessionSecrets(tmp_path / "private" / "secure-0.sqlite")
    kept = SessionSecrets(None)
    return lambda: kept


def test_a_node_has_one_channel_key(reopened):
    assert reopened().channel(b"first") == b"first"
    assert reopened().channel(b"other") == b"first"


def test_a_session_goes_one_way(reopened):
    reopened().begin(ONE, SECRETS)
    assert reopened().look(ONE) == reopened().look(ONE) == SECRETS
    reopened().masked(ONE, {"left": b"over"})
    assert reopened().waiting(ONE) == {"left": b"over"}
    for step in (lambda: reopened().look(ONE), lambda: reopened().masked(ONE, {})):
        with pytest.raises(ClientError, match="stage 'shared'"):
            step()
    reopened().end(ONE)
    for step in (
        lambda: reopened().end(ONE),
        lambda: reopened().waiting(ONE),
        lambda: reopened().look(ONE),
    ):
        with pytest.raises(ClientError, match="does not take that step"):
            step()


def test_nothing_is_unmasked_before_it_is_masked_or_in_another_session(reopened):
    reopened().begin(ONE, SECRETS)
    for step in (
        lambda: reopened().waiting(ONE),
        lambda: reopened().end(ONE),
        lambda: reopened().look(TWO),
    ):
        with pytest.raises(ClientError):
            step()
    assert reopened().look(ONE) == SECRETS


def test_a_new_session_ends_the_one_before_and_keeps_the_channel(reopened):
    reopened().channel(b"key")
    reopened().begin(ONE, SECRETS)
    reopened().masked(ONE, SECRETS)
    reopened().begin(TWO, {"place": b"\x02"})
    with pytest.raises(ClientError):
        reopened().waiting(ONE)
    assert reopened().look(TWO) == {"place": b"\x02"} and reopened().channel(b"other") == b"key"


def test_the_file_is_readable_by_its_owner_only_and_deletes(tmp_path):
    file = tmp_path / "private" / "secure-0.sqlite"
    kept = SessionSecrets(file)
    assert not file.exists()
    kept.begin(ONE, SECRETS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = SECRETS["mask-seed"].hex().encode()
    assert secret in file.read_bytes()
    kept.masked(ONE, {"place": b"\x01"})
    kept.end(ONE)
    assert all(secret not in other.read_bytes() for other in file.parent.iterdir())


# A device counts its uploads and refuses further ones, also after a restart.

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")
STEP = "step={name='dpvae', participations=2}"


def ids(*clients):
    return np.array(clients, dtype=np.int64)


def take(ledger, clients, round_number, most, fresh):
    """Which clients may upload."""
    limits = Limits(rounds=most)
    return np.isin(clients, ledger.spend("", round_number, clients, 0.0, limits, again=fresh))


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_client_has_so_many_and_no_more(tmp_path, on_disk):
    ledger = Participation(tmp_path / "uploads.sqlite" if on_disk else None)
    assert take(ledger, ids(1, 2), 1, 2, fresh=False).tolist() == [True, True]
    assert take(ledger, ids(2, 3), 2, 2, fresh=False).tolist() == [True, True]
    if on_disk:
        ledger = Participation(tmp_path / "uploads.sqlite")
    assert take(ledger, ids(1, 2, 3), 3, 2, fresh=False).tolist() == [True, False, True]


def test_what_a_round_costs_does_not_grow_with_earlier_uploads():
    """In thousands of instructions of SQLite, which go through 20,000 rows in a hundred."""
    ledger, thousands = Participation(None), []
    take(ledger, np.arange(20_000), 1, 1, fresh=False)
    ledger._memory.set_progress_handler(lambda: thousands.append(1) and None, 1000)
    assert not take(ledger, np.arange(20), 2, 1, fresh=False).any()
    assert len(thousands) <= 5


def test_a_repeated_round_counts_once_from_a_seed_and_each_time_without(tmp_path):
    seeded, fresh = Participation(None), Participation(None)
    assert [take(seeded, ids(1), 1, 2, fresh=False)[0] for _ in range(5)] == [True] * 5
    assert [take(fresh, ids(1), 1, 2, fresh=True)[0] for _ in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_run_that_goes_back_takes_later_uploads_back(tmp_path):
    ledger = Participation(None)
    for round_number in (1, 2, 3):
        take(ledger, ids(1), round_number, 3, fresh=False)
    assert take(ledger, ids(1), 2, 3, fresh=False)[0] and take(ledger, ids(1), 3, 3, fresh=False)[0]
    assert not take(ledger, ids(1), 4, 3, fresh=False)[0]


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_node_adds_nothing_of_those_who_refuse(load_tiny, tmp_path, path):
    node = Node(load_tiny(*VAE, STEP, f"engine.path={path}"), 0, 1, tmp_path)
    arrays = {name: value.numpy() for name, value in node.initial().items()}
    for round_number in (1, 2):
        assert train_clients(node, arrays, TrainOrder(round_number, ids(3))).clients == 1
    again = Node(load_tiny(*VAE, STEP, f"engine.path={path}"), 0, 1, tmp_path)
    alone = train_clients(again, arrays, TrainOrder(3, ids(5)))
    both = train_clients(again, arrays, TrainOrder(3, ids(3, 5)))
    assert both.clients == 1 and alone.clients == 1
    for name, value in alone.total.items():
        np.testing.assert_array_equal(both.total[name], value)


def test_clients_that_count_stay_with_their_node(load_tiny, tmp_path):
    assert Node(load_tiny(*VAE, STEP), 0, 1, tmp_path).work is None
    assert Node(load_tiny(*VAE, "step={name='dpvae'}"), 0, 1, tmp_path).work is not None
