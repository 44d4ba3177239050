# SPDX-License-Identifier: Apache-2.0
"""Robust rules: the numbers of Flower's rules on the same updates; rules over those that changed a
row by hand; UNION's clusters by scikit-learn's k-means."""

from itertools import permutations

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
from fedrec.protocol.sparse_update import SparseUpdate
from strategies.base import Aggregate
from strategies.robust._rule import ClientChanges
from strategies.robust.union import mean_distances, outlying

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


def applied(updates, name, theta=None, **settings):
    """The parameters after a rule; before, they are zero unless given."""
    section = Section.model_validate({"name": name, **settings})
    rule = resolve(STRATEGY, name)(component_settings(STRATEGY, section), None, {})
    theta = theta or {name: np.zeros(value.shape[1:]) for name, value in updates.items()}
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


def test_krum_refuses_to_choose_more_than_there_are(updates):
    with pytest.raises(ExperimentError, match=f"cannot choose {CLIENTS + 1} of {CLIENTS} updates"):
        applied(updates, "krum", malicious=SHARE, keep=CLIENTS + 1)
    whole = {n: v.mean(axis=0) for n, v in updates.items()}
    same(applied(updates, "krum", malicious=SHARE, keep=CLIENTS), whole)


def test_bulyan_is_flowers(updates):
    chosen = selected(updates, CLIENTS - 2 * MALICIOUS)
    lists = [[value[place] for value in updates.values()] for place in chosen]
    middle = [np.median([own[n] for own in lists], axis=0) for n in range(len(updates))]
    wanted = aggregate_n_closest_weights(middle, lists, CLIENTS - 4 * MALICIOUS)
    found = applied(updates, "bulyan", malicious=SHARE)
    same(found, dict(zip(updates, wanted, strict=True)))


def test_the_rules_are_byzfls(updates):
    """It has no Bulyan."""
    byzfl = pytest.importorskip("byzfl")
    flat = np.concatenate([value.reshape(CLIENTS, -1) for value in updates.values()], axis=1)
    krum = {"malicious": SHARE}
    cases = [
        ("median", {}, byzfl.Median()),
        ("trimmed-mean", {"cut": SHARE}, byzfl.TrMean(MALICIOUS)),
        ("krum", krum, byzfl.Krum(MALICIOUS)),
        ("krum", {**krum, "keep": CLIENTS - MALICIOUS}, byzfl.MultiKrum(MALICIOUS)),
    ]
    for name, settings, rule in cases:
        found = applied(updates, name, **settings)
        whole = np.concatenate([value.ravel() for value in found.values()])
        np.testing.assert_allclose(whole, rule(flat), rtol=1e-6, atol=1e-9)


def test_bulyan_needs_enough_clients(updates):
    with pytest.raises(ExperimentError, match="at least 19 clients"):
        applied(updates, "bulyan", malicious=4 / CLIENTS)


def kmeans_gap(numbers, clusters):
    """Gap statistic and its error by scikit-learn's k-means on uniform reference sets."""
    from sklearn.cluster import KMeans

    def spread(values):
        found = KMeans(clusters, n_init=20, random_state=0).fit(values[:, None])
        return np.log(found.inertia_), found.labels_

    random = np.random.default_rng(7)
    references = [spread(random.random(len(numbers)))[0] for _ in range(60)]
    own, labels = spread(numbers)
    return np.mean(references) - own, np.std(references) * np.sqrt(1 + 1 / 60), labels


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("apart", [0, 6])
def test_two_clusters_are_those_of_k_means_and_the_gap_statistic(seed, apart):
    pytest.importorskip("sklearn")
    random = np.random.default_rng(seed)
    numbers = random.random(20)
    numbers[:apart] += 4.0
    scaled = (numbers - numbers.min()) / np.ptp(numbers)
    one, _, _ = kmeans_gap(scaled, 1)
    two, error, labels = kmeans_gap(scaled, 2)
    smaller = labels == np.argmin(np.bincount(labels))
    assert (one < two - error) == bool(apart)
    assert np.array_equal(outlying(numbers, 0), smaller if apart else np.zeros(20, bool))
    assert np.array_equal(outlying(numbers, 20), smaller)


def test_equal_numbers_are_one_cluster():
    assert not outlying(np.ones(5), 5).any()


def test_uniformity_is_the_mean_distance_of_unit_vectors(updates):
    table = np.random.default_rng(1).normal(size=(8, 3))
    changes = [updates["table"][client] for client in range(CLIENTS)]
    items = np.array([1, 4, 5, 7])
    rows = [np.flatnonzero(own.any(axis=1)) for own in changes]
    sparse = [SparseUpdate((8, 3), r, own[r]) for r, own in zip(rows, changes, strict=True)]
    for given in (changes, sparse):
        found = mean_distances(ClientChanges.of(given, table), items)
        for client, own in enumerate(changes):
            unit = [row / np.linalg.norm(row) for row in (table + own)[items]]
            pairs = [np.linalg.norm(a - b) for a, b in permutations(unit, 2)]
            assert found[client] == pytest.approx(np.mean(pairs), rel=1e-9)


def test_union_leaves_out_those_that_draw_items_together(updates):
    table = np.random.default_rng(1).normal(size=(8, 3))
    updates["table"] *= 0.1
    updates["table"][:MALICIOUS] = 0.9 * (table.mean(0) - table)  # towards one point
    theta = {"table": table, "vector": np.zeros(4)}
    honest = {n: theta[n] + v[MALICIOUS:].mean(axis=0) for n, v in updates.items()}
    same(applied(updates, "union", theta, malicious=0.0, sample=5), honest)


def test_union_needs_embeddings(updates):
    with pytest.raises(ExperimentError, match="embeddings"):
        applied(updates, "union", embeddings="item.id")


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


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "norm-bound", "union"])
def test_they_are_refused_beside_secure_sums_and_a_user_level_guarantee(name, run_tiny):
    with pytest.raises(ExperimentError, match="cannot be made private"):
        run_tiny(f"strategy={{name='{name}'}}", "privacy={clip-norm=1.0,noise-multiplier=1.0}")
    with pytest.raises(ExperimentError, match="secure"):
        run_tiny(f"strategy={{name='{name}'}}", "secure-aggregation=true", output="secure")
