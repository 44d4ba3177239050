# SPDX-License-Identifier: Apache-2.0
"""Measures of reproduced tables: attacks, single systems, data and networks, epsilons and times;
and for DP-VAE runs with the users' own noise, whole histories, and other systems."""

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clients.evaluation import evaluate_clients, mean_metrics
from clients.node import Node
from fedrec.baselines.base import Ratings
from fedrec.baselines.private.ratings import DpsgdPnbmConfig
from fedrec.baselines.ratings import Svd, SvdConfig
from fedrec.components import registry
from fedrec.components.registry import PERTURBATION
from fedrec.components.sections import component_of
from fedrec.data.interactions import Interactions
from fedrec.data.population import POPULATIONS, Population, read_interactions
from fedrec.data.splits.rules import BoundedConfig
from fedrec.errors import ClientError, DataError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.evaluation.tables import Evaluated, HeldOutLists, Metrics
from fedrec.experiment.schema import EvaluationConfig
from fedrec.perturb.substitutes import FIGURE
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.rdp import gdp_parameter
from fedrec.privacy.accounting.sampling import FixedSize
from fedrec.protocol.messages import EvaluateOrder
from fedrec.rng import stream, torch_stream
from fedrec.runs.folder import RunFolder
from simulations.attacks.base import run_attack
from simulations.attacks.bounds import audit_one_rating
from simulations.recommending import with_parameters
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import SYSTEM, finished, values

# Success of attacks on experiments.


def membership(
    job: TaskJob,
    dataset: str,
    experiment: str,
    row: str,
    set: Sequence[str] = (),
    shadow_users: int = 1000,
) -> list[Found]:
    """Accuracy of PrivRec's membership attack."""
    chosen = {"name": "membership", "shadow-users": shadow_users, "judged": 60}
    if job.quick:
        chosen |= {"shadow-users": 20, "judged": 4, "trees": 5}
    attacked = job.experiment(experiment, [*set, "evaluation.baselines=[]"])
    accuracy = run_attack(attacked, chosen, job.folder).figures.accuracy
    return [Found(dataset, row, "MIA accuracy", accuracy.value, accuracy.low, accuracy.high)]


def attribute(
    job: TaskJob,
    dataset: str,
    experiment: str,
    row: str,
    set: Sequence[str] = (),
    sources: Sequence[str] = ("profiles",),
) -> Iterator[Found]:
    """Balanced accuracy and, for two classes, AUC of the neural attacker on the attribute that a
    perturbation protects, and the errors of the attacked system, if any."""
    attacked = job.experiment(experiment, set)
    for source in sources:
        name = attacked.settings(PERTURBATION).attribute
        chosen = {"name": "attribute", "attribute": name, "source": source}
        outcome = run_attack(attacked, chosen, job.folder)
        words = "" if source == "profiles" else f" from {source}"
        success = outcome.figures.balanced_accuracy
        metric = f"balanced accuracy{words}"
        yield Found(dataset, row, metric, success.value, success.low, success.high)
        if outcome.figures.auc is not None:
            yield Found(dataset, row, f"AUC{words}", outcome.figures.auc)
        recommends = outcome.table.get("recommends", {})
        for name in ("mae", "rmse") if recommends else ():
            yield Found(dataset, row, name.upper(), recommends[name])


def one_rating(job: TaskJob, dataset: str, ratings: int, epsilon: float) -> list[Found]:
    """Lower bound of the epsilon of PNBM's algorithm 1 for one rating of a user with `ratings`
    ratings, at the floor of its denominators."""
    config = DpsgdPnbmConfig(
        epsilon=epsilon, iterations=1, start="constant", rescale=0.05, learning_rate=0.1
    )
    bound = audit_one_rating(config, ratings, 20 if job.quick else 1000)
    row = f"{ratings} ratings, epsilon {epsilon:g}"
    return [Found(dataset, row, "epsilon at least", bound)]


# A single centralised system of an experiment.


def alone(
    job: TaskJob,
    experiment: str,
    label: str,
    dataset: str,
    metrics: Mapping[str, str],
    set: Sequence[str] = (),
) -> Iterator[Found]:
    """Metrics of a centralised system, and its CPU seconds."""
    loaded = job.experiment(experiment, set)
    table = loaded.table()
    settings = loaded.evaluation.baseline_settings()[label]
    named = {"name": label, **settings, "label": label}
    table["evaluation"] = {**table["evaluation"], "baselines": [named]}
    started = time.process_time()
    result = finished(job, table)
    yield from values(result, dataset, {label: label}, metrics)
    yield Found(dataset, label, "CPU s", round(time.process_time() - started, 1))


# The papers' numbers on data and networks: PrivRec's figure 2, DP-VAE's tables 2 and 3, and
# UPC-SDG's table 1. Without training.

