# SPDX-License-Identifier: Apache-2.0
"""A training round on one node: train the clients of the order and add their updates.

Sums are taken in float64 and in an order that is a function of the clients' data, so that they
depend neither on the order of messages nor, up to the last float32 digit, on how many nodes share
the work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

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
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.protocol.orders import TrainOrder, TrainSum

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
    empty = partial(
        UpdateSum,
        arrays,
        node.model.item_tables,
        order.weighting,
        order.protection,
        node.noise,
        order.round,
        node.device,
    )
    untouched = watch_plug_in(step, arrays)
    try:
        reply = _sum(node, step, parameters, clients, order, empty())
    except Exception as error:
        masked = order.protection is not None or order.secure is not None
        # without its step's noise, a zero would be told from an upload
        if not (node.hides_failures and masked) or isinstance(step.config, PersonalNoise):
            raise
        log.error("round %d: a client failed and counts as zero", order.round, exc_info=error)
        total = empty()
        for worker, part in step.assign(clients):
            for client in part.tolist():
                total.add(client, _train_or_zero(node, worker, parameters, client, order.round))
        reply = total.sum()
    untouched.refuse("step", step, f"in round {order.round}")
    return reply


def _sum(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    order: TrainOrder,
    total: UpdateSum,
) -> TrainSum:
    for worker, part in step.assign(clients):
        path = node.path(worker)
        if isinstance(worker, CohortStep) and path.name != "reference":
            kept: dict[int, dict[str, np.ndarray]] = {}
            for places, trained in train_in_blocks(
                node, worker, path, parameters, part, "client", order.round
            ):
                members = part[places].tolist()
                total.add_block(members, _without_private(worker, trained, members, kept))
            keep_private(node, kept, order.round)
        else:
            for client in part.tolist():
                total.add(client, _train(node, worker, parameters, client, order.round))
    reply = total.sum()
    if order.protection is None:
        refuse_non_finite(step, reply, clients.tolist(), order.round)
    return reply


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
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int
) -> Update:
    private = step.private_names(list(parameters))
    start = personal_parameters(node, step, parameters, client, round_)
    update = run_step(step, start, node, client, "client", round_)
    if not private:
        return update
    kept = {name: (start[name] + update.delta[name]).cpu().numpy() for name in private}
    keep_private(node, {client: kept}, round_)
    sent = {name: torch.zeros_like(d) if name in kept else d for name, d in update.delta.items()}
    return Update(sent, update.examples, update.loss)


def _train_or_zero(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int
) -> Update:
    """A client's update; zero where its training fails or diverges."""
    try:
        update = _train(node, step, parameters, client, round_)
    except Exception:
        update = None
    if update is not None and all(bool(v.isfinite().all()) for v in update.delta.values()):
        return update
    return Update({n: torch.zeros_like(v) for n, v in parameters.items()}, 0, math.nan)


def _section(node: Node, order: TrainOrder) -> Section:
    own = node.experiment.step
    table = order.step if order.step is not None else {"name": own.name, **own.options}
    return Section.model_validate({**table, **(order.overrides or {})})
