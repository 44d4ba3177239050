# SPDX-License-Identifier: Apache-2.0
"""Robust rules: the numbers of Flower's rules on the same updates; rules over those that changed a
row by hand; what each stops."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp.strategy.bulyan import aggregate_n_closest_weights
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedrec.components.registry import STRATEGY, resolve
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.orders import TrainEach
from strategies.base import Aggregate

CLIENTS = 15
MALICIOUS = 3
SHARE = MALICIOUS / CLIENTS


@pytest.fixture
def updates():
    """15 updates of a table of which each changes some rows, and of a vector; three are large."""
    random = np.random.default_rng(4)
    table = random.normal(size=(CLIENTS, 8, 3)) * (random.random((CLIENTS, 8, 1)) < 0.6)
    vector = random.normal(size=(CLIENTS, 4))
    table[:MALICIOUS] *= 20
    vector[:MALICIOUS] += 5
    return {"table": table, "vector": vector}


def each_of(updates):
    items = [np.flatnonzero(own.any(axis=1)) for own in updates["table"]]
    rows = np.concatenate([own[i] for own, i in zip(updates["table"], items, strict=True)])
    requests = ItemRequests.of(np.arange(CLIENTS), items)
    arrays = ClientArrays(requests, {"vector": updates["vector"]}, {"table": rows})
    return TrainEach(arrays, np.ones(CLIENTS, np.int64), np.zeros(CLIENTS))


def applied(updates, name, **settings):
    """The change of zero parameters by a rule."""
    section = Section.model_validate({"name": name, **settings})
    rule = resolve(STRATEGY, name)(component_settings(STRATEGY, section), None, {})
    theta = {name: np.zeros(value.shape[1:]) for name, value in updates.items()}
    return rule.apply(theta, Aggregate({}, CLIENTS, CLIENTS, 1, each_of(updates)))


def selected(updates, count):
    """Indices of Flower's Multi-Krum."""
    contents = [
        RecordDict({"arrays": ArrayRecord({n: Array(v[place]) for n, v in updates.items()})})
        for place in range(CLIENTS)
    ]
    found = select_multikrum(contents, MALICIOUS, count)
    return [next(i for i, one in enumerate(contents) if one is own) for own in found]


def same(found, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-9)


def test_the_median_is_that_of_numpy_and_flower(updates):
    same(applied(updates, "median"), {n: np.median(v, axis=0) for n, v in updates.items()})


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.2, 0.45])
def test_the_trimmed_mean_is_flowers(updates, cut):
    same(
        applied(updates, "trimmed-mean", cut=cut),
        {n: trim_mean(v, cut) for n, v in updates.items()},
    )


@pytest.mark.parametrize("keep", [1, 4, 12])
def test_krum_chooses_as_flower_does(updates, keep):
    chosen = selected(updates, keep)
    assert not set(chosen) & set(range(MALICIOUS))
    found = applied(updates, "krum", malicious=SHARE, keep=keep)
    same(found, {n: v[chosen].mean(axis=0) for n, v in updates.items()})


def test_bulyan_is_flowers(updates):
    chosen = selected(updates, CLIENTS - 2 * MALICIOUS)
    lists = [[value[place] for value in updates.values()] for place in chosen]
    middle = [np.median([own[n] for own in lists], axis=0) for n in range(len(updates))]
    wanted = aggregate_n_closest_weights(middle, lists, CLIENTS - 4 * MALICIOUS)
    found = applied(updates, "bulyan", malicious=SHARE)
    same(found, dict(zip(updates, wanted, strict=True)))


def test_bulyan_needs_enough_clients(updates):
    with pytest.raises(ExperimentError, match="at least 19 clients"):
        applied(updates, "bulyan", malicious=4 / CLIENTS)


@pytest.mark.parametrize("norm", [None, 1.5])
def test_the_bound_on_norms_by_hand(updates, norm):
    flat = np.concatenate([value.reshape(CLIENTS, -1) for value in updates.values()], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    bound = np.median(norms) if norm is None else norm
    factors = np.minimum(1, bound / norms)
    found = applied(updates, "norm-bound", **({} if norm is None else {"norm": norm}))
    same(found, {n: np.tensordot(factors, v, 1) / CLIENTS for n, v in updates.items()})


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_rows_over_the_clients_that_changed_them(updates, name):
    settings = {"cut": 0.25} if name == "trimmed-mean" else {}
    found = applied(updates, name, over="touching", least=9, **settings)["table"]
    moved = 0
    for row in range(8):
        own = updates["table"][updates["table"][:, row].any(axis=1), row]
        rule = np.median(own, axis=0) if name == "median" else trim_mean(own, 0.25)
        wanted = rule if len(own) >= 9 else np.zeros(3)
        moved += len(own) >= 9
        np.testing.assert_allclose(found[row], wanted, rtol=1e-9, atol=1e-12)
    assert 0 < moved < 8


def test_the_server_rate_scales_the_step(updates):
    one = applied(updates, "median")
    half = applied(updates, "median", **{"server-lr": 0.5})
    same(half, {n: value / 2 for n, value in one.items()})


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "norm-bound"])
def test_they_are_refused_beside_secure_sums_and_a_user_level_guarantee(name, run_tiny):
    with pytest.raises(ExperimentError, match="cannot be made private"):
        run_tiny(f"strategy={{name='{name}'}}", "privacy={clip-norm=1.0,noise-multiplier=1.0}")
    with pytest.raises(ExperimentError, match="secure"):
        run_tiny(f"strategy={{name='{name}'}}", "secure-aggregation=true", output="secure")
