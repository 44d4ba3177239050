# SPDX-License-Identifier: Apache-2.0
"""Nodes of a run as the loop sees them, and the exchange of messages with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import INITIAL, read_arrays
from server.cohort import Roster, call_roster
from server.devices import (
    SynchronousTimeline,
    Timeline,
    check_named_clients,
    check_personal_noise,
    time_needed,
)
from server.exchange import DroppedReplies, answers
from server.privacy.secure_sums import secure_sums


def node_names(grid: Grid) -> Mapping[str, str]:
    """Names of a grid's nodes, such as `node-2`, by Flower's id; empty in a simulation."""
    return getattr(grid, "node_names", {})


class Federation:
    """Nodes of a simulation: all online from the start, and trusted.

    Args:
        experiment: the resolved experiment.
        grid: connection to the nodes.

    Raises:
        ExperimentError: users' own budgets are combined with late devices.
    """

    untrusted = False
    """True if nodes are untrusted."""

    def __init__(self, experiment: Experiment, grid: Grid) -> None:
        check_personal_noise(experiment)
        self.experiment = experiment
        self.grid = grid
        self.timeout = experiment.engine.timeout
        self.dropped = DroppedReplies(
            always=self.untrusted, secret=experiment.hides_cohorts, called=node_names(grid)
        )
        """Record of dropped replies."""
        self.roster = self._first_roster()
        self.secure = secure_sums(experiment, grid, self.roster, self.dropped)
        """Secure aggregation; None if nodes send their sums unmasked."""

    @property
    def members(self) -> Roster:
        """Nodes as strategies see them: a single one under secure aggregation."""
        return self.roster if self.secure is None else self.secure.whole

    def refresh_roster(self) -> bool:
        """Look for new nodes; returns True if `roster` has changed."""
        return False

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Make the simulated time of rounds; None without simulated devices.

        Args:
            strategy: the run's strategy.

        Raises:
            ExperimentError: rounds close early without simulated time, or the strategy or step does
                not support it.
        """
        experiment = self.experiment
        if experiment.devices is not None:
            check_named_clients(strategy, "devices")
            return SynchronousTimeline(experiment, experiment.devices)
        if experiment.closing is not None:
            raise time_needed("closing")
        return None

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """Request initial parameters from one node, as the server need not have the catalogue; all
        nodes return the same.

        Raises:
            ClientError: the node failed.
        """
        message = Message(RecordDict(), self.roster.nodes[0], INITIAL)
        replies = self.grid.send_and_receive([message], timeout=self.timeout)
        (reply,) = answers(replies, sent=self.roster.nodes[:1], max_failures=0.0)
        return read_arrays(reply.content)

    def shared(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Put parameters, writable, into memory that the grid shares with the nodes, if any."""
        offered = getattr(self.grid, "share", dict)(parameters)
        return {
            name: value if value.flags.writeable else value.copy()
            for name, value in offered.items()
        }

    def train(self, messages: Sequence[Message], theta: Mapping[str, np.ndarray]) -> list[Message]:
        """Send a round's training messages and collect the accepted replies, in the order of the
        nodes; under secure aggregation one reply for all nodes.

        Args:
            messages: the strategy's messages.
            theta: the shared parameters in them.

        Raises:
            ClientError: more nodes failed than `engine.max-failures` allows.
        """
        sent, replies = self._exchange(messages)
        good = self._valid(sent, self._good(sent, replies), theta)
        rank = {node: index for index, node in enumerate(self.roster.nodes)}
        return sorted(good, key=lambda reply: rank.get(reply.metadata.src_node_id, len(rank)))

    def ask(self, messages: Sequence[Message]) -> list[Message]:
        """Send messages other than for training, and return the replies without errors.

        Raises:
            ClientError: more nodes failed than `engine.max-failures` allows.
        """
        return self._good(messages, self.grid.send_and_receive(messages, timeout=self.timeout))

    def _good(self, sent: Sequence[Message], replies: Iterable[Message]) -> list[Message]:
        return answers(
            replies,
            sent=[message.metadata.dst_node_id for message in sent],
            max_failures=self.experiment.engine.max_failures,
            dropped=self.dropped,
            may_be_late=self.untrusted and self.experiment.leaves_late,
        )

    def _exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Iterable[Message]]:
        """Send training messages; returns the messages that count in the round, and the replies."""
        if not messages:
            return (), ()
        if self.secure is not None:
            return messages, self.secure.send_and_receive(messages)
        return messages, self.grid.send_and_receive(messages, timeout=self.timeout)

    def _first_roster(self) -> Roster:
        return call_roster(self.grid, timeout=self.timeout)

    def _valid(
        self,
        messages: Sequence[Message],
        replies: list[Message],
        theta: Mapping[str, np.ndarray],
    ) -> list[Message]:
        """Validate replies; all are accepted, as the nodes are trusted."""
        return replies
