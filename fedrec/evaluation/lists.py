# SPDX-License-Identifier: Apache-2.0
"""Metrics from scores of the catalogue, for federated and centralised systems and attacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.data.population import Population
from fedrec.evaluation.tables import NEW, NEW_OF_ALL, OLD, UNTRAINED, Evaluated, Metrics
from fedrec.experiment.schema import TARGET_METRICS
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.ranks import RankedBlock

_Masks = dict[str, Tensor]


class HeldOutLists:
    """Ranked lists of a population's users with held-out items.

    A positive that occurs in several held-out rows counts that often in single-positive lists. With
    `protocol = "reconstruction"` the whole history is held out, and nothing is left out.

    Args:
        population: the clients.
        metrics: metrics of the experiment.
        settings: `[evaluation]` of the experiment.
    """

    def __init__(
        self, population: Population, metrics: Metrics, settings: EvaluationConfig
    ) -> None:
        self._population = population
        self._metrics = metrics
        self._settings = settings
        self._untrained = torch.tensor(population.untrained_items)
        self._new = population.new_items(settings.held_out)

    def measure(self, clients: np.ndarray, scores: Tensor, *, sums: bool = False) -> Evaluated:
        """Compute the metrics of clients.

        Args:
            clients: `int64 [clients]`.
            scores: `float [clients, items]`, higher is better.
            sums: whether to add the sums that metrics of all lists need.
        """
        sums = sums and bool(self._metrics.of_lists)
        scores = scores.cpu().contiguous()
        masks = self._masks(clients)
        block = self._block(scores, masks)
        if sums:
            block.popularity = torch.tensor(self._population.popularity)
            liked = self._population.rows(clients, positive=True)
            block.liked = torch.from_numpy(liked.mask())
        columns = self._metrics.of_block(block) | self._of_untrained_items(block)
        columns |= self._of_new_items(scores, masks)
        return Evaluated(clients, columns, self._metrics.sums(block) if sums else {})

    def _block(self, scores: Tensor, masks: _Masks) -> RankedBlock:
        """The lists of some clients, with the targets of an adversary."""
        adversary = self._population.adversary
        targets = None if adversary is None else torch.from_numpy(adversary.targets)
        return RankedBlock(scores, ks=self._metrics.ks, targets=targets, **masks)

    def _of_untrained_items(self, block: RankedBlock) -> dict[str, np.ndarray]:
        """Metrics over only held-out items without training rows, NaN for clients without one;
        empty if no client has one. Other held-out items stay in the lists."""
        users, items, _ = block.positives
        untrained = self._untrained[items]
        if not untrained.any() or self._settings.protocol == "reconstruction":
            return {}
        wanted = torch.zeros_like(block.relevant)
        wanted[users[untrained], items[untrained]] = True
        without = ~wanted.any(1).numpy()
        columns = self._metrics.of_block(block.about(wanted))
        return {
            UNTRAINED + name: np.where(without, np.nan, values)
            for name, values in columns.items()
            if name.partition("@")[0] not in TARGET_METRICS  # of no held-out item
        }

    def _of_new_items(self, scores: Tensor, masks: _Masks) -> dict[str, np.ndarray]:
        """Metrics of new items, ranked alone and among all items, and of the others, ranked alone;
        NaN for clients without a held-out new item. Nothing without new items."""
        if self._new is None or self._settings.protocol == "reconstruction":
            return {}
        new = torch.from_numpy(self._new)
        nothing = torch.zeros_like(new)
        columns: dict[str, np.ndarray] = {}
        without = ~(masks["relevant"] & new).any(1).numpy()
        for prefix, out, counted in (
            (NEW, ~new, new),
            (NEW_OF_ALL, nothing, new),
            (OLD, new, ~new),
        ):
            changed = {name: masks[name] | out for name in ("seen", "masked")}
            changed["relevant"] = masks["relevant"] & counted
            values = self._metrics.of_block(self._block(scores, {**masks, **changed}))
            columns |= {prefix + name: np.where(without, np.nan, v) for name, v in values.items()}
        return columns

    def _masks(self, clients: np.ndarray) -> _Masks:
        if self._settings.protocol == "reconstruction":
            rows = self._population.rows(clients, "all", positive=True)
            history = torch.from_numpy(rows.mask())
            return {"seen": history, "known": torch.zeros_like(history), "relevant": history}
        lists = self._population.held_out(clients, self._settings.held_out)
        arrays = {
            "seen": lists.seen,
            "known": lists.known,
            "relevant": lists.relevant,
            "masked": lists.masked(self._settings.masked),
            "weights": lists.weight,
        }
        return {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}


def ranking_metrics(
    scores: Tensor,
    *,
    ks: Sequence[int] = (5, 10, 20, 30),
    sampled_items: int | None = None,
    **masks: Any,
) -> dict[str, np.ndarray]:
    """Per-user metrics, `float64 [users]` each, from scores `float [users, items]`; for `masks` see
    `RankedBlock`."""
    settings = EvaluationConfig(ks=tuple(ks), sampled_items=sampled_items)
    return Metrics("ranking", settings).of_block(RankedBlock(scores, ks=ks, **masks))
