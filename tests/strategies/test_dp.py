# SPDX-License-Identifier: Apache-2.0
"""User-level DP around strategies: released noise, sensitivity with malicious clients and nodes,
and charges."""

import math

import dp_checks
import numpy as np
import pytest
from dp_checks import (
    CLIENTS,
    CLIP,
    COORDINATES,
    ITEMS,
    SHAPES,
    WIDTH,
    Federation,
    assert_std,
    flat,
    honest,
    norm,
    order_of,
    update,
)
from flwr.app import Error, Message
from scipy.stats import chi, gamma, kstest

from fedrec.errors import ExperimentError
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.messages import TrainSum, pack_sum, unpack_sum
from fedrec.protocol.updates import SparseUpdate
from fedrec.rng import Reproducible
from simulations.engines.grid import identify_server

pytestmark = pytest.mark.usefixtures("identity")
NOBODY = dict.fromkeys(range(CLIENTS))


@pytest.mark.parametrize("check", dp_checks.CHECKS)
def test_the_aggregator(check):
    check(dp_checks.Parts())


@pytest.mark.parametrize("rate", [0.25, 2.0])
def test_noise_is_added_before_the_servers_learning_rate(rate):
    """The parameters move by rate * (sum + noise) / M, so the noise is proportional to the rate."""
    federation = Federation(server_lr=rate)
    moved = flat(federation.play()) * rate / CLIENTS
    assert_std(moved, rate * 2 * CLIP / CLIENTS)
    assert federation.charged[0][1].noise_multiplier == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "std"),
    [
        ({"adjacency": "add-remove", "sampler": "poisson", "clients": 40, "cohort": 12}, CLIP),
        ({"noise_multiplier": 0.25}, CLIP / 2),
    ],
)
def test_noise_multiplier_is_relative_to_the_configured_norm(settings, std):
    updates = dict.fromkeys(range(40), update(0.0))
    assert_std(flat(Federation(**settings).play(updates)), std)


def test_laplace_noise():
    """Scale b = 2 S z in L1; Laplace's kurtosis of 6 makes the standard error of its deviation
    sqrt(5 / 4 n)."""
    federation = Federation(mechanism="laplace", noise_multiplier=0.5)
    noise = flat(federation.play())
    assert abs(noise.std() / (math.sqrt(2) * CLIP) - 1) < 5 * math.sqrt(5 / 4 / noise.size)
    assert kstest(noise, "laplace", args=(0, CLIP)).pvalue > 1e-5
    lone = {**dict.fromkeys(range(CLIENTS), update(0.0)), 4: update(1.0)}
    released = Federation(mechanism="laplace", noise_multiplier=0.0).play(lone)
    assert norm(released, 1) == pytest.approx(CLIP, rel=1e-4)  # clipped in L1
    assert federation.charged[0][1].mechanism == "laplace"
    assert federation.charged[0][1].noise_multiplier == 0.5


def test_an_empty_cohort_is_released_with_noise_and_charged():
    """Poisson sampling may draw no client, and nothing may reveal it."""
    federation = Federation(sampler="poisson", adjacency="add-remove", clients=40, cohort=12)
    federation.configured()
    assert_std(flat(federation.applied([])), CLIP)
    assert [number for number, _ in federation.charged] == [1]


def test_a_charge_that_fails_releases_nothing():
    federation = Federation()

    def broke(number):
        raise OSError("disk full")

    federation.privacy.charge = broke
    federation.source.gaussian = lambda *of: pytest.fail("noise was drawn")
    with pytest.raises(OSError, match="disk full"):
        federation.play()


def test_frozen_parameters_do_not_move():
    federation = Federation(parameters=("layer.*",), noise_multiplier=2.0)
    order, *_ = [order_of(message) for message in federation.configured()]
    assert order.protection is not None and order.protection.names == ("layer.weight", "layer.bias")
    federation.round -= 1
    released = federation.play(honest())
    assert not released["item.id"].any()
    assert released["layer.weight"].all() and released["layer.bias"].all()


