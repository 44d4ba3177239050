# SPDX-License-Identifier: Apache-2.0
"""Attribute inference on an experiment: from profiles, from recommendation lists, or from clients'
updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedrec.attacks.attribute import Inference, infer_attribute
from fedrec.attacks.classifier import Attacker
from fedrec.attacks.membership import one_hot, top_lists
from fedrec.config import did_you_mean
from fedrec.data.cache import POPULATIONS
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.rng import stream
from server.callbacks.base import Callback
from simulations.attacks.federations import derived, parameters_of, scores_of, section
from simulations.study.runs import run_once

if TYPE_CHECKING:
    from clients.hosting.node import Node

_AT_ONCE = 256  # clients whose generated parameters are in memory at a time

Source = Literal["profiles", "recommendations", "updates"]


@dataclass(frozen=True)
class AttributeOptions:
    """The attacker's view and methods.

    Attributes:
        attribute: name of a user feature.
        source: `"profiles"`: the items that each device learns from (perturbed, where the
            experiment perturbs them); `"recommendations"`: top lists of the trained system;
            `"updates"`: what each client uploads in the round after the last.
        attacker: `"neural"` or `"logistic"`.
        folds: number of folds.
        lists: lists of the shared model, or after each user's own fine-tuning.
        length: items in a list.
        exclude_known: whether lists leave out items of the user's real training rows.
        without: patterns of parameters that the attacker ignores, such as `user.*`.
    """

    attribute: str
    source: Source = "profiles"
    attacker: Attacker = "neural"
    folds: int = 5
    lists: Literal["shared", "fine-tuned"] = "fine-tuned"
    length: int = 10
    exclude_known: bool = True
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttributeAttack:
    """Results of the attack.

    Attributes:
        options: the attacker's view and methods.
        categories: labels of the classes, as in `success.classes`.
        success: on the training clients whose attribute is known.
        recommends: metrics of the attacked system; empty for attacks on profiles, which need no
            system.
    """

    options: AttributeOptions
    categories: tuple[str, ...]
    success: Inference
    recommends: dict[str, float]

    def table(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "attack": "attribute", "success": self.success.table()}


def attack_attribute(
    experiment: Experiment,
    options: AttributeOptions,
    output: Path,
    callbacks: Sequence[Callback] = (),
) -> AttributeAttack:
    """Train the system if the attack needs one (unless it is in `output` already), and attack it.

    Raises:
        ExperimentError: the attribute is unknown or has several values per user, or a class has too
            few users.
        FedrecError: see `simulations.runner.run`.
    """
    POPULATIONS.renew(experiment)
    population = POPULATIONS.population(experiment)
    users, labels, categories = _attacked(population, options.attribute)
    recommends: dict[str, float] = {}
    if options.source == "profiles":
        described = _profiles(population, users)
        scaling = "rows"
    else:
        run = run_once(
            derived(experiment, "target", experiment.seed, {}, every=0),
            output / "target",
            callbacks,
        )
        recommends = dict(run.read_result().metrics)
        if options.source == "recommendations":
            described = _lists(experiment, population, parameters_of(run), users, options)
            scaling = "rows"
        else:
            described = np.stack(list(_updates(experiment, parameters_of(run), users, options)))
            scaling = "columns"
    success = infer_attribute(
        described,
        labels,
        attacker=options.attacker,
        scaling=scaling,
        folds=options.folds,
        seed=experiment.seed,
    )
    return AttributeAttack(options, categories, success, recommends)


def _attacked(
    population: Population, attribute: str
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Training clients with an attribute, their classes as codes from 0 without gaps, and the
    classes' labels."""
    data = population.interactions
    known = data.user_features.names
    if attribute not in known or data.user_features[attribute].width != 1:
        raise ExperimentError(
            f"{attribute!r} is not an attribute that can be inferred",
            expected=f"a user feature with one category per user, of {', '.join(known) or 'none'}",
            got=attribute,
            fix=did_you_mean(attribute, known) if known else "choose another dataset",
        )
    feature = data.user_features[attribute]
    users = population.partition.training_clients
    codes = feature.padded()[users, 0]
    present, labels = np.unique(codes[codes >= 0], return_inverse=True)
    return (
        users[codes >= 0],
        labels.astype(np.int64),
        tuple(feature.categories[code] for code in present),
    )


