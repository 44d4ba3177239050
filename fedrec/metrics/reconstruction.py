# SPDX-License-Identifier: Apache-2.0
"""Reconstruction of a user's whole history: the catalogue is ranked with nothing masked. This does
not measure recommendation, because most relevant items are part of the model's input. It exists
because it alone explains how Fang et al. (DP-VAE, table 8) can print a Recall@20 above their
Recall@50: with `hits / min(|Q|, R)` (their equation 22) that needs most users to have more than 20
items in Q. Its names begin with `reconstruction-`, so that its figures cannot be mistaken for those
of held-out items.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.errors import ExperimentError

PREFIX = "reconstruction-"


def reconstruction_metrics(scores: Tensor, history: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Recall and NDCG of the whole catalogue's list against the whole history.

    Args:
        scores: `float [users, items]`, higher is better.
        history: `bool [users, items]`, liked items of the user in any part of the data.
        ks: lengths of the lists, each >= 1.

    Returns:
        `float64 [users]` for each of `"reconstruction-recall@k"`, hits over the smaller of |Q| and
        k, and `"reconstruction-ndcg@k"`, over the best list of that length. NaN for a user without
        history.

    Raises:
        ExperimentError: a score is NaN.
    """
    if bool(torch.isnan(scores).any()):
        raise ExperimentError(
            "the scores of a model cannot be ranked",
            expected="finite scores",
            got="NaN",
            fix="lower the learning rate",
        )
    longest = min(max(ks), scores.shape[1])
    hits = history.gather(
        1, scores.sort(dim=1, descending=True, stable=True).indices[:, :longest]
    ).double()
    gains = (
        torch.arange(2, longest + 2, dtype=torch.float64, device=scores.device).log2().reciprocal()
    )
    recalled = hits.cumsum(1)
    dcg = (hits * gains).cumsum(1)
    ideal = gains.cumsum(0)
    number = history.sum(1)
    found = {}
    for k in ks:
        end = min(k, longest) - 1
        best = number.clamp(max=min(k, longest))
        nothing = torch.where(number > 0, 0.0, torch.nan)
        found[f"{PREFIX}recall@{k}"] = recalled[:, end] / best.clamp(min=1) + nothing
        found[f"{PREFIX}ndcg@{k}"] = dcg[:, end] / ideal[best.clamp(min=1) - 1] + nothing
    return found
