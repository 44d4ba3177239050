# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: one row per user, and sums over users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fedrec.evaluation.groups import UNTRAINED_ITEMS, group_means
from fedrec.evaluation.metrics import Metrics

GROUP = "group:"
"""Prefix of the columns that hold the members of a group of users, 0 or 1."""
UNTRAINED = "untrained:"
"""Prefix of the columns that hold metrics over items without training rows alone."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Metrics of some users.

    Attributes:
        table: one row per user, indexed by client id: one column per metric, and one `group:NAME`
            for each group with a member, so that means over groups need no features, and
            `untrained:METRIC` where users have held-out items without training rows.
        sums: what the metrics of all users' lists are computed from, summed over the users; empty
            where it was not asked for.
    """

    table: pd.DataFrame
    sums: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, np.ndarray],
        clients: np.ndarray,
        sums: Mapping[str, np.ndarray] | None = None,
    ) -> Evaluated:
        """From the columns of clients `int64 [clients]`."""
        return cls(pd.DataFrame(dict(columns), pd.Index(clients, name="client")), sums or {})

    @classmethod
    def joined(cls, parts: Iterable[Evaluated]) -> Evaluated:
        """All parts as one, ascending by client; a part without a member of a group has no column
        for it."""
        tables: list[pd.DataFrame] = []
        sums: dict[str, np.ndarray] = {}
        for part in parts:
            tables.append(part.table)
            for name, value in part.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        if not tables:
            return cls.of({}, np.empty(0, np.int64))
        table = (pd.concat(tables) if len(tables) > 1 else tables[0]).sort_index()
        if any(not one.columns.equals(table.columns) for one in tables):
            groups = [column for column in table if str(column).startswith(GROUP)]
            table[groups] = table[groups].fillna(0.0)
        return cls(table, sums)

    def with_groups(self, groups: Mapping[str, np.ndarray]) -> Evaluated:
        """The same with a column for each group; its members are `bool [clients]`."""
        columns = [*self.table, *(f"{GROUP}{name}" for name in groups)]
        values = np.column_stack([self.table.to_numpy(np.float64), *groups.values()])
        found = pd.DataFrame(values, self.table.index, columns)
        for counted in self.table.select_dtypes("int"):
            found[counted] = self.table[counted]
        return Evaluated(found, self.sums)

    @property
    def users(self) -> pd.DataFrame:
        """The metrics over all held-out items, without the groups."""
        others = (GROUP, UNTRAINED)
        return self.table.loc[:, [not str(name).startswith(others) for name in self.table]]

    def means(self, metrics: Metrics) -> dict[str, float]:
        """Figures for all users together; empty without users."""
        users = self.users
        columns = dict(zip(users, users.to_numpy().T, strict=True))
        return (metrics.means(columns) if len(users) else {}) | metrics.of_sums(self.sums)

    def groups(self) -> pd.DataFrame:
        """Means over each group of users, one row per group, sorted by name, because nodes reply in
        any order and know different groups; and over items without training rows, where there are
        any among the held-out ones."""
        names = sorted(str(name) for name in self.table if str(name).startswith(GROUP))
        members = {name.removeprefix(GROUP): self.table[name].to_numpy() > 0 for name in names}
        found = group_means(self.users, members)
        own = self.table.filter(regex=f"^{UNTRAINED}").rename(
            columns=lambda name: str(name).removeprefix(UNTRAINED)
        )
        if not own.shape[1]:
            return found
        everybody = {UNTRAINED_ITEMS: np.ones(len(own), dtype=bool)}
        return pd.concat([found, group_means(own, everybody)])
