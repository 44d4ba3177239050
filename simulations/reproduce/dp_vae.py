# SPDX-License-Identifier: Apache-2.0
"""Measures of DP-VAE's tables: runs with the users' own noise, whole histories, and other
systems."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from clients.evaluation import evaluate_clients, mean_metrics
from clients.node import Node
from fedrec.baselines.base import Ratings
from fedrec.baselines.ratings import Svd, SvdConfig
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import ClientError, DataError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.evaluation.tables import Evaluated, HeldOutLists, Metrics
from fedrec.experiment.schema import EvaluationConfig
from fedrec.privacy.accounting.rdp import gdp_parameter
from fedrec.protocol.orders import EvaluateOrder
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from simulations.recommending import with_parameters
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import SYSTEM, finished, values

PREFIX = "reconstruction-"
# relative to the best list of 100, for any length of the history (paper, section 4.1)
OF_ALL = f"{PREFIX}ndcg@100-of-100"
_WHOLE = ("evaluation.protocol='reconstruction'", "evaluation.ks=[20, 50, 100]")
_PERSONAL = {"nominal": "asked", "replace-one": "true"}
_PERCENTILES = ("p10", "p50", "p90")
_EPSILONS = (0.3, 0.5, 1.0, 1.5, 10.0, 100.0, 1000.0, math.inf)


def noisy(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    rows: Mapping[str, str] | None = None,
    set: Sequence[str] = (),
    histories: bool = False,
) -> Iterator[Found]:
    """Numbers of a run that may diverge, percentiles of the users' requested epsilons and of those
    under replace-one, and with `histories` the quality of reconstructed whole histories. A diverged
    run only has the number of that round.
    """
    try:
        result = finished(job, experiment, set)
    except ClientError as error:
        after = re.search(r"diverged in round (\d+)", str(error))
        if after is None:
            raise
        yield Found(dataset, row, "diverged in round", float(after.group(1)))
        return
    yield from values(result, dataset, {SYSTEM: row, **(rows or {})}, metrics)
    users = RunFolder(result.folder).summary().get("personal", {}).get("users", {})
    spreads = itertools.product(_PERSONAL.items() if users else (), _PERCENTILES)
    for (kind, word), percentile in spreads:
        yield Found(dataset, row, f"{word} epsilon, {percentile}", float(users[kind][percentile]))
    if histories:
        node = Node(job.experiment(experiment, [*set, *_WHOLE]), 0, 1, None)
        means = whole_histories(node, with_parameters(result).parameters)
        yield from (Found(dataset, row, name, value) for name, value in means.items())


def whole_histories(node: Node, parameters: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Quality of reconstructed whole histories, most of which is the input: not a measure of
    recommendation."""
    users = evaluate_clients(node, parameters, EvaluateOrder(node.experiment.rounds, None))
    lengths = node.population.rows(users.clients, "all", positive=True).mask().sum(1)
    of_all = users.columns[f"{PREFIX}ndcg@100"] * _ideal(lengths) / _ideal(np.array([100]))
    means = mean_metrics(Evaluated(users.clients, {**users.columns, OF_ALL: of_all}))
    return {name: value for name, value in means.items() if name.startswith(PREFIX)}


def _ideal(lengths: np.ndarray) -> np.ndarray:
    """Discounted gain of the best list of 100 by length of the history."""
    return (1 / np.log2(np.arange(2, 102))).cumsum()[np.minimum(lengths, 100) - 1]


def reconstruction(job: TaskJob, experiment: str, dataset: str) -> Iterator[Found]:
    """Quality of whole histories reconstructed by popularity and EASE."""
    systems = evaluate_baselines(
        ("popularity", "ease"),
        POPULATIONS.population(job.experiment(experiment)),
        held_out="test",
        ks=(20, 50, 100),
        protocol="reconstruction",
    )
    for name, means in systems.items():
        yield from (Found(dataset, name, metric, value) for metric, value in means.items())


def bounded(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    baseline: str,
    p_min: float,
    set: Sequence[str],
) -> Iterator[Found]:
    """Metrics on validation rows of a centralised system trained without users below the minimum of
    theorem 1 at `p_min`, and the number of training users.

    All users are ranked, also those who do not train, so that the lists are the same for all
    `p_min`.
    """
    population = POPULATIONS.population(job.experiment(experiment, set))
    ks = (20, 50, 100)
    means = evaluate_baselines((baseline,), population, held_out="validation", ks=ks)[baseline]
    row = f"{baseline}, {p_min:g}"
    yield from (Found(dataset, row, theirs, means[ours]) for ours, theirs in metrics.items())
    training = len(population.partition.training_clients)
    yield Found(dataset, row, "training users", float(training))


