# SPDX-License-Identifier: Apache-2.0
"""Measures of reproduced tables: attacks, single systems, data and networks, epsilons and times."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedrec.attacks.audit import audit_one_rating
from fedrec.baselines.private.pnbm import DpsgdPnbmConfig
from fedrec.components import registry
from fedrec.components.registry import PERTURBATION
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population, read_interactions
from fedrec.data.splits.rules import BoundedConfig
from fedrec.experiment.sections import component_of
from fedrec.perturb.substitutes import FIGURE
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize
from fedrec.rng import torch_stream
from fedrec.runs.folder import RunFolder
from simulations.attacks.base import run_attack
from simulations.studies.declaration import Found, TaskJob
from simulations.studies.runs import finished, values

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
