# SPDX-License-Identifier: Apache-2.0
"""Federation of real nodes, which join and leave and are untrusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import unpack_train_order
from fedrec.runs.folder import RunFolder
from server.asynchronous import AsynchronousFederation
from server.cohort import Roster
from server.deployed.discovery import MOST_CLIENTS, Discovery, most_common_parameters
from server.deployed.grid import DeployedGrid
from server.deployed.validation import ReplyValidator
from server.federation import Federation


def federation_of(run: RunFolder, grid: Grid) -> Federation:
    """Make the federation of a grid's nodes, simulated or real.

    Raises:
        ExperimentError: the nodes are real, the noise depends on their number of clients, and the
            deployment does not limit the number of clients per node.
    """
    if isinstance(grid, DeployedGrid):
        return DeployedFederation(run, grid)
    asynchronous = run.experiment.asynchronous is not None
    return (AsynchronousFederation if asynchronous else Federation)(run.experiment, grid)


class DeployedFederation(Federation):
    """Federation of a deployment's nodes.

    Args:
        run: the run folder; contains the roster.
        grid: connection to the nodes.
    """

    untrusted = True

    def __init__(self, run: RunFolder, grid: DeployedGrid) -> None:
        experiment = run.experiment
        _check_simulated(experiment)
        _check_registered(experiment, grid)
        self.discovery = Discovery(
            grid,
            run.path / "roster.npz",
            timeout=experiment.engine.timeout,
            most=grid.most_clients or MOST_CLIENTS,
        )
        super().__init__(experiment, grid)
        self._deployed = grid
        self.validator = ReplyValidator(self.dropped, experiment)

    def refresh_roster(self) -> bool:
        """Look for new nodes; returns True if `roster` has changed."""
        if not self.discovery.refresh_roster():
            return False
        self.roster = self.discovery.roster
        if self.secure is not None:
            self.secure.roster = self.roster
        return True

    def timeline(self, strategy: Strategy) -> None:
        """Return None: real nodes have no simulated time."""

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """Return the initial parameters of the majority of a few nodes.

        Raises:
            ClientError: no node returns finite parameters.
        """
        return most_common_parameters(self.grid, self.roster, timeout=self.timeout)

    def train(self, messages: Sequence[Message], theta: Mapping[str, np.ndarray]) -> list[Message]:
        """Train as in `Federation`.

        Raises:
            ExperimentError: a node would get several messages in one round.
            ClientError: more nodes failed than `engine.max-failures` allows.
        """
        _check_single_messages(messages)
        return super().train(messages, theta)

    def _exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Iterable[Message]]:
        """Send messages as in `Federation`; with `[closing]`, until the round closes."""
        closing = self.experiment.closing
        if closing is None or not messages:
            return super()._exchange(messages)
        asked = {message.metadata.dst_node_id: _clients_in(message) for message in messages}
        needed = closing.needed(sum(asked.values()))
        replies = self._deployed.send_and_receive(
            messages,
            timeout=self.timeout if closing.deadline is None else closing.deadline,
            enough=lambda good: sum(asked[reply.metadata.src_node_id] for reply in good) >= needed,
        )
        return messages, replies

    def _first_roster(self) -> Roster:
        return self.discovery.wait_for(self.experiment.engine.nodes or 1)

    def _valid(
        self,
        messages: Sequence[Message],
        replies: list[Message],
        theta: Mapping[str, np.ndarray],
    ) -> list[Message]:
        return self.validator.trained(messages, replies, theta)


def _check_simulated(experiment: Experiment) -> None:
    """Check that the experiment has no table for simulated devices."""
    for name in ("devices", "asynchronous"):
        if getattr(experiment, name) is not None:
            raise ExperimentError(
                f"[{name}] applies only to simulated devices, and these nodes are real",
                fix="leave it out; [closing] with a deadline does not wait for slow devices",
            )


def _check_registered(experiment: Experiment, grid: DeployedGrid) -> None:
    """Check that no node can reduce the noise by claiming more clients, which seems to lower the
    sampling rate."""
    privacy = experiment.privacy
    if privacy is not None and privacy.placement != "local" and grid.most_clients is None:
        raise ExperimentError(
            "noise depends on the number of clients, and this deployment does not limit the clients"
            " per node",
            fix="set most-clients in deployment.toml to the largest number of users of a node",
        )


def _clients_in(message: Message) -> int:
    """Number of clients in a training order; an order for all clients of a node counts as one."""
    clients = unpack_train_order(message.content).clients
    return 1 if clients is None else len(clients)


def _check_single_messages(messages: Sequence[Message]) -> None:
    """Check that a strategy sends each node one message, as only one reply is accepted."""
    counts = Counter(message.metadata.dst_node_id for message in messages)
    for node, count in counts.items():
        if count > 1:
            raise ExperimentError(
                f"the strategy sends node {node} {count} messages in one round; only one reply is"
                " accepted",
                fix="for the update of each client, set `reply = 'each'` in the strategy's class"
                " (docs/plugins.md); or set strategy.name = 'reptile'",
            )
