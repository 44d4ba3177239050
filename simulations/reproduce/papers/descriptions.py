# SPDX-License-Identifier: Apache-2.0
"""What the papers state of their data and networks: PrivRec's figure 2, DP-VAE's tables 2 and 3,
and UPC-SDG's table 1. Nothing is trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simulations.reproduce.quick import shrunk
from simulations.reproduce.study import Found, Job, Study, Task

if TYPE_CHECKING:
    from fedrec.data.interactions import Interactions
    from fedrec.experiment.schema import Experiment

BINS = (20, 50, 100, 200, 500, 1000)
"""Upper ends of figure 2's bins of visited items, inclusive; the last bin has no end."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SIZES = "ml-100k"
ELSEWHERE = "The other data sets are not among the data at hand; their rows stay empty."


def privrec() -> Iterator[Study]:
    """Figure 2: how many users have how many items."""
    yield Study(
        "privrec",
        "figure2",
        "Users by the number of visited items (MovieLens-1M, Frappe)",
        ("ml-1m", "frappe"),
        (_activity("MovieLens-1M", "ml-1m"), _activity("Frappe", "frappe")),
    )


def dp_vae() -> Iterator[Study]:
    """Table 2 (data sets, whole and bounded by theorem 1) and table 3 (the network)."""
    yield Study(
        "dp-vae",
        "table2",
        "Data sets as they are (OL) and with users' rows bounded by theorem 1 (PD)",
        (SIZES,),
        (Task("ml-100k", 3, _bounded, seeded=False),),
        (ELSEWHERE, "PD bounds users' rows; the paper's rule for items is not given."),
    )
    yield Study(
        "dp-vae",
        "table3",
        "Network and settings on MovieLens-100K, as shipped",
        (SIZES,),
        (Task("ml-100k", 3, _network, seeded=False),),
        (
            ELSEWHERE,
            "Settings of `dpvae-ml100k`: a batch is the users of a round, and as many epochs as a "
            "user sends uploads.",
        ),
    )


def upc_sdg() -> Iterator[Study]:
    """Table 1: the data sets."""
    yield Study(
        "upc-sdg",
        "table1",
        "Data sets (Office, Gowalla)",
        ("amazon-upc", "gowalla"),
        (_statistics("Office", "amazon-upc", 3), _statistics("Gowalla", "gowalla", 5)),
        (ELSEWHERE, "The authors' files of Office have 2,406 items."),
    )


def _activity(dataset: str, name: str) -> Task:
    def work(job: Job) -> list[Found]:
        data = _interactions(job, name)
        pairs = np.unique(data.users * data.num_items + data.items)
        counts = np.bincount(pairs // data.num_items, minlength=data.num_users)
        ends = (0, *BINS, math.inf)
        found = [
            Found(
                dataset, "users", _bin(low, high), float(((low < counts) & (counts <= high)).sum())
            )
            for low, high in itertools.pairwise(ends)
        ]
        found += [
            Found(dataset, "items of a user", f"quantile {share:g}", float(value))
            for share, value in zip(QUANTILES, np.quantile(counts, QUANTILES), strict=True)
        ]
        return [*found, Found(dataset, "items of a user", "mean", float(counts.mean()))]

    return Task(name, 5, work, seeded=False)


def _bin(low: float, high: float) -> str:
    return f"more than {low:g} items" if math.isinf(high) else f"{low + 1:g} to {high:g} items"


def _bounded(job: Job) -> list[Found]:
    from fedrec.data.splits.bounded import BoundedConfig

    data = _interactions(job, SIZES)
    bounds = BoundedConfig()
    counts = np.bincount(data.users, minlength=data.num_users)
    kept = counts[counts >= bounds.bound(bounds.p_min)].clip(max=math.floor(bounds.bound(1.0)))
    whole = _sizes("ML-100K", "OL", data.num_users, data.num_items, len(data), "ratings")
    return [
        *whole,
        *_sizes("ML-100K", "PD", len(kept), data.num_items, int(kept.sum()), "ratings"),
    ]


def _network(job: Job) -> list[Found]:
    from fedrec.components import registry
    from fedrec.data.population import Population
    from fedrec.experiment.loading import read
    from fedrec.rng import torch_stream

    experiment = _loaded(job, read("dpvae-ml100k", ()))
    schema = Population.of(experiment).schema()
    own: Any = experiment.settings(registry.MODEL)
    model = registry.resolve(registry.MODEL, experiment.model.name)(own, schema)
    parameters = model.initial(torch_stream(experiment.seed, "init"))
    step: Any = experiment.settings(registry.STEP)
    sampler: Any = experiment.settings(registry.SAMPLER)
    numbers = {
        "batch size": sampler.cohort,
        "epochs": sampler.participations,
        "beta": step.beta,
        "latent dimension": own.latent,
        "parameters": sum(value.numel() for value in parameters.values()),
    }
    return [Found("ML-100K", "VAE", name, float(number)) for name, number in numbers.items()]


def _statistics(dataset: str, name: str, seconds: float) -> Task:
    def work(job: Job) -> list[Found]:
        data = _interactions(job, name)
        return list(_sizes(dataset, "", data.num_users, data.num_items, len(data), "interactions"))

    return Task(name, seconds, work, seeded=False)


def _sizes(
    dataset: str, model: str, users: int, items: int, rows: int, word: str
) -> Iterator[Found]:
    """Users, items, rows and the share of pairs without a row, in per cent (equation 21)."""
    sparsity = 100 * (1 - rows / (users * items))
    numbers = {"users": users, "items": items, word: rows, "sparsity in %": sparsity}
    return (Found(dataset, model, name, float(number)) for name, number in numbers.items())


def _interactions(job: Job, name: str) -> Interactions:
    from fedrec.data.population import read_interactions

    table = {"name": "description", "dataset": {"name": name}, "split": {"name": "ratio"}}
    return read_interactions(_loaded(job, {**table, "evaluation": {"baselines": ["popularity"]}}))


def _loaded(job: Job, table: dict[str, Any]) -> Experiment:
    from fedrec.experiment.loading import load

    return load(shrunk(table) if job.quick else table, ())
