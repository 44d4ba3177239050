# SPDX-License-Identifier: Apache-2.0
"""A probe that needs no model: the list of a user's items by how seldom they were among the
negatives that this very run drew on the user's device.

Where held-out items are kept out of the negatives, the list finds them. Without that leak every
item that a held-out one is ranked against was drawn as often, and the list is at chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from clients.node import Node
from clients.step import Step
from fedrec.components.registry import SAMPLER, resolve
from fedrec.evaluation.lists import ranking_metrics
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section
from fedrec.rng import stream

_CELLS_AT_ONCE = 4_000_000  # users times items


def never_drawn(experiment: Experiment) -> dict[str, np.ndarray]:
    """Metrics of ranking each held-out user's items by how seldom they were negatives, in training
    and in on-device fine-tuning.

    Args:
        experiment: a resolved one, as it was run.

    Returns:
        `float64 [users]` by metric; chance for a user whose device drew none.
    """
    node = Node(experiment, 0, 1, None)
    population = node.population
    settings = experiment.evaluation
    clients = population.evaluated_clients(settings.held_out)
    rounds = _rounds_of(experiment, population.training_clients)
    size = max(1, _CELLS_AT_ONCE // population.interactions.num_items)
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, len(clients), size):
        part = clients[start : start + size]
        scores = np.zeros((len(part), population.interactions.num_items), dtype=np.float32)
        for place, client in enumerate(part.tolist()):
            for items in _draws(node, client, rounds.get(client, ())):
                scores[place, items] -= 1
        lists = population.held_out(part, settings.held_out)
        masks = {n: torch.from_numpy(getattr(lists, n)) for n in ("seen", "relevant", "known")}
        ranked = ranking_metrics(
            torch.from_numpy(scores),
            ks=settings.ks,
            sampled_items=settings.sampled_items,
            seen=masks["seen"],
            relevant=masks["relevant"],
            known=masks["known"],
        )
        parts.append(ranked)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _rounds_of(experiment: Experiment, training: np.ndarray) -> dict[int, list[int]]:
    """The rounds of each client that was in any."""
    sampler = resolve(SAMPLER, experiment.sampler.name)(
        experiment.settings(SAMPLER), training, experiment.seed
    )
    found: dict[int, list[int]] = {}
    for number in range(1, experiment.rounds + 1):
        for client in sampler.sample(number).tolist():
            found.setdefault(client, []).append(number)
    return found


def _draws(node: Node, client: int, rounds: list[int] | tuple[()]) -> Iterator[np.ndarray]:
    """The distinct negatives of each round of a client, and of its fine-tuning."""
    experiment = node.experiment
    tuned = experiment.fine_tune_step()
    asked: list[tuple[Section, str, int]] = [(experiment.step, "client", one) for one in rounds]
    asked.append((tuned, "fine-tune", experiment.rounds))
    for section, name, number in asked:
        step = node.step(section)
        if draws_negatives(step) and step.config.epochs:
            random = stream(experiment.seed, name, client, number)
            found = step.batches(node.population.client(client), random)
            real = np.arange(found.items.shape[1]) < found.sizes[:, None]
            yield np.unique(found.items[real & (found.labels == 0)])


def draws_negatives(step: Step) -> bool:
    """Whether a step trains on drawn items beside the user's own."""
    return "negatives" in type(step.config).model_fields
