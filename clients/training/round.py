# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients of the order and add their updates.

Sums are taken in float64 and in an order that is a function of the clients' data, so that they
depend neither on the order of messages nor, up to the last float32 digit, on how many nodes share
the work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from clients.hosting.node import Node
from clients.hosting.step_checks import refuse_non_finite, refuse_unmatched, watch_plug_in
from clients.step import CohortStep, GeneratedStep, Step, Update
from clients.storage.uploads import permitted
from clients.training.blocks import train_in_blocks
from clients.training.keeping import keep_private
from clients.training.one_client import personal_parameters, run_step, to_device
from clients.training.update_sum import UpdateSum
from fedrec.cohort.outcome import Outcome
from fedrec.cohort.results import Trained
from fedrec.components.registry import MODEL, STEP, ours, resolve
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.sections import Section
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.protocol.orders import TrainOrder, TrainSum
from fedrec.rng import stream

log = logging.getLogger("fedrec")


def train_clients(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainSum:
    """Train the clients of an order and add up their weighted, or protected, updates.

    Raises:
        ClientError: a client's work failed or diverged; names the client, the step and its data.
        ComponentError: the step violated its contract.
    """
    step = node.step(_section(node, order)).in_round(order.round)
    if node.model.generated or isinstance(step, GeneratedStep):
        raise ExperimentError(
            "model or step need parameters that the server generates for each client",
            expected="model, step and strategy all by one name: metamf, gpfedrec or fedgnn",
            got=(
                f"model {type(node.model).__name__!r}, step {type(step).__name__!r} and shared"
                " parameters"
            ),
            fix="set strategy.name to that of the step, or another model and step",
        )
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


def _add_all(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    total: UpdateSum,
) -> None:
    """Train the clients and add their updates."""
    kept: dict[int, dict[str, np.ndarray]] = {}
    for worker, part in step.assign(clients):
        for members, found in _trained(node, worker, parameters, part, round_, kept):
            total.take(members, found)
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
                _refuse_diverged(found, client)
            except Exception as error:
                message = "round %d: client %d failed and counts like one without rows"
                log.error(message, round_, client, exc_info=error)
                found = _without_rows(node, worker, parameters, client, round_)
                own = {}
            total.take([client], found)
            kept |= own
    keep_private(node, kept, round_)


def _trained(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    kept: dict[int, dict[str, np.ndarray]],
) -> Iterator[tuple[list[int], Outcome | Update]]:
    """Clients and what they send, in blocks or one after the other; their private parameters are
    added to `kept`."""
    path = node.path(step)
    if isinstance(step, CohortStep) and path.name != "reference":
        for places, trained in train_in_blocks(
            node, step, path, parameters, clients, "client", round_
        ):
            members = clients[places].tolist()
            yield members, _without_private(step, trained, members, kept)
        return
    for client in clients.tolist():
        yield [client], _train(node, step, parameters, client, round_, kept)


def only_reads(node: Node, order: TrainOrder) -> bool:
    """Whether the received parameters are guaranteed to stay unchanged: a plain sum by a built-in
    step and model."""
    if order.clients is None or order.each or order.secure is not None:
        return False
    return ours(STEP, resolve(STEP, _section(node, order).name)) and ours(MODEL, type(node.model))


def _without_private(
    step: Step, trained: Outcome, clients: list[int], kept: dict[int, dict[str, np.ndarray]]
) -> Outcome:
    """A block without the private parameters of its clients, which are collected for the private
    state."""
    private = step.private_names(list(trained.start))
    if not private or not isinstance(trained, Trained):  # other outcomes have no private parameters
        return trained
    moved = {name: trained.values[name].cpu().numpy() for name in private if name in trained.values}
    kept |= {
        client: {name: value[place] for name, value in moved.items()}
        for place, client in enumerate(clients)
    }
    return replace(
        trained, values={name: v for name, v in trained.values.items() if name not in private}
    )


def _train(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    client: int,
    round_: int,
    kept: dict[int, dict[str, np.ndarray]],
) -> Update:
    private = step.private_names(list(parameters))
    start = personal_parameters(node, step, parameters, client, round_)
    update = run_step(step, start, node, client, "client", round_)
    if not private:
        return update
    kept[client] = {n: (start[n] + update.delta[n]).cpu().numpy() for n in private}
    sent = {name: torch.zeros_like(d) if name in private else d for name, d in update.delta.items()}
    return Update(sent, update.examples, update.loss)


def _refuse_diverged(found: Outcome | Update, client: int) -> None:
    """Refuse a client's result with NaN or infinity.

    Raises:
        ClientError: it has some.
    """
    if isinstance(found, Update):
        finite = all(bool(value.isfinite().all()) for value in found.delta.values())
    else:
        finite = bool(found.norms().isfinite().all())
    if not finite:
        raise ClientError(f"client {client} diverged", expected="a finite update")


def _without_rows(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int
) -> Update:
    """The update of a client without rows: zero, and the noise that its step adds."""
    zeros = {name: torch.zeros_like(value) for name, value in parameters.items()}
    if not isinstance(step.config, PersonalNoise):
        return Update(zeros, 0, math.nan)
    data = node.population.client(client).without_rows()
    return step.update(parameters, data, stream(node.experiment.seed, "client", client, round_))


def _section(node: Node, order: TrainOrder) -> Section:
    own = node.experiment.step
    table = order.step if order.step is not None else {"name": own.name, **own.options}
    return Section.model_validate({**table, **(order.overrides or {})})
