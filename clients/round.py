# SPDX-License-Identifier: Apache-2.0
"""A training round on one node, from the order to the sums or the single updates of its clients.

A training round on one node: train the clients of the order, and add their updates or keep them
apart.

Sums are taken in float64 and in an order that is a function of the clients' data, so that they
depend neither on the order of messages nor, up to the last float32 digit, on how many nodes share
the work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from torch import Tensor

from clients.blocks import train_in_blocks
from clients.node import Node
from clients.one_client import to_device
from clients.participation import permitted
from clients.step import Step
from clients.step_checks import refuse_non_finite, refuse_unmatched
from clients.steps.updates import Updates
from clients.sums import CompressedUpdates, UpdateSum
from fedrec.components.registry import MODEL, STEP, ours, resolve
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.phases import rounds_before_last_phase, symmetric_of
from fedrec.experiment.sections import Section
from fedrec.privacy.personal import PersonalNoise
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import TrainEach, TrainOrder, TrainSum
from fedrec.protocol.updates import Change
from fedrec.rng import stream
from fedrec.training.block import Block
from fedrec.training.results import Outcome


def keep_private(node: Node, kept: Mapping[int, Mapping[str, Change]], round_: int) -> None:
    """Save the private parameters of some clients after a round; nothing if there are none.

    Raises:
        ClientError: the node has no private state.
    """
    if not kept:
        return
    if node.private is None:
        raise ClientError(
            "private parameters cannot be saved",
            expected="a run folder, for the private state of the clients",
            got=f"private parameters {list(next(iter(kept.values())))}",
            fix="give the run an output folder",
        )
    node.private.save_all(kept, round_, keep=_rounds(node))


def _rounds(node: Node) -> int:
    """Number of rounds whose private state is kept: a resumed run may start from any kept
    checkpoint, and needs the private state of that round. The oldest is deleted when the newest is
    written, which may still continue while the next round trains. With early stopping the run ends
    with the parameters of an earlier round.
    """
    experiment = node.experiment
    watch = experiment.early_stopping
    back = 0
    if watch is not None:
        back = rounds_before_last_phase(experiment) + watch.every * (watch.patience + 1)
    return experiment.checkpoint.every * experiment.checkpoint.keep + 2 + back


# The updates of a node's clients, kept apart.


class EachUpdate:
    """Collects updates.

    Args:
        private: names of the parameters that stay with the clients.
        tables: names of the parameters of which clients change few rows.
    """

    def __init__(self, private: Collection[str], tables: Collection[str]) -> None:
        self.private = private
        self.tables = tables
        self._blocks: list[TrainEach] = []

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block."""
        names = [name for name in trained.names if name not in self.private]
        tables = [name for name in names if name in self.tables]
        examples = np.array(trained.block.examples, dtype=np.int64)
        losses = np.array(trained.losses(), dtype=np.float64)
        self._blocks.append(TrainEach(trained.each(clients, names, tables), examples, losses))

    @property
    def errors(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """Nothing is left out of an update."""
        return {}

    def reply(self) -> TrainEach:
        """The updates so far, by client."""
        return TrainEach.joined(self._blocks)


log = logging.getLogger("fedrec")


class Collector(Protocol):
    """Takes the trained blocks of a round."""

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block, without what stays with the clients."""
        ...

    @property
    def errors(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """What each client keeps of its update for its next one, by names of their own."""
        ...


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted, or protected, updates.

    Raises:
        ClientError: a client's work failed or diverged; names the client, the step and its data.
        ComponentError: the step violated its contract.
        ExperimentError: the step needs parameters that the server generates for each client.
    """
    work = _RoundOfClients.of(node, arrays, order)
    private = work.step.private_names(list(work.parameters))
    if isinstance(work.step.config, PersonalNoise):
        _refuse_compression(node, "clients' own noise is on every number")
    compressed = CompressedUpdates.of(
        node.experiment,
        order.round,
        node.private,
        private,
        passes_on=node.sends_compressed and order.secure is None and order.clients is not None,
    )
    total = UpdateSum(
        arrays,
        node.model.item_tables,
        order.weighting,
        order.protection,
        node.noise,
        order.round,
        node.device,
        compressed,
        symmetric_of(node.experiment, order.step),
    )
    covered = order.protection is not None or order.secure is not None
    hides = node.hides_failures and (covered or isinstance(work.step.config, PersonalNoise))
    work.add_to(total, hides)
    reply = total.sum()
    if order.protection is None and not hides:
        refuse_non_finite(work.step, reply, work.clients.tolist(), order.round)
    return reply


def train_each(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainEach:
    """Train the clients of an order; the update of each.

    Raises:
        ClientError: a client's work failed, or the server sent it rows of other items than it
            needs.
        ComponentError: the step violated its contract.
        ExperimentError: the order protects the updates, or step and model need other parameters.
    """
    if order.protection is not None or order.clients is None:
        raise ExperimentError(
            "the update of each client is asked for, under protection or of nobody by name",
            expected="clients by name, and no [privacy]",
            got="protection" if order.protection is not None else "an order for all clients",
            fix="set strategy.name = 'reptile', which needs the sum alone",
        )
    _refuse_compression(node, "the update of each client is asked for, uncompressed")
    work = _RoundOfClients.of(node, arrays, order)
    tables = node.model.item_tables if work.given is None else work.given.rows
    total = EachUpdate(work.step.private_names(list(work.parameters)), tables)
    work.add_to(total)
    return total.reply()


@dataclass(frozen=True, eq=False)
class _RoundOfClients:
    """The work of a node's clients in a round.

    Attributes:
        node: the node.
        step: what they do.
        arrays: what the server sent.
        parameters: the global ones; if the server generated parameters for each client, only those
            that the clients keep, of a new model.
        clients: `int64 [clients]`.
        round: the round.
        given: the generated parameters; None: without.
    """

    node: Node
    step: Step
    arrays: Mapping[str, np.ndarray]
    parameters: dict[str, Tensor]
    clients: np.ndarray
    round: int
    given: ClientArrays | None

    @classmethod
    def of(cls, node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> Self:
        """The work of an order.

        Raises:
            ExperimentError: model or step need other parameters.
        """
        step = node.step(_section(node, order)).in_round(order.round)
        generated = step.generated and order.each
        if generated != step.generated or (node.model.generated and not generated):
            raise _needs_generated(node, step)
        given = None
        asked = node.training if order.clients is None else np.sort(order.clients)
        if generated:
            node.refuse_generated()
            given = ClientArrays.read(arrays)
            fresh = node.fresh if step.keeps else {}
            start = {name: fresh[name].to(node.device) for name in step.private_names(list(fresh))}
            asked = given.requests.clients
        else:
            refuse_unmatched(step, list(arrays))
            start = to_device(arrays, node.device)
        clients = permitted(node.uploads, step, asked, order.round)
        return cls(node, step, arrays, start, clients, order.round, given)

    def add_to(self, total: Collector, hides_failures: bool = False) -> None:
        """Train the clients and collect their updates; their private parameters are saved.

        Args:
            total: takes the updates.
            hides_failures: whether a client whose training fails or diverges counts like one
                without rows. Clients are then trained alone, so that none is trained again to find
                which one failed: the duration would reveal that one did.
        """
        kept: dict[int, dict[str, Change]] = {}
        for worker, part in self.node.workers(self.step, self.clients, self.round):
            blocks = self._alone(worker, part) if hides_failures else self._blocks(worker, part)
            for members, shared, own in blocks:
                total.add_block(members, shared)
                kept |= own
                del shared  # before the next block is built
        for client, left in total.errors.items():
            kept[client] = {**kept.get(client, {}), **left}
        keep_private(self.node, kept, self.round)

    def _blocks(self, step: Step, clients: np.ndarray) -> Iterator[_Block]:
        private = step.private_names(list(self.parameters))
        trained_blocks = train_in_blocks(
            self.node,
            step,
            self.node.path(step),
            self.parameters,
            clients,
            "client",
            self.round,
            given=self.given,
        )
        for places, trained in trained_blocks:
            yield _parted(clients[places].tolist(), trained, private, bool(step.replaced))
            del trained

    def _alone(self, step: Step, clients: np.ndarray) -> Iterator[_Block]:
        for client in clients.tolist():
            try:
                (block,) = self._blocks(step, np.array([client], dtype=np.int64))
                if not bool(block[1].norms().isfinite().all()):
                    raise ClientError(
                        f"client {client} diverged",
                        expected="a finite update",
                        got="infinities or NaN",
                        fix="lower the learning rate of the step",
                    )
            except Exception as error:
                message = "round %d: client %d failed and counts like one without rows"
                log.error(message, self.round, client, exc_info=error)
                block = [client], self._without_rows(step, client), {}
            yield block

    def _without_rows(self, step: Step, client: int) -> Outcome:
        """The block of a client without rows: zero, and the noise that its step adds."""
        if not isinstance(step.config, PersonalNoise):
            return Updates(self.parameters, Block.without_batches([0]), {}, [math.nan])
        data = self.node.population.client(client).without_rows()
        drawn = stream(self.node.experiment.seed, "client", client, self.round)
        block = step.block([data.features], [step.batches(data, drawn)], self.node.device)
        private = step.private_names(list(self.parameters))
        return step.train_block(self.parameters, block).kept(private)[0]


def _refuse_compression(node: Node, why: str) -> None:
    """Refuse compression where nothing would be compressed.

    Raises:
        ExperimentError: the experiment has some.
    """
    if node.experiment.compression is not None:
        raise ExperimentError(
            f"[compression] has no effect here: {why}",
            expected="a strategy that sums the updates of clients, which add no noise of their own",
            got=f"compression {node.experiment.compression.name!r}",
            fix="leave out [compression], or choose another strategy or step",
        )


_Block = tuple[list[int], Outcome, dict[int, dict[str, Change]]]
"""The clients of a block, what they send, and what each of them keeps; a `SparseUpdate` is a table
of which all other rows are zero."""


def _parted(members: list[int], trained: Outcome, private: Sequence[str], replaces: bool) -> _Block:
    """What a block sends, and what its clients keep; nothing new for those without examples if the
    step `replaces` parameters."""
    shared, values = trained.kept(private)
    moved = {
        name: value.cpu().numpy() if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
    own = {
        client: {name: value[place] for name, value in moved.items()}
        for place, client in enumerate(members if moved else [])
        if not replaces or trained.block.examples[place]
    }
    return members, shared, own


def _needs_generated(node: Node, step: Step) -> ExperimentError:
    return ExperimentError(
        "model or step need parameters that the server generates for each client",
        expected="model, step and strategy all by one name: metamf, gpfedrec or fedgnn",
        got=(
            f"model {type(node.model).__name__!r}, step {type(step).__name__!r} and shared"
            " parameters"
        ),
        fix="set strategy.name to that of the step, or another model and step",
    )


def only_reads(node: Node, order: TrainOrder) -> bool:
    """Whether the received parameters are guaranteed to stay unchanged: a plain sum by a built-in
    step and model."""
    if order.clients is None or order.each or order.secure is not None:
        return False
    return ours(STEP, resolve(STEP, _section(node, order).name)) and ours(MODEL, type(node.model))


def _section(node: Node, order: TrainOrder) -> Section:
    own = node.experiment.step
    table = order.step if order.step is not None else {"name": own.name, **own.options}
    return Section.model_validate({**table, **(order.overrides or {})})
