# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: one row per user, and sums over users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedrec.evaluation.groups import UNTRAINED_ITEMS, group_means
from fedrec.evaluation.metrics import Metrics

if TYPE_CHECKING:
    import pandas as pd

GROUP = "group:"
"""Prefix of the columns that hold the members of a group of users, 0 or 1."""
UNTRAINED = "untrained:"
"""Prefix of the columns that hold metrics over items without training rows alone."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Metrics of some users.

    Attributes:
        clients: `int64 [users]`.
        columns: `[users]` each: metrics by name, and one `group:NAME` for each group with a member,
            so that means over groups need no features, and `untrained:METRIC` where users have
            held-out items without training rows.
        sums: what the metrics of all users' lists are computed from, summed over the users; empty
            where it was not asked for.
    """

    clients: np.ndarray
    columns: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Evaluated:
        """From a table as `table` makes it."""
        columns = {str(name): table[name].to_numpy() for name in table.columns}
        return cls(table.index.to_numpy(), columns)

    @classmethod
    def joined(cls, parts: Iterable[Evaluated]) -> Evaluated:
        """All parts as one, ascending by client; a part without a member of a group has no column
        for it."""
        found: list[Evaluated] = []
        sums: dict[str, np.ndarray] = {}
        for part in parts:
            found.append(cls(part.clients, part.columns))
            for name, value in part.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        clients = np.concatenate([np.empty(0, np.int64), *(part.clients for part in found)])
        order = np.argsort(clients, kind="stable")
        names = dict.fromkeys(name for part in found for name in part.columns)
        columns = {
            name: np.concatenate([part._column(name) for part in found])[order] for name in names
        }
        return cls(clients[order], columns, sums)

    def _column(self, name: str) -> np.ndarray:
        """A column; without one nobody is a member of a group, and others are unknown."""
        if name in self.columns:
            return self.columns[name]
        return np.full(len(self), 0.0 if name.startswith(GROUP) else np.nan)

    def with_groups(self, groups: Mapping[str, np.ndarray]) -> Evaluated:
        """The same with a column for each group; its members are `bool [clients]`."""
        columns = {
            name: values if values.dtype.kind == "i" else values.astype(np.float64)
            for name, values in self.columns.items()
        }
        members = {f"{GROUP}{name}": own.astype(np.float64) for name, own in groups.items()}
        return Evaluated(self.clients, columns | members, self.sums)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The columns of metrics over all held-out items, without the groups."""
        others = (GROUP, UNTRAINED)
        return {
            name: values for name, values in self.columns.items() if not name.startswith(others)
        }

    @property
    def table(self) -> pd.DataFrame:
        """All columns, one row per user, indexed by client id."""
        return self._table_of(self.columns)

    @property
    def users(self) -> pd.DataFrame:
        """The metrics over all held-out items, likewise, without the groups."""
        return self._table_of(self.metrics)

    def _table_of(self, columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
        import pandas as pd  # nodes do without

        return pd.DataFrame(dict(columns), index=pd.Index(self.clients, name="client"))

    def means(self, metrics: Metrics) -> dict[str, float]:
        """Figures for all users together; empty without users."""
        own = self.metrics
        kind = np.result_type(*own.values()) if own else np.float64
        columns = {name: values.astype(kind) for name, values in own.items()}
        return (metrics.means(columns) if len(self) else {}) | metrics.of_sums(self.sums)

    def groups(self) -> pd.DataFrame:
        """Means over each group of users, one row per group, sorted by name, because nodes reply in
        any order and know different groups; and over items without training rows, where there are
        any among the held-out ones."""
        import pandas as pd

        names = sorted(name for name in self.columns if name.startswith(GROUP))
        members = {name.removeprefix(GROUP): self.columns[name] > 0 for name in names}
        means = group_means(self.metrics, members)
        untrained = {
            name.removeprefix(UNTRAINED): values
            for name, values in self.columns.items()
            if name.startswith(UNTRAINED)
        }
        if not untrained:
            return means
        everybody = {UNTRAINED_ITEMS: np.ones(len(self), dtype=bool)}
        return pd.concat([means, group_means(untrained, everybody)])