BINS = (20, 50, 100, 200, 500, 1000)
"""Inclusive upper ends of figure 2's bins of visited items; the last bin is open."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def activity(job: TaskJob, name: str, dataset: str) -> Iterator[Found]:
    """Numbers of users by their number of items."""
    data = _interactions(job, name)
    pairs = np.unique(data.users * data.num_items + data.items)
    counts = np.bincount(pairs // data.num_items, minlength=data.num_users)
    for low, high in itertools.pairwise((0, *BINS, math.inf)):
        label = f"{low + 1:g} to {high:g} items"
        if math.isinf(high):
            label = f"more than {low:g} items"
        yield Found(dataset, "users", label, float(((low < counts) & (counts <= high)).sum()))
    for share, value in zip(QUANTILES, np.quantile(counts, QUANTILES), strict=True):
        yield Found(dataset, "items of a user", f"quantile {share:g}", float(value))
    yield Found(dataset, "items of a user", "mean", float(counts.mean()))


def sizes(job: TaskJob, name: str, dataset: str) -> Iterator[Found]:
    """Size of a data set."""
    data = _interactions(job, name)
    yield from _sizes(dataset, "", data.num_users, data.num_items, len(data), "interactions")


def bounded(job: TaskJob, name: str, dataset: str) -> Iterator[Found]:
    """Sizes of a data set as it is and with users' rows bounded by DP-VAE's theorem 1."""
    data = _interactions(job, name)
    bounds = BoundedConfig()
    counts = np.bincount(data.users, minlength=data.num_users)
    lengths = counts[counts >= bounds.bound(bounds.p_min)]
    lengths = lengths.clip(max=math.floor(bounds.bound(1.0)))
    yield from _sizes(dataset, "OL", data.num_users, data.num_items, len(data), "ratings")
    yield from _sizes(dataset, "PD", len(lengths), data.num_items, int(lengths.sum()), "ratings")


def network(job: TaskJob, experiment: str, dataset: str) -> Iterator[Found]:
    """Sizes of an autoencoder and settings of its training."""
    loaded = job.experiment(experiment)
    schema = Population.of(loaded).schema()
    settings: Any = loaded.settings(registry.MODEL)
    model = component_of(registry.MODEL, loaded.model, schema)
    step: Any = loaded.settings(registry.STEP)
    sampler: Any = loaded.settings(registry.SAMPLER)
    parameters = model.initial(torch_stream(loaded.seed, "init")).values()
    numbers = {
        "batch size": sampler.cohort,
        "epochs": sampler.participations,
        "beta": step.beta,
        "latent dimension": settings.latent,
        "parameters": sum(value.numel() for value in parameters),
    }
    yield from (Found(dataset, "VAE", key, float(value)) for key, value in numbers.items())


def _sizes(
    dataset: str, model: str, users: int, items: int, rows: int, word: str
) -> Iterator[Found]:
    """Users, items, rows and the share of pairs without a row, in per cent (equation 21)."""
    sparsity = 100 * (1 - rows / (users * items))
    numbers = {"users": users, "items": items, word: rows, "sparsity in %": sparsity}
    return (Found(dataset, model, key, float(value)) for key, value in numbers.items())


def _interactions(job: TaskJob, name: str) -> Interactions:
    table = {"name": "description", "dataset": {"name": name}, "split": {"name": "ratio"}}
    baselines = {"evaluation": {"baselines": ["popularity"]}}
    return read_interactions(job.experiment({**table, **baselines}))


# PrivRec's epsilons (tables 4 and 5), and the time of its rounds (figure 9).

ROUNDS = 1000
NOISE = 1.0
DELTAS = (0.0, 1e-8, 1e-6, 1e-4)
BACKENDS = {
    "DP-PrivRec": "paper",
    "each round counted once, autodp": "autodp",
    "each round counted once, PLD": "pld",
}


def epsilons(job: TaskJob, dataset: str, clients: int, cohorts: Sequence[int]) -> Iterator[Found]:
    """Epsilons by cohort: the paper's arithmetic, and the cost of 1,000 rounds."""
    for cohort, (model, backend) in itertools.product(
        cohorts[:1] if job.quick else cohorts, BACKENDS.items()
    ):
        accountant = Accountant(backend)
        accountant.step(
            NoisyRound("gaussian", FixedSize(cohort, clients), "replace-one", NOISE), ROUNDS
        )
        for delta in DELTAS:
            metric = f"epsilon, q={cohort}/{clients}, delta={delta:g}"
            yield Found(dataset, model, metric, accountant.epsilon(delta).epsilon)


def round_time(
    job: TaskJob, dataset: str, experiment: str, row: str, clients: int, set: Sequence[str]
) -> list[Found]:
    """Median milliseconds of training per round, without the first round."""
    train = RunFolder(finished(job, experiment, set).folder).timings()["train"].iloc[1:]
    milliseconds = 1000 * float(train.median())
    return [Found(dataset, row, f"ms a round, {clients} clients", milliseconds)]


# Similarity of UPC-SDG's substitutes to the rows that they replace (figure 4).


def similarity(
    job: TaskJob, dataset: str, experiment: Mapping[str, Any], row: str, set: Sequence[str]
) -> list[Found]:
    """Mean similarity by the paper's definition 2."""
    perturbed = Population.of(job.experiment({**experiment, "rounds": 1}, set)).perturbed
    by_gamma = {} if perturbed is None else perturbed.figures[FIGURE]
    return [Found(dataset, row, "similarity", kinds["paper"]) for kinds in by_gamma.values()]


# DP-VAE: runs with the users' own noise, whole histories, and other systems.

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
        means = _whole_histories(node, with_parameters(result).parameters)
        yield from (Found(dataset, row, name, value) for name, value in means.items())


def _whole_histories(node: Node, parameters: Mapping[str, np.ndarray]) -> dict[str, float]:
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


def trained_within_bounds(
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
