# SPDX-License-Identifier: Apache-2.0
"""A node's work for clients whose parameters the server generates: item requests and gradients.

Parameters and gradients of all clients of a message are stacked arrays. Gradients are not summed,
because the server's generator needs each client's. Private parameters of clients are not among
them: they start with the values of a new model and stay on the node.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from clients.hosting.node import Node
from clients.step import GeneratedStep, Step
from clients.training.keeping import keep_private
from clients.training.one_client import private_parameters, run_step, to_device
from fedrec.cohort.batches import Batches
from fedrec.errors import ClientError, ExperimentError, FedrecError
from fedrec.experiment.sections import Section
from fedrec.metrics.rating import rating_errors_by_user
from fedrec.protocol.generated import Generated, ItemRequests
from fedrec.protocol.orders import HeldOutPart, ItemQuery, TrainEach, TrainOrder
from fedrec.rng import stream


def requested_items(node: Node, order: ItemQuery) -> ItemRequests:
    """The items that clients need in a round, or those of their held-out rows."""
    clients = np.sort(order.clients)
    if order.purpose != "train":
        validates = order.purpose == "validate"
        part = "validation" if validates else node.experiment.evaluation.held_out
        lists = [
            np.unique(node.population.held_out_ratings(client, part)[0])
            for client in clients.tolist()
        ]
        return ItemRequests.of(clients, lists)
    step = _generated_step(node.step(Section.model_validate(order.step)))
    return ItemRequests.of(
        clients, [_touched(batches) for batches in _batches(node, step, clients, order.round)]
    )


def train_each(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> TrainEach:
    """Gradients of each client of an order with respect to the parameters that were generated for
    it.

    Raises:
        ClientError: training a client failed, or the parameters do not match its data.
        ExperimentError: the step does not support generated parameters.
    """
    step = _generated_step(node.step(Section.model_validate(order.step)).in_round(order.round))
    given = Generated.read(arrays)
    if node.path(step).name == "reference":
        return _one_by_one(node, step, given, order.round)
    return _in_blocks(node, step, given, order.round)


def generated_errors(node: Node, given: Generated, part: HeldOutPart) -> pd.DataFrame:
    """Errors of each client's predictions for its held-out rows, `mae`, `rmse` and number of
    `rows`."""
    clients = given.requests.clients
    held_out = [node.population.held_out_ratings(client, part) for client in clients.tolist()]
    counts = np.array([len(items) for items, _ in held_out], dtype=np.int64)
    real = np.arange(counts.max(initial=1)) < counts[:, None]
    rows = np.zeros(real.shape, dtype=np.int64)
    own = np.split(given.requests.items, given.requests.offsets[1:-1])
    rows[real] = np.concatenate(
        [np.searchsorted(own[place], items) for place, (items, _) in enumerate(held_out)]
    )
    width = int(np.diff(given.requests.offsets).max(initial=1))
    places = torch.from_numpy(rows).to(node.device)
    with torch.no_grad():
        predicted = node.model.predict(
            to_device(given.padded(width), node.device), (), places, rows=places
        )
    users = np.repeat(np.arange(len(clients)), counts)
    actual = np.concatenate([ratings for _, ratings in held_out])
    errors = rating_errors_by_user(predicted.cpu().numpy()[real], actual, users, len(clients))
    return pd.DataFrame({**errors, "rows": counts}, index=pd.Index(clients, name="client"))


def _in_blocks(node: Node, step: GeneratedStep, given: Generated, round_: int) -> TrainEach:
    clients = given.requests.clients
    gradients = _empty(step, given)
    private = _fresh_private(node, step)
    kept = dict[int, dict[str, np.ndarray]]()
    examples = np.zeros(len(clients), dtype=np.int64)
    losses = np.full(len(clients), np.nan)
    batches = _batches(node, step, clients, round_)
    sizes = {
        name: torch.from_numpy(value[:1]) for name, value in (given.values | given.rows).items()
    } | private
    for places in node.blocks(batches, sizes, list(given.rows)):
        own = given.take(np.array(places))
        block = step.block([() for _ in places], [batches[place] for place in places], node.device)
        width = block.touched.shape[1]
        real = own.real(width)
        if not np.array_equal(block.touched.cpu().numpy()[real], own.requests.items):
            raise _mismatch(own.requests.clients, round_)
        start = private_parameters(node, step, private, own.requests.clients, round_)
        try:
            with node.products():
                parameters = to_device(own.padded(width), node.device) | start
                found, measured = step.gradients(parameters, block)
        except Exception as error:
            raise _blame(node, step, own, round_) from error
        examples[places] = block.examples
        losses[places] = measured.cpu().numpy()
        rows = given.requests.rows_of(np.array(places))
        for name in gradients.values:
            gradients.values[name][places] = found[name].cpu().numpy()
        for name in gradients.rows:
            gradients.rows[name][rows] = found[name].cpu().numpy()[real]
        moved = {name: (value - found[name]).cpu().numpy() for name, value in start.items()}
        for place, client in enumerate(own.requests.clients.tolist() if moved else []):
            kept[client] = {name: value[place] for name, value in moved.items()}
    keep_private(node, kept, round_)
    return TrainEach(gradients, examples, losses)


def _one_by_one(node: Node, step: GeneratedStep, given: Generated, round_: int) -> TrainEach:
    """The reference: one client after the other, with its whole item tables."""
    gradients = _empty(step, given)
    examples = []
    losses = []
    private = _fresh_private(node, step)
    kept = dict[int, dict[str, np.ndarray]]()
    for place, client in enumerate(given.requests.clients.tolist()):
        rows = given.requests.rows_of(np.array([place]))
        items = given.requests.items[rows]
        own = private_parameters(node, step, private, np.array([client]), round_)
        start = _whole(node, given.take(np.array([place]))) | {n: v[0] for n, v in own.items()}
        update = run_step(step, start, node, client, "client", round_)
        for name in gradients.values:
            gradients.values[name][place] = -update.delta[name].cpu().numpy()
        for name in gradients.rows:
            gradients.rows[name][rows] = -update.delta[name].cpu().numpy()[items]
        if own:
            kept[client] = {n: (start[n] + update.delta[n]).cpu().numpy() for n in own}
        examples.append(update.examples)
        losses.append(update.loss)
    keep_private(node, kept, round_)
    return TrainEach(
        gradients, np.array(examples, dtype=np.int64), np.array(losses, dtype=np.float64)
    )


def _whole(node: Node, own: Generated) -> dict[str, Tensor]:
    """One client's parameters, tables at full size; rows that it did not ask for are zero."""
    found = {name: value[0] for name, value in own.values.items()}
    for name, value in own.rows.items():
        found[name] = np.zeros((node.model.schema.num_items, *value.shape[1:]), dtype=value.dtype)
        found[name][own.requests.items] = value
    return to_device(found, node.device)


