# SPDX-License-Identifier: Apache-2.0
"""Ranking against a few sampled items (He et al. 2017, section 4.1), in expectation over the
sample.

NCF and most federated recommenders rank each held-out positive among n items (99) that are drawn
from those that its user never interacted with. With N such items of which g score higher, the
number of higher ones in a sample without replacement is hypergeometric, and the rank is that number
plus one. So the expected `hits-of-M@k` and `ndcg-of-M@k`, with M = n + 1 the length of the list,
follow from the full ranking: no figure here depends on which items were drawn. Items of equal score
are ordered at random, as in `fedrec.metrics.ranking`; a constant score gets k / M hits.

Sampled metrics are not consistent with full ones (Krichene and Rendle 2020): they are provided for
comparison with published figures, in addition to the full ranking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sampled_metrics(
    scores: Tensor,
    *,
    seen: Tensor,
    relevant: Tensor,
    ks: Sequence[int],
    sampled: int,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Expected metrics of each user.

    Args:
        scores: `float [users, items]`, higher is better.
        seen: `bool [users, items]`, items of the user in any part; contains `relevant`.
        relevant: `bool [users, items]`, held-out positives, each ranked on its own.
        ks: lengths of the lists' heads, each >= 1.
        sampled: n, items drawn for each positive, >= 1; all never-seen items where these are fewer.
        weights: `[users, items]`, how often each positive counts; default: once.

    Returns:
        `float64 [users]` for each of `"hits-of-M@k"` and `"ndcg-of-M@k"`, M = n + 1; NaN without a
        positive.
    """
    users, items = relevant.nonzero(as_tuple=True)
    weight = torch.ones(len(users), dtype=torch.float64, device=scores.device)
    if weights is not None:
        weight = weights[users, items].double()
    higher, equal, available = _competitors(scores, seen, users, items)
    total = _by_user(weight, users, len(scores))
    found = {}
    chances = _chances(higher, equal, available, min(max(ks), sampled + 1), sampled)
    gains = (
        1 / torch.arange(2, chances.shape[1] + 2, dtype=torch.float64, device=scores.device).log2()
    )
    for k in ks:
        head = chances[:, :k]
        found[f"hits-of-{sampled + 1}@{k}"] = (
            _by_user(weight * head.sum(1), users, len(scores)) / total
        )
        found[f"ndcg-of-{sampled + 1}@{k}"] = (
            _by_user(weight * (head @ gains[:k]), users, len(scores)) / total
        )
    return found


def _competitors(
    scores: Tensor, seen: Tensor, users: Tensor, items: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of never-seen items above and tied with each positive, and in total, each `int64
    [positives]`."""
    higher = torch.empty_like(users)
    equal = torch.empty_like(users)
    # The n-th positives of all users are compared with whole rows at once.
    counts = torch.bincount(users, minlength=len(scores))
    place = torch.arange(len(users), device=users.device) - (counts.cumsum(0) - counts)[users]
    never = ~seen
    for number in range(int(counts.max()) if len(users) else 0):
        chosen = (place == number).nonzero()[:, 0]
        own = users[chosen]
        value = scores[users[chosen], items[chosen]][:, None]
        rows = scores[own]
        free = never[own]
        higher[chosen] = ((rows > value) & free).sum(1)
        equal[chosen] = ((rows == value) & free).sum(1)
    return higher, equal, never.sum(1)[users]


def _chances(
    higher: Tensor, equal: Tensor, available: Tensor, longest: int, sampled: int
) -> Tensor:
    """`float64 [positives, longest]`: probabilities that 0 to longest - 1 items of a sample are
    ranked above.

    Of the items tied with a positive, a random number is above: each number from 0 to all is
        equally likely.
    """
    found = _hypergeometric(higher.double(), available.double(), longest, sampled)
    for row in (equal > 0).nonzero()[:, 0].tolist():
        above = torch.arange(int(equal[row]) + 1, device=higher.device).double() + higher[row]
        found[row] = _hypergeometric(
            above, available[row].double().expand_as(above), longest, sampled
        ).mean(0)
    return found


def _hypergeometric(higher: Tensor, available: Tensor, longest: int, sampled: int) -> Tensor:
    """`float64 [n, longest]`: probabilities of j `higher` items in a sample of the `available`
    ones."""
    drawn = available.clamp(max=sampled)[:, None]
    higher = higher[:, None]
    available = available[:, None]
    j = torch.arange(longest, dtype=torch.float64, device=higher.device)[None]
    rest = available - higher
    possible = (j <= higher) & (j <= drawn) & (drawn - j <= rest)
    ways = _log_choose(higher, j) + _log_choose(rest, drawn - j) - _log_choose(available, drawn)
    return torch.where(possible, ways.exp(), 0.0)


def _log_choose(whole: Tensor, part: Tensor) -> Tensor:
    """Logarithm of the binomial coefficient; arbitrary if it is not defined."""
    part = part.clamp(min=0)
    return (
        torch.lgamma(whole + 1)
        - torch.lgamma(part + 1)
        - torch.lgamma((whole - part).clamp(min=0) + 1)
    )


def _by_user(values: Tensor, users: Tensor, num_users: int) -> Tensor:
    return torch.zeros(num_users, dtype=torch.float64, device=values.device).index_add_(
        0, users, values
    )
