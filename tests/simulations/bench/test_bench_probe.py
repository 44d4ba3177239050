# SPDX-License-Identifier: Apache-2.0
"""The probe without a model finds held-out items where they are kept out of the negatives, and
nothing elsewhere."""

import numpy as np
import pytest

from clients.hosting.node import Node
from fedrec.experiment.loading import load
from simulations.bench.probe import draws_negatives, never_drawn


@pytest.fixture
def table(tiny_experiment):
    """An experiment of 40 rounds of everybody, with or without the leak."""

    def make(leaky, **changes):
        made = tiny_experiment() | {
            "dataset": {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20},
            "split": {"name": "leave-one-out", "leaky-negatives": leaky},
            "sampler": {"name": "full"},
            "rounds": 40,
        }
        made["evaluation"] = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 0}}
        return made | changes

    return make


@pytest.mark.parametrize("leaky", [False, True])
def test_undrawn_items_of_a_run_reveal_nothing_without_the_leak(table, leaky):
    hits = never_drawn(load(table(leaky)))["hits-of-100@10"]
    assert hits.mean() > 0.97 if leaky else abs(hits.mean() - 0.1) < 0.1


def test_draws_on_the_device_before_ranking_count_too(table):
    """Without rounds in which a user is, only fine-tuning can leak."""
    evaluation = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 1, "negatives": 200}}
    sampler = {"name": "fixed-size", "cohort": 1}
    leaky = load(table(True, evaluation=evaluation, sampler=sampler, rounds=1))
    assert never_drawn(leaky)["hits-of-100@10"].mean() > 0.3


def test_a_system_without_negatives_is_at_chance_exactly(table):
    one = load(table(True) | {"model": {"name": "item-weights"}, "step": {"name": "gram"}})
    assert not draws_negatives(Node(one, 0, 1, None).step(one.step))
    np.testing.assert_allclose(never_drawn(one)["hits-of-100@10"], 0.1)


def test_users_in_parts_are_users_at_once(table, monkeypatch):
    whole = never_drawn(load(table(False, rounds=2)))
    monkeypatch.setattr("simulations.bench.probe._CELLS_AT_ONCE", 1000)  # four users
    parts = never_drawn(load(table(False, rounds=2)))
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-12)
