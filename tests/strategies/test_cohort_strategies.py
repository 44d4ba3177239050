# SPDX-License-Identifier: Apache-2.0
"""Strategies over cohorts, Flower's own, and mutants that an audit of noise must find."""

import dataclasses
import re
from dataclasses import replace

import dp_checks
import numpy as np
import pytest
import torch
from dp_checks import Parts
from flwr.app import ConfigRecord, Error, Message
from flwr.serverapp.strategy import FedAdam

from clients.node import Node
from clients.round import train_clients, train_each
from clients.sums import UpdateSum
from fedrec.components.registry import MODEL, STRATEGY, resolve
from fedrec.config import Config
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.models.privrec import PrivRec
from fedrec.privacy.clipping import Clip, Protection
from fedrec.protocol.messages import (
    TrainEach,
    TrainOrder,
    TrainSum,
    pack_each,
    pack_sum,
    unpack_each,
    unpack_order,
)
from fedrec.protocol.serialization import from_record, to_record
from fedrec.protocol.updates import dense_change
from fedrec.rng import Reproducible, torch_stream
from fedrec.training.results import Dense
from server.checkpoint import memory_of, restore
from strategies.base import Aggregate, more_than_sums
from strategies.dp import DpFedAvg
from strategies.sums import FedAdam as FedAdamFedAdam
from strategies.sums import FedAdamConfig, FedAvg, Reptile, ReptileConfig
from tests.runs import assert_same_run, parameters_in, resumed

# REPTILE and FedAvg on arrays small enough to compute by hand, through Flower's Strategy interface.

THETA = {"w": np.array([1, 2], np.float32), "b": np.array(10, np.float32)}
STEP = {"name": "sgd", "epochs": 2}


class TwoNodes:
    """Node 7 hosts clients 0 and 2, node 5 hosts client 1: node order is not id order."""

    def __init__(self, cohort=(0, 1, 2)):
        self.cohort = np.array(cohort, dtype=np.int64)

    def sample(self, round_number):
        self.asked = round_number
        return self.cohort

    def by_node(self, clients):
        groups = [(7, clients[clients != 1]), (5, clients[clients == 1])]
        return [(node, group) for node, group in groups if len(group)]


def reptile(rate=0.5, cohort=(0, 1, 2), **settings):
    return Reptile(ReptileConfig(server_lr=rate, **settings), TwoNodes(cohort), STEP)


def fedavg():
    return FedAvg(Config(), TwoNodes(), STEP)


def configured(strategy, round_number=1, theta=THETA):
    return list(strategy.configure_train(round_number, to_record(theta), ConfigRecord(), None))


def answer(message, w, b, clients, weight, loss=(0.0, 0)):
    total = {"w": np.array(w, np.float32), "b": np.array(b, np.float32)}
    return Message(pack_sum(TrainSum(total, clients, weight, 4 * clients, *loss)), reply_to=message)


@pytest.mark.usefixtures("identity")
def test_every_node_gets_one_message_with_its_clients_and_the_step():
    strategy = reptile()
    messages = configured(strategy, 3)
    orders = [unpack_order(TrainOrder, message.content) for message in messages]
    assert [message.metadata.dst_node_id for message in messages] == [7, 5]
    assert [order.clients.tolist() for order in orders] == [[0, 2], [1]]
    assert all(order.round == 3 and order.step == STEP for order in orders)
    assert strategy.cohorts.asked == 3
    assert messages[0].content["arrays"] is messages[1].content["arrays"]


