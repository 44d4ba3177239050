# SPDX-License-Identifier: Apache-2.0
"""A node's work for clients whose parameters the server generates, apart from training: the items
that they need, and the errors of their predictions."""

from __future__ import annotations

import numpy as np
import torch

from clients.node import Node
from clients.one_client import to_device
from clients.step import Step
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError, FedrecError
from fedrec.experiment.sections import Section
from fedrec.metrics.base import RatedBlock
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.orders import HeldOutPart, ItemQuery
from fedrec.rng import stream
from fedrec.runtime.ragged import distinct


def requested_items(node: Node, order: ItemQuery) -> ItemRequests:
    """The items that clients need in a round, or those of their held-out rows."""
    clients = np.sort(order.clients)
    if order.purpose != "train":
        validates = order.purpose == "validate"
        part = "validation" if validates else node.experiment.evaluation.held_out
        lists = [
            np.unique(node.population.rows(np.array([client]), part).items)
            for client in clients.tolist()
        ]
        return ItemRequests.of(clients, lists)
    step = node.step(Section.model_validate(order.step))
    if not step.generated:
        raise ExperimentError(
            f"step {type(step).__name__!r} cannot start from generated parameters",
            expected="a step by the name of the strategy: metamf, gpfedrec or fedgnn",
            fix="set step.name to strategy.name, or choose another strategy",
        )
    data = node.population.clients(clients)
    return ItemRequests.of(clients, [_touched(node, step, client, order.round) for client in data])


def generated_ratings(node: Node, given: ClientArrays, part: HeldOutPart) -> RatedBlock:
    """Each client's predictions for its held-out rows."""
    clients = given.requests.clients
    held_out = node.population.rows(clients, part)
    counts = np.diff(held_out.offsets)
    real = np.arange(counts.max(initial=1)) < counts[:, None]
    rows = np.zeros(real.shape, dtype=np.int64)
    requested, tested = (
        np.split(lists.items, lists.offsets[1:-1]) for lists in (given.requests, held_out)
    )
    rows[real] = np.concatenate(list(map(np.searchsorted, requested, tested)))
    width = int(np.diff(given.requests.offsets).max(initial=1))
    table_rows = torch.from_numpy(rows).to(node.device)
    with torch.no_grad():
        predicted = node.model.predict(
            to_device(given.padded(width), node.device), (), table_rows, rows=table_rows
        )
    predicted = predicted.cpu().numpy()[real]
    return RatedBlock(predicted, held_out.labels, held_out.owner, len(clients))


def _touched(node: Node, step: Step, data: ClientData, round_: int) -> np.ndarray:
    """The items of one client's batches, `int64 [items]`, ascending."""
    drawn = stream(node.experiment.seed, "client", data.client, round_)
    try:
        references, named = step.batches(data, drawn).references()
    except FedrecError as error:
        raise error.about(f"client {data.client}") from error
    return distinct(references[named])