def _profiles(population: Population, users: np.ndarray) -> np.ndarray:
    """`float32 [users, items]`, 1 for the items that a device learns from."""
    table = np.zeros((len(users), population.interactions.num_items), dtype=np.float32)
    for place, user in enumerate(users.tolist()):
        table[place, population.client(user).items] = 1.0
    return table


def _lists(
    experiment: Experiment,
    population: Population,
    parameters: Mapping[str, np.ndarray],
    users: np.ndarray,
    options: AttributeOptions,
) -> np.ndarray:
    """`float32 [users, items]`, 1 for the items of a user's list."""
    blocks = []
    for part, scores in scores_of(
        experiment, parameters, users, fine_tune=options.lists == "fine-tuned"
    ):
        if options.exclude_known:
            scores = np.where(
                population.held_out(part, experiment.evaluation.held_out).known, -np.inf, scores
            )
        blocks.append(one_hot(top_lists(scores, options.length), scores.shape[1]))
    return np.concatenate(blocks)


def _updates(
    experiment: Experiment,
    parameters: Mapping[str, np.ndarray],
    users: np.ndarray,
    options: AttributeOptions,
) -> Iterator[np.ndarray]:
    """Descriptions of each client's upload in one more round: for a table or matrix the norms of
    its rows' changes, for a vector its changes. Which rows change, and by how much, is most
    informative; directions are left out to keep a description short.
    """
    from clients.hosting.node import Node
    from clients.training.one_client import to_device, update_of

    node = Node(experiment, 0, 1, None)
    if node.model.generated:
        yield from _generated_updates(node, parameters, users, options)
        return
    step = node.step(experiment.step)
    private = set(step.private_names(list(parameters)))
    seen = [
        n
        for n in parameters
        if n not in private and not any(fnmatchcase(n, p) for p in options.without)
    ]
    own = to_device(parameters, node.device)
    for user in users.tolist():
        drawn = stream(experiment.seed, "client", user, experiment.rounds + 1)
        delta = update_of(step, own, node.population.client(user), drawn).delta
        parts = [
            delta[name].norm(dim=-1).flatten() if delta[name].dim() > 1 else delta[name]
            for name in seen
        ]
        yield np.concatenate([part.cpu().numpy() for part in parts])


def _generated_updates(
    node: Node, parameters: Mapping[str, np.ndarray], users: np.ndarray, options: AttributeOptions
) -> Iterator[np.ndarray]:
    """The same if the server generates each client's parameters: the uploads are updates of
    these."""
    import torch

    from clients.generated import requested_items
    from clients.training.round import train_each
    from fedrec.models.metamf import generate
    from fedrec.protocol.client_arrays import ClientArrays
    from fedrec.protocol.orders import ItemQuery, TrainOrder

    experiment = node.experiment
    rows = node.population.interactions.num_items
    own = {name: torch.from_numpy(np.asarray(value)) for name, value in parameters.items()}
    round_ = experiment.rounds + 1
    step = section(experiment, "step")
    for part in np.array_split(users, -(-len(users) // _AT_ONCE)):
        clients = np.sort(part)
        requests = requested_items(node, ItemQuery(round_, clients, "train", step))
        with torch.no_grad():
            values, low = generate(own, torch.from_numpy(requests.clients), requests)
        sent = ClientArrays(
            requests,
            {name: value.numpy() for name, value in values.items()},
            {"item.low": low.numpy()},
        )
        found = train_each(
            node, sent.arrays(), TrainOrder(round_, clients, step=step, each=True)
        ).updates
        for client in part.tolist():
            one = found.take(np.searchsorted(clients, [client]))
            tables = {name: np.zeros(rows, dtype=np.float32) for name in one.rows}
            for name, gradient in one.rows.items():
                tables[name][one.requests.items] = np.linalg.norm(gradient, axis=-1)
            heads = {
                n: v[0] if v.ndim < 3 else np.linalg.norm(v[0], axis=-1)
                for n, v in one.values.items()
            }
            seen = [
                v
                for n, v in (heads | tables).items()
                if not any(fnmatchcase(n, p) for p in options.without)
            ]
            yield np.concatenate(seen)
