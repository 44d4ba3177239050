# SPDX-License-Identifier: Apache-2.0
"""A training round on one node, from the order to the sums or the single updates of its clients.

Sums are taken in float64 and in an order that is a function of the clients' data, so that they
depend neither on the order of messages nor, up to the last float32 digit, on how many nodes share
the work.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from clients.blocks import to_device, train_in_blocks
from clients.node import Node, check_private_patterns
from clients.participation import permitted
from clients.step import Step, private_names, replaced_names
from clients.storage import Arrays
from clients.sums import CompressedUpdates, UpdateSum
from fedrec.components.registry import MODEL, STEP, ours, resolve
from fedrec.components.sections import Section, finite, named
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.phases import rounds_before_last_phase, step_table, symmetric_of
from fedrec.models.base import is_generated
from fedrec.privacy.personal import PersonalNoise
from fedrec.protocol.messages import TrainEach, TrainOrder, TrainSum
from fedrec.protocol.updates import ClientArrays, SparseUpdate
from fedrec.rng import stream
from fedrec.training.block import Block
from fedrec.training.results import BlockUpdate

log = logging.getLogger("fedrec")


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted, or protected, updates.

    Raises:
        ClientError: a client's work failed or diverged; names the client, the step and its data.
        ComponentError: the step violated its contract.
        ExperimentError: the step needs parameters that the server generates for each client.
    """
    work = _work(node, arrays, order)
    adds_noise = isinstance(work.step.config, PersonalNoise)
    if adds_noise:
        _check_uncompressed(node, "clients' own noise is on every number")
    compressed = CompressedUpdates.of(node.experiment, order.round, node.private, work.private)
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
    # Clients are then trained alone, so that none is trained again to find which one failed: the
    # duration would reveal that one did.
    hides_failures = node.real and (covered or adds_noise)
    private: list[tuple[list[int], Arrays]] = []
    for block in _trained(node, work, alone=hides_failures):
        total.add_block(block.clients, block.update)
        private.append(block.private)
        del block  # before the next one is built
    if total.errors:
        private = _with_errors(private, total.errors)
    _save_private(node, private, order.round)
    reply = total.sum()
    if order.protection is None and not hides_failures:
        _check_finite_sum(work.step, reply, work.clients.tolist(), order.round)
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
            "the update of each client was requested, but the order is protected or names no"
            " clients",
            expected="clients by name, and no [privacy]",
            got="protection" if order.protection is not None else "an order for all clients",
            fix="set strategy.name = 'reptile', which needs the sum alone",
        )
    _check_uncompressed(node, "the update of each client is sent uncompressed")
    work = _work(node, arrays, order)
    tables = node.model.item_tables if work.given is None else work.given.rows
    answers: list[TrainEach] = []
    private: list[tuple[list[int], Arrays]] = []
    for block in _trained(node, work):
        update = block.update
        names = [name for name in update.names if name not in work.private]
        updates = update.each(block.clients, names, [name for name in names if name in tables])
        examples = np.array(update.block.examples, dtype=np.int64)
        answers.append(TrainEach(updates, examples, np.array(update.losses(), dtype=np.float64)))
        private.append(block.private)
        del block, update
    _save_private(node, private, order.round)
    return TrainEach.joined(answers)


class _Work(NamedTuple):
    """The work of a node's clients in a round.

    Attributes:
        step: what they do.
        parameters: the global ones; if the server generated parameters for each client, only those
            that the clients keep, of a new model.
        private: names of the parameters that stay with the clients.
        clients: `int64 [clients]`.
        round: the round.
        given: the generated parameters; None: without.
    """

    step: Step
    parameters: dict[str, Tensor]
    private: list[str]
    clients: np.ndarray
    round: int
    given: ClientArrays | None


class _Block(NamedTuple):
    """A trained block.

    Attributes:
        clients: `[C]`.
        update: what they send.
        private: those of them that save private parameters, and these.
    """

    clients: list[int]
    update: BlockUpdate
    private: tuple[list[int], Arrays]