@pytest.mark.usefixtures("identity")
def test_reptile_is_equation_6():
    """theta + 0.5 * (1 / 3) * (sum over three clients): w = [1, 2] + [9, -3] / 6, b = 10 + 1.5 /
    6."""
    strategy = reptile(0.5)
    one, two = configured(strategy)
    arrays, metrics = strategy.aggregate_train(
        1, [answer(one, [6, -6], 1, 2, 2, (1.0, 2)), answer(two, [3, 3], 0.5, 1, 1, (0.5, 1))]
    )
    found = from_record(arrays)
    assert found["w"].tolist() == [2.5, 1.5] and found["b"].tolist() == 10.25
    assert found["w"].dtype == np.float32 and found["b"].shape == ()
    sent = 3 * 4 * (2 + 1)  # three clients get w and b and send both, as the nodes do not tell
    counts = {"num-clients": 3, "num-examples": 12, "bytes-up": sent, "bytes-down": sent}
    assert dict(metrics) == counts | {"loss": 0.5}


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(("round_number", "moved"), [(1, 8), (2, 6), (4, 2), (5, 0), (9, 0)])
def test_the_server_rate_falls_linearly_to_zero(round_number, moved, after):
    """Over T = 4 rounds the rate is 1, 3/4, 1/2, 1/4, and nothing after; one client moves w by
    8."""
    round_number += after
    strategy = reptile(1.0, anneal_rounds=4, anneal_after=after)
    one, _ = configured(strategy, round_number)
    arrays, _ = strategy.aggregate_train(round_number, [answer(one, [8, 8], 8, 1, 1)])
    assert from_record(arrays)["w"].tolist() == [1 + moved, 2 + moved]


@pytest.mark.usefixtures("identity")
def test_fedavg_divides_by_the_examples():
    """Weights 8 and 2: w = [1, 2] + ([6, -6] + [4, 0]) / 10, b = 10 + (5 + 5) / 10."""
    strategy = fedavg()
    one, two = configured(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(one, [6, -6], 5, 2, 8), answer(two, [4, 0], 5, 1, 2)]
    )
    found = from_record(arrays)
    np.testing.assert_allclose(found["w"], [2, 1.4], rtol=1e-6)
    assert found["b"] == 11


def test_only_those_who_answered_count():
    """The failed node is skipped: M is 1, not 3."""
    strategy = reptile(1.0)
    one, two = configured(strategy)
    failed = Message(Error(2, "out of memory"), reply_to=one)
    arrays, metrics = strategy.aggregate_train(1, [failed, answer(two, [3, 3], 0.5, 1, 1)])
    assert from_record(arrays)["w"].tolist() == [4, 5] and metrics["num-clients"] == 1


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("cohort", [(), (0, 1, 2)])
def test_without_any_answer_the_parameters_stay(cohort):
    strategy = reptile(cohort=cohort)
    messages = configured(strategy)
    assert len(messages) == (2 if cohort else 0)
    arrays, metrics = strategy.aggregate_train(
        1, [Message(Error(2, "x"), reply_to=message) for message in messages]
    )
    down = {"bytes-up": 0, "bytes-down": 4 * (2 + 1) * len(cohort)}
    assert arrays is None and dict(metrics) == {"num-clients": 0, "num-examples": 0} | down


@pytest.mark.usefixtures("identity")
def test_sums_are_added_in_float64():
    """In float32, 2^24 + 1 + 1 would stay 2^24."""
    strategy = reptile(1.0)
    one, two = configured(
        strategy, theta={"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}
    )
    replies = [
        answer(one, [2**24, 1], 0, 1, 1),
        answer(two, [1, 1], 0, 1, 1),
        answer(two, [1, 1], 0, 0, 0),
    ]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert from_record(arrays)["w"].tolist() == [2**23 + 1, 1.5]


# Strategies that ask for the update of each client: the updates, engines, refusals.

CLIENTS = np.array([1, 4, 7, 9, 11])


def start_of(node):
    return {name: value.numpy() for name, value in node.initial().items()}


def wholes(reply, arrays, place):
    return {n: dense_change(reply.updates.changes(n, table)[place]) for n, table in arrays.items()}


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("engine.path=blocks", "step.proximal-mu=0.3"),
        ("engine.path=reference",),
        ("step={name='counts'}", "model.item-bias=true"),
    ],
)
def test_each_update_is_the_sum_over_that_client_alone(load_tiny, settings):
    """Through a message, and joined from two nodes in any order."""
    node = Node(load_tiny(*settings), 0, 1, None)
    arrays = start_of(node)
    parts = [
        unpack_each(pack_each(train_each(node, arrays, TrainOrder(1, part, each=True))))
        for part in (CLIENTS[3:], CLIENTS[:3])
    ]
    joined = TrainEach.joined(parts)
    assert joined.clients.tolist() == CLIENTS.tolist()
    for place, client in enumerate(CLIENTS.tolist()):
        alone = train_clients(node, arrays, TrainOrder(1, np.array([client])))
        found = wholes(joined, arrays, place)
        for name, change in alone.total.items():
            wanted = dense_change(change)
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-6)
        assert joined.examples[place] == alone.examples
    assert any(value.any() for value in wholes(joined, arrays, 0).values())


