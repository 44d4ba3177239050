# SPDX-License-Identifier: Apache-2.0
"""Recommenders that learn from perturbed rows, with two kinds of masking, and what the perturbed
table reveals (`benchmarks/upc-sdg.toml`).

`both` leaves real and synthetic training items out of the lists, `learned` only the synthetic ones,
so that replaced originals are ranked; `ease on devices` is EASE that learned from the synthetic
table, applied to real rows, as a device could.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedrec.data.population import Population
from fedrec.evaluation.central import CentralEvaluation, make_baseline
from fedrec.experiment.schema import Experiment
from fedrec.perturb.noisy_cooccurrence import disclosure
from fedrec.perturb.substitutes import FIGURE, measured_similarity
from fedrec.rng import stream
from simulations.studies.declaration import Found, TaskJob


def told(
    job: TaskJob,
    experiment: str | Mapping[str, Any],
    dataset: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
    masks: Sequence[str] = ("both", "learned"),
    tested: int | None = None,
    similar: bool = True,
) -> Iterator[Found]:
    """Metrics of each of an experiment's baselines, and what the perturbed table reveals.

    Args:
        job: of the task, whose name is a row of the table.
        experiment: a table.
        dataset: name of the data.
        metrics: our metric -> its title.
        set: overrides of the experiment.
        masks: values of `evaluation.masked`.
        tested: number of tested users, the same each time; default: all.
        similar: whether mean similarity is measured where the perturbation does not tell it.
    """
    row = job.task.name
    loaded = job.experiment(experiment, set)
    population = Population.of(loaded)
    for label, mask, found in _metrics(loaded, population, masks, tested):
        for ours, theirs in metrics.items():
            yield Found(dataset, row, f"{label} {mask} {theirs}", found[ours])
    if population.perturbed is None:
        return
    real = population.interactions.with_rows(population.partition.train_rows)
    table = disclosure(real, population.perturbed, loaded.seed)
    figures = population.perturbed.figures
    if FIGURE in figures or similar:
        by_gamma = figures.get(FIGURE) or measured_similarity(
            real, population.perturbed, loaded.seed
        )
        table |= {"similarity": next(iter(by_gamma.values()), {})}
    for name, value in table.items():
        for part, number in value.items() if isinstance(value, dict) else [("", value)]:
            yield Found(dataset, row, f"{name} {part}".strip(), float(number))


def _metrics(
    loaded: Experiment, population: Population, masks: Sequence[str], tested: int | None
) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Metrics of each baseline with each mask."""
    clients = population.evaluated_clients(loaded.evaluation.held_out)
    if tested is not None:
        clients = np.sort(stream(0, "tested").permutation(clients)[:tested])
    plain = Population(
        population.interactions, population.partition, task="ranking", positive_above=None
    )

    def evaluation(data: Population, mask: str) -> CentralEvaluation:
        settings = loaded.evaluation.model_copy(update={"masked": mask})
        return CentralEvaluation(data, settings, clients=clients)

    learned = evaluation(population, masks[0])
    for label, options in loaded.evaluation.baseline_settings().items():
        model = make_baseline(label, options, seed=loaded.seed)
        learned.fit(model)
        asked = [(label, population, mask) for mask in masks]
        asked += [("ease on devices", plain, "real")] if label == "ease" else []
        for name, data, mask in asked:
            found = evaluation(data, mask).evaluate(model)
            yield name, mask, found.means(learned.metrics)
