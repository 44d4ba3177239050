# SPDX-License-Identifier: Apache-2.0
"""What the papers state of their data and networks: PrivRec's figure 2, DP-VAE's tables 2 and 3,
and UPC-SDG's table 1. Nothing is trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedrec.components import registry
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population, read_interactions
from fedrec.data.splits.bounded import BoundedConfig
from fedrec.rng import torch_stream
from simulations.study.study import Found, TaskJob

BINS = (20, 50, 100, 200, 500, 1000)
"""Upper ends of figure 2's bins of visited items, inclusive; the last bin has no end."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def activity(job: TaskJob, name: str, dataset: str) -> Iterator[Found]:
    """How many users have how many items."""
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
    """The size of a data set."""
    data = _interactions(job, name)
    yield from _sizes(dataset, "", data.num_users, data.num_items, len(data), "interactions")


def bounded(job: TaskJob, name: str, dataset: str) -> Iterator[Found]:
    """Sizes of a data set as it is and with users' rows bounded by DP-VAE's theorem 1."""
    data = _interactions(job, name)
    bounds = BoundedConfig()
    counts = np.bincount(data.users, minlength=data.num_users)
    kept = counts[counts >= bounds.bound(bounds.p_min)].clip(max=math.floor(bounds.bound(1.0)))
    yield from _sizes(dataset, "OL", data.num_users, data.num_items, len(data), "ratings")
    yield from _sizes(dataset, "PD", len(kept), data.num_items, int(kept.sum()), "ratings")


def network(job: TaskJob, experiment: str, dataset: str) -> Iterator[Found]:
    """Sizes of an autoencoder and settings of its training."""
    loaded = job.experiment(experiment)
    schema = Population.of(loaded).schema()
    own: Any = loaded.settings(registry.MODEL)
    model = registry.resolve(registry.MODEL, loaded.model.name)(own, schema)
    step: Any = loaded.settings(registry.STEP)
    sampler: Any = loaded.settings(registry.SAMPLER)
    parameters = model.initial(torch_stream(loaded.seed, "init")).values()
    numbers = {
        "batch size": sampler.cohort,
        "epochs": sampler.participations,
        "beta": step.beta,
        "latent dimension": own.latent,
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
