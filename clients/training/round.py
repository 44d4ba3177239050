# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients of the order, and add their updates or keep them
apart.

Sums are taken in float64 and in an order that is a function of the clients' data, so that they
depend neither on the order of messages nor, up to the last float32 digit, on how many nodes share
the work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from clients.hosting.node import Node
from clients.hosting.step_checks import refuse_non_finite, refuse_unmatched, watch_plug_in
from clients.local.updates import Updates
from clients.step import Step
from clients.storage.uploads import permitted
from clients.training.blocks import train_in_blocks
from clients.training.each_update import EachUpdate
from clients.training.keeping import keep_private
from clients.training.one_client import to_device
from clients.training.update_sum import UpdateSum
from fedrec.cohort.block import Block
from fedrec.cohort.outcome import Outcome
from fedrec.components.registry import MODEL, STEP, ours, resolve
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.sections import Section
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import TrainEach, TrainOrder, TrainSum
from fedrec.rng import stream

log = logging.getLogger("fedrec")


class Collector(Protocol):
    """Takes the trained blocks of a round."""

    def add_block(self, clients: Sequence[int], trained: Outcome) -> None:
        """The updates of a whole block, without what stays with the clients."""
        ...


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted, or protected, updates.

    Raises:
        ClientError: a client's work failed or diverged; names the client, the step and its data.
        ComponentError: the step violated its contract.
        ExperimentError: the step needs parameters that the server generates for each client.
    """
    step = node.step(_section(node, order)).in_round(order.round)
    _refuse_generated(node, step, step.generated or node.model.generated)
    refuse_unmatched(step, list(arrays))
    parameters = to_device(arrays, node.device)
    asked = node.training if order.clients is None else np.sort(order.clients)
    clients = permitted(node.uploads, step, asked, order.round)
    total = UpdateSum(
        arrays,
        node.model.item_tables,
        order.weighting,
        order.protection,
        node.noise,
        order.round,
        node.device,
    )
    untouched = watch_plug_in(step, arrays)
    covered = order.protection is not None or order.secure is not None
    if node.hides_failures and (covered or isinstance(step.config, PersonalNoise)):
        _add_one_by_one(node, step, parameters, clients, order.round, total)
        reply = total.sum()
    else:
        _add_all(node, step, parameters, clients, order.round, total)
        reply = total.sum()
        if order.protection is None:
            refuse_non_finite(step, reply, clients.tolist(), order.round)
    untouched.refuse("step", step, f"in round {order.round}")
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
    step = node.step(_section(node, order)).in_round(order.round)
    _refuse_generated(node, step, node.model.generated and not step.generated)
    if not step.generated:
        refuse_unmatched(step, list(arrays))
        parameters = to_device(arrays, node.device)
        clients = permitted(node.uploads, step, np.sort(order.clients), order.round)
        private = step.private_names(list(arrays))
        total = EachUpdate(list(arrays), private, node.model.item_tables)
        untouched = watch_plug_in(step, arrays)
        _add_all(node, step, parameters, clients, order.round, total)
        reply = total.reply()
        untouched.refuse("step", step, f"in round {order.round}")
        return reply
    node.refuse_generated()
    given = ClientArrays.read(arrays)
    # private parameters of a client that was in no round yet are those of a new model
    names = step.private_names(list(node.fresh)) if step.keeps else []
    parameters = {name: node.fresh[name].to(node.device) for name in names}
    total = EachUpdate(None, names, given.rows)
    clients = given.requests.clients
    _add_all(node, step, parameters, clients, order.round, total, given)
    return total.reply()


def _add_all(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    total: Collector,
    given: ClientArrays | None = None,
) -> None:
    """Train the clients and collect their updates; their private parameters are saved."""
    kept: dict[int, dict[str, np.ndarray]] = {}
    for worker, part in step.assign(clients):
        for members, found in _trained(node, worker, parameters, part, round_, kept, given):
            total.add_block(members, found)
    keep_private(node, kept, round_)


def _add_one_by_one(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    total: UpdateSum,
) -> None:
    """The same; a client whose training fails or diverges counts like one without rows.

    Clients are trained alone, so that none is trained again to find which one failed: the duration
    would reveal that one did.
    """
    kept: dict[int, dict[str, np.ndarray]] = {}
    for worker, part in step.assign(clients):
        for client in part.tolist():
            alone = np.array([client], dtype=np.int64)
            own: dict[int, dict[str, np.ndarray]] = {}
            try:
                ((_, found),) = _trained(node, worker, parameters, alone, round_, own)
                if not bool(found.norms().isfinite().all()):
                    raise ClientError(
                        f"client {client} diverged",
                        expected="a finite update",
                        got="infinities or NaN",
                        fix="lower the learning rate of the step",
                    )
            except Exception as error:
                message = "round %d: client %d failed and counts like one without rows"
                log.error(message, round_, client, exc_info=error)
                found = _without_rows(node, worker, parameters, client, round_)
                own = {}
            total.add_block([client], found)
            kept |= own
    keep_private(node, kept, round_)


def _trained(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    kept: dict[int, dict[str, np.ndarray]],
    given: ClientArrays | None = None,
) -> Iterator[tuple[list[int], Outcome]]:
    """Clients and what they send, in blocks; their private parameters are added to `kept`."""
    private = step.private_names(list(parameters))
    for places, trained in train_in_blocks(
        node, step, node.path(step), parameters, clients, "client", round_, given=given
    ):
        members = clients[places].tolist()
        shared, values = trained.kept(private)
        moved = {name: value.cpu().numpy() for name, value in values.items()}
        for place, client in enumerate(members if moved else []):
            kept[client] = {name: value[place] for name, value in moved.items()}
        yield members, shared


def _without_rows(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int
) -> Outcome:
    """The block of a client without rows: zero, and the noise that its step adds."""
    if not isinstance(step.config, PersonalNoise):
        return Updates(parameters, Block.without_batches([0]), {}, [math.nan])
    data = node.population.client(client).without_rows()
    drawn = stream(node.experiment.seed, "client", client, round_)
    block = step.block([data.features], [step.batches(data, drawn)], node.device)
    return step.train_block(parameters, block).kept(step.private_names(list(parameters)))[0]


def _refuse_generated(node: Node, step: Step, refused: bool) -> None:
    """Refuse a model or step that gets other parameters than it needs."""
    if refused:
        raise ExperimentError(
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