def test_protection_and_orders_for_nobody_by_name_are_refused(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    arrays = start_of(node)
    protection = Protection(1.0, 2, tuple(arrays))
    for order in (
        TrainOrder(1, CLIENTS, each=True, protection=protection),
        TrainOrder(1, None, each=True),
    ):
        with pytest.raises(ExperimentError, match="update of each client"):
            train_each(node, arrays, order)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("median trimmed-mean krum norm-bound union bulyan", "update of each client"),
        ("metamf gpfedrec fedgnn", "update of each client"),
        ("flwr.serverapp.strategy:FedAdam", "a strategy of Flower's"),
        ("two-stage means-start", "overrides configure_train or aggregate_train"),
        ("reptile fedavg fed-adam gram transitions fcf fed-als fold-in", "^$"),
    ],
)
def test_what_a_strategy_needs_beside_the_sum_is_stated(names, reason):
    for name in names.split():
        assert re.search(reason, more_than_sums(resolve(STRATEGY, name)))


def test_it_is_refused_beside_secure_sums(run_tiny):
    with pytest.raises(ExperimentError, match="needs more than the sum"):
        run_tiny("strategy={name='trimmed-mean'}", "secure-aggregation=true", "engine.nodes=4")


# Flower's own strategies run unchanged on fedrec's clients, and can be resumed.

FLOWER = "flwr.serverapp.strategy"


def initial(experiment):
    model = PrivRec(experiment.settings(MODEL), Population.of(experiment).schema())
    return {
        name: value.numpy()
        for name, value in model.initial(torch_stream(experiment.seed, "init")).items()
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FedAdam", {"eta": 0.05}),
        ("FedProx", {"proximal-mu": 0.1}),
        ("Krum", {"num-malicious-nodes": 1}),
    ],
)
def test_stock_strategy_trains(run_tiny, name, settings):
    overrides = [
        f"strategy.name={FLOWER}:{name}",
        *(f"strategy.{key}={value}" for key, value in settings.items()),
    ]
    result = run_tiny("engine.nodes=4", *overrides)
    start, end = initial(result.experiment), parameters_in(result.folder)
    assert list(result.rounds["round"]) == [1, 2] and np.isfinite(result.rounds["loss"]).all()
    for array_name, before in start.items():
        after = end[array_name]
        assert (
            after.dtype == before.dtype and after.shape == before.shape and np.isfinite(after).all()
        )
    assert not np.array_equal(start["item.id"], end["item.id"])
    assert np.isfinite(result.users["hits@5"]).all()


@pytest.mark.parametrize("name", ["FedAdam", "FedAvgM"])
def test_a_strategy_with_memory_is_resumed_as_if_unbroken(run_tiny, name):
    overrides = ["rounds=4", f"strategy.name={FLOWER}:{name}"]
    if name == "FedAvgM":
        overrides += ["strategy.server-momentum=0.9"]
    whole = run_tiny(*overrides, output="whole")
    assert_same_run(resumed(run_tiny, *overrides, after=2), whole)


