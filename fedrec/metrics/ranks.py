# SPDX-License-Identifier: Apache-2.0
"""Blocks of users with items ranked by scores: best items, and ranks of single items.

Ranking metrics are computed from a block of users whose items are ranked by scores.

There are two definitions of a list, which must not be mixed up.

*Single-positive lists* (PrivRec, section 3.3, equations 12 and 13). Every held-out positive is
ranked on its own against all items that its user never interacted with, in any part; the user's
other positives are not in the list. Equation 13 does not say how a user's lists are combined; their
mean is within [0, 1] and discounted hits are at most hits. The paper's tables of nDCG grow faster
in k than this definition can (by more than the change of hits divided by log2(k + 2)), so compare
`hits@k` with them only.

Ties there are resolved by expectation under random tie-breaking. With g never-seen items scored
higher and e scored equal, the rank is uniform on g + 1, ..., g + e + 1. With a gain c(r) that
depends on the rank only, and its running sum C(r) = c(1) + ... + c(r), the expected gain is (C(g +
e + 1) - C(g)) / (e + 1). So a constant score over n never-seen items gets exactly k / (n + 1) hits,
and results do not depend on the order of the catalogue.

*Whole lists*. One list per user, over all items that are not in the training part; every held-out
positive in it is relevant. Ties are resolved by expectation here, too: each of T tied items, of
which R are relevant, is equally probable at each of their T positions, so that a position is
relevant with probability R / T, and two positions with R (R - 1) / (T (T - 1)). Only which items
are shown (`lists`), and so metrics of lists, depend on the order of the catalogue: lower index
first.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.errors import ExperimentError


def pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each true cell of a sparse mask `bool [users, items]`, `int64 [n]`, by
    rows; faster in numpy than in torch."""
    cells = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return cells // mask.shape[1], cells % mask.shape[1]


def best_items(values: Tensor, longest: int) -> Tensor:
    """Best items of each row of values `float [users, items]`, `int64 [users, longest]`: by
    decreasing value, ties by index; in any order for -infinity."""
    best, columns = values.topk(min(longest + 1, values.shape[1]), dim=1)
    items = columns[:, :longest].sort(dim=1).values
    # `topk` takes arbitrary ones of the items tied at the last position; if the next one is also
    # tied, the lowest indices are taken instead.
    floor = best[:, longest - 1]
    left_out = (best[:, longest:] == floor[:, None]).any(1) & (floor > -torch.inf)
    for row in left_out.nonzero()[:, 0].tolist():
        above = columns[row][best[row] > floor[row]]
        level = pairs(values[[row]] == floor[row])[1][: longest - len(above)]
        items[row] = torch.cat([above, level]).sort().values
    order = values.gather(1, items).sort(dim=1, descending=True, stable=True).indices
    return items.gather(1, order)


