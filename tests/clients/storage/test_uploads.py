# SPDX-License-Identifier: Apache-2.0
"""A device counts its uploads and refuses further ones, also after a restart."""

import numpy as np
import pytest

from clients.hosting.node import Node
from clients.storage.uploads import UploadLedger
from clients.training.round import train_clients
from fedrec.protocol.orders import TrainOrder

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")
STEP = "step={name='dpvae', participations=2}"


def ids(*clients):
    return np.array(clients, dtype=np.int64)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_client_has_so_many_and_no_more(tmp_path, on_disk):
    ledger = UploadLedger(tmp_path / "uploads.sqlite" if on_disk else None)
    assert ledger.take(ids(1, 2), 1, 2, fresh=False).tolist() == [True, True]
    assert ledger.take(ids(2, 3), 2, 2, fresh=False).tolist() == [True, True]
    if on_disk:
        ledger = UploadLedger(tmp_path / "uploads.sqlite")
    assert ledger.take(ids(1, 2, 3), 3, 2, fresh=False).tolist() == [True, False, True]


def test_what_a_round_costs_does_not_grow_with_earlier_uploads():
    """In thousands of instructions of SQLite, which go through 20,000 rows in a hundred."""
    ledger, thousands = UploadLedger(None), []
    ledger.take(np.arange(20_000), 1, 1, fresh=False)
    ledger._memory.set_progress_handler(lambda: thousands.append(1) and None, 1000)
    assert not ledger.take(np.arange(20), 2, 1, fresh=False).any()
    assert len(thousands) <= 5


def test_a_repeated_round_counts_once_from_a_seed_and_each_time_without(tmp_path):
    seeded, fresh = UploadLedger(None), UploadLedger(None)
    assert [seeded.take(ids(1), 1, 2, fresh=False)[0] for _ in range(5)] == [True] * 5
    assert [fresh.take(ids(1), 1, 2, fresh=True)[0] for _ in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_run_that_goes_back_takes_later_uploads_back(tmp_path):
    ledger = UploadLedger(None)
    for round_number in (1, 2, 3):
        ledger.take(ids(1), round_number, 3, fresh=False)
    assert ledger.take(ids(1), 2, 3, fresh=False)[0] and ledger.take(ids(1), 3, 3, fresh=False)[0]
    assert not ledger.take(ids(1), 4, 3, fresh=False)[0]


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