def test_a_strategy_that_waits_for_more_nodes_than_there_are_is_refused(run_tiny):
    with pytest.raises(ExperimentError) as caught:
        run_tiny("engine.nodes=1", f"strategy.name={FLOWER}:FedAdam")
    assert "min-available-nodes" in caught.value.fix and "not 1" in caught.value.expected


def test_the_state_of_a_strategy_is_all_attributes_with_arrays(identity):
    arrays = {"w": np.arange(3, dtype=np.float32), "a/b": np.array(2.5)}
    strategy = FedAdam(eta=0.25)
    strategy.m_t = arrays
    strategy.history = [arrays["w"], arrays["w"] * 2]
    strategy.last = arrays["w"] * 3
    strategy.record, strategy.rounds_seen = to_record(arrays), 7
    memory = memory_of(strategy, [])
    assert all(isinstance(value, np.ndarray) for value in memory.values())
    fresh = FedAdam()
    restore(memory, fresh, [])
    assert (
        fresh.eta == 0.25 and fresh.rounds_seen == 7 and isinstance(fresh.min_available_nodes, int)
    )
    assert all(np.array_equal(fresh.m_t[name], value) for name, value in arrays.items())
    assert [part.tolist() for part in fresh.history] == [[0, 1, 2], [0, 2, 4]]
    assert fresh.last.tolist() == [0, 3, 6]
    assert all(
        np.array_equal(from_record(fresh.record)[name], value) for name, value in arrays.items()
    )


# FedAdam against torch's Adam on the same gradients, and through a resumed run.

GRADIENTS = np.random.default_rng(0).standard_normal((6, 4, 3))


def strategy(**settings):
    return FedAdamFedAdam(FedAdamConfig(**settings), None, {"name": "sgd"})


def applied(made, rounds, theta):
    for place in rounds:
        total = {"w": -5.0 * GRADIENTS[place]}
        theta = made.apply(theta, Aggregate(total, 5, 5.0, place + 1))
    return theta


def test_with_one_local_step_it_is_adam_on_the_cohort():
    weight = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    for gradient in GRADIENTS:
        weight.grad = torch.from_numpy(gradient)
        adam.step()
    made = strategy(server_lr=0.1)
    theta = applied(made, range(6), {"w": np.zeros((4, 3))})
    np.testing.assert_allclose(theta["w"], weight.detach().numpy(), rtol=1e-10)


# Ten broken aggregators, each with the check that must catch it.


class Scaled(DpFedAvg):
    """Adds noise with a factor."""

    factor = 1.0

    def release(self, round_number, theta, sums):
        plan = self.plan
        wrong = plan.per_clip_norm * self.factor
        self.plan = dataclasses.replace(plan, per_clip_norm=wrong)
        try:
            return super().release(round_number, theta, sums)
        finally:
            self.plan = plan


class NoNoise(Scaled):
    factor = 0.0


class HalfNoise(Scaled):
    factor = 0.5


class NoiseByRootOfClients(Scaled):
    factor = dp_checks.CLIENTS**-0.5


class SameSeed(DpFedAvg):
    """Draws the noise of round 1 in every round."""

    def release(self, round_number, theta, sums):
        return super().release(1, theta, sums)


class SameStream(DpFedAvg):
    """Draws all parameters' noise from one stream."""

    def __init__(self, plan, phase, source, charge):
        class Nameless(Reproducible):
            def gaussian(self, size, name, *address):
                return super().gaussian(size, "", *address)

        super().__init__(plan, phase, Nameless(source.seed), charge)


class TouchedRowsOnly(DpFedAvg):
    """Adds no noise to untouched rows."""

    def release(self, round_number, theta, sums):
        noisy = super().release(round_number, theta, sums)
        for name, value in noisy.items():
            dense = [dense_change(reply.total[name]) for reply, _ in sums]
            value[~np.any(dense, axis=0)] = 0
        return noisy


