# SPDX-License-Identifier: Apache-2.0
"""Properties of recommendation lists beyond accuracy: coverage, concentration and popularity.

Accuracy is a mean over users; these look at all users' lists of length k together, known items left
out.

    coverage@k          share of the catalogue that is in at least one list
    gini@k              Gini coefficient of how often each item is in a list: 0 if all are equally
                        often, 1 - 1/items if all lists hold the same single item
    popularity@k        mean over users of the mean popularity of the items in the list, which is
                        the share of training users who like an item
    popularity-lift@k   that mean divided by the same mean over the user's known liked items,
                        minus 1 (Abdollahpouri et al. 2019); mean over users who have such items

A user without a held-out positive counts like any other: a list is made for everybody who is
evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.metrics.ranking import best_items


class ListStatistics:
    """Accumulates statistics of the lists of blocks of users.

    Args:
        popularity: `float [items]`, share of the training users who like each item, in [0, 1].
        ks: lengths of the lists, each >= 1.
    """

    def __init__(self, popularity: Tensor, ks: Sequence[int]) -> None:
        self._popularity = popularity.double()
        self._ks = tuple(ks)
        self._counts = {k: torch.zeros(len(popularity), dtype=torch.int64) for k in ks}
        self._means: dict[int, list[Tensor]] = {k: [] for k in ks}
        self._known: list[Tensor] = []

    def add(self, scores: Tensor, known: Tensor, liked: Tensor) -> None:
        """Count a block of users.

        Args:
            scores: `float [users, items]`, higher is better.
            known: `bool [users, items]`, items that are left out of the list.
            liked: `bool [users, items]`, the known items that the user likes.
        """
        longest = min(max(self._ks), scores.shape[1])
        candidates = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(known, -torch.inf)
        lists = best_items(candidates, longest)
        offered = (~known).sum(1, keepdim=True)
        # a user who knows nearly all items has a shorter list
        listed = torch.arange(longest) < offered
        shares = self._popularity[lists] * listed
        users, items = liked.nonzero(as_tuple=True)
        amounts = torch.zeros(len(liked), dtype=torch.float64).index_add_(
            0, users, self._popularity[items]
        )
        self._known.append(amounts / torch.bincount(users, minlength=len(liked)))
        for k in self._ks:
            inside = listed[:, :k]
            self._counts[k] += torch.bincount(lists[:, :k][inside], minlength=len(self._popularity))
            self._means[k].append(shares[:, :k].sum(1) / inside.sum(1))

    def result(self) -> dict[str, float]:
        """The four metrics for each k; NaN if there are no lists."""
        found = {}
        known = torch.cat(self._known) if self._known else torch.zeros(0)
        for k in self._ks:
            own = torch.cat(self._means[k]) if self._means[k] else torch.zeros(0)
            found[f"coverage@{k}"] = float((self._counts[k] > 0).double().mean())
            found[f"gini@{k}"] = gini(self._counts[k])
            found[f"popularity@{k}"] = float(own.nanmean())
            found[f"popularity-lift@{k}"] = float((own / known - 1).nanmean())
        return found


def gini(counts: Tensor) -> float:
    """Gini coefficient of amounts >= 0, `[n]`; NaN where all are zero.

    The mean difference of two of them, over twice their mean.
    """
    ascending = counts.double().sort().values
    number = len(ascending)
    total = ascending.sum()
    place = torch.arange(1, number + 1, dtype=torch.float64)
    return (
        float((2 * place - number - 1) @ ascending / (number * total))
        if total > 0
        else float("nan")
    )
