# SPDX-License-Identifier: Apache-2.0
"""Real nodes, which join and leave and are not trusted, as the loop sees them."""

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
from server.devices import check_personal_noise
from server.federation import Federation


def federation_of(run: RunFolder, grid: Grid) -> Federation:
    """The nodes that a grid reaches.

    Raises:
        ExperimentError: the nodes are real, the noise depends on their number of clients, and the
            deployment sets no largest number of clients per node.
    """
    if isinstance(grid, DeployedGrid):
        return DeployedFederation(run, grid)
    asynchronous = run.experiment.asynchronous is not None
    return (AsynchronousFederation if asynchronous else Federation)(run.experiment, grid)


class DeployedFederation(Federation):
    """The nodes of a deployment.

    Args:
        run: the run folder; keeps the roster.
        grid: reaches the nodes.
    """

    untrusted = True

    def __init__(self, run: RunFolder, grid: DeployedGrid) -> None:
        experiment = run.experiment
        _check_simulated(experiment)
        check_personal_noise(experiment)
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
        """Look for new nodes; whether `roster` has changed."""
        if not self.discovery.refresh_roster():
            return False
        self.roster = self.discovery.roster
        if self.secure is not None:
            self.secure.roster = self.roster
        return True

    def timeline(self, strategy: Strategy) -> None:
        """As in `Federation`: nothing, as real nodes answer when they do."""

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """The parameters that the majority of a few nodes return.

        Raises:
            ClientError: there is no majority.
        """
        return most_common_parameters(self.grid, self.roster, timeout=self.timeout)

    def train(self, messages: Sequence[Message], theta: Mapping[str, np.ndarray]) -> list[Message]:
        """As in `Federation`.

        Raises:
            ExperimentError: a node would get several messages in one round.
            ClientError: more nodes failed than `engine.max-failures` allows.
        """
        _check_single_messages(messages)
        return super().train(messages, theta)

    def _exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Iterable[Message]]:
        """As in `Federation`; with `[closing]`, those that come before the round closes."""
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
    """Refuse tables of simulated devices."""
    for name in ("devices", "asynchronous"):
        if getattr(experiment, name) is not None:
            raise ExperimentError(
                f"[{name}] is for simulated devices, and these nodes are real",
                fix="leave it out; [closing] with a deadline does not wait for slow devices",
            )


def _check_registered(experiment: Experiment, grid: DeployedGrid) -> None:
    """Refuse noise that a node could reduce by false claims: with more clients, each is assumed to
    be sampled less often."""
    privacy = experiment.privacy
    if privacy is not None and privacy.placement != "local" and grid.most_clients is None:
        raise ExperimentError(
            "noise depends on the number of clients, and this deployment does not limit how many a"
            " node may claim",
            fix="set most-clients in deployment.toml to the largest number of users of a node",
        )


def _clients_in(message: Message) -> int:
    """Number of clients in a training order; an order for all clients of a node counts as one."""
    clients = unpack_train_order(message.content).clients
    return 1 if clients is None else len(clients)


def _check_single_messages(messages: Sequence[Message]) -> None:
    """Refuse a strategy that sends a node several messages: of its replies, only one would be
    accepted."""
    counts = Counter(message.metadata.dst_node_id for message in messages)
    for node, count in counts.items():
        if count > 1:
            raise ExperimentError(
                f"the strategy sends node {node} {count} messages in one round, of which one would"
                " be answered",
                fix="for the update of each client, set `reply = 'each'` in the strategy's class"
                " (docs/plugins.md); or set strategy.name = 'reptile'",
            )
