# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics for a block of users, in two definitions that must not be mixed up.

*Single-positive lists* (PrivRec, section 3.3, equations 12 and 13). Every held-out positive is
ranked on its own against all items that its user never interacted with, in any part; the user's
other positives are not in the list. `hits@k` is the share of held-out positives that reach the
first k places, `ndcg@k` the mean over them of 1 / log2(rank + 1), or 0 beyond k; a list has one
relevant item, so the ideal DCG is 1. Equation 13 does not say how a user's lists are combined;
their mean is within [0, 1] and at most `hits@k`. The paper's tables grow faster in k than this
definition can (by more than the change of hits divided by log2(k + 2)), so compare `hits@k` with
them only.

Ties there are resolved by expectation under random tie-breaking. With g never-seen items scored
higher and e scored equal, the rank is uniform on g + 1, ..., g + e + 1. With a gain c(r) that
depends on the rank only, and its running sum C(r) = c(1) + ... + c(r), the expected gain is (C(g +
e + 1) - C(g)) / (e + 1). So a constant score over n never-seen items gets exactly k / (n + 1) hits,
and results do not depend on the order of the catalogue.

*Whole lists* (`recall@k`, `precision@k`, `ndcg-list@k`, `map@k`, `mrr`). One list per user, over
all items that are not in the training part; every held-out positive in it is relevant. The
denominators are the number of relevant items (recall), k (precision) and the DCG of the best
possible list of length k (`ndcg-list`). `map@k` is the sum of the precision at each relevant item
among the first k, divided by the number of relevant items, as in TREC (others divide by the smaller
of that and k). `mrr` is the reciprocal rank of the first relevant item in the full list. Ties are
broken by item index, lower first: deterministic, but a model with few distinct scores depends on
the order of the catalogue here, unlike above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.errors import ExperimentError


def ranking_metrics(
    scores: Tensor,
    *,
    seen: Tensor,
    known: Tensor,
    relevant: Tensor,
    ks: Sequence[int] = (5, 10, 20, 30),
    weights: Tensor | None = None,
    masked: Tensor | None = None,
) -> dict[str, Tensor]:
    """Both kinds of metrics for a block of users.

    Args:
        scores: `float [users, items]`, higher is better; infinite values are allowed.
        seen: `bool [users, items]`, items of the user in any part; contains `relevant`.
        known: `bool [users, items]`, items of the user's training part.
        relevant: `bool [users, items]`, held-out positives. Those that are also known (a repeated
            use) count in single-positive lists only, because a whole list cannot contain them.
        ks: lengths of the lists, each >= 1; more than the catalogue holds is allowed.
        weights: `[users, items]`, how often each held-out positive counts in single-positive lists
            (row-level evaluation of repeated use); default: once.
        masked: `bool [users, items]`, items excluded from whole lists; default: the known ones. A
            relevant item among them that is not known counts as missed: it is in the denominators,
            but in no list.

    Returns:
        `float64 [users]` for each of `"hits@k"`, `"ndcg@k"`, `"recall@k"`, `"precision@k"`,
        `"ndcg-list@k"`, `"map@k"` and `"mrr"`. A user without a held-out positive has NaN, to be
        left out of means.

    Raises:
        ExperimentError: a score is NaN.
        ValueError: shapes differ, `relevant` is not within `seen`, or a k is below 1.
    """
    _check(scores, seen, known, relevant, ks)
    # Masked items get -infinity, so real scores must stay above it.
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    return {
        **_single_positive(scores, seen, relevant, ks, weights),
        **_whole_list(scores, known if masked is None else masked, relevant & ~known, ks),
    }


def _check(
    scores: Tensor, seen: Tensor, known: Tensor, relevant: Tensor, ks: Sequence[int]
) -> None:
    shapes = {tuple(tensor.shape) for tensor in (scores, seen, known, relevant)}
    if len(shapes) != 1 or scores.dim() != 2:
        raise ValueError(
            f"Expected four tensors of one shape [users, items], got {sorted(shapes)}."
        )
    if not ks or min(ks) < 1:
        raise ValueError(f"Expected list lengths >= 1, got ks={tuple(ks)!r}.")
    if bool((relevant & ~seen).any()):
        raise ValueError("Expected every relevant item to be seen, got one that is not.")
    nans = int(torch.isnan(scores).sum())
    if nans:
        raise ExperimentError(
            "the scores of a model cannot be ranked",
            expected="finite scores",
            got=f"{nans} NaN among {scores.numel()} scores",
            fix="training has probably diverged: lower the learning rate or the noise",
        )


def _discounts(longest: int, device: torch.device) -> Tensor:
    """`float64 [longest + 1]`: running sum of 1 / log2(rank + 1) over the first n ranks, at index
    n."""
    gains = torch.arange(2, longest + 2, dtype=torch.float64, device=device).log2().reciprocal()
    return torch.cat([gains.new_zeros(1), gains.cumsum(0)])


