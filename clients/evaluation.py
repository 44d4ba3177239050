# SPDX-License-Identifier: Apache-2.0
"""Evaluation on one node: fine-tune on each client's known rows, then test on its held-out rows
(PrivRec section 3.3).

The reply is one row per client: its metrics, and one 0/1 column `group:NAME` for each group with a
member, so that the server can average over groups without seeing features. Metrics are not private;
they are for simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from clients.generated import generated_errors
from clients.hosting.node import Node
from clients.step import Step
from clients.training.blocks import train_in_blocks
from clients.training.one_client import to_device
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.rating import rating_errors
from fedrec.metrics.reconstruction import reconstruction_metrics
from fedrec.metrics.sampled import sampled_metrics
from fedrec.models.base import HistoryModel
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.messages import GROUP
from fedrec.protocol.orders import EvaluateOrder, HeldOutPart

_CELLS_PER_BLOCK = (
    1_000_000  # users times items whose masks and scores are in memory at a time, about 20 MiB
)
_SCORED_AT_ONCE = (
    20_000  # users times items per forward pass, so that the activations stay in cache
)


def evaluate_clients(
    node: Node, arrays: Mapping[str, np.ndarray], order: EvaluateOrder
) -> pd.DataFrame:
    """Metrics of the clients of an order, one row each, indexed by client id, ascending.

    Raises:
        ClientError: fine-tuning a client failed.
        ExperimentError: the model's scores are not numbers.
    """
    clients = node.hosted(order.clients)
    table = (
        node.experiment.fine_tune_step()
        if order.step is None
        else Section.model_validate(order.step)
    )
    step = node.step(table)
    part = order.held_out or node.experiment.evaluation.held_out
    if order.each:
        metrics = _generated_table(node, step, ClientArrays.read(arrays), part)
    else:
        metrics = _table(node, step, to_device(arrays, node.device), clients, order.round, part)
    groups = node.groups(clients)
    members = pd.DataFrame(
        {f"{GROUP}{name}": member.astype(float) for name, member in groups.items()}, metrics.index
    )
    return pd.concat([metrics, members], axis=1)


def mean_metrics(table: pd.DataFrame) -> dict[str, float | int]:
    """Means over the clients and their number, in the form that Flower's strategies expect."""
    own = table[[column for column in table.columns if not column.startswith(GROUP)]]
    return {
        "num-examples": len(table),
        **{str(name): float(value) for name, value in own.mean().items()},
    }


def _table(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    held_out: HeldOutPart,
) -> pd.DataFrame:
    if node.experiment.task == "rating":
        return _rating_table(node, step, parameters, clients, round_, held_out)
    return _ranking_table(
        node, clients, lambda part: client_scores(node, step, parameters, part, round_), held_out
    )


def _generated_table(
    node: Node, step: Step, given: ClientArrays, held_out: HeldOutPart
) -> pd.DataFrame:
    """Metrics under parameters that were generated for each client, without training."""
    if step.config.epochs:
        raise ExperimentError(
            "generated parameters are not fine-tuned on the device",
            expected="epochs = 0 in evaluation.fine-tune",
            got=f"epochs = {step.config.epochs}",
            fix="--set evaluation.fine-tune={epochs=0}",
        )
    if node.experiment.task == "rating":
        return generated_errors(node, given, held_out)
    clients = given.requests.clients

    def scores(part: np.ndarray) -> Tensor:
        own = given.take(np.searchsorted(clients, part))
        with torch.no_grad():
            return node.model.scores(to_device(own.values, node.device), ())

    return _ranking_table(node, clients, scores, held_out)


