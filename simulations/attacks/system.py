# SPDX-License-Identifier: Apache-2.0
"""A trained system from an attacker's view: parameters, scores, lists, and clients' updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from clients.blocks import to_device, update_of
from clients.evaluation import client_scorer, requested_items
from clients.node import Node
from clients.round import train_each
from clients.step import private_names
from fedrec.attacks.membership import top_lists
from fedrec.components.sections import Section
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import step_table
from fedrec.experiment.schema import Experiment
from fedrec.models.personal import MetaMf, generate
from fedrec.protocol.messages import ItemQuery, TrainOrder
from fedrec.protocol.updates import ClientArrays
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from simulations.recommending import with_parameters

_BLOCK = 256  # users whose scores or generated parameters are in memory at a time


class TrainedSystem:
    """A trained system under attack.

    Args:
        experiment: the attacked experiment; its data, model, `engine.device` and `engine.threads`
            are used.
        run: the run.
        members: `int64 [n]`, ascending: the users who trained it.
    """

    def __init__(self, experiment: Experiment, run: RunFolder, members: np.ndarray) -> None:
        self.experiment = experiment
        self.run = run
        self.members = members

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the recommendations."""
        return dict(self.run.read_result().metrics)

    @cached_property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Final global parameters of the run, read-only.

        Raises:
            RunError: the checkpoint is missing.
        """
        parameters = with_parameters(self.run.read_result()).parameters
        if not parameters:
            fix = "remove the folder and start again"
            raise RunError(f"{self.run.path} has no checkpoint", fix=fix)
        for value in parameters.values():
            value.setflags(write=False)
        return parameters

    def scores(
        self, users: np.ndarray, *, fine_tune: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Scores of the catalogue.

        Args:
            users: `int64 [users]`.
            fine_tune: whether each user first fine-tunes on its own data, as in the experiment's
                evaluation.

        Yields:
            A block of the users, and `float32 [block, items]`.

        Raises:
            ExperimentError: the system has private parameters.
        """
        node = self._node
        tuned = self.experiment.fine_tune_step()
        untuned = Section.model_validate({**tuned.options, "name": tuned.name, "epochs": 0})
        step = node.step(tuned if fine_tune else untuned)
        if private := private_names(step, self.parameters):
            raise ExperimentError(
                f"systems with private parameters ({', '.join(private)}) cannot be attacked",
                fix="--set step.private-parameters=[]",
            )
        scores_of = client_scorer(node, step, self._tensors, self.experiment.rounds)
        for start in range(0, len(users), _BLOCK):
            part = users[start : start + _BLOCK]
            if isinstance(node.model, MetaMf):
                scores = _generated_scores(node, self._tensors, part)
            else:
                scores = scores_of(part)
            yield part, scores.cpu().numpy()

    def lists(self, users: np.ndarray, length: int, *, as_shown: bool = False) -> np.ndarray:
        """Recommendation lists, `int64 [users, length]`, best item first.

        Args:
            users: `int64 [users]`.
            length: items in a list, at most those of the catalogue.
            as_shown: whether to return the lists that users see: fine-tuned, and without items of
                their real training rows.
        """
        population = self._node.population
        codes = population.feature_codes(users)
        # Users with equal features are made adjacent, because those of a block are scored once.
        order = np.lexsort(np.concatenate(codes, axis=1).T) if codes else np.arange(len(users))
        blocks = []
        for part, scores in self.scores(users[order], fine_tune=as_shown):
            if as_shown:
                held_out = population.held_out(part, self.experiment.evaluation.held_out)
                scores = np.where(held_out.known, -np.inf, scores)
            blocks.append(top_lists(scores, length))
        return np.concatenate(blocks)[np.argsort(order)]

    def updates(self, users: np.ndarray) -> Iterator[np.ndarray]:
        """Yield descriptions of clients' uploads in one more round, `float32 [columns]`: norms of
        row changes of tables and matrices, changes of vectors. Changed rows and their norms are
        most informative; directions are omitted for brevity.

        Args:
            users: `int64 [users]`.
        """
        node = self._node
        if isinstance(node.model, MetaMf):
            for table in _generated_updates(node, self._tensors, users):
                yield np.concatenate(list(table.values()))
            return
        step = node.step(self.experiment.step)
        private = set(private_names(step, self.parameters))
        names = [name for name in self.parameters if name not in private]
        for user in users.tolist():
            drawn = stream(self.experiment.seed, "client", user, self.experiment.rounds + 1)
            delta = update_of(step, self._tensors, node.population.client(user), drawn).delta
            parts = [
                delta[name].norm(dim=-1).flatten() if delta[name].dim() > 1 else delta[name]
                for name in names
            ]
            yield np.concatenate([part.cpu().numpy() for part in parts])

    @cached_property
    def _node(self) -> Node:
        """Node with all clients of the attacked experiment."""
        return Node(self.experiment, 0, 1, None)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        copies = {name: value.copy() for name, value in self.parameters.items()}
        return to_device(copies, self._node.device)


def _generated_scores(node: Node, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
    """Scores of the catalogue, `float32 [users, items]`, with each user's generated parameters."""
    with torch.no_grad():
        values, low = generate(parameters, torch.from_numpy(users.copy()).to(node.device), None)
        return node.model.scores({**values, "item.low": low}, ())


def _generated_updates(
    node: Node, parameters: Mapping[str, Tensor], users: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Yield each client's upload, by name: updates of its generated parameters."""
    rows = node.population.interactions.num_items
    round_ = node.experiment.rounds + 1
    step = step_table(node.experiment.step)
    for part in np.array_split(users, -(-len(users) // _BLOCK)):
        clients = np.sort(part)
        requests = requested_items(node, ItemQuery(round_, clients, "train", step))
        with torch.no_grad():
            values, low = generate(parameters, torch.from_numpy(requests.clients), requests)
        sent = ClientArrays(
            requests,
            {name: value.numpy() for name, value in values.items()},
            {"item.low": low.numpy()},
        )
        order = TrainOrder(round_, clients, step=step, each=True)
        updates = train_each(node, sent.arrays(), order).updates
        for client in part.tolist():
            update = updates.take(np.searchsorted(clients, [client]))
            tables = {name: np.zeros(rows, dtype=np.float32) for name in update.rows}
            for name, gradient in update.rows.items():
                tables[name][update.requests.items] = np.linalg.norm(gradient, axis=-1)
            heads = {
                n: v[0] if v.ndim < 3 else np.linalg.norm(v[0], axis=-1)
                for n, v in update.values.items()
            }
            yield heads | tables
