# SPDX-License-Identifier: Apache-2.0
"""Centralised baselines under the protocol of the federated systems: same rows, same lists, same metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.metrics.ranking import ranking_metrics
from fedrec.registry import BASELINE, resolve

Names = Sequence[str] | Mapping[str, Mapping[str, Any]]


def evaluate_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
    clients: np.ndarray | None = None,
    block: int = 256,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients and rank each held-out client's items.

    A baseline is fitted to the positive train rows of the training clients; a held-out client is known to it by the
    positives of its own train rows. A positive that occurs in several held-out rows counts that often in `hits@k` and
    `ndcg@k`.

    Args:
        names: names of baselines, or a mapping from names to settings; a name alone takes the defaults.
        population: the clients; its task is ranking.
        held_out: the part that is ranked.
        ks: lengths of the lists.
        clients: `int64`, the held-out clients to evaluate; default: all.
        block: clients scored at a time; memory grows with block x items.

    Returns:
        For each baseline, the mean of each ranking metric over the clients with a held-out positive.

    Raises:
        ExperimentError: a name is unknown, settings are wrong, or a baseline refuses the catalogue.
        DataError: no held-out row is positive.
    """
    settings = names if isinstance(names, Mapping) else {name: {} for name in names}
    baselines = {name: _make(name, options) for name, options in settings.items()}
    clients = population.evaluated_clients(held_out) if clients is None else clients
    if not len(clients):
        raise DataError(
            f"{population.interactions.name} has nothing to rank",
            expected=f"at least one positive {held_out} row",
            got="none",
            fix="hold out a larger share, or lower the rating above which a row is positive",
        )
    training = _histories(population, population.partition.training_clients)
    for baseline in baselines.values():
        baseline.fit(training)
    tables: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in baselines}
    for start in range(0, len(clients), block):
        part = clients[start : start + block]
        for name, metrics in _block(baselines, population, part, held_out, ks).items():
            tables[name].append(metrics)
    return {name: _means(blocks) for name, blocks in tables.items()}


def _block(
    baselines: Mapping[str, Baseline],
    population: Population,
    clients: np.ndarray,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
) -> dict[str, dict[str, torch.Tensor]]:
    """Metrics of each baseline for a block of clients, `[clients]` each."""
    lists = population.held_out(clients, held_out)
    masks = {name: torch.from_numpy(getattr(lists, name)) for name in ("seen", "known", "relevant")}
    weights = None if lists.weight is None else torch.from_numpy(lists.weight)
    liked = _histories(population, clients)
    return {
        name: ranking_metrics(baseline.scores(liked), **masks, ks=ks, weights=weights)
        for name, baseline in baselines.items()
    }


def _histories(population: Population, clients: np.ndarray) -> Histories:
    return Histories(population.interactions.num_items, *population.liked(clients))


def _make(name: str, options: Mapping[str, Any]) -> Baseline:
    baseline = resolve(BASELINE, name)
    return baseline(baseline.Config.parse(options, at=f"baselines.{name}"))


def _means(blocks: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    return {metric: float(torch.cat([block[metric] for block in blocks]).nanmean()) for metric in blocks[0]}