def noisy_popularity(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str = "epsilon {epsilon:g} for all",
    set: Sequence[str] = (),
    epsilons: Sequence[float] = _EPSILONS,
    delta: float = 1.25e-5,
) -> Iterator[Found]:
    """Metrics of popularity under the same noise: every user sends its history once, scaled to
    length 1 and with its own noise. All users get one list, sorted by the sum. The noise is drawn
    once for the sum, with the same distribution.
    """
    settings = job.experiment(experiment, set)
    population = POPULATIONS.population(settings)
    clients = population.evaluated_clients("test")
    judged = settings.evaluation.final_users
    if judged and judged < len(clients):
        clients = np.sort(stream(job.seed, "judged").choice(clients, judged, replace=False))
    evaluation = settings.evaluation.model_copy(update={"ks": (20, 50, 100)})
    lists = _lists(evaluation, population)
    users = population.partition.training_clients
    total = np.zeros(population.interactions.num_items)
    for start in range(0, len(users), 4096):
        histories = population.histories(users[start : start + 4096])
        total += (histories / np.linalg.norm(histories, axis=1, keepdims=True)).sum(0)
    for epsilon in epsilons:
        std = 0.0
        if math.isfinite(epsilon):
            std = 2 * math.sqrt(len(users)) / gdp_parameter(epsilon, delta)
        noise = std * np.random.default_rng(job.seed).standard_normal(len(total))
        scores = torch.from_numpy(total + noise).float().expand(len(clients), -1)
        table = lists.measure(clients, scores).table
        for ours, theirs in metrics.items():
            value = float(np.nanmean(table[ours]))
            yield Found(dataset, row.format(epsilon=epsilon), theirs, value)


def _lists(settings: EvaluationConfig, population: Population) -> HeldOutLists:
    """Lists of test rows, to evaluate scores without a baseline."""
    settings = settings.model_copy(update={"held_out": "test"})
    return HeldOutLists(population, Metrics("ranking", settings), settings)


def predicted_ratings(
    job: TaskJob,
    experiment: str,
    dataset: str,
    metrics: Mapping[str, str],
    row: str,
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """Metrics of the paper's SVD (table 4), a model of ratings, with items ranked by predicted
    rating."""
    settings = job.experiment(experiment, set)
    population = POPULATIONS.population(settings)
    data = population.interactions
    rows = population.partition.train_rows
    if data.ratings is None:
        raise DataError(f"{data.name} has no ratings", fix="choose a dataset with ratings")
    rated = Ratings(
        data.num_users,
        data.num_items,
        data.users[rows],
        data.items[rows],
        data.ratings[rows].astype(np.float64),
    )
    system = Svd(SvdConfig(seed=job.seed))
    system.fit_ratings(rated)
    clients = population.evaluated_clients("test")
    nothing = replace(rated, users=rated.users[:0], items=rated.items[:0], values=rated.values[:0])
    every = np.arange(data.num_items)
    lists = _lists(settings.evaluation, population)
    blocks: list[Evaluated] = []
    for block in np.array_split(clients, max(1, len(clients) // 64)):
        pairs = (block.repeat(data.num_items), np.tile(every, len(block)))
        scores = system.predict(nothing, *pairs).reshape(len(block), -1)
        blocks.append(lists.measure(block, torch.from_numpy(scores).float()))
    table = Evaluated.joined(blocks).table
    for ours, theirs in metrics.items():
        yield Found(dataset, row, theirs, float(np.nanmean(table[ours])))


def fitted(
    job: TaskJob, experiment: str, dataset: str, row: str, set: Sequence[str]
) -> Iterator[Found]:
    """Target numbers for a synthetic population: likes per user, shares of the most liked items,
    and quality of ranking systems."""
    result = finished(job, experiment, set)
    settings = job.experiment(experiment, set)
    rows = POPULATIONS.population(settings).interactions
    above = settings.positive_above
    liked = np.ones(len(rows), bool)
    if above is not None and rows.ratings is not None:
        liked = rows.ratings > above
    counts = np.bincount(rows.users[liked])
    for percent in (10, 50, 90):
        likes = float(np.percentile(counts[counts > 0], percent))
        yield Found(dataset, row, f"likes, p{percent}", likes)
    shares = np.sort(np.bincount(rows.items[liked]))[::-1] / liked.sum()
    for top in (10, 100, 1000):
        yield Found(dataset, row, f"share of {top} items", float(shares[:top].sum()))
    for name, means in result.baselines.items():
        yield Found(dataset, row, f"NDCG@100, {name}", means["ndcg@100"])
        yield Found(dataset, row, f"Recall@20, {name}", means["recall@20"])
