# SPDX-License-Identifier: Apache-2.0
"""Centralised baselines under the protocol of the federated systems: same rows, same lists, same metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.blame import Unchanged, blaming, refuse_wrong
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.rating import rating_errors
from fedrec.metrics.reconstruction import reconstruction_metrics
from fedrec.registry import BASELINE, resolve

Names = Sequence[str] | Mapping[str, Mapping[str, Any]]

log = logging.getLogger("fedrec")


def evaluate_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
    clients: np.ndarray | None = None,
    block: int = 256,
    protocol: Literal["reconstruction"] | None = None,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients and rank each held-out client's items: means over the clients.

    For arguments and errors see `measure_baselines`.

    Returns:
        For each baseline, the mean of each ranking metric over the clients with a held-out positive.
    """
    measured = measure_baselines(
        names, population, held_out=held_out, ks=ks, clients=clients, block=block, protocol=protocol
    )
    return {
        name: {metric: float(values.nanmean()) for metric, values in metrics.items()}
        for name, metrics in measured.items()
    }


def measure_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
    clients: np.ndarray | None = None,
    block: int = 256,
    protocol: Literal["reconstruction"] | None = None,
) -> dict[str, dict[str, torch.Tensor]]:
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
        protocol: `reconstruction` ranks the whole catalogue against the whole history instead.

    Returns:
        For each baseline and ranking metric `float64 [clients]`; NaN for a client without a held-out positive.

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
        with blaming(BASELINE.name, baseline, "in fit"):
            untouched = Unchanged({"items": training.items, "offsets": training.offsets})
            baseline.fit(training)
            untouched.refuse(BASELINE.name, baseline, "in fit")
    tables: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in baselines}
    for start in range(0, len(clients), block):
        part = clients[start : start + block]
        measured = (
            _block(baselines, population, part, held_out, ks)
            if protocol is None
            else _reconstructed(baselines, population, part, ks)
        )
        for name, metrics in measured.items():
            tables[name].append(metrics)
    return {
        name: {metric: torch.cat([block[metric] for block in blocks]) for metric in blocks[0]}
        for name, blocks in tables.items()
    }


def evaluate_rating_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    clients: np.ndarray | None = None,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients' ratings and predict the held-out ones.

    Like the systems, they learn from perturbed rows where devices do, and are tested on real ones.

    Args:
        names: see `evaluate_baselines`; those that predict no ratings are left out.
        population: the clients; its task is rating.
        held_out: the part that is predicted.
        clients: `int64`, the held-out clients to evaluate; default: all.

    Returns:
        For each baseline `mae` and `rmse`, pooled over all held-out rows; of those whose paper states a guarantee also
        `nominal-epsilon` and `epsilon`, the exact one, see `fedrec.privacy.stated`. What these do not say is logged.
    """
    settings = names if isinstance(names, Mapping) else {name: {} for name in names}
    made = {name: _make(name, options) for name, options in settings.items()}
    clients = population.evaluated_clients(held_out) if clients is None else clients
    training = _ratings(population, population.partition.training_clients)
    found = {}
    for name, baseline in made.items():
        if isinstance(baseline, RatingBaseline):
            baseline.fit_ratings(training)
            users, items, actual = population.held_out_rated(clients, held_out)
            predicted = baseline.predict(_ratings(population, clients), users, items)
            found[name] = {**rating_errors(predicted, actual), **_stated(name, baseline)}
    return found


def _stated(name: str, baseline: Baseline) -> dict[str, float]:
    """What a fitted baseline's paper states of its privacy, and what holds; the words go to the log."""
    stated = baseline.stated()
    if stated is None:
        return {}
    for line in stated.lines():
        log.warning("%s: %s", name, line)
    return {"nominal-epsilon": stated.nominal, "epsilon": stated.exact}


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
        name: ranking_metrics(_scores(baseline, liked), **masks, ks=ks, weights=weights)
        for name, baseline in baselines.items()
    }


def _scores(baseline: Baseline, liked: Histories) -> torch.Tensor:
    """A baseline's scores of the catalogue for some users, `float32 [users, items]`."""
    untouched = Unchanged({"items": liked.items, "offsets": liked.offsets})
    with blaming(BASELINE.name, baseline, "in scores"):
        scores = baseline.scores(liked)
        expected, shape = (liked.num_users, liked.num_items), tuple(getattr(scores, "shape", ()))
        if not isinstance(scores, torch.Tensor) or shape != expected:
            got = f"{type(scores).__name__} {list(shape)}"
            refuse_wrong(BASELINE.name, baseline, "in scores", expected=f"a tensor {list(expected)}", got=got)
        if bool(torch.isnan(scores).any()):
            refuse_wrong(BASELINE.name, baseline, "in scores", expected="numbers", got="NaN")
        untouched.refuse(BASELINE.name, baseline, "in scores")
    return scores


def _reconstructed(
    baselines: Mapping[str, Baseline], population: Population, clients: np.ndarray, ks: tuple[int, ...]
) -> dict[str, dict[str, torch.Tensor]]:
    """The same of whole histories."""
    history, liked = torch.from_numpy(population.whole_history(clients)), _histories(population, clients)
    return {name: reconstruction_metrics(_scores(one, liked), history, ks) for name, one in baselines.items()}


def _histories(population: Population, clients: np.ndarray) -> Histories:
    return Histories(population.interactions.num_items, *population.liked(clients))


def _ratings(population: Population, clients: np.ndarray) -> Ratings:
    users, items, values = population.rated(clients)
    data = population.interactions
    return Ratings(data.num_users, data.num_items, users, items, values.astype(np.float64))


def _make(name: str, options: Mapping[str, Any]) -> Baseline:
    baseline = resolve(BASELINE, name)
    settings = baseline.Config.parse(options, at=f"baselines.{name}")
    with blaming(BASELINE.name, baseline, "when it was made"):
        return baseline(settings)
