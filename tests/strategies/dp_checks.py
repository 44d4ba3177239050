# SPDX-License-Identifier: Apache-2.0
"""Checks of a differentially private aggregator, which a correct one passes and a broken one fails.

Clients' sums, messages, strategy and release are those of a real run; only the updates are given,
so that they can be arbitrarily bad. The parameters start at zero, so the parameters after a round
are the release.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message
from scipy.stats import kstest

from clients.steps.descent import Update, as_block
from clients.sums import UpdateSum
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.messages import TrainOrder, pack_sum, unpack_order
from fedrec.protocol.serialization import from_record, to_record
from fedrec.rng import Reproducible
from strategies.base import CohortStrategy
from strategies.dp import DpFedAvg
from strategies.sums import Reptile, ReptileConfig

ITEMS = 3706
WIDTH = 16
SHAPES = {"item.id": (ITEMS, WIDTH), "layer.weight": (20, 8), "layer.bias": (8,)}
COORDINATES = sum(int(np.prod(shape)) for shape in SHAPES.values())
CLIP, CLIENTS = 4.0, 12
WORST = {  # updates of one client that try to move the sum by more than the clip norm allows
    "huge": lambda: update(1e30),
    "huge the other way": lambda: update(-1e30),
    "zero": lambda: update(0.0),
    "nan": lambda: update(np.nan),
    "infinite": lambda: update(np.inf),
    "one nan": lambda: spoiled(np.nan),
    "one infinity": lambda: spoiled(-np.inf),
    "weighted": lambda: update(5.0, examples=10**9),
    "dropped": lambda: None,
}


def update(scale: float, *, examples: int = 3, seed: int = 7, names=tuple(SHAPES)) -> Update:
    """An update in a random direction that touches five items; zero in all but the named
    parameters."""
    random = np.random.default_rng(seed)
    delta = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name in names:
        rows = random.choice(ITEMS, 5, replace=False) if name == "item.id" else slice(None)
        values = scale * random.standard_normal(delta[name][rows].shape)
        delta[name][rows] = torch.as_tensor(values, dtype=torch.float32)
    return Update(delta, examples, 0.5)


def spoiled(value: float) -> Update:
    """An update with one bad coordinate."""
    one = update(1.0)
    one.delta["layer.weight"][3, 3] = value
    return one


def honest(clients: int = CLIENTS) -> dict[int, Update | None]:
    """The updates of all clients, some of them longer than the clip norm."""
    return {
        client: update(0.1 * (client + 1), examples=client + 1, seed=client)
        for client in range(clients)
    }


class Fixed:
    """The cohort is the first `cohort` clients of all, client c on node 100 + c % nodes."""

    def __init__(self, clients: int, cohort: int, nodes: int) -> None:
        self.clients, self.cohort, self.nodes = np.arange(clients), cohort, nodes

    def sample(self, round_number: int) -> np.ndarray:
        return (self.clients[: self.cohort] + round_number) % len(self.clients)

    def by_node(self, clients: np.ndarray) -> list[tuple[int, np.ndarray]]:
        groups = [(100 + node, clients[clients % self.nodes == node]) for node in range(self.nodes)]
        return [(node, group) for node, group in groups if len(group)]


@dataclass(frozen=True)
class Parts:
    """The components of a federation; a broken aggregator replaces one of them."""

    privacy: type[DpFedAvg] = DpFedAvg
    total: type[UpdateSum] = UpdateSum
    strategy: type[CohortStrategy] = Reptile
    start: dict[str, np.ndarray] = field(
        default_factory=lambda: {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
    )


class Federation:
    """Rounds of a private strategy. By default all clients are in every cohort, each on its own
    node."""

    def __init__(
        self,
        parts: Parts | None = None,
        *,
        server_lr: float = 1.0,
        clients: int = CLIENTS,
        cohort: int | None = None,
        nodes: int | None = None,
        sampler: str = "fixed-size",
        **privacy: Any,
    ) -> None:
        self.parts, self.rate = parts or Parts(), server_lr
        self.cohort = clients if cohort is None else cohort
        settings = {"clip_norm": CLIP, **privacy}
        if "noise_multiplier" not in settings and "epsilon" not in settings:
            settings["noise_multiplier"] = 1.0
        plan = Plan.of(PrivacyConfig(**settings), sampler, {"cohort": self.cohort}, clients, 10)
        self.charged: list[Any] = []
        cohorts: Any = Fixed(clients, self.cohort, nodes or clients)
        cls = self.parts.strategy
        self.strategy = cls(ReptileConfig(server_lr=server_lr), cohorts, {"name": "sgd"})
        self.source = Reproducible(5)
        self.strategy.privacy = self.parts.privacy(
            plan,
            "main",
            self.source,
            lambda number: self.charged.append((number, plan.event("main"))),
        )
        self.round, self.asked = 0, []

    @property
    def privacy(self) -> DpFedAvg:
        assert self.strategy.privacy is not None
        return self.strategy.privacy

    def configured(self) -> list[Message]:
        """The messages of the next round."""
        self.round += 1
        self.theta = {name: value.copy() for name, value in self.parts.start.items()}
        messages = list(
            self.strategy.configure_train(self.round, to_record(self.theta), ConfigRecord(), None)
        )
        self.asked.append([order_of(message).clients.tolist() for message in messages])
        return messages

    def answer(self, message: Message, updates: dict[int, Update | None]) -> Message:
        """The reply of a node; it fails if none of its clients has an update."""
        order = order_of(message)
        total = self.parts.total(
            self.parts.start,
            ["item.id"],
            order.weighting,
            order.protection,
            self.source,
            order.round,
        )
        present = [client for client in order.clients.tolist() if updates.get(client) is not None]
        if not present:
            return Message(Error(2, "gone"), reply_to=message)
        start = {name: torch.from_numpy(value) for name, value in self.parts.start.items()}
        for client in present:
            total.add_block([client], as_block(start, [updates[client]]))
        return Message(pack_sum(total.sum()), reply_to=message)

    def applied(self, replies: list[Message]) -> dict[str, np.ndarray]:
        """The change of the parameters times M / server_lr: the released sum."""
        arrays, _ = self.strategy.aggregate_train(self.round, replies)
        assert arrays is not None, "nothing was released"
        moved = from_record(arrays)
        factor = self.cohort / self.rate
        return {
            n: (moved[n].astype(np.float64) - start) * factor
            for n, start in self.parts.start.items()
        }

    def play(self, updates: dict[int, Update | None] | None = None) -> dict[str, np.ndarray]:
        """A round in which the clients have these updates (zero by default); returns the released
        sum."""
        if updates is None:
            updates = dict.fromkeys(range(CLIENTS), update(0.0))
        return self.applied([self.answer(message, updates) for message in self.configured()])


def order_of(message: Message) -> TrainOrder:
    """The order in a training message."""
    return unpack_order(TrainOrder, message.content)


def flat(released: dict[str, np.ndarray]) -> np.ndarray:
    """All coordinates as one vector."""
    return np.concatenate([released[name].ravel() for name in SHAPES])


def norm(released: dict[str, np.ndarray], order: int = 2) -> float:
    """Norm over all parameters together."""
    return float(np.linalg.norm(flat(released), order))


def assert_std(noise: np.ndarray, expected: float) -> None:
    """Standard deviation within five standard errors: 1.5% over all coordinates."""
    assert abs(noise.std() / expected - 1) < 5 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 5 * expected / np.sqrt(noise.size)


def noise_has_the_accounted_scale(parts: Parts) -> None:
    """The noise of a sum is N(0, (2 S z)^2) in every round; over eight rounds, the deviation is
    known to 0.5%."""
    federation = Federation(parts, noise_multiplier=0.7)
    noise = np.concatenate([flat(federation.play()) for _ in range(8)])
    assert_std(noise, 2 * CLIP * 0.7)
    assert kstest(noise / (2 * CLIP * 0.7), "norm").pvalue > 1e-5


def noise_is_drawn_anew(parts: Parts) -> None:
    """Rounds, and parameters of one round, are not correlated."""
    federation = Federation(parts)
    first, second = federation.play(), federation.play()
    size = SHAPES["layer.weight"]
    pairs = [
        (flat(first), flat(second)),
        (first["item.id"].ravel()[: np.prod(size)], first["layer.weight"].ravel()),
    ]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


def every_row_has_noise(parts: Parts) -> None:
    """An untouched row has the same noise as a touched one."""
    updates = honest()
    touched = np.unique(
        np.concatenate([u.delta["item.id"].any(1).nonzero()[:, 0] for u in updates.values() if u])
    )
    released = Federation(parts, noise_multiplier=3.0).play(updates)
    assert all(value.all() for value in released.values())
    assert_std(np.delete(released["item.id"], touched, axis=0), 2 * CLIP * 3.0)


def sum_moves_by_two_clip_norms_at_most(parts: Parts) -> None:
    """Replacing one client does not change the sum of the others, and moves the whole by at most 2
    S."""
    for nodes in (CLIENTS, 3):
        sums = {}
        for name, make in WORST.items():
            sums[name] = Federation(parts, nodes=nodes, noise_multiplier=0.0).play(
                {**honest(), 4: make()}
            )
        for one in sums.values():
            for other in sums.values():
                moved = norm({name: one[name] - other[name] for name in SHAPES})
                assert moved <= 2 * CLIP * (1 + 1e-5)
        moved = norm({n: sums["huge"][n] - sums["huge the other way"][n] for n in SHAPES})
        assert moved >= 2 * CLIP * (1 - 1e-4)  # and the noise is calibrated to no less


def clients_count_the_same(parts: Parts) -> None:
    """The same update with a billion examples does not move the sum further."""
    few, many = (
        Federation(parts, noise_multiplier=0.0).play(
            {**honest(), 4: update(1.0, examples=examples)}
        )
        for examples in (1, 10**9)
    )
    np.testing.assert_allclose(flat(few), flat(many), rtol=1e-6, atol=1e-9)


def norm_is_that_of_all_parameters(parts: Parts) -> None:
    """A client with large updates of all parameters moves them together by S."""
    for names in (("item.id", "layer.weight", "layer.bias"), ("layer.bias",)):
        lone: dict[int, Update | None] = dict.fromkeys(range(CLIENTS), update(0.0))
        lone[4] = update(100.0, names=names)
        assert abs(norm(Federation(parts, noise_multiplier=0.0).play(lone)) / CLIP - 1) < 1e-4


def denominator_is_fixed(parts: Parts) -> None:
    """Dropped clients count as zero: the weight of the others is the same with and without them."""
    updates = honest()
    half = {client: update if client % 2 else None for client, update in updates.items()}
    zeroed = {client: u if client % 2 else update(0.0) for client, u in updates.items()}
    for nodes in (CLIENTS, 2, 3):
        found, expected = (
            Federation(parts, nodes=nodes, noise_multiplier=0.0).play(u) for u in (half, zeroed)
        )
        np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-5, atol=1e-6)
    # so is the weight of the noise
    assert_std(flat(Federation(parts).play({0: update(0.0)})), 2 * CLIP)


def nobody_is_drawn_for_a_failed_client(parts: Parts) -> None:
    """Cohorts do not depend on failures, in this round and later ones."""
    asked = []
    for gone in ({}, {3: None}):
        federation = Federation(parts, cohort=6, noise_multiplier=0.0)
        for _ in range(4):
            federation.play({**honest(), **gone})
        asked.append(federation.asked)
    assert asked[0] == asked[1]
    assert all(sum(len(clients) for clients in messages) == 6 for messages in asked[1])


CHECKS = (
    noise_has_the_accounted_scale,
    noise_is_drawn_anew,
    every_row_has_noise,
    sum_moves_by_two_clip_norms_at_most,
    clients_count_the_same,
    norm_is_that_of_all_parameters,
    denominator_is_fixed,
    nobody_is_drawn_for_a_failed_client,
)
