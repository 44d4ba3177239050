# SPDX-License-Identifier: Apache-2.0
"""Evaluation on one node: fine-tune on each client's known rows, then test on its held-out rows
(PrivRec section 3.3).

The reply is one row per client: its metrics, and one 0/1 column `group:NAME` for each group with a
member, so that the server can average over groups without seeing features; and, if the order asks
for them, sums over the clients for the metrics of all lists. None of this is private: it is for
simulations. Real nodes send metrics as often as their owners allow, and no sums.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from clients.blocks import needed_items, private_parameters, to_device, train_in_blocks
from clients.node import Node
from clients.step import Step, private_names
from fedrec.components.sections import Section
from fedrec.data.interactions import last_items, recent_weights
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import Evaluated, HeldOutLists, known_means
from fedrec.metrics.base import RatedBlock
from fedrec.models.base import HistoryModel, Parameters
from fedrec.protocol.messages import EvaluateOrder, HeldOutPart, ItemQuery
from fedrec.protocol.updates import ClientArrays, ItemRequests

# users times items whose masks and scores are in memory at a time, about 20 MiB
_CELLS_PER_BLOCK = 1_000_000
_PRIVATE_TOGETHER = 16  # users whose private parameters are in memory at a time, without tables
_LEAST = 16  # users per block, who share the reading of a long catalogue
_CELLS_KEPT = 4_000_000  # users times items whose shared scores are kept, 16 MiB
# users times items per forward pass, so that the activations stay in cache
_SCORED_AT_ONCE = 20_000


def evaluate_clients(
    node: Node, arrays: Mapping[str, np.ndarray], order: EvaluateOrder
) -> Evaluated:
    """Metrics of the clients of an order, ascending by client id.

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
    if order.each:
        evaluated = _generated(node, ClientArrays.read(arrays), order)
    elif node.experiment.task == "rating":
        evaluated = _rated(node, step, to_device(arrays, node.device), clients, order)
    else:
        scores = client_scorer(node, step, to_device(arrays, node.device), order.round)
        evaluated = _ranked(node, clients, scores, order)
    return evaluated.with_groups(node.groups(clients))


def mean_metrics(evaluated: Evaluated) -> dict[str, float | int]:
    """Means over the clients and their number, in the form that Flower's strategies expect."""
    columns = evaluated.metrics
    values = np.column_stack([np.empty((len(evaluated), 0)), *columns.values()])
    means = known_means(values, axis=0).tolist()
    return {"num-examples": len(evaluated), **dict(zip(columns, means, strict=True))}


def _generated(node: Node, given: ClientArrays, order: EvaluateOrder) -> Evaluated:
    """Metrics under parameters that were generated for each client, without training."""
    clients = given.requests.clients
    if node.experiment.task == "rating":
        block = _generated_ratings(node, given, _part(node, order))
        return Evaluated(clients, node.metrics.of_ratings(block))

    def scores(part: np.ndarray) -> Tensor:
        client_arrays = given.take(np.searchsorted(clients, part))
        with torch.no_grad():
            return node.model.scores(to_device(client_arrays.values, node.device), ())

    return _ranked(node, clients, scores, order)


def _part(node: Node, order: EvaluateOrder) -> HeldOutPart:
    return order.held_out or node.experiment.evaluation.held_out


def _ranked(
    node: Node, clients: np.ndarray, scores_of: Callable[[np.ndarray], Tensor], order: EvaluateOrder
) -> Evaluated:
    settings = node.experiment.evaluation.model_copy(update={"held_out": _part(node, order)})
    lists = HeldOutLists(node.population, node.metrics, settings)
    parts = _blocks(node, clients)
    # one at a time: sums are as long as the catalogue
    return Evaluated.joined(lists.measure(part, scores_of(part), sums=order.sums) for part in parts)


