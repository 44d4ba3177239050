# SPDX-License-Identifier: Apache-2.0
"""Nodes of a run as the loop sees them, and the exchange of messages with them, in synchronous and
asynchronous rounds."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedrec.components.registry import STEP
from fedrec.devices import DevicesConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import AsynchronousConfig, Experiment
from fedrec.privacy.personal import PersonalNoise
from fedrec.protocol.messages import (
    ARRAYS,
    CONFIG,
    INITIAL,
    TrainOrder,
    pack_sum,
    read_arrays,
    unpack_order,
    unpack_sum,
)
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.protocol.updates import scaled
from fedrec.runtime.ragged import strip_prefix
from server.cohort import SECONDS, SampledCohorts, SynchronousTimeline, Timeline
from server.nodes import DroppedReplies, Roster, answers, call_roster
from server.privacy.secure_sums import secure_sums
from strategies.base import CohortStrategy, more_than_sums, parts_of
from strategies.per_client import MetaMfStrategy


def node_names(grid: Grid) -> Mapping[str, str]:
    """Names of a grid's nodes, such as `node-2`, by Flower's id; empty in a simulation."""
    return getattr(grid, "node_names", {})


class Federation:
    """Nodes of a simulation: all online from the start, and trusted.

    Args:
        experiment: the resolved experiment.
        grid: connection to the nodes.

    Raises:
        ExperimentError: users' own budgets are combined with late devices, or rounds close early
            without simulated time.
    """

    untrusted = False
    """True if nodes are untrusted."""

    def __init__(self, experiment: Experiment, grid: Grid) -> None:
        _check_personal_noise(experiment)
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
        self.timeline = self._timeline()
        """Simulated time of rounds; None without simulated devices."""

    @property
    def members(self) -> Roster:
        """Nodes as strategies see them: a single one under secure aggregation."""
        return self.roster if self.secure is None else self.secure.whole

    def refresh_roster(self) -> bool:
        """Look for new nodes; returns True if `roster` has changed."""
        return False

    def check_strategy(self, strategy: Strategy) -> None:
        """Check that a strategy works with these nodes.

        Raises:
            ExperimentError: it waits for more nodes than exist, does not support simulated devices,
                or needs more than the sum that secure aggregation provides.
        """
        if self.secure is not None:
            _check_additive(strategy)
        _check_enough_nodes(strategy, len(self.roster.nodes))
        if self.timeline is not None:
            _check_named_clients(strategy, "devices")

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

    def _timeline(self) -> Timeline | None:
        experiment = self.experiment
        if experiment.devices is not None:
            return SynchronousTimeline(experiment, experiment.devices)
        if experiment.closing is not None:
            raise _time_needed("closing")
        return None

    def _first_roster(self) -> Roster:
        return call_roster(self.grid, timeout=self.timeout)

    def _valid(
        self, messages: Sequence[Message], replies: list[Message], theta: Mapping[str, np.ndarray]
    ) -> list[Message]:
        """Validate replies; all are accepted, as the nodes are trusted."""
        return replies


# Checks of experiments and strategies with simulated time.


def _time_needed(table: str) -> ExperimentError:
    """Error for a table that needs simulated time, without `[devices]`."""
    return ExperimentError(
        f"[{table}] needs simulated or real reply times of devices",
        expected="[devices] in a simulation" + (", or real nodes" if table == "closing" else ""),
        fix="add [devices], such as --set 'devices={}'",
    )


def _check_named_clients(strategy: Strategy, table: str) -> list[Strategy]:
    """Check that a strategy sends the global parameters to clients by id.

    Args:
        strategy: that of the experiment.
        table: the table that needs it.

    Returns:
        The strategies of its phases.

    Raises:
        ExperimentError: it does not.
    """
    parts = parts_of(strategy)
    if not all(isinstance(p, CohortStrategy) and not isinstance(p, MetaMfStrategy) for p in parts):
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} does not work with [{table}]",
            expected="a strategy of fedrec's that sends the global parameters to its clients",
            fix=f"set strategy.name = 'reptile', or leave out [{table}]",
        )
    return parts


def _check_personal_noise(experiment: Experiment) -> None:
    """Check that users' own budgets, which count requests, are not combined with late devices,
    where more clients are asked than reply.

    Raises:
        ExperimentError: they are.
    """
    known_cohorts = experiment.known_cohorts
    if known_cohorts and isinstance(experiment.settings(STEP), PersonalNoise):
        raise ExperimentError(
            "users' own budgets count the rounds in which they are asked, but late devices upload"
            " in others",
            got=f"step {experiment.step.name!r}",
            fix="leave these tables out, or choose a step without users' own noise",
        )


def _check_additive(strategy: Strategy) -> None:
    """Check that a strategy needs only the sum of its clients' updates.

    Raises:
        ExperimentError: it needs more.
    """
    for part in parts_of(strategy):
        reason = more_than_sums(type(part))
        if reason:
            raise ExperimentError(
                f"strategy {type(part).__name__!r} needs more than the sum that secure aggregation"
                " provides",
                got=reason,
                fix="set strategy.name = 'reptile', or leave out secure-aggregation",
            )


def _check_enough_nodes(strategy: Strategy, nodes: int) -> None:
    """Check that a strategy does not wait for more nodes than exist: Flower's strategies would wait
    forever.

    Raises:
        ExperimentError: its minimum is above `nodes`.
    """
    needed = max(
        getattr(strategy, "min_available_nodes", 0), getattr(strategy, "min_train_nodes", 0)
    )
    if needed > nodes:
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} waits for more nodes than exist",
            expected=f"at least {needed} nodes, not {nodes}",
            fix="set engine.nodes, or strategy.min-available-nodes and strategy.min-train-nodes",
        )


# Asynchronous rounds of simulated devices (FedBuff, Nguyen et al. 2022, algorithm 1).
#
# `concurrency` clients train at a time, each from the parameters that it was sent. A round ends,
# and the server takes a step, when the buffer has as many answers as the sampler's cohort has
# clients. A client that has replied or is lost is replaced at once; the next clients are the
# sampler's cohorts, taken sequentially. With a concurrency of one cohort and equally fast devices,
# each round is the synchronous one.
#
# An answer to parameters of s rounds ago enters the sum with weight (1 + s)^-a, a = 0.5, and the
# sum is divided as in a synchronous round: by the number of clients, or the weight of their
# examples. The strategy is unaware of it: the federation replaces the parameters in its messages,
# and weights the sums in the replies.
#
# Differs from the paper: a client neither trains twice at a time nor is twice in one buffer, so
# that it moves a step by no more than one update; answers that come at the same time are ordered by
# client; and a client is trained when its answer is taken, with the random stream and the step's
# settings of that round.

_MOST_LOST = 1000  # lost clients per reply
_STALENESS = 0.5  # the exponent a


class _InFlight(NamedTuple):
    """A client in training; in the order of the queue."""

    end: float
    """Simulated time, in seconds, of its reply or its loss."""
    client: int
    version: int
    """Round of the parameters that it was sent."""
    lost: bool
    """True if it does not reply."""


_QUEUE = np.dtype([("end", "f8"), ("client", "i8"), ("version", "i8"), ("lost", "?")])
"""Fields of a client in training in a checkpoint."""


class _BufferedTimeline(Timeline):
    """Rounds of the replies that arrive first, whenever their clients started.

    Args:
        experiment: the experiment.
        config: its `[devices]` table.
        asynchronous: its `[asynchronous]` table.

    Attributes:
        versions: parameters that clients started from, by round.
        answers: round of the parameters that each client of the current round was sent.
    """

    def __init__(
        self, experiment: Experiment, config: DevicesConfig, asynchronous: AsynchronousConfig
    ) -> None:
        super().__init__(experiment, config)
        self.config = asynchronous
        self.versions: dict[int, dict[str, np.ndarray]] = {}
        self._queue: list[_InFlight] = []
        self.answers: dict[int, int] = {}
        self._draws = 0  # cohorts that the sampler drew
        self._next: list[int] = []  # drawn clients that have not started, in reverse order
        self._ended = 0.0
        self._lost = 0

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Save the first parameters; prints nothing."""
        if not self.versions:
            self.versions[0] = _copies(theta)
        return super().announce(theta)

    def groups(self, clients: np.ndarray) -> Iterator[np.ndarray]:
        """Group the clients of a round, `int64 [clients]`, by the parameters that they were sent,
        the newest first."""
        versions = np.array([self.answers[client] for client in clients.tolist()], dtype=np.int64)
        for version in np.unique(versions)[::-1]:
            yield clients[versions == version]

    def memory(self) -> dict[str, np.ndarray]:
        """Time and totals, the queue with its parameters, and the next clients."""
        memory = {
            **super().memory(),
            "draws": np.asarray(self._draws),
            "next": np.array(self._next, dtype=np.int64),
            "queue": np.array(sorted(map(tuple, self._queue)), dtype=_QUEUE),
        }
        for version, arrays in self.versions.items():
            memory |= {f"version/{version}/{name}": value for name, value in arrays.items()}
        return memory

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        super().restore(memory)
        self._draws = int(memory["draws"])
        self._next = memory["next"].tolist()
        self._queue = [_InFlight(*client) for client in memory["queue"].tolist()]
        self.versions.clear()
        for key, value in strip_prefix("version/", memory).items():
            version, _, name = key.partition("/")
            self.versions.setdefault(int(version), {})[name] = value

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        buffer = int(cohorts.section.options["cohort"])
        most = max(buffer, len(cohorts.clients) - buffer + 1)
        if self.config.concurrency > most:
            raise ExperimentError(
                "wrong value for 'asynchronous.concurrency'",
                expected=f"at most {most}: the {len(cohorts.clients)} clients without those whose"
                " answers are in the buffer",
                got=str(self.config.concurrency),
                fix="set a smaller number, or a smaller sampler.cohort",
            )
        self.answers = {}
        self._lost = 0
        now = self.clock
        while len(self.answers) < buffer:
            now = self._refilled(now, round_number, cohorts)
            at = self._queue[0].end
            while self._queue and self._queue[0].end <= at and len(self.answers) < buffer:
                client = heapq.heappop(self._queue)
                if client.lost:
                    self._lost += 1
                else:
                    self.answers[client.client] = client.version
            now = max(now, at)
            if self._lost > _MOST_LOST * buffer:
                raise ExperimentError(
                    "almost all clients go offline before they finish training",
                    got=f"{self._lost} clients that did not answer in one round",
                    fix="set shorter device times, or more hours in devices.nightly",
                )
        self._ended = now
        return np.array(sorted(self.answers), dtype=np.int64)

    def _refilled(self, now: float, round_number: int, cohorts: SampledCohorts) -> float:
        """Start clients up to the concurrency; if none trains or is available, at the next time at
        which one is. Returns the time."""
        busy = {client.client for client in self._queue} | self.answers.keys()
        if not self._queue and self.devices.config.nightly is not None:
            idle = cohorts.clients[~np.isin(cohorts.clients, list(busy))]
            now = self._when_present(idle, 1, now)
        started: list[int] = []
        while len(started) < self.config.concurrency - len(self._queue):
            client = self._drawn(cohorts, busy, now)
            if client is None:
                break
            started.append(client)
            busy.add(client)
        clients = np.array(started, dtype=np.int64)
        ends, lost = self._ends(clients, now)
        for end, client, gone in zip(ends.tolist(), started, lost.tolist(), strict=True):
            heapq.heappush(self._queue, _InFlight(end, client, round_number - 1, gone))
        return now

    def _drawn(self, cohorts: SampledCohorts, busy: set[int], now: float) -> int | None:
        """Next client to start; None if no other client can start."""
        while True:
            while self._next:
                client = self._next.pop()
                if client not in busy and len(self._present(np.array([client]), now)):
                    return client
            if np.isin(self._present(cohorts.clients, now), list(busy)).all():
                return None
            self._draws += 1
            self._next = cohorts.drawn(self._draws).tolist()[::-1]

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Complete the planned round, and save its parameters; returns its counts of answers."""
        self.clock = self._ended
        stale = [round_number - 1 - version for version in self.answers.values()]
        needed = {client.version for client in self._queue}
        self.versions = {v: theta for v, theta in self.versions.items() if v in needed}
        self.versions[round_number] = _copies(zero_copy_arrays(arrays))
        late = sum(rounds > 0 for rounds in stale)
        self._counts.update({"answers": len(stale), "late": late, "lost": self._lost})
        self._counts["stale rounds"] += sum(stale)
        return {
            SECONDS: self.clock,
            "late-clients": late,
            "staleness": sum(stale) / max(1, len(stale)),
            "late-bytes": self._lost * self._bytes,
        }

    def _in_words(self) -> str:
        counts = self._counts
        mean = counts["stale rounds"] / max(1, counts["answers"])
        lost = f", and {counts['lost']} clients did not reply." if counts["lost"] else "."
        return (
            f"{counts['late']} of {counts['answers']} replies were to parameters of earlier rounds,"
            f" on average {mean:.3g} rounds old{lost}"
        )


class AsynchronousFederation(Federation):
    """A simulation whose clients start from the parameters of several rounds."""

    timeline: _BufferedTimeline

    def check_strategy(self, strategy: Strategy) -> None:
        """Check that a strategy works with asynchronous rounds.

        Raises:
            ExperimentError: it needs more than the weighted sum of its clients' updates.
        """
        parts = _check_named_clients(strategy, "asynchronous")
        reason = f"{len(parts)} phases" if len(parts) > 1 else more_than_sums(type(parts[0]))
        if reason:
            raise ExperimentError(
                f"strategy {type(strategy).__name__!r} does not work with [asynchronous]",
                expected="a strategy without phases that uses only the sum of the clients' updates",
                got=reason,
                fix="set strategy.name = 'reptile' or 'fed-adam', or leave out [asynchronous]",
            )

    def _timeline(self) -> _BufferedTimeline:
        experiment = self.experiment
        if experiment.devices is None or experiment.asynchronous is None:
            raise _time_needed("asynchronous")
        return _BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)

    def _exchange(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Iterable[Message]]:
        """Send messages as in `Federation`, with each group's start parameters and its weight in
        the sum."""
        timeline = self.timeline
        stale: dict[tuple[int, str], int] = {}  # versions, by node and message group
        sent = []
        number = 0
        for message in messages:
            order = unpack_order(TrainOrder, message.content)
            number = order.round
            version = timeline.answers[int(order.clients[0])]  # type: ignore[index]
            if version < number - 1:
                node = message.metadata.dst_node_id
                group = message.metadata.group_id
                stale[node, group] = version
                arrays = to_record(timeline.versions[version])
                content = RecordDict({ARRAYS: arrays, CONFIG: message.content[CONFIG]})
                message = Message(content, node, MessageType.TRAIN, group_id=group)
            sent.append(message)
        replies = list(super()._exchange(sent)[1])
        for reply in replies:
            version = stale.get((reply.metadata.src_node_id, reply.metadata.group_id), -1)
            if version >= 0 and not reply.has_error():
                answer = unpack_sum(reply.content)
                total = scaled(answer.total, (number - version) ** -_STALENESS)
                reply.content = pack_sum(replace(answer, total=total))
        return sent, replies


def _copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copy parameters, as the next round may change them in place."""
    return {name: np.array(value) for name, value in arrays.items()}