def _single_positive(
    scores: Tensor, seen: Tensor, relevant: Tensor, ks: Sequence[int], weights: Tensor | None
) -> dict[str, Tensor]:
    users, items = relevant.nonzero(as_tuple=True)
    weight = torch.ones(len(users), dtype=torch.float64, device=scores.device)
    if weights is not None:
        weight = weights[users, items].double()
    total = _sum_by_user(weight, users, len(scores))
    higher, equal, users, weight = _competitors(scores, seen, users, items, weight, max(ks))
    discounts = _discounts(max(ks), scores.device)
    metrics = {}
    for k in ks:
        first = higher.clamp(max=k)
        last = (higher + equal + 1).clamp(max=k)
        share = weight / (equal + 1)
        metrics[f"hits@{k}"] = _sum_by_user(share * (last - first), users, len(scores)) / total
        metrics[f"ndcg@{k}"] = (
            _sum_by_user(share * (discounts[last] - discounts[first]), users, len(scores)) / total
        )
    return metrics


def _competitors(
    scores: Tensor, seen: Tensor, users: Tensor, items: Tensor, weight: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of never-seen items above and tied with each positive, `int64 [positives]`, and the
    positives' users and weights.

    Only the positives that can reach the first `longest` places are returned: a positive below the
    `longest`-th best never-seen item has no gain. So the best never-seen items suffice, and no row
    needs to be sorted.
    """
    never_seen = scores.masked_fill(seen, -torch.inf)
    best = never_seen.topk(min(longest, scores.shape[1]), dim=1).values
    floor = best[:, -1]
    # More items may be tied with the floor than are among the best.
    at_floor = (never_seen == floor[:, None]).count_nonzero(dim=1)
    value = scores[users, items]
    reaches = value >= floor[users]
    users = users[reaches]
    value = value[reaches, None]
    weight = weight[reaches]
    higher = (best[users] > value).sum(1)
    equal = torch.where(value[:, 0] == floor[users], at_floor[users], (best[users] == value).sum(1))
    return higher, equal, users, weight


def _sum_by_user(values: Tensor, users: Tensor, num_users: int) -> Tensor:
    return torch.zeros(num_users, dtype=torch.float64, device=values.device).index_add_(
        0, users, values
    )


def _whole_list(
    scores: Tensor, masked: Tensor, relevant: Tensor, ks: Sequence[int]
) -> dict[str, Tensor]:
    candidates = scores.masked_fill(masked, -torch.inf)
    longest = min(max(ks), scores.shape[1])
    hit = (relevant & ~masked).gather(1, best_items(candidates, longest)).double()
    discounts = _discounts(max(ks), scores.device)
    hits = hit.cumsum(1)
    dcg = (hit * discounts.diff()[:longest]).cumsum(1)
    precisions = (hit * hits / torch.arange(1, longest + 1, device=hit.device)).cumsum(1)
    number = relevant.sum(1)
    # 0 / 0 gives NaN for a user without a positive; precision has no such denominator.
    nothing = torch.where(number > 0, 0.0, torch.nan).double()
    metrics = {"mrr": _first_relevant(candidates, relevant).double().reciprocal() + nothing}
    for k in ks:
        end = min(k, longest) - 1
        metrics[f"recall@{k}"] = hits[:, end] / number
        metrics[f"precision@{k}"] = hits[:, end] / k + nothing
        metrics[f"ndcg-list@{k}"] = dcg[:, end] / discounts[number.clamp(max=k)]
        metrics[f"map@{k}"] = precisions[:, end] / number
    return metrics


def best_items(values: Tensor, longest: int) -> Tensor:
    """The first places of each row.

    Args:
        values: `float [users, items]`.
        longest: number of places, at most the number of items.

    Returns:
        `int64 [users, longest]`: items by falling value, equal values by rising index; in any
        order where -infinity.
    """
    best = values.topk(min(longest + 1, values.shape[1]), dim=1)
    items = best.indices[:, :longest].sort(dim=1).values
    # topk keeps arbitrary ones of the items tied at the last place; if the next one is also tied,
    # the lowest indices are taken instead.
    floor = best.values[:, longest - 1 : longest]
    after = best.values[:, longest:]
    left_out = (after == floor).any(1)
    rows = (left_out & (floor[:, 0] > -torch.inf)).nonzero()[:, 0]
    if len(rows):
        above = values[rows] > floor[rows]
        level = values[rows] == floor[rows]
        kept = above | (level & (level.cumsum(1) <= longest - above.sum(1, keepdim=True)))
        items[rows] = kept.nonzero()[:, 1].view(-1, longest)
    order = values.gather(1, items).sort(dim=1, descending=True, stable=True).indices
    return items.gather(1, order)


def _first_relevant(candidates: Tensor, relevant: Tensor) -> Tensor:
    """`int64 [users]`: rank of the best relevant item in the full list, from 1; arbitrary where
    there is none."""
    top = candidates.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
    index = torch.arange(candidates.shape[1], device=candidates.device)
    first = (
        index.expand_as(candidates)
        .masked_fill(~(relevant & (candidates == top)), len(index))
        .amin(1, keepdim=True)
    )
    ahead = (candidates > top) | ((candidates == top) & (index < first))
    return ahead.count_nonzero(dim=1) + 1