def test_the_norm_is_that_of_the_parameters_that_are_sent():
    """The update of the frozen item table is a hundred times as long, and does not affect the clip
    of the rest."""
    lone = {**dict.fromkeys(range(CLIENTS), update(0.0)), 4: update(0.1)}
    lone[4].delta["item.id"] *= 1e6
    released = Federation(parameters=("layer.*",), noise_multiplier=0.0).play(lone)
    np.testing.assert_allclose(
        released["layer.weight"], lone[4].delta["layer.weight"].numpy(), rtol=1e-6
    )


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(
        ExperimentError, match=r"(?s)no parameter matches the pattern 'itme.id'.*item.id"
    ):
        Federation(parameters=("itme.id",)).configured()


# --- nodes that do not follow their orders
# ---------------------------------------------------------------------


def lying(message: Message, total, clients=1) -> Message:
    """A reply that no fedrec client would send."""
    return Message(pack_sum(TrainSum(total, clients, clients, 1, 0.5, 1)), reply_to=message)


def table(value: float, names=tuple(SHAPES)):
    return {name: np.full(SHAPES[name], value, np.float32) for name in names}


def rows(places, value=1.0, kind=np.int64, shape=SHAPES["item.id"]):
    values = np.full((len(places), shape[1]), value, np.float32)
    return {**table(1.0), "item.id": SparseUpdate(shape, np.array(places, kind), values)}


@pytest.mark.parametrize("nodes", [CLIENTS, 3], ids=["phones", "nodes of four"])
@pytest.mark.parametrize("value", [1e30, -3e38, 100.0])
def test_a_node_moves_the_sum_by_no_more_than_its_clients_may(nodes, value):
    """For any number of clients that it reports."""
    federation = Federation(nodes=nodes, noise_multiplier=0.0)
    messages = federation.configured()
    released = federation.applied([lying(messages[0], table(value), clients=10**6)])
    assert norm(released) == pytest.approx(CLIP * CLIENTS / nodes, rel=1e-4)


def test_a_node_that_names_rows_is_bounded_too():
    federation = Federation(noise_multiplier=0.0)
    message, *_ = federation.configured()
    released = federation.applied([lying(message, rows([3, 5], 1e20))])
    assert norm(released) == pytest.approx(CLIP, rel=1e-3)


