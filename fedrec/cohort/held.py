# SPDX-License-Identifier: Apache-2.0
"""A mix of table rows that stays the same throughout a client's training, such as that of the user's own features.

If a mix m = s T of the rows of a table is what the loss sees of it, gradient g of m moves the table by `-r s^T g`, and
with it the mix by `-r |s|^2 g`. So the mix can take all steps itself, and the table is made up once, at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.cohort.sgd import Group


class HeldMix:
    """The joined mixes of some tables, which stand for the tables until `settle`.

    Args:
        groups: the tables, `[C, R, d]` each.
        shares: what the rows of each table count for the first a clients, `[a, 1, R]`; the others train no more.
    """

    def __init__(self, groups: Sequence[Group], shares: Sequence[Tensor]) -> None:
        self._groups, self._shares = list(groups), list(shares)
        self._latest = self._shares
        self._powers = [share.square().sum(-1, keepdim=True) for share in shares]
        tables = [group.value[: len(share)] for group, share in zip(groups, shares, strict=True)]
        self._widths = [table.shape[2] for table in tables]
        rated = [power * group.rate for power, group in zip(self._powers, groups, strict=True)]
        self._rates = torch.cat([r.expand(-1, -1, width) for r, width in zip(rated, self._widths, strict=True)], -1)
        self._start = torch.cat([torch.bmm(share, table) for share, table in zip(shares, tables, strict=True)], -1)
        with torch.inference_mode(False):  # later steps may not be in inference mode, and change it all the same
            self._value = self._start.clone()
        self._first = self._value, self._rates

    def fits(self, groups: Sequence[Group], shares: Sequence[Tensor]) -> bool:
        """Whether these are the same tables, and the same shares or those of the first of the clients."""
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            return False
        if not all(map(operator.is_, shares, self._latest)):  # the rule; where memory begins takes longer to ask
            if not all(map(same_memory, shares, self._shares)):
                return False
            self._latest = list(shares)
        return True

    def value(self, clients: int) -> Tensor:
        """The mix of the first clients as it is now, `[clients, 1, sum of d]`."""
        return self.first(clients)[0]

    def first(self, clients: int) -> tuple[Tensor, Tensor]:
        """The `value` of the first clients, and the step sizes of its gradient, of the same shape."""
        if self._first[0].shape[0] != clients:
            self._first = self._value[:clients], self._rates[:clients]
        return self._first

    def descend(self, gradient: Tensor) -> None:
        """The step of all tables, given the gradient of the mix of the clients that `value` was last asked for."""
        value, rates = self._first
        value.addcmul_(gradient, rates, value=-1)

    def settle(self) -> None:
        """Give the tables what they have moved by."""
        moved = (self._value - self._start).split_with_sizes(self._widths, -1)
        for group, share, power, own in zip(self._groups, self._shares, self._powers, moved, strict=True):
            steps = own / torch.where(power > 0, power, 1.0)
            group.value[: len(share)].baddbmm_(share.transpose(1, 2), steps)
            group.held = None


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the first is the other, or its first rows; both must be alive."""
    return one.data_ptr() == other.data_ptr() and len(one) <= len(other) and one.shape[1:] == other.shape[1:]