def _ranking_table(
    node: Node,
    clients: np.ndarray,
    scores_of: Callable[[np.ndarray], Tensor],
    held_out_part: HeldOutPart,
) -> pd.DataFrame:
    settings = node.experiment.evaluation
    population = node.population
    block = max(1, _CELLS_PER_BLOCK // population.interactions.num_items)
    columns: list[pd.DataFrame] = []
    for start in range(0, len(clients), block):
        part = clients[start : start + block]
        scores = scores_of(part).cpu()
        if settings.protocol == "reconstruction":
            history = torch.from_numpy(population.whole_history(part))
            columns.append(_frame(reconstruction_metrics(scores, history, settings.ks), part))
            continue
        held_out = population.held_out(part, held_out_part)
        metrics = ranking_metrics(
            scores,
            seen=torch.from_numpy(held_out.seen),
            known=torch.from_numpy(held_out.known),
            relevant=torch.from_numpy(held_out.relevant),
            ks=settings.ks,
            weights=None if held_out.weight is None else torch.from_numpy(held_out.weight),
            masked=torch.from_numpy(held_out.masked(settings.masked)),
        )
        if settings.sampled_items is not None:
            metrics |= sampled_metrics(
                scores,
                seen=torch.from_numpy(held_out.seen),
                relevant=torch.from_numpy(held_out.relevant),
                ks=settings.ks,
                sampled=settings.sampled_items,
                weights=None if held_out.weight is None else torch.from_numpy(held_out.weight),
            )
        columns.append(_frame(metrics, part))
    return (
        pd.concat(columns).rename_axis("client")
        if columns
        else pd.DataFrame(index=pd.Index([], name="client"))
    )


def _frame(metrics: Mapping[str, Tensor], clients: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({name: value.numpy() for name, value in metrics.items()}, index=clients)


def client_scores(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, round_: int
) -> Tensor:
    """Scores of the catalogue for each client, `float32 [clients, items]`, with its own fine-tuned
    parameters."""
    if _all_alike(step, parameters):
        return _shared_scores(node, parameters, clients)
    scores = torch.empty(len(clients), node.model.schema.num_items)
    for place, users, own in _fine_tuned(node, step, parameters, clients, round_):
        with torch.no_grad():
            if isinstance(node.model, HistoryModel):
                scores[place] = _history_scores(node, node.model, own, clients[place : place + 1])[
                    0
                ]
            else:
                scores[place] = node.model.scores(own, users)[0]
    return scores


def _history_scores(
    node: Node, model: HistoryModel, parameters: Mapping[str, Tensor], clients: np.ndarray
) -> Tensor:
    """Scores `[clients, items]` under the parameters of one client, `[1, ...]` each."""
    known = node.population.histories(clients, model.rated, model.low_rated)
    histories = torch.from_numpy(known).to(node.device)
    return model.history_scores(parameters, histories.unsqueeze(0))[0]


@torch.no_grad()
def _shared_scores(node: Node, parameters: dict[str, Tensor], clients: np.ndarray) -> Tensor:
    """Scores under the shared parameters; clients with equal features are scored once."""
    if isinstance(node.model, HistoryModel):
        return _history_scores(node, node.model, _slices(parameters, 1), clients)
    codes = node.population.feature_codes(clients)
    if not codes:
        return node.model.scores(_slices(parameters, 1), ()).expand(len(clients), -1)
    widths = np.cumsum([table.shape[1] for table in codes])[:-1]
    distinct, place = np.unique(np.concatenate(codes, axis=1), axis=0, return_inverse=True)
    scores = []
    block = max(1, _SCORED_AT_ONCE // node.model.schema.num_items)
    for start in range(0, len(distinct), block):
        part = distinct[start : start + block]
        users = tuple(
            torch.from_numpy(table.copy()).to(node.device)
            for table in np.split(part, widths, axis=1)
        )
        scores.append(node.model.scores(_slices(parameters, len(part)), users))
    return torch.cat(scores)[torch.from_numpy(place.reshape(-1))]


def _fine_tuned(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, round_: int
) -> Iterator[tuple[int, tuple[Tensor, ...], dict[str, Tensor]]]:
    """Each client's place in `clients`, features `[1, width]`, and parameters after fine-tuning
    `[1, ...]`."""
    codes = [
        torch.from_numpy(table).to(node.device) for table in node.population.feature_codes(clients)
    ]
    for place, own in _tuned_parameters(node, step, parameters, clients, round_):
        yield place, tuple(table[place : place + 1] for table in codes), own


def _tuned_parameters(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, round_: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    for places, trained in train_in_blocks(
        node, step, node.path(step), parameters, clients, "fine-tune", round_, round_ + 1
    ):
        for member, place in enumerate(places):
            yield place, trained.parameters_of(member)


def _rating_table(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    round_: int,
    held_out: HeldOutPart,
) -> pd.DataFrame:
    rows: list[dict[str, float]] = [{} for _ in clients]
    if isinstance(node.model, HistoryModel):
        block = max(1, _CELLS_PER_BLOCK // node.population.interactions.num_items)
        for start in range(0, len(clients), block):
            part = clients[start : start + block]
            scores = client_scores(node, step, parameters, part, round_).cpu().numpy()
            for place, client in enumerate(part.tolist()):
                rows[start + place] = _rating_errors(node, client, scores[place], held_out)
        return pd.DataFrame(rows, index=pd.Index(clients, name="client"))
    for place, users, own in _fine_tuned(node, step, parameters, clients, round_):
        items, ratings = node.population.held_out_ratings(int(clients[place]), held_out)
        with torch.no_grad():
            predicted = node.model.predict(
                own, users, torch.from_numpy(items).to(node.device).unsqueeze(0)
            )
        rows[place] = {**rating_errors(predicted[0].cpu().numpy(), ratings), "rows": len(items)}
    return pd.DataFrame(rows, index=pd.Index(clients, name="client"))


def _rating_errors(
    node: Node, client: int, scores: np.ndarray, held_out: HeldOutPart
) -> dict[str, float]:
    """Errors of one client's held-out ratings, from predicted ratings of the whole catalogue."""
    items, ratings = node.population.held_out_ratings(client, held_out)
    return {**rating_errors(scores[items], ratings), "rows": len(items)}


def _all_alike(step: Step, parameters: dict[str, Tensor]) -> bool:
    """Whether all clients are evaluated with the same parameters: no fine-tuning, no private
    parameters."""
    return step.config.epochs == 0 and not step.private_names(list(parameters))


def _slices(parameters: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {
        name: value.unsqueeze(0).expand(count, *value.shape) for name, value in parameters.items()
    }
