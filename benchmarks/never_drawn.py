# SPDX-License-Identifier: Apache-2.0
"""The list that uses no model: a user's items by how seldom they were among the negatives that this
very run drew (`benchmarks/peers.toml`). Where held-out items are kept out of the negatives, it
finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from clients.hosting.node import Node
from fedrec.components.registry import SAMPLER, resolve
from fedrec.evaluation.lists import ranking_metrics
from fedrec.experiment.schema import Experiment
from fedrec.rng import stream
from simulations.study.runs import measure
from simulations.study.study import Found, TaskJob


def beside(
    job: TaskJob,
    experiment: str,
    dataset: str,
    row: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of a run, and those of the list without a model."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    for file in job.run_path.glob("private/*"):
        file.unlink()  # as large as the catalogue times the users; nothing resumes it
    found = never_drawn(job.experiment(experiment, set))
    for ours, theirs in metrics.items():
        yield Found(dataset, f"no model, draws of {row}", theirs, found[ours])


def never_drawn(experiment: Experiment) -> dict[str, float]:
    """Metrics of ranking each user's items by how seldom they were negatives."""
    node = Node(experiment, 0, 1, None)
    step = node.step(experiment.step)
    population = node.population
    sampler = resolve(SAMPLER, experiment.sampler.name)(
        experiment.settings(SAMPLER), population.training_clients, experiment.seed
    )
    part = experiment.evaluation.held_out
    clients = population.evaluated_clients(part)
    shape = (population.interactions.num_users, population.interactions.num_items)
    scores = np.zeros(shape)
    for number in range(1, experiment.rounds + 1):
        for client in sampler.sample(number).tolist():
            random = stream(experiment.seed, "client", client, number)
            found = step.batches(population.client(client), random)
            real = np.arange(found.items.shape[1]) < found.sizes[:, None]
            negative = found.items[real & (found.labels == 0)]
            scores[client, np.unique(negative)] -= 1
    lists = population.held_out(clients, part)
    masks = {name: torch.from_numpy(getattr(lists, name)) for name in ("seen", "relevant", "known")}
    own = torch.from_numpy(scores[clients])
    sampled = experiment.evaluation.sampled_items
    metrics = ranking_metrics(own, **masks, ks=experiment.evaluation.ks, sampled_items=sampled)
    return {name: float(np.nanmean(values)) for name, values in metrics.items()}
