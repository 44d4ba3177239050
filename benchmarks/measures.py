# SPDX-License-Identifier: Apache-2.0
"""Measures of the studies in this folder, beside those that come with fedrec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedrec.data.population import Population
from fedrec.evaluation.central import CentralEvaluation, make_baseline
from fedrec.experiment.schema import Experiment
from fedrec.perturb.noisy_cooccurrence import disclosure
from fedrec.perturb.substitutes import FIGURE, measured_similarity
from fedrec.rng import stream
from simulations.reproduce.bench import never_drawn
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import finished, measure


def _upload(rounds: pd.DataFrame) -> float:
    """Kilobytes that a client sends in a round."""
    sent = np.sum(rounds["bytes-up"].to_numpy()) / np.sum(rounds["num-clients"].to_numpy())
    return float(sent) / 1000


def _hours(rounds: pd.DataFrame) -> float:
    """Simulated hours of the whole run."""
    return float(rounds["simulated-seconds"].iloc[-1]) / 3600


FIGURES = {"kB per upload": _upload, "simulated hours": _hours}


def beside_rounds(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    figure: str,
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """The numbers of one run, see `simulations.studies.runs.measure`, and one of `FIGURES`."""
    yield from measure(job, experiment, dataset, metrics, row, set=set)
    yield Found(dataset, row, figure, FIGURES[figure](finished(job, experiment, set).rounds))


def beside_no_model(
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
    metrics_of_list = never_drawn(job.experiment(experiment, set))
    for ours, theirs in metrics.items():
        yield Found(
            dataset, f"no model, draws of {row}", theirs, float(np.nanmean(metrics_of_list[ours]))
        )


def perturbed(
    job: TaskJob,
    experiment: str | Mapping[str, Any],
    dataset: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
    masks: Sequence[str] = ("both", "learned"),
    tested: int | None = None,
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
    """
    row = job.task.name
    loaded = job.experiment(experiment, set)
    population = Population.of(loaded)
    for label, mask, means in _metrics(loaded, population, masks, tested):
        for ours, theirs in metrics.items():
            yield Found(dataset, row, f"{label} {mask} {theirs}", means[ours])
    if population.perturbed is None:
        return
    real = population.interactions.with_rows(population.partition.train_rows)
    table = disclosure(real, population.perturbed, loaded.seed)
    by_gamma = population.perturbed.figures.get(FIGURE)
    by_gamma = by_gamma or measured_similarity(real, population.perturbed, loaded.seed)
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
            table = evaluation(data, mask).evaluate(model)
            yield name, mask, table.means(learned.metrics)