def _levels(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of scores `[users, items]` above and equal to each user's value `[users]`, `int64
    [users]` each."""
    rows = scores.numpy()
    column = values.numpy()[:, None]
    counts = (np.count_nonzero(cells, axis=1) for cells in (rows > column, rows == column))
    above, level = map(torch.from_numpy, counts)
    return above, level


def _without(values: Tensor, mask: Tensor) -> Tensor:
    """Values `float [users, items]`, -infinity where masked."""
    array = values.numpy()
    return torch.from_numpy(np.where(mask.numpy(), array.dtype.type(-np.inf), array))


class RankedBlock:
    """Scores of a block of users and the items that their lists are tested on, on the processor.

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
        liked: `bool [users, items]`, known items that the user likes, for metrics of popularity.
        popularity: `float64 [items]`, share of the training users who like each item, likewise.
        targets: `int64 [targets]`, the items that an adversary promotes, for metrics of these.

    Raises:
        ExperimentError: a score is NaN.
        ValueError: shapes differ, or `relevant` is not within `seen`.
    """

    def __init__(
        self,
        scores: Tensor,
        *,
        seen: Tensor,
        known: Tensor,
        relevant: Tensor,
        ks: Sequence[int] = (5, 10, 20, 30),
        weights: Tensor | None = None,
        masked: Tensor | None = None,
        liked: Tensor | None = None,
        popularity: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        shapes = {tuple(tensor.shape) for tensor in (scores, seen, known, relevant)}
        if len(shapes) != 1:
            raise ValueError(f"Expected tensors of one shape [users, items], got {sorted(shapes)}.")
        self._relevant = pairs(relevant)
        if not seen[self._relevant].all():
            raise ValueError("Expected every relevant item to be seen, got one that is not.")
        self.scores = _finite(scores)
        self.seen = seen
        self.known = known
        self.relevant = relevant
        self.weights = weights
        self.masked = known if masked is None else masked
        self.liked = liked
        self.popularity = popularity
        self.targets = targets
        self.longest = max(ks)
        """Largest k."""
        self._once: dict[Any, Any] = {}

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, cached for metrics with the same key."""
        if key not in self._once:
            self._once[key] = compute()
        return self._once[key]

    def gains(self, longest: int) -> Tensor:
        """Gains of ranks for NDCG, 1 / log2(rank + 1), `float64 [longest]`."""
        ranks = torch.arange(2, longest + 2, dtype=torch.float64, device=self.scores.device)
        return ranks.log2().reciprocal()

    def sum_by_user(self, values: Tensor, users: Tensor) -> Tensor:
        """Sums of `values [n]` by their users `int64 [n]`, `float64 [users]`."""
        zeros = torch.zeros(len(self.scores), dtype=torch.float64, device=self.scores.device)
        return zeros.index_add_(0, users, values)

    def given(self, name: str) -> Tensor:
        """Return an optional argument of the block: `liked` `[users, items]`, `popularity`
        `[items]` or `targets` `[targets]`.

        Raises:
            ValueError: this block was made without it.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"Expected the argument {name!r} of the block, got none.")
        return value

    @cached_property
    def positives(self) -> tuple[Tensor, Tensor, Tensor]:
        """User, item and weight of each held-out positive, `[positives]` each."""
        users, items = self._relevant
        if self.weights is None:
            return users, items, torch.ones(users.shape, dtype=torch.float64, device=users.device)
        return users, items, self.weights[users, items].double()

    @cached_property
    def total_weight(self) -> Tensor:
        """Sum of the weights of each user's positives, `float64 [users]`."""
        users, _, weight = self.positives
        return self.sum_by_user(weight, users)

    @cached_property
    def _never_seen_scores(self) -> Tensor:
        """Scores `float [users, items]`, -infinity for seen items."""
        return _without(self.scores, self.seen)

    @cached_property
    def _list_scores(self) -> Tensor:
        """Scores `float [users, items]`, -infinity for items left out of the whole lists."""
        return _without(self.scores, self.masked)

    @cached_property
    def _never_seen(self) -> tuple[Tensor, Tensor]:
        """Best scores of never-seen items, best first, `[users, positions]`, and the number of
        never-seen items with the last of these scores, `int64 [users]`."""
        longest = min(self.longest, self.scores.shape[1])
        best = self._never_seen_scores.topk(longest, dim=1).values
        # more items may be tied with the last position than are among the best
        return best, self.never_seen_levels(best[:, -1])[1]

    @cached_property
    def _competitors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers of never-seen items above and tied with each positive, `int64 [positives]`, and
        the positives' users and weights.

        Only the positives that can reach the first `longest` positions are returned: a positive
        below the `longest`-th best never-seen item has no gain. So the best never-seen items
        suffice, and no row needs to be sorted.
        """
        users, items, weight = self.positives
        best, at_floor = self._never_seen
        floor = best[:, -1]
        value = self.scores[users, items]
        reaches = value >= floor[users]
        users = users[reaches]
        value = value[reaches, None]
        higher = (best[users] > value).sum(1)
        equal = torch.where(
            value[:, 0] == floor[users], at_floor[users], (best[users] == value).sum(1)
        )
        return higher, equal, users, weight[reaches]

    def expected_gain(self, gains: Tensor) -> Tensor:
        """Mean expected gain of a user's held-out positives, each ranked in a list of its own,
        `float64 [users]`; NaN without a positive.

        Args:
            gains: `float64 [k]`, of the ranks 1 to k, at most `longest`; later ranks have none.
        """
        higher, equal, users, weight = self._competitors
        running = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        first = running[higher.clamp(max=len(gains))]
        last = running[(higher + equal + 1).clamp(max=len(gains))]
        return self.sum_by_user(weight / (equal + 1) * (last - first), users) / self.total_weight

    def candidates(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of items `int64 [n]` in the whole lists of users `int64 [n]`, `float [n]`;
        -infinity for items left out."""
        return self._list_scores[users, items]

    def levels(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of items of whole lists above and equal to each user's value `[users]`, `int64
        [users]` each; items left out of the lists have -infinity."""
        return _levels(self._list_scores, values)

    def never_seen_levels(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of never-seen items above and equal to each user's value `[users]`, `int64
        [users]` each."""
        return _levels(self._never_seen_scores, values)

    @cached_property
    def lists(self) -> Tensor:
        """Whole lists `int64 [users, positions]`, best item first, of length max(k) or the
        catalogue's; ties by lower index."""
        return best_items(self._list_scores, min(self.longest, self.scores.shape[1]))

    @cached_property
    def listed(self) -> Tensor:
        """Mask of filled positions of `lists`, `bool [users, positions]`; a user who knows nearly
        all items has a shorter list."""
        ranks = torch.arange(self.lists.shape[1], device=self.scores.device)
        left_out = torch.from_numpy(np.count_nonzero(self.masked.numpy(), axis=1))
        return ranks < self.scores.shape[1] - left_out[:, None]

    @cached_property
    def wanted(self) -> tuple[Tensor, Tensor]:
        """Relevant items of whole lists: user and item of each, `int64 [n]`."""
        users, items, _ = self.positives
        new = ~self.known[users, items]
        return users[new], items[new]

    @cached_property
    def number(self) -> Tensor:
        """Number of relevant items of each whole list, `int64 [users]`."""
        return self.wanted[0].bincount(minlength=len(self.scores))

    def count_wanted(self, values: Tensor) -> Tensor:
        """Number of relevant items of whole lists with a user's value, `[users]`, as `int64
        [users]`; 0 for -infinity."""
        users, items = self.wanted
        scores = self.candidates(users, items)
        equal = (scores == values[users]) & (scores > -torch.inf)
        return users[equal].bincount(minlength=len(self.scores))

    @cached_property
    def ties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ties of each position of `lists`, also beyond the list: numbers of items of equal score,
        of relevant ones, and of those at earlier positions; `float64 [users, positions]` each."""
        seen, known, masked = (
            mask.gather(1, self.lists) for mask in (self.relevant, self.known, self.masked)
        )
        scores = self._list_scores.gather(1, self.lists)
        relevant = seen & ~known & ~masked
        group = torch.zeros_like(self.lists)
        group[:, 1:] = (scores[:, 1:] != scores[:, :-1]).cumsum(1)
        ones = torch.ones_like(group, dtype=torch.float64)
        none = torch.zeros_like(ones)
        number = none.scatter_add(1, group, ones)
        hits = none.scatter_add(1, group, relevant.double())
        earlier = ones.cumsum(1) - 1 - (number.cumsum(1) - number).gather(1, group)
        last = self.levels(scores[:, -1])[1]
        for counts, totals in ((number, last), (hits, self.count_wanted(scores[:, -1]))):
            counts.scatter_(1, group[:, -1:], totals[:, None].double())
        return number.gather(1, group), hits.gather(1, group), earlier

    @cached_property
    def hits(self) -> Tensor:
        """Probability that a position of a whole list is relevant, `float64 [users, positions]`."""
        number, relevant, _ = self.ties
        return relevant / number

    @cached_property
    def nothing(self) -> Tensor:
        """NaN for a user without a relevant item, else 0, `float64 [users]`; added to metrics that
        do not divide by that number."""
        return torch.where(self.number > 0, 0.0, torch.nan).double()


def _finite(scores: Tensor) -> Tensor:
    """Replace -infinity in scores, which marks masked items, by the lowest number.

    Raises:
        ExperimentError: a score is NaN.
    """
    nans = int(np.count_nonzero(np.isnan(scores.numpy())))
    if nans:
        raise ExperimentError(
            "model scores contain NaN",
            expected="finite scores",
            got=f"{nans} NaN among {scores.numel()} scores",
            fix="training has probably diverged: lower the learning rate or the noise",
        )
    return scores.clamp(min=torch.finfo(scores.dtype).min)
