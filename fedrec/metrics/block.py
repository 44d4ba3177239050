# SPDX-License-Identifier: Apache-2.0
"""A block of users whose items are ranked by scores: what ranking metrics are computed from.

There are two definitions of a list, which must not be mixed up.

*Single-positive lists* (PrivRec, section 3.3, equations 12 and 13). Every held-out positive is
ranked on its own against all items that its user never interacted with, in any part; the user's
other positives are not in the list. Equation 13 does not say how a user's lists are combined; their
mean is within [0, 1] and NDCG at most the hit rate. The paper's tables grow faster in k than this
definition can (by more than the change of hits divided by log2(k + 2)), so compare `hits@k` with
them only.

Ties there are resolved by expectation under random tie-breaking. With g never-seen items scored
higher and e scored equal, the rank is uniform on g + 1, ..., g + e + 1. With a gain c(r) that
depends on the rank only, and its running sum C(r) = c(1) + ... + c(r), the expected gain is (C(g +
e + 1) - C(g)) / (e + 1). So a constant score over n never-seen items gets exactly k / (n + 1) hits,
and results do not depend on the order of the catalogue.

*Whole lists*. One list per user, over all items that are not in the training part; every held-out
positive in it is relevant. Ties are resolved by expectation here, too: each of T tied items, of
which R are relevant, is equally probable at each of their T places, so that a place is relevant
with probability R / T, and two of them with R (R - 1) / (T (T - 1)). Only which items are shown
(`lists`), and so metrics of lists, depend on the order of the catalogue: lower index first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.errors import ExperimentError

_ABOVE_AND_LEVEL = (np.greater, np.equal)
_CHUNK = 512  # items; of long catalogues, only the chunks that hold a best item are sorted


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
        sampled: `bool [users, items]`, the items that sampled metrics draw from; default: those
            that are not seen. A relevant item among them is left out.
        targets: `int64 [targets]`, the items that an adversary promotes, for metrics of these.

    Raises:
        ExperimentError: a score is NaN.
        ValueError: shapes differ, `relevant` is not within `seen`, or a k is below 1.
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
        sampled: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        _check(scores, seen, known, relevant, ks)
        # Masked items get -infinity, so real scores must stay above it.
        self.scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        self.seen = seen
        self.known = known
        self.relevant = relevant
        self.weights = weights
        self.masked = known if masked is None else masked
        self._sampled = sampled
        self.liked = liked
        self.popularity = popularity
        self.targets = targets
        self.longest = max(ks)
        """Largest k."""
        self._once: dict[Any, Any] = {}

    def about(self, relevant: Tensor) -> RankedBlock:
        """The same lists, tested on other items, `bool [users, items]` within `relevant`."""
        _refuse_unseen(relevant, self.seen)
        other = copy(self)
        other.relevant = relevant
        other._sampled = None if self._sampled is None else self._sampled & ~self.relevant
        other._once = {}
        of_relevant = ("positives", "total_weight", "_competitors", "sampled", "wanted", "number")
        for name in (*of_relevant, "ties", "hits", "nothing"):
            vars(other).pop(name, None)
        return other

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which metrics with the same key share."""
        if key not in self._once:
            self._once[key] = compute()
        return self._once[key]

    def gains(self, longest: int) -> Tensor:
        """`float64 [longest]`: gains of ranks for NDCG, 1 / log2(rank + 1)."""
        ranks = torch.arange(2, longest + 2, dtype=torch.float64, device=self.scores.device)
        return ranks.log2().reciprocal()

    def sum_by_user(self, values: Tensor, users: Tensor) -> Tensor:
        """`float64 [users]`: sums of `values [n]` by their users `int64 [n]`."""
        zeros = torch.zeros(len(self.scores), dtype=torch.float64, device=self.scores.device)
        return zeros.index_add_(0, users, values)

    def given(self, name: str) -> Tensor:
        """An argument that not every block has: `liked` `[users, items]`, `popularity` `[items]` or
        `targets` `[targets]`.

        Raises:
            ValueError: this block was made without it.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"Expected the argument {name!r} of the block, got none.")
        return found

    @cached_property
    def positives(self) -> tuple[Tensor, Tensor, Tensor]:
        """User, item and weight of each held-out positive, `[positives]` each."""
        users, items = pairs(self.relevant)
        if self.weights is None:
            return users, items, torch.ones(users.shape, dtype=torch.float64, device=users.device)
        return users, items, self.weights[users, items].double()

    @cached_property
    def total_weight(self) -> Tensor:
        """`float64 [users]`: sum of the weights of each user's positives."""
        users, _, weight = self.positives
        return self.sum_by_user(weight, users)

    @cached_property
    def _never_seen(self) -> tuple[Tensor, Tensor]:
        """The best scores of never-seen items, best first, `[users, places]`, and the number of
        never-seen items with the last of these scores, `int64 [users]`."""
        never_seen = _without(self.scores, self.seen)
        best = _best(never_seen, min(self.longest, self.scores.shape[1]))[0]
        # more items may be tied with the last place than are among the best
        return best, self.count(never_seen.numpy() == best[:, -1:].numpy())

    @cached_property
    def _competitors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers of never-seen items above and tied with each positive, `int64 [positives]`, and
        the positives' users and weights.

        Only the positives that can reach the first `longest` places are returned: a positive below
        the `longest`-th best never-seen item has no gain. So the best never-seen items suffice, and
        no row needs to be sorted.
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
        """`float64 [users]`: mean over a user's held-out positives, each in a list of its own, of
        the expected gain of its rank; NaN without a positive.

        Args:
            gains: `float64 [k]`, of the ranks 1 to k, at most `longest`; later ranks have none.
        """
        higher, equal, users, weight = self._competitors
        running = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        first = running[higher.clamp(max=len(gains))]
        last = running[(higher + equal + 1).clamp(max=len(gains))]
        return self.sum_by_user(weight / (equal + 1) * (last - first), users) / self.total_weight

    @cached_property
    def candidates(self) -> Tensor:
        """`float [users, items]`: scores of the items of whole lists, -infinity for the others."""
        return _without(self.scores, self.masked)

    @cached_property
    def lists(self) -> Tensor:
        """`int64 [users, places]`: the whole lists, best item first, of the largest k or of the
        catalogue's length."""
        return best_items(self.candidates, min(self.longest, self.scores.shape[1]))

    @cached_property
    def listed(self) -> Tensor:
        """`bool [users, places]`: which places of `lists` hold an item; a user who knows nearly all
        items has a shorter list."""
        places = torch.arange(self.lists.shape[1], device=self.scores.device)
        return places < self.count(~self.masked.numpy())[:, None]

    @cached_property
    def sampled(self) -> Tensor:
        """`bool [users, items]`: the items that sampled metrics draw from."""
        return ~self.seen if self._sampled is None else self._sampled & ~self.relevant

    @cached_property
    def wanted(self) -> tuple[Tensor, Tensor]:
        """The relevant items of whole lists: user and item of each, `int64 [n]`."""
        users, items, _ = self.positives
        new = ~self.known[users, items]
        return users[new], items[new]

    @cached_property
    def number(self) -> Tensor:
        """`int64 [users]`: number of relevant items of each whole list."""
        return self.wanted[0].bincount(minlength=len(self.scores))

    def count(self, condition: np.ndarray) -> Tensor:
        """`int64 [users]`: number of items for which a condition `bool [users, items]` holds. Numpy
        compares and counts in a quarter of torch's time."""
        return torch.from_numpy(np.count_nonzero(condition, axis=1))

    def count_wanted(self, values: Tensor) -> Tensor:
        """`int64 [users]`: number of relevant items of whole lists with a user's value, `[users]`;
        0 for -infinity."""
        users, items = self.wanted
        own = self.candidates[users, items]
        equal = (own == values[users]) & (own > -torch.inf)
        return users[equal].bincount(minlength=len(self.scores))

    @cached_property
    def ties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the items with the same score as a place of `lists`, some of them beyond the list:
        their number, how many of them are relevant, and how many are at earlier places; `float64
        [users, places]` each."""
        scores = self.candidates.gather(1, self.lists)
        seen, known, masked = (
            mask.gather(1, self.lists) for mask in (self.relevant, self.known, self.masked)
        )
        relevant = seen & ~known & ~masked
        group = torch.zeros_like(self.lists)
        group[:, 1:] = (scores[:, 1:] != scores[:, :-1]).cumsum(1)
        ones = torch.ones_like(group, dtype=torch.float64)
        none = torch.zeros_like(ones)
        number = none.scatter_add(1, group, ones)
        found = none.scatter_add(1, group, relevant.double())
        earlier = ones.cumsum(1) - 1 - (number.cumsum(1) - number).gather(1, group)
        last = self.count(self.candidates.numpy() == scores[:, -1:].numpy())
        for counts, those in ((number, last), (found, self.count_wanted(scores[:, -1]))):
            counts.scatter_(1, group[:, -1:], those[:, None].double())
        return number.gather(1, group), found.gather(1, group), earlier

    @cached_property
    def hits(self) -> Tensor:
        """`float64 [users, places]`: probability that a place of a whole list is relevant."""
        number, relevant, _ = self.ties
        return relevant / number

    @cached_property
    def nothing(self) -> Tensor:
        """`float64 [users]`: NaN for a user without a relevant item, else 0; to be added to what
        does not divide by their number."""
        return torch.where(self.number > 0, 0.0, torch.nan).double()


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
    _refuse_unseen(relevant, seen)
    nans = np.count_nonzero(np.isnan(scores.numpy()))
    if nans:
        raise ExperimentError(
            "the scores of a model cannot be ranked",
            expected="finite scores",
            got=f"{nans} NaN among {scores.numel()} scores",
            fix="training has probably diverged: lower the learning rate or the noise",
        )


def _refuse_unseen(relevant: Tensor, seen: Tensor) -> None:
    if (relevant.numpy() > seen.numpy()).any():
        raise ValueError("Expected every relevant item to be seen, got one that is not.")


def best_items(values: Tensor, longest: int) -> Tensor:
    """The first places of each row.

    Args:
        values: `float [users, items]`.
        longest: number of places, at most the number of items.

    Returns:
        `int64 [users, longest]`: items by falling value, equal values by rising index; in any
        order where -infinity.
    """
    best, places = _best(values, min(longest + 1, values.shape[1]))
    items = places[:, :longest].sort(dim=1).values
    # topk keeps arbitrary ones of the items tied at the last place; if the next one is also tied,
    # the lowest indices are taken instead.
    floor = best[:, longest - 1 : longest]
    after = best[:, longest:]
    left_out = (after == floor).any(1)
    for row in (left_out & (floor[:, 0] > -torch.inf)).nonzero()[:, 0].tolist():
        own = values[row].numpy()
        above, level = (np.flatnonzero(test(own, floor[row].numpy())) for test in _ABOVE_AND_LEVEL)
        kept = np.concatenate([above, level[: longest - len(above)]])
        items[row] = torch.from_numpy(np.sort(kept))
    order = values.gather(1, items).sort(dim=1, descending=True, stable=True).indices
    return items.gather(1, order)


def pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each true cell of a mask `bool [users, items]` in which few are, `int64
    [n]`, by rows; numpy skips the others faster than torch."""
    cells = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return cells // mask.shape[1], cells % mask.shape[1]


def _without(values: Tensor, mask: Tensor) -> Tensor:
    """A copy of values `float [users, items]`, -infinity where masked."""
    own = values.numpy()
    return torch.from_numpy(np.where(mask.numpy(), own.dtype.type(-np.inf), own))


def _best(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The best values of each row, best first, and their places, `[users, number]` each; of equal
    values any, as `Tensor.topk`, and in an eighth of its time for a million items.

    No item is better than the best of its chunk, so that as many chunks as items are wanted
    suffice.
    """
    users, items = values.shape
    chunks = items // _CHUNK
    if chunks <= 2 * number:
        return values.topk(number, dim=1)
    best = values[:, : chunks * _CHUNK].view(users, chunks, _CHUNK).amax(2).topk(number, dim=1)
    inside = (best.indices[:, :, None] * _CHUNK + torch.arange(_CHUNK)).flatten(1)
    rest = torch.arange(chunks * _CHUNK, items).expand(users, -1)
    places = torch.cat([inside, rest], 1)
    found = values.gather(1, places).topk(number, dim=1)
    return found.values, places.gather(1, found.indices)
