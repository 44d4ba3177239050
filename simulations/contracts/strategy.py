# SPDX-License-Identifier: Apache-2.0
"""The contract of a strategy, a `CohortStrategy` or one of Flower's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from numpy.testing import assert_equal

from clients.node import Node
from clients.steps.descent import Update, as_block
from clients.sums import UpdateSum
from fedrec.components.registry import STRATEGY
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.messages import pack_sum, unpack_order
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import dense_change
from fedrec.rng import Reproducible
from simulations import runner
from simulations.contracts.base import RunContract, assert_close
from simulations.engines.grid import identify_server
from strategies.base import Aggregate, CohortStrategy, protect
from strategies.dp import DpFedAvg

CLIENTS = 6
CLIP_NORM = 2.0
SHAPES = {"item.id": (9, 3), "item.bias": (9, 1), "layer.weight": (4, 2), "layer.bias": (2,)}
# updates of one client that try to change the sum by more than the clip norm
ODD: dict[str, Any] = {
    "as the others": lambda: _update(4),
    "huge": lambda: _update(4, 1e30),
    "huge the other way": lambda: _update(4, -1e30),
    "NaN": lambda: _update(4, np.nan),
    "infinite": lambda: _update(4, np.inf),
    "of a billion examples": lambda: _update(4, 5.0, examples=10**9),
    "zero": lambda: _update(4, 0.0),
}


class StrategyContract(RunContract):
    """Contract of a strategy: subclass it and set `component` to a `Strategy`."""

    kind = STRATEGY

    def test_a_run_moves_finite_parameters_and_keeps_their_shapes(self, tmp_path: Path) -> None:
        """Check that two rounds change the values of parameters but not names, shapes and types."""
        result = self.plain(tmp_path)
        drawn = Node(result.experiment, 0, 1, None).initial()
        start = {name: value.numpy() for name, value in drawn.items()}
        for name, before in start.items():
            after = result.parameters[name]
            same = after.shape == before.shape and after.dtype == before.dtype
            assert same, f"{name!r} has a different shape or type"
            assert np.isfinite(after).all(), f"{name!r} is not finite"
        moved = any(not np.array_equal(start[name], result.parameters[name]) for name in start)
        assert moved, "two rounds do not change parameters"

    def test_the_distribution_over_nodes_makes_no_difference(self, tmp_path: Path) -> None:
        """Check that two and three nodes give the same parameters; Flower's own strategies see
        nodes, not clients."""
        self._skip_flowers()
        two = self.plain(tmp_path).parameters
        three = self.run(tmp_path / "three", "engine.nodes=3").parameters
        assert_close(three, two, "three nodes against two", 1e-3)

    def test_privacy_is_bounded_or_refused(self, tmp_path: Path) -> None:
        """Check that replacing a client changes the sum by at most 2 S and not the denominator, or
        that the strategy is refused under differential privacy, with a reason."""
        if not issubclass(self.cls, CohortStrategy):
            sections = {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
            with pytest.raises(ExperimentError, match="cannot be made private"):
                runner.run(self.small(**sections), output=tmp_path / "private")
            return
        try:
            released = {name: self._released(make()) for name, make in ODD.items()}
        except ExperimentError as error:
            assert error.fix, f"refused without the reason: {error}"
            return
        released["gone"] = self._released(None)
        for name, (sums, clients) in released.items():
            for other_name, (other, other_clients) in released.items():
                squares = [float(np.square(sums[n] - other[n]).sum()) for n in SHAPES]
                moved = float(np.sqrt(sum(squares))) / CLIP_NORM
                words = f"replacing {name!r} by {other_name!r} changes the sum by {moved:.3f} S"
                assert moved <= 2 * (1 + 1e-4), words
                assert_equal(clients, other_clients, f"{name!r}: the denominator")

    def test_a_private_run_is_charged_or_refused(self, tmp_path: Path) -> None:
        """Check that each round of a private run is charged to the ledger, or that the strategy is
        refused, with a reason."""
        self._skip_flowers()
        try:
            result = self.run(tmp_path / "private", "privacy={clip-norm=1.0, noise-multiplier=1.0}")
        except ExperimentError as error:
            assert error.fix, f"refused without the reason: {error}"
            return
        ledger = Ledger(result.folder / "privacy.jsonl")
        charged = {charge.round_number for charge in ledger.charges}
        done = set(result.rounds["round"])
        assert charged >= done, f"rounds {sorted(done - charged)} are not charged"

    def _released(self, odd: Update | None) -> tuple[dict[str, np.ndarray], float]:
        """Aggregate of a private round without noise in which client 4 sends `odd`.

        Raises:
            ExperimentError: the strategy cannot be made private.
        """
        identify_server()
        strategy, aggregates = self._private()
        theta = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        grid: Any = None
        sent = list(strategy.configure_train(1, to_record(theta), ConfigRecord(), grid))
        updates = {client: odd if client == 4 else _update(client) for client in range(CLIENTS)}
        replies = [
            reply for message in sent if (reply := _answer(message, theta, updates)) is not None
        ]
        strategy.aggregate_train(1, replies)
        assert len(aggregates) == 1, "the rule did not receive the private sum"
        changes = aggregates[0].changes
        sums = {name: dense_change(changes[name], theta[name]) for name in SHAPES}
        return sums, aggregates[0].clients

    def _skip_flowers(self) -> None:
        if not issubclass(self.cls, CohortStrategy):
            pytest.skip("Flower's own strategies see nodes, not clients, and are never private")

    def _private(self) -> tuple[CohortStrategy, list[Aggregate]]:
        """Strategy with a clip norm and without noise, and a list to which its aggregates are
        appended."""
        aggregates: list[Aggregate] = []
        strategy: CohortStrategy = self.cls(self.config(), _Everyone(), {"name": "sgd"})
        plan = Plan.of(
            PrivacyConfig(clip_norm=CLIP_NORM, noise_multiplier=0.0),
            "fixed-size",
            {"cohort": CLIENTS},
            CLIENTS,
            10,
        )
        for phase, part in strategy.phases().items():
            protect(part, DpFedAvg(plan, phase, Reproducible(5), lambda number: None))
            part.apply = _recording(part.apply, aggregates)  # type: ignore[method-assign]
        return strategy, aggregates


class _Everyone:
    """Cohorts of all clients, each on its own node."""

    section = Section(name="fixed-size")

    clients = np.arange(CLIENTS)

    def sample(self, round_number: int) -> np.ndarray:
        """All clients, `int64 [clients]`."""
        return self.clients

    def by_node(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Node numbers and their clients, for clients `int64 [n]`."""
        yield from ((100 + int(client), clients[[index]]) for index, client in enumerate(clients))

    def draw(self, name: str, share: float) -> np.ndarray:
        """All clients, `int64 [clients]`."""
        return self.clients

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> _Everyone:
        """These cohorts, for any clients `int64 [n]`."""
        return self


def _update(client: int, scale: float = 1.0, examples: int = 3) -> Update:
    random = np.random.default_rng(client)
    with np.errstate(all="ignore"):
        drawn = {
            n: (scale * random.standard_normal(s)).astype(np.float32) for n, s in SHAPES.items()
        }
    return Update({name: torch.from_numpy(value) for name, value in drawn.items()}, examples, 0.5)


def _answer(
    message: Message, theta: Mapping[str, np.ndarray], updates: Mapping[int, Update | None]
) -> Message | None:
    """Reply of a node; None if its only client left."""
    order = unpack_order(TrainOrder, message.content)
    clients = [] if order.clients is None else order.clients.tolist()
    total = UpdateSum(
        theta, ["item.id"], order.weighting, order.protection, Reproducible(5), order.round
    )
    start = {name: torch.from_numpy(value) for name, value in theta.items()}
    present = {client: update for client in clients if (update := updates[client]) is not None}
    for client, update in present.items():
        total.add_block([client], as_block(start, [update]))
    return Message(pack_sum(total.sum()), reply_to=message) if present else None


def _recording(apply: Any, aggregates: list[Aggregate]) -> Any:
    def wrapped(theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        aggregates.append(aggregate)
        return apply(theta, aggregate)

    return wrapped