def _batches(node: Node, step: GeneratedStep, clients: np.ndarray, round_: int) -> list[Batches]:
    """Each client's examples, the same in both messages of a round."""
    found = []
    for client in clients.tolist():
        data = node.population.client(client)
        try:
            found.append(step.batches(data, stream(node.experiment.seed, "client", client, round_)))
        except FedrecError as error:
            raise error.about(f"client {client}") from error
    return found


def _touched(batches: Batches) -> np.ndarray:
    references, named = batches.references()
    return np.unique(references[named])


def _fresh_private(node: Node, step: GeneratedStep) -> dict[str, Tensor]:
    """Private parameters of a client that was never in a round: those of a new model."""
    if not step.keeps:
        return {}
    fresh = node.fresh
    return {name: fresh[name].to(node.device) for name in step.private_names(list(fresh))}


def _empty(step: GeneratedStep, given: Generated) -> Generated:
    """Arrays for the gradients that are sent."""
    sent = step.sent([*given.values, *given.rows])
    return Generated(
        given.requests,
        {name: np.zeros_like(value) for name, value in given.values.items() if name in sent},
        {name: np.zeros_like(value) for name, value in given.rows.items() if name in sent},
    )


def _generated_step(step: Step) -> GeneratedStep:
    if isinstance(step, GeneratedStep):
        return step
    raise ExperimentError(
        f"step {type(step).__name__!r} cannot start from generated parameters",
        expected="a step by the name of the strategy: metamf, gpfedrec or fedgnn",
        got=type(step).__name__,
        fix="set step.name to strategy.name, or choose another strategy",
    )


def _mismatch(clients: np.ndarray, round_: int) -> ClientError:
    return ClientError(
        f"the parameters of round {round_} are not those that the clients need",
        expected="the rows of the items that they named",
        got=f"other rows, for some of the clients {', '.join(map(str, clients.tolist()))}",
        fix="request the round's items from the nodes before generating parameters",
    )


def _blame(node: Node, step: GeneratedStep, own: Generated, round_: int) -> FedrecError:
    """The error of the client that makes a block fail, found by training the clients one by one."""
    try:
        _one_by_one(node, step, own, round_)
    except FedrecError as error:
        return error
    return ClientError(
        f"step {type(step).__name__!r} failed for a block of clients, but for none of them alone"
        f" (round {round_})",
        expected=f"gradients of clients {', '.join(map(str, own.requests.clients.tolist()))}",
        got="an error in the block",
        fix="--set engine.path=reference trains one client after the other",
    )
