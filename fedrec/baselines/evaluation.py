# SPDX-License-Identifier: Apache-2.0
"""Centralised baselines under the protocol of the federated systems: same rows, same lists, same
metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedrec.baselines.base import RatingBaseline
from fedrec.baselines.protocol import (
    RankingProtocol,
    RatingProtocol,
    Settings,
    make_baseline,
    settings_that_fit,
    stated_privacy,
)
from fedrec.data.population import Population
from fedrec.experiment.schema import Masked
from fedrec.metrics.rating import rating_errors

_LOG = logging.getLogger("fedrec")

Names = Sequence[str] | Mapping[str, Mapping[str, Any]]


def evaluate_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
    clients: np.ndarray | None = None,
    block: int = 256,
    protocol: Literal["reconstruction"] | None = None,
    masked: Masked = "real",
    say: Callable[[str], None] = _LOG.warning,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients and rank each held-out client's items: means over
    the clients.

    A baseline for which the data are too large is skipped, and replaced by its `stand_in`.

    Args:
        names: names of baselines, or a mapping from names to settings; a name alone takes the
            defaults. A mapping may have names of its own, with the baseline's name among the
            settings as `name`.
        population: the clients; its task is ranking.
        held_out: see `RankingProtocol`, as all following arguments.
        ks: lengths of the lists.
        clients: `int64 [clients]`, the held-out clients to evaluate; default: all.
        block: clients scored at a time; memory grows with block x items.
        protocol: `reconstruction` ranks the whole catalogue against the whole history instead.
        masked: which known items whole lists leave out, where training rows are perturbed.
        say: called with a line for each baseline that is skipped, with the reason; default: a
            warning in the log.

    Returns:
        For each baseline, the mean of each ranking metric over the clients with a held-out
        positive, and the metrics of `fedrec.metrics.beyond_accuracy`.

    Raises:
        ExperimentError: a name is unknown, settings are wrong, or a baseline refuses the catalogue.
        DataError: no held-out row is positive.
    """
    lists = RankingProtocol(
        population,
        held_out=held_out,
        ks=ks,
        clients=clients,
        block=block,
        protocol=protocol,
        masked=masked,
    )
    found = {}
    for name, options in _that_fit(names, lists, say).items():
        baseline = make_baseline(name, options)
        statistics = lists.statistics()
        lists.fit(baseline)
        metrics = lists.rank(baseline, statistics=statistics)
        found[name] = {metric: float(values.nanmean()) for metric, values in metrics.items()}
        found[name] |= statistics.result() if statistics is not None else {}
    return found


def evaluate_rating_baselines(
    names: Names,
    population: Population,
    *,
    held_out: Literal["test", "validation"],
    clients: np.ndarray | None = None,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients' ratings and predict the held-out ones.

    Like the federated systems, they are trained on perturbed rows if devices are, and tested on
    real rows.

    Args:
        names: see `evaluate_baselines`; those that predict no ratings are left out.
        population: the clients; its task is rating.
        held_out: the part that is predicted.
        clients: `int64 [clients]`, the held-out clients to evaluate; default: all.

    Returns:
        For each baseline `mae` and `rmse`, pooled over all held-out rows; of those whose paper
        states a guarantee also `nominal-epsilon` and `epsilon`, the exact one, see
        `fedrec.privacy.stated`. Their caveats are logged.
    """
    made = {name: make_baseline(name, options) for name, options in _settings(names).items()}
    protocol = RatingProtocol(population, held_out=held_out, clients=clients)
    return {
        name: rating_errors(*protocol.measure(baseline)[1:]) | stated_privacy(name, baseline)
        for name, baseline in made.items()
        if isinstance(baseline, RatingBaseline)
    }


def _that_fit(names: Names, lists: RankingProtocol, say: Callable[[str], None]) -> Settings:
    return settings_that_fit(
        _settings(names), lists.training.num_users, lists.training.num_items, say
    )


def _settings(names: Names) -> Settings:
    return names if isinstance(names, Mapping) else {name: {} for name in names}
