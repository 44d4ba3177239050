# SPDX-License-Identifier: Apache-2.0
"""The best items of each user, and numbers of items above a value or level with it, among those
that a mask leaves.

For long catalogues nothing is copied. A row is cut into chunks whose largest scores are found once;
no item is better than the largest of its chunk, so that as many chunks as items are wanted suffice,
and only chunks that reach a value are counted.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_CHUNK = 512  # items


class LongRows:
    """Scores of some users.

    Args:
        scores: `float [users, items]`, contiguous, on the processor.
    """

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self._pairs: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}  # by the mask's id
        self._chunks = scores.shape[1] // _CHUNK
        self._whole = self._chunks * _CHUNK  # items in chunks; the rest are looked at each time

    @cached_property
    def _largest(self) -> Tensor:
        """`float [users, chunks]`: the largest score of each whole chunk."""
        return self._chunked(self.scores).amax(2)

    def has_nan(self) -> bool:
        """Whether a score is NaN."""
        return bool(self._largest.isnan().any() or self.scores[:, self._whole :].isnan().any())

    def best(self, mask: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        """The best scores of each row, best first, and their places, `[users, number]` each; of
        equal scores any.

        Args:
            mask: `bool [users, items]`, the items that count as -infinity; None: none.
            number: at most the number of items.
        """
        if self._chunks <= 2 * number:
            return _without(self.scores, mask).topk(number, dim=1)
        best = self._largest_without(mask).topk(number, dim=1)
        inside = (best.indices[:, :, None] * _CHUNK + torch.arange(_CHUNK)).flatten(1)
        rest = torch.arange(self._whole, self.scores.shape[1]).expand(len(inside), -1)
        places = torch.cat([inside, rest], 1)
        values = self.scores.gather(1, places)
        if mask is not None:
            values.masked_fill_(mask.gather(1, places), -torch.inf)
        found = values.topk(number, dim=1)
        return found.values, places.gather(1, found.indices)

    def first(self, mask: Tensor | None, number: int) -> Tensor:
        """The first places of each row, `int64 [users, number]`: items by falling score, equal ones
        by rising index; in any order where -infinity. For the arguments see `best`."""
        longest = min(number + 1, self.scores.shape[1])
        best, places = self.best(mask, longest)
        items = places[:, :number].sort(dim=1).values
        # `best` keeps arbitrary ones of the items tied at the last place; if the next one is also
        # tied, the lowest indices are taken instead.
        floor = best[:, number - 1]
        left_out = (best[:, number:] == floor[:, None]).any(1) & (floor > -torch.inf)
        tied = left_out.nonzero()[:, 0].tolist()
        if tied:
            from fedrec.metrics._native import first_level  # importing Numba is slow
        for row in tied:
            above = places[row][best[row] > floor[row]].numpy()
            level = np.empty(number - len(above), dtype=np.int64)
            hidden = np.zeros(0, dtype=bool) if mask is None else mask[row].numpy()
            first_level(self.scores[row].numpy(), hidden, floor[row].item(), level)
            items[row] = torch.from_numpy(np.sort(np.concatenate([above, level])))
        values = self.scores.gather(1, items)
        if mask is not None:
            values.masked_fill_(mask.gather(1, items), -torch.inf)
        return items.gather(1, values.sort(dim=1, descending=True, stable=True).indices)

    def levels(self, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of items above each user's value and level with it, `int64 [users]` each.

        Args:
            mask: `bool [users, items]`, the items that count as -infinity.
            values: `float [users]`.
        """
        from fedrec.metrics._native import add_levels  # importing Numba is slow

        above = np.zeros(len(values), dtype=np.int64)
        level = np.zeros(len(values), dtype=np.int64)
        largest = self._largest.numpy()
        add_levels(self.scores.numpy(), largest, _CHUNK, values.numpy(), above, level)
        users, items = self._masked(mask)
        scores = self.scores[users, items]
        own = values[users]
        hidden = users.bincount(minlength=len(values))
        return (
            torch.from_numpy(above) - users[scores > own].bincount(minlength=len(values)),
            torch.from_numpy(level)
            - users[scores == own].bincount(minlength=len(values))
            + hidden * (values == -torch.inf),
        )

    def _largest_without(self, mask: Tensor | None) -> Tensor:
        """`float [users, chunks]`: the largest scores of chunks, of the items that a mask
        leaves."""
        if mask is None:
            return self._largest
        users, items = self._masked(mask)
        inside = items < self._whole
        cells = (users * self._chunks + items // _CHUNK)[inside].unique()
        users = cells // self._chunks
        chunks = cells % self._chunks
        own = self._chunked(self.scores)[users, chunks]
        own.masked_fill_(self._chunked(mask)[users, chunks], -torch.inf)
        largest = self._largest.clone()
        largest[users, chunks] = own.amax(1)
        return largest

    def _masked(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """`pairs` of a mask, found once."""
        if id(mask) not in self._pairs:
            self._pairs[id(mask)] = mask, pairs(mask)  # with the mask, so that its id stays its own
        return self._pairs[id(mask)][1]

    def _chunked(self, values: Tensor) -> Tensor:
        """`[users, chunks, _CHUNK]`, without the rest."""
        return values[:, : self._whole].view(len(values), self._chunks, _CHUNK)


def pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each true cell of a mask `bool [users, items]` in which few are, `int64
    [n]`, by rows; numpy skips the others faster than torch."""
    cells = torch.from_numpy(np.flatnonzero(mask.numpy()))
    return cells // mask.shape[1], cells % mask.shape[1]


def best_items(values: Tensor, longest: int) -> Tensor:
    """The first places of each row of values `float [users, items]`, see `LongRows.first`."""
    return LongRows(values.contiguous()).first(None, longest)


def _without(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values `float [users, items]`, -infinity where masked."""
    if mask is None:
        return values
    own = values.numpy()
    return torch.from_numpy(np.where(mask.numpy(), own.dtype.type(-np.inf), own))