@pytest.mark.parametrize("nodes", [CLIENTS, 3], ids=["phones", "nodes of four"])
@pytest.mark.parametrize(
    "settings",
    [
        {"placement": "local"},
        {"placement": "distributed", "max_dropouts": 2},
        {"placement": "local", "mechanism": "laplace"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_with_noise_of_the_clients_a_node_is_bounded_too(settings, nodes):
    """By clip norm and noise; honest sums are not scaled."""
    federation = Federation(nodes=nodes, **settings)
    plan, own = federation.strategy.privacy.plan, CLIENTS // nodes
    messages = federation.configured()
    size = {"laplace": COORDINATES, "gaussian": math.sqrt(COORDINATES / own)}
    noise = plan.client_noise_scale * own * size[plan.config.mechanism]
    for value in (1e30, -3e38):
        released = federation.applied([lying(messages[0], table(value), clients=10**6)])
        length = np.abs(flat(released)).sum() if plan.clip.order == 1 else norm(released)
        missing = plan.missing_noise_std(own) * math.sqrt(COORDINATES)
        assert length <= CLIP * own + 1.1 * noise + 1.1 * missing
    honest_sum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for client in range(own):
        noisy = plan.protection(SHAPES).noisy(
            {name: np.zeros(shape) for name, shape in SHAPES.items()}, Reproducible(3), 1, client
        )
        honest_sum = {name: value + noisy[name] for name, value in honest_sum.items()}
    bounded = federation.strategy.privacy._bounded(
        honest_sum, list(SHAPES), federation.parts.start, own
    )
    for name, value in honest_sum.items():
        assert np.array_equal(bounded[name], value)


@pytest.mark.parametrize(("clients", "numbers"), [(1, 1), (1, 100), (7, 3), (30, 10**6)])
def test_noise_is_practically_never_longer_than_its_bound(clients, numbers):
    """Against the exact distributions of the norms."""
    for mechanism, order in (("gaussian", 2), ("laplace", 1)):
        config = PrivacyConfig(
            clip_norm=2.0, noise_multiplier=3.0, placement="local", mechanism=mechanism
        )
        plan = Plan.of(config, "full", {}, 50, 1)
        scale = plan.client_noise_scale
        bound = plan.clip_of_sum(clients, numbers)
        assert bound.order == order
        room = (bound.norm - 2.0 * clients) / scale
        if order == 2:
            assert chi.sf(room / math.sqrt(clients), numbers) < 1e-30
            assert room / math.sqrt(clients) < math.sqrt(numbers) + 12.1
        else:
            assert gamma.sf(room, clients * numbers) < 1e-30


def changed(touched, values):
    """A sum whose item rows are those given, right or wrong."""
    return {**table(1.0), "item.id": SparseUpdate(SHAPES["item.id"], touched, values)}


def without_the_first(replies=()):
    """The sum that is released if the first node sends other replies than its own."""
    federation = Federation(noise_multiplier=0.0)
    one, *others = federation.configured()
    answers = [federation.answer(message, honest()) for message in others]
    return flat(federation.applied([lying(one, reply) for reply in replies] + answers))


@pytest.fixture(scope="module")
def others_alone():
    identify_server()
    return without_the_first()


@pytest.mark.parametrize(
    "total",
    [
        table(1.0, ("item.id", "layer.bias")),
        {},
        {**table(1.0), "layer.bias": np.ones(9, np.float32)},
        {**table(1.0), "layer.bias": np.float32(1)},
        {**table(1.0), "layer.weight": np.full(SHAPES["layer.weight"], np.nan, np.float32)},
        {**table(1.0), "layer.weight": np.full(SHAPES["layer.weight"], np.inf, np.float32)},
        {**table(1.0), "layer.bias": np.array(["1"] * 8)},
        {**table(1.0), "layer.bias": np.ones(8, np.complex64)},
        rows([3, 5], np.nan),
        rows([5, 3]),
        rows([3, 3]),
        rows([-1, 3]),
        rows([3, ITEMS]),
        rows([3, 5], kind=np.float64),
        rows([3, 5], shape=(ITEMS + 1, WIDTH)),
        changed(np.array([3, 5]), np.ones((2, WIDTH - 1), np.float32)),
        changed(np.array([[3, 5]]), np.ones((1, WIDTH), np.float32)),
    ],
)  # fmt: skip
def test_a_sum_that_is_none_counts_as_zero(total, others_alone):
    """The round continues with the others."""
    assert np.array_equal(without_the_first([total]), others_alone) and others_alone.any()


def test_parameters_that_were_not_requested_are_left_out():
    federation = Federation(noise_multiplier=0.0)
    message, *_ = federation.configured()
    released = federation.applied(
        [lying(message, {**table(0.001), "extra": np.ones(3, np.float32)})]
    )
    assert set(released) == set(SHAPES) and released["layer.bias"] == pytest.approx(0.001)


@pytest.mark.parametrize("placement", ["central", "local", "distributed"])
def test_answers_that_were_not_asked_for_count_as_zero(placement):
    """A second reply, and one of a node without a client in the round."""
    results = []
    for bad in (True, False):
        federation = Federation(cohort=6, placement=placement)
        messages = federation.configured()
        replies = [federation.answer(message, honest()) for message in messages]
        unknown = Message(messages[0].content, 999, "train")
        more = [
            lying(messages[0], table(1.0)),
            lying(messages[0], table(1e9)),
            lying(unknown, table(1.0)),
        ]
        results.append(federation.applied(replies + (more if bad else [])))
    assert np.array_equal(flat(results[0]), flat(results[1]))


@pytest.mark.parametrize("nodes", [CLIENTS, 3])
def test_a_failed_node_counts_as_zero(nodes):
    federation = Federation(nodes=nodes, noise_multiplier=0.0)
    one, *others = federation.configured()
    replies = [federation.answer(message, honest()) for message in others]
    released = federation.applied([Message(Error(2, "gone"), reply_to=one), *replies])
    lost = order_of(one).clients.tolist()
    expected = Federation(noise_multiplier=0.0).play(
        {**honest(), **dict.fromkeys(lost, update(0.0))}
    )
    np.testing.assert_allclose(flat(released), flat(expected), rtol=1e-5, atol=1e-6)


# --- noise of clients
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [CLIENTS, 4])
def test_local_noise_is_that_of_one_upload_for_every_client(nodes):
    federation = Federation(placement="local", nodes=nodes)
    noise = flat(federation.play())
    assert_std(noise, 2 * CLIP * math.sqrt(CLIENTS))
    assert abs(np.corrcoef(noise, flat(federation.play()))[0, 1]) < 5 / math.sqrt(noise.size)


def test_clients_own_noise_differs_from_client_to_client():
    federation = Federation(placement="local")
    sums = [unpack_sum(federation.answer(m, honest()).content) for m in federation.configured()[:2]]
    one, two = (np.concatenate([reply.total[name].ravel() for name in SHAPES]) for reply in sums)
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(one.size)


def test_without_noise_only_the_rows_that_clients_touched_are_released():
    federation, updates = Federation(noise_multiplier=0.0, nodes=3), honest()
    sums = [
        (unpack_sum(federation.answer(message, updates).content), len(order_of(message).clients))
        for message in federation.configured()
    ]
    table = federation.privacy.release(1, federation.theta, sums)["item.id"]
    assert isinstance(table, SparseUpdate) and 5 < len(table.rows) <= 5 * CLIENTS
    expected = np.zeros(SHAPES["item.id"])
    for one in updates.values():
        whole = np.concatenate(
            [value.numpy().astype(np.float64).ravel() for value in one.delta.values()]
        )
        expected += min(1.0, CLIP / np.linalg.norm(whole)) * one.delta["item.id"].numpy()
    np.testing.assert_allclose(table.dense(), expected, rtol=1e-6, atol=1e-6)


def test_distributed_shares_add_up_to_the_central_noise():
    federation = Federation(placement="distributed")
    assert_std(flat(federation.play()), 2 * CLIP)
    assert federation.charged == []  # which the guard does before the clients are asked


@pytest.mark.parametrize("failed", range(6))
def test_distributed_noise_is_never_less_than_accounted(failed):
    """Up to two failures are planned for; beyond that, the server adds the missing noise. Excess
    noise remains."""
    federation = Federation(placement="distributed", max_dropouts=2)
    updates = {client: None if client < failed else update(0.0) for client in range(CLIENTS)}
    shares = (CLIENTS - failed) / (CLIENTS - 2)
    assert_std(flat(federation.play(updates)), 2 * CLIP * math.sqrt(max(1.0, shares)))


def test_noise_that_is_topped_up_repeats_no_other():
    one, two = Federation(placement="distributed"), Federation()
    noise, central = flat(one.play(NOBODY)), flat(two.play())
    assert_std(noise, 2 * CLIP)
    pairs = [(noise, flat(one.play(NOBODY))), (noise, central)]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(a.size) for a, b in pairs)


def test_clients_that_claim_to_be_more_do_not_reduce_the_noise():
    federation = Federation(placement="distributed")
    one, *_ = federation.configured()
    released = federation.applied([lying(one, table(0.0), clients=10**6)])
    assert_std(flat(released), 2 * CLIP * math.sqrt((CLIENTS - 1) / CLIENTS))