def _work(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> _Work:
    """The work of an order.

    Raises:
        ExperimentError: model or step need other parameters.
    """
    step = node.step(_section(node, order), order.round)
    generated = step.generated and order.each
    if generated != step.generated or (not generated and is_generated(node.model, arrays)):
        raise ExperimentError(
            "model or step need parameters that the server generates for each client",
            expected="model, step and strategy all by one name: metamf, gpfedrec or fedgnn",
            got=f"model {type(node.model).__name__!r}, step {type(step).__name__!r} and shared"
            " parameters",
            fix="set strategy.name to that of the step, or another model and step",
        )
    if generated:
        given = ClientArrays.read(arrays)
        fresh = node.fresh if step.private else {}
        start = {name: fresh[name].to(node.device) for name in private_names(step, fresh)}
        asked = given.requests.clients
    else:
        given = None
        check_private_patterns(step, list(arrays))
        start = to_device(arrays, node.device)
        asked = node.training if order.clients is None else np.sort(order.clients)
    clients = permitted(node.uploads, step, asked, order.round)
    return _Work(step, start, private_names(step, start), clients, order.round, given)


def _trained(node: Node, work: _Work, *, alone: bool = False) -> Iterator[_Block]:
    """Train the clients; with `alone`, one that fails or diverges counts like one without rows."""
    for step, clients in node.workers(work.step, work.clients, work.round):
        if not alone:
            yield from _blocks(node, work, step, clients)
            continue
        for client in clients.tolist():
            try:
                (block,) = _blocks(node, work, step, np.array([client], dtype=np.int64))
                if not bool(block.update.norms().isfinite().all()):
                    raise ClientError(
                        f"client {client} diverged",
                        expected="a finite update",
                        fix="lower the learning rate of the step",
                    )
            except Exception as error:
                message = "round %d: client %d failed and counts like one without rows"
                log.error(message, work.round, client, exc_info=error)
                block = _Block([client], _without_rows(node, work, step, client), ([], {}))
            yield block


def _blocks(node: Node, work: _Work, step: Step, clients: np.ndarray) -> Iterator[_Block]:
    names = private_names(step, work.parameters)
    replaced = replaced_names(step, names)
    order = work.parameters, clients, "client", work.round
    blocks = train_in_blocks(node, step, node.path(step), *order, given=work.given)
    for indices, trained in blocks:
        members = clients[indices].tolist()
        update, values = trained.kept(names)
        saved: Arrays = {
            name: value.numpy(force=True) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        savers = members
        if replaced:  # what was not loaded is not saved again
            with_rows = np.flatnonzero(trained.block.examples).tolist()
            savers = [members[i] for i in with_rows]
            saved = {
                name: value[with_rows]
                if isinstance(value, np.ndarray)
                else [value[i] for i in with_rows]
                for name, value in saved.items()
            }
        yield _Block(members, update, (savers, saved))
        del trained, update


def _without_rows(node: Node, work: _Work, step: Step, client: int) -> BlockUpdate:
    """The block of a client without rows: zero, and the noise that its step adds."""
    if not isinstance(step.config, PersonalNoise):
        return BlockUpdate(work.parameters, Block.without_batches([0]), {}, [math.nan])
    data = node.population.client(client).without_rows()
    drawn = stream(node.experiment.seed, "client", client, work.round)
    block = step.block([data.features], [step.batches(data, drawn)], node.device)
    return step.train_block(work.parameters, block).kept(work.private)[0]


def _with_errors(
    private: Iterable[tuple[list[int], Arrays]], errors: Mapping[int, Arrays]
) -> list[tuple[list[int], Arrays]]:
    """The private parameters of each client, and what a compression left out of its update."""
    by_client: dict[int, Arrays] = {
        client: {name: value[index : index + 1] for name, value in values.items()}
        for clients, values in private
        for index, client in enumerate(clients)
    }
    for client, left_out in errors.items():
        by_client[client] = {**by_client.get(client, {}), **left_out}
    return [([client], values) for client, values in by_client.items()]


def _check_uncompressed(node: Node, why: str) -> None:
    """Check that the experiment has no compression where nothing would be compressed.

    Raises:
        ExperimentError: it has some.
    """
    if node.experiment.compression is not None:
        raise ExperimentError(
            f"[compression] has no effect here: {why}",
            expected="a strategy that sums the updates of clients, which add no noise of their own",
            got=f"compression {node.experiment.compression.name!r}",
            fix="leave out [compression], or choose another strategy or step",
        )


def _save_private(node: Node, private: Iterable[tuple[list[int], Arrays]], round_: int) -> None:
    """Save the private parameters of some clients after a round; nothing if there are none.

    A resumed run may start from any checkpoint that is kept, and needs the private state of that
    round. With early stopping the run ends with the parameters of an earlier round.

    Raises:
        ClientError: the node has no private state.
    """
    private = [(clients, values) for clients, values in private if clients and values]
    if not private:
        return
    if node.private is None:
        raise ClientError(
            "private parameters cannot be saved",
            expected="a run folder, for the private state of the clients",
            got=f"private parameters {list(private[0][1])}",
            fix="give the run an output folder",
        )
    experiment = node.experiment
    stopping = experiment.early_stopping
    rounds = experiment.checkpoint.every * experiment.checkpoint.keep + 2
    if stopping is not None:
        rounds += rounds_before_last_phase(experiment)
        rounds += stopping.patience + 1
    node.private.save_all(private, round_, keep=rounds)


def only_reads(node: Node, order: TrainOrder) -> bool:
    """True if the received parameters are guaranteed to stay unchanged: a plain sum by a built-in
    step and model."""
    if order.clients is None or order.each or order.secure is not None:
        return False
    return ours(STEP, resolve(STEP, _section(node, order).name)) and ours(MODEL, type(node.model))


def _section(node: Node, order: TrainOrder) -> Section:
    table = order.step if order.step is not None else step_table(node.experiment.step)
    return Section.model_validate({**table, **(order.overrides or {})})


def _check_finite_sum(step: Step, reply: TrainSum, clients: Sequence[int], round_: int) -> None:
    """Check that no sum has NaN or infinity.

    Raises:
        ClientError: one has; names the step, its file and the clients.
    """
    for name, change in reply.total.items():
        values = change.values if isinstance(change, SparseUpdate) else change
        if not finite(values):
            whose = (
                f"client {clients[0]}" if len(clients) == 1 else f"some of {len(clients)} clients"
            )
            raise ClientError(
                f"training diverged in round {round_}",
                expected="finite updates",
                got=f"NaN or infinity in {name!r} from {named('step', step)}, {whose}",
                fix="lower step.learning-rate or strategy.server-lr, or fix that file; "
                "the previous checkpoint is intact",
            )