class Believing(DpFedAvg):
    """Does not bound nodes' sums."""

    def _bounded(self, total, names, theta, asked):
        return total


class Unclipped(UpdateSum):
    def _shares(self, update):
        return np.ones(len(update.block.examples))


class Weighted(UpdateSum):
    """Clips, and then weights by examples."""

    def _shares(self, update):
        return super()._shares(update) * np.array(update.block.examples)


class ClippedByTensor(UpdateSum):
    """Clips every parameter separately."""

    def _shares(self, update):
        return np.ones(len(update.block.examples))

    def add_block(self, clients, update):
        clip = Clip(self.protection.clip_norm)
        changes = {}
        for name, change in update.changes.items():
            values = change.changes.double().flatten(1)
            factors = torch.from_numpy(clip.factors(values.norm(dim=1).numpy()))
            shape = (-1, *[1] * (change.changes.dim() - 1))
            changes[name] = Dense(change.changes * factors.reshape(shape).float())
        super().add_block(clients, replace(update, changes=changes))


class Survivors(Reptile):
    """Divides by the clients that answered."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.answered = sum(not reply.has_error() for reply in replies)
        return super().aggregate_train(server_round, replies)

    def apply(self, theta, aggregate):
        nodes = len(self.cohorts.by_node(self.cohorts.sample(1)))
        return super().apply(
            theta, dataclasses.replace(aggregate, clients=aggregate.clients * self.answered / nodes)
        )


class Resampling(Reptile):
    """Draws replacements for failed clients."""

    def configure_train(self, server_round, arrays, config, grid):
        self.messages = list(super().configure_train(server_round, arrays, config, grid))
        return self.messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        failed = [reply.metadata.src_node_id - 100 for reply in replies if reply.has_error()]
        self.cohorts.clients = np.setdiff1d(self.cohorts.clients, failed)
        return super().aggregate_train(server_round, replies)


MUTANTS = {
    "no noise": (Parts(privacy=NoNoise), dp_checks.noise_has_the_accounted_scale),
    "half the noise": (Parts(privacy=HalfNoise), dp_checks.noise_has_the_accounted_scale),
    "noise / sqrt(M)": (
        Parts(privacy=NoiseByRootOfClients),
        dp_checks.noise_has_the_accounted_scale,
    ),
    "same seed every round": (Parts(privacy=SameSeed), dp_checks.noise_is_drawn_anew),
    "same seed for every parameter": (Parts(privacy=SameStream), dp_checks.noise_is_drawn_anew),
    "noise on touched rows only": (Parts(privacy=TouchedRowsOnly), dp_checks.every_row_has_noise),
    "no clip": (
        Parts(total=Unclipped, privacy=Believing),
        dp_checks.sum_moves_by_two_clip_norms_at_most,
    ),
    "weighted mean": (Parts(total=Weighted, privacy=Believing), dp_checks.clients_count_the_same),
    "clip per tensor": (
        Parts(total=ClippedByTensor, privacy=Believing),
        dp_checks.norm_is_that_of_all_parameters,
    ),
    "survivors as denominator": (Parts(strategy=Survivors), dp_checks.denominator_is_fixed),
    "resampling after failure": (
        Parts(strategy=Resampling),
        dp_checks.nobody_is_drawn_for_a_failed_client,
    ),
}


@pytest.mark.usefixtures("identity")
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_broken_aggregator_is_caught(mutant):
    parts, check = MUTANTS[mutant]
    with pytest.raises(AssertionError):
        check(parts)


@pytest.mark.usefixtures("identity")
def test_a_scale_that_is_one_percent_off_is_caught():
    for factor in (0.99, 1.01):
        mutant = type("Off", (Scaled,), {"factor": factor})
        with pytest.raises(AssertionError):
            dp_checks.noise_has_the_accounted_scale(Parts(privacy=mutant))
