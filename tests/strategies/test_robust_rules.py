# SPDX-License-Identifier: Apache-2.0
"""Robust rules, and training in two stages."""

from itertools import permutations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy.bulyan import aggregate_n_closest_weights
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from fedrec.components.registry import STRATEGY, resolve
from fedrec.components.sections import Section, component_settings
from fedrec.errors import ExperimentError
from fedrec.protocol.messages import Presence, TrainEach, TrainOrder, unpack_order
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import ClientArrays, ItemRequests, SparseUpdate
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from server.nodes import Roster
from strategies.base import Aggregate
from strategies.robust import ChoiceConfig, _ClientChanges, _mean_distances, _outlying
from strategies.sums import FedAvg, Reptile
from tests.runs import assert_same_run, parameters_in, resumed

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
    assert np.array_equal(_outlying(numbers, 0), smaller if apart else np.zeros(20, bool))
    assert np.array_equal(_outlying(numbers, 20), smaller)


def test_uniformity_is_the_mean_distance_of_unit_vectors(updates):
    table = np.random.default_rng(1).normal(size=(8, 3))
    changes = [updates["table"][client] for client in range(CLIENTS)]
    items = np.array([1, 4, 5, 7])
    rows = [np.flatnonzero(own.any(axis=1)) for own in changes]
    sparse = [SparseUpdate((8, 3), r, own[r]) for r, own in zip(rows, changes, strict=True)]
    for given in (changes, sparse):
        found = _mean_distances(_ClientChanges.of(given, table), items)
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
    same(applied(updates, "union", theta, malicious=0.0), honest)


def test_union_needs_embeddings():
    with pytest.raises(ExperimentError, match="embeddings"):
        resolve(STRATEGY, "union")(ChoiceConfig(), None, {}).check_parameters({"w": np.zeros(4)})


def test_the_bound_on_norms_by_hand(updates):
    flat = np.concatenate([value.reshape(CLIENTS, -1) for value in updates.values()], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    factors = np.minimum(1, np.median(norms) / norms)
    same(
        applied(updates, "norm-bound"),
        {n: np.tensordot(factors, v, 1) / CLIENTS for n, v in updates.items()},
    )


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


# Two-stage training: participants, strategy and step of each round, and resuming in either stage.

STEP = "step={name='contrastive', hidden=4, session-length=4, masks=1, epochs=1}"
STAGES = (
    f"strategy={{name='two-stage', stage-one={{rounds=2, {STEP}, strategy={{name='reptile',"
    " server-lr=2.0}}}"
)


@pytest.fixture
def made(load_tiny):
    """The strategy of the tiny experiment (18 clients on two nodes), created as by the server."""

    def make(*overrides):
        experiment = load_tiny("rounds=4", STAGES, *overrides)
        halves = [np.arange(place, 18, 2) for place in range(2)]
        roster = Roster(
            (70, 50), tuple(Presence(p, half, half[:0]) for p, half in enumerate(halves))
        )
        return make_strategy(experiment, SampledCohorts(experiment, roster))

    return make


def orders(strategy, round_number):
    record = to_record({"w": np.zeros(2, np.float32)})
    messages = list(strategy.configure_train(round_number, record, ConfigRecord(), None))
    return [unpack_order(TrainOrder, message.content) for message in messages]


@pytest.mark.usefixtures("identity")
def test_each_stage_orders_its_own_step_and_combines_by_its_own_rule(made):
    strategy = made("strategy.main={name='fedavg'}", "step.epochs=3")
    first, main = strategy.phases().values()
    assert [strategy._strategy_of(number) for number in (1, 2, 3, 4)] == [first, first, main, main]
    assert {order.step["name"] for order in orders(strategy, 2)} == {"contrastive"}
    assert {order.step["hidden"] for order in orders(strategy, 2)} == {4}
    assert {(order.step["name"], order.step["epochs"]) for order in orders(strategy, 3)} == {
        ("sgd", 3)
    }
    assert [order.weighting for order in orders(strategy, 1) + orders(strategy, 3)] == [
        "uniform"
    ] * 2 + ["examples"] * 2
    assert isinstance(strategy._strategy_of(2), Reptile)
    assert strategy._strategy_of(2).config.server_lr == 2
    assert isinstance(strategy._strategy_of(3), FedAvg)


@pytest.mark.parametrize(
    ("override", "problem", "fix"),
    [
        ("stage-one.round=3", "unknown key 'strategy.stage-one.round'", "rounds"),
        ("main.server-rl=3.0", "unknown key 'strategy.main.server-rl'", "server-lr"),
        ("stage-one.step.hiden=3", "unknown key 'strategy.stage-one.step.hiden'", "hidden"),
        ("stage-one.strategy={name='reptil'}", "unknown strategy 'reptil'", "reptile"),
        ("stage-one.sampler={name='poison'}", "unknown sampler 'poison'", "poisson"),
        ("stage-one.rounds=0", "wrong value for 'strategy.stage-one.rounds'", None),
    ],
)
def test_settings_are_checked_to_the_last_component(load_tiny, override, problem, fix):
    with pytest.raises(ExperimentError) as caught:
        load_tiny(STAGES, "strategy.main={name='reptile'}", f"strategy.{override}")
    assert caught.value.problem == problem
    assert fix is None or caught.value.fix == f"did you mean {fix!r}?"


def test_a_strategy_that_is_not_fedrecs_own_cannot_be_a_stage(made):
    with pytest.raises(ExperimentError, match="cannot run the rounds of a phase"):
        made("strategy.main={name='flwr.serverapp.strategy:FedAdam'}")


@pytest.mark.parametrize("at", ["strategy.main", "strategy.stage-one.strategy"])
def test_a_strategy_with_phases_of_its_own_cannot_be_a_stage(made, at):
    with pytest.raises(ExperimentError, match=r"has phases and cannot(.*\n)*.*wrap the two stages"):
        made(f"{at}={{name='popularity-start'}}", "model.item-bias=true")


def test_stage_one_leaves_the_recommender_and_the_main_stage_the_encoders_as_they_are(run_tiny):
    first = run_tiny(STAGES, output="first")  # two rounds, both of stage one
    start = run_tiny(STAGES, "strategy.stage-one.strategy.server-lr=1e-30", output="start")
    whole = run_tiny(STAGES, "rounds=4", output="whole")
    begun, staged, ended = (parameters_in(result.folder) for result in (start, first, whole))
    encoders = {name for name in begun if name.startswith("session.")}
    changed = {name for name in begun if not np.array_equal(begun[name], staged[name])}
    assert changed == {"item.id", *encoders} and len(encoders) == 7
    assert {name for name in begun if np.array_equal(staged[name], ended[name])} == encoders
    assert whole.rounds["stage"].tolist() == [1, 1, 2, 2]
    assert np.isfinite(whole.rounds["loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_broken_off_in_either_stage_is_resumed_as_if_unbroken(run_tiny, after):
    inner = "{name='fed-adam'}"
    overrides = [
        "rounds=4",
        STAGES,
        f"strategy.stage-one.strategy={inner}",
        f"strategy.main={inner}",
        "step={name='joint', hidden=4}",
    ]
    whole = run_tiny(*overrides, output="whole")
    assert_same_run(resumed(run_tiny, *overrides, after=after), whole)