def _blocks(node: Node, clients: np.ndarray) -> Iterator[np.ndarray]:
    """The clients, a few at a time."""
    size = max(_LEAST, _CELLS_PER_BLOCK // node.population.interactions.num_items)
    return (clients[start : start + size] for start in range(0, len(clients), size))


def client_scorer(
    node: Node, step: Step, parameters: dict[str, Tensor], round_: int
) -> Callable[[np.ndarray], Tensor]:
    """Scores of the catalogue for clients, `float32 [clients, items]` of `int64 [clients]`, each
    with its own fine-tuned parameters. What clients share is computed once."""
    private = private_names(step, parameters)
    if step.config.epochs:
        return partial(_tuned_scores, node, step, parameters, round_)
    if not private:
        return _shared_scorer(node, parameters)
    together = 1 if set(private) & set(node.model.item_tables) else _PRIVATE_TOGETHER

    def scores(clients: np.ndarray) -> Tensor:
        parts = np.array_split(clients, max(1, -(-len(clients) // together)))
        tables = [_own_scores(node, step, parameters, p, round_ + 1) for p in parts]
        return torch.cat(tables) if len(tables) > 1 else tables[0]

    return scores


def own_parameters(
    node: Node, step: Step, parameters: dict[str, Tensor], client: int, round_: int
) -> dict[str, Tensor]:
    """Parameters that one client scores with instead of shared ones, by name and without cohort
    dimension: its private ones, or all that its fine-tuning changes."""
    clients = np.array([client])
    if not step.config.epochs:
        private_values = private_parameters(node, step, parameters, clients, round_ + 1)
        return {name: value[0] for name, value in private_values.items()}
    ((_, _, tuned),) = _fine_tuned(node, step, parameters, clients, round_)
    private = private_names(step, parameters)
    return {
        name: value[0].detach()
        for name, value in tuned.items()
        if name in private or not torch.equal(value[0], parameters[name])
    }


def history_of(node: Node, model: HistoryModel, clients: np.ndarray) -> Tensor:
    """Histories by which a model represents clients, `[clients, items]` or `[clients, longest]`."""
    form = model.form
    liked = node.population.rows(clients, positive=True)
    if form.longest is not None:
        known = last_items(*liked.sequences(), form.longest)
    elif form.recency is not None:
        num_items = node.population.interactions.num_items
        known = recent_weights(*liked.sequences(), num_items, form.recency)
    else:
        known = node.population.histories(clients, form.rated, form.low_rated)
    return torch.from_numpy(known).to(node.device)


def _tuned_scores(
    node: Node, step: Step, parameters: dict[str, Tensor], round_: int, clients: np.ndarray
) -> Tensor:
    """Scores of clients after the fine-tuning of each."""
    scores = torch.empty(len(clients), node.model.schema.num_items)
    for index, users, client_params in _fine_tuned(node, step, parameters, clients, round_):
        with torch.no_grad():
            if isinstance(node.model, HistoryModel):
                history = history_of(node, node.model, clients[index : index + 1])
                scores[index] = node.model.history_scores(client_params, history[None])[0, 0]
            else:
                scores[index] = node.model.scores(client_params, users)[0]
        del client_params  # which are views of a block
    return scores


@torch.no_grad()
def _shared_scorer(node: Node, parameters: dict[str, Tensor]) -> Callable[[np.ndarray], Tensor]:
    """Scores under the shared parameters."""
    if not isinstance(node.model, HistoryModel):
        return _FeatureScores(node, parameters)
    model = node.model
    scorer = model.scorer(_slices(parameters, 1))

    @torch.no_grad()
    def scores(clients: np.ndarray) -> Tensor:
        return scorer(history_of(node, model, clients)[None])[0]

    return scores


class _FeatureScores:
    """Scores of clients under shared parameters; those with equal features are scored once.

    Args:
        node: whose clients they are.
        parameters: without cohort dimension.
    """

    def __init__(self, node: Node, parameters: dict[str, Tensor]) -> None:
        self._node = node
        self._parameters = parameters
        self._cached: dict[bytes, Tensor] = {}
        self._most = _CELLS_KEPT // node.model.schema.num_items

    @torch.no_grad()
    def __call__(self, clients: np.ndarray) -> Tensor:
        """`float32 [clients, items]` of `int64 [clients]`."""
        codes = self._node.population.feature_codes(clients)
        if not codes:
            if not self._cached:
                self._cached[b""] = self._node.model.scores(_slices(self._parameters, 1), ())[0]
            return self._cached[b""].expand(len(clients), -1)
        widths = np.cumsum([table.shape[1] for table in codes])[:-1]
        distinct, row_of = np.unique(np.concatenate(codes, axis=1), axis=0, return_inverse=True)
        names = [row.tobytes() for row in distinct]
        new = [number for number, name in enumerate(names) if name not in self._cached]
        rows = self._scored(np.split(distinct[new], widths, axis=1))
        self._cached |= zip((names[number] for number in new), rows, strict=True)
        scores = torch.stack([self._cached[name] for name in names])
        if len(self._cached) > self._most:
            self._cached.clear()
        return scores[torch.from_numpy(row_of.reshape(-1))]

    def _scored(self, codes: list[np.ndarray]) -> Iterator[Tensor]:
        """Scores `[items]` of each row of category codes, per feature `int64 [rows, width]`."""
        model = self._node.model
        block = max(1, _SCORED_AT_ONCE // model.schema.num_items)
        for start in range(0, len(codes[0]), block):
            users = tuple(
                torch.from_numpy(table[start : start + block].copy()).to(self._node.device)
                for table in codes
            )
            yield from model.scores(_slices(self._parameters, len(users[0])), users)


@torch.no_grad()
def _own_scores(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, before: int
) -> Tensor:
    """Scores of clients who share all but private parameters, without fine-tuning."""
    given = _slices(parameters, len(clients))
    given |= private_parameters(node, step, parameters, clients, before)
    if isinstance(node.model, HistoryModel):
        histories = history_of(node, node.model, clients)
        return node.model.history_scores(given, histories[:, None])[:, 0]
    codes = node.population.feature_codes(clients)
    users = tuple(torch.from_numpy(table).to(node.device) for table in codes)
    return node.model.scores(given, users)


def _fine_tuned(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, round_: int
) -> Iterator[tuple[int, tuple[Tensor, ...], Parameters]]:
    """Each client's place in `clients`, features `[1, width]`, and parameters after fine-tuning
    `[1, ...]`."""
    codes = [
        torch.from_numpy(table).to(node.device) for table in node.population.feature_codes(clients)
    ]
    for indices, trained in train_in_blocks(
        node, step, node.path(step), parameters, clients, "fine-tune", round_, round_ + 1
    ):
        for member, index in enumerate(indices):
            users = tuple(table[index : index + 1] for table in codes)
            yield index, users, trained.parameters_of(member)
        del trained  # before the next block is built


def _rated(
    node: Node, step: Step, parameters: dict[str, Tensor], clients: np.ndarray, order: EvaluateOrder
) -> Evaluated:
    part = _part(node, order)
    rows: list[dict[str, float]] = [{} for _ in clients]

    def measure(index: int, predict: Callable[[np.ndarray], np.ndarray]) -> None:
        """Errors of one client's held-out ratings, from a function of their items, and what is
        predicted of an adversary's targets."""
        held_out = node.population.rows(clients[[index]], part)
        targets = None
        unrated = node.population.unrated_targets(clients[index : index + 1])
        if unrated is not None and node.population.adversary is not None:
            predicted = predict(node.population.adversary.targets)
            targets = np.where(unrated, predicted, np.nan)
        block = RatedBlock(predict(held_out.items), held_out.labels, targets=targets)
        errors = node.metrics.of_ratings(block)
        rows[index] = {name: values[0] for name, values in errors.items()}

    if isinstance(node.model, HistoryModel):
        done = 0
        scores_of = client_scorer(node, step, parameters, order.round)
        for block in _blocks(node, clients):
            scores = scores_of(block).cpu().numpy()
            for index in range(len(block)):
                measure(done + index, scores[index].__getitem__)
            done += len(block)
    else:
        for index, users, client_params in _fine_tuned(
            node, step, parameters, clients, order.round
        ):
            measure(index, partial(_predictions, node, client_params, users))
            del client_params
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
    return Evaluated(clients, columns)


@torch.no_grad()
def _predictions(
    node: Node, parameters: Parameters, users: tuple[Tensor, ...], items: np.ndarray
) -> np.ndarray:
    """Predicted ratings of one client, `float32 [n]`, for items `int64 [n]`."""
    asked = torch.from_numpy(items).to(node.device).unsqueeze(0)
    return node.model.predict(parameters, users, asked)[0].cpu().numpy()


def _slices(parameters: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {
        name: value.unsqueeze(0).expand(count, *value.shape) for name, value in parameters.items()
    }


# Clients whose parameters the server generates: the items that they need, and the errors of their
# predictions.


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
    return needed_items(node, step, clients, order.round)


def _generated_ratings(node: Node, given: ClientArrays, part: HeldOutPart) -> RatedBlock:
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
