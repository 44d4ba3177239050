# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: metrics as columns, users as rows, and means over groups of users."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedrec.components.registry import METRIC, available_names, resolve
from fedrec.components.sections import Section, component_errors, component_of, refuse_wrong
from fedrec.config import did_you_mean
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import TARGET_METRICS, EvaluationConfig
from fedrec.metrics.base import ListMetric, Metric, RatedBlock, RatingMetric, UserMetric
from fedrec.metrics.ranks import RankedBlock

ROWS = "rows"
"""Column of rating tables: number of held-out rows of each user."""
# Groups of metrics: the columns of a group are ordered by list length, and those of one length as
# named here.
_GROUPS = {
    None: (
        ("hits", "ndcg"),
        ("mrr",),
        ("recall", "hit-rate", "precision", "discounted-hits", "map"),
    ),
    "reconstruction": (("reconstruction-recall", "reconstruction-ndcg"),),
    "rating": (("mae", "rmse"),),
}
"""By protocol of ranking, and for ratings."""
_LISTS = ("coverage", "gini", "popularity", "popularity-lift")
_SAMPLED = ("hits-of", "ndcg-of")
_LOWER = ("loss", "epsilon", "nominal-epsilon")  # columns of tables beside metrics


class Metrics:
    """Metrics of an experiment's evaluation.

    Args:
        task: task of the experiment.
        settings: `[evaluation]` of the experiment.

    Attributes:
        ks: lengths of the lists.
        of_lists: the metrics of all users' lists together.
        columns: metric and list length of each column of a table of users, in order.

    Raises:
        ExperimentError: a metric of `evaluation.metrics` is unknown or not for this task, or one of
            `evaluation.shown` is unknown.
    """

    def __init__(self, task: str, settings: EvaluationConfig) -> None:
        self.ks = settings.ks
        added = [_made(section, task) for section in settings.metrics or ()]
        named = _GROUPS["rating" if task == "rating" else settings.protocol]
        groups = [[_made(Section(name=name), task) for name in group] for group in named]
        if settings.sampled_items is not None and task == "ranking" and settings.protocol is None:
            options = {"items": settings.sampled_items}
            groups.append([_made(Section(name=name, **options), task) for name in _SAMPLED])  # type: ignore[arg-type]
        groups += [[metric] for metric in added if not isinstance(metric, ListMetric)]
        self.columns = {
            metric.column(k): (metric, k)
            for group in groups
            for k in (self.ks if group[0].has_k else self.ks[:1])
            for metric in group
        }
        lists = () if settings.protocol or task == "rating" else _LISTS
        self.of_lists: list[ListMetric] = [
            metric
            for metric in (*(_made(Section(name=name), task) for name in lists), *added)
            if isinstance(metric, ListMetric)
        ]
        if settings.shown is not None:
            _check_shown(settings.shown, {metric.name for metric in added})

    def of_block(self, block: RankedBlock) -> dict[str, np.ndarray]:
        """Columns of a table of users, `float64 [users]` each."""
        return {
            column: _per_user(metric, block, k)
            for column, (metric, k) in self.columns.items()
            if isinstance(metric, UserMetric)
        }

    def of_ratings(self, block: RatedBlock) -> dict[str, np.ndarray]:
        """Columns of a table of users: metrics `float64 [users]`, and the number of rows."""
        values = {
            column: metric.per_user(block)
            for column, (metric, _) in self.columns.items()
            if isinstance(metric, RatingMetric)
        }
        return {**values, ROWS: block.counts}

    def sums(self, block: RankedBlock) -> dict[str, np.ndarray]:
        """Sums for the metrics of lists over a block of users, by `NAME@k`."""
        totals: dict[str, np.ndarray] = {}
        for metric in self.of_lists:
            for k in self.ks if metric.has_k else self.ks[:1]:
                with component_errors(METRIC.name, metric, "in sums"):
                    sums = metric.sums(block, k).items()
                    totals |= {f"{name}@{k}": value.cpu().numpy() for name, value in sums}
        return totals

    def of_sums(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Metrics of lists, from the sums over all users; empty without sums."""
        values = {}
        for k in self.ks if sums else ():
            end = f"@{k}"
            at_k = {key.removesuffix(end): sums[key] for key in sums if key.endswith(end)}
            values |= {
                metric.column(k): metric.value(at_k)
                for metric in self.of_lists
                if metric.has_k or k == self.ks[0]
            }
        return values

    def means(self, users: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means over users; ratings are pooled over rows, as is usual for MAE and RMSE.

        Args:
            users: the columns of a table of users, `float64 [users]` each.
        """
        rows = users.get(ROWS)
        return {
            column: _mean(self.columns.get(column, (None, 0))[0], values, rows)
            for column, values in users.items()
            if column != ROWS
        }

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each column of a table of users, in order."""
        ranges = {column: metric.range for column, (metric, _) in self.columns.items()}
        rated = any(isinstance(metric, RatingMetric) for metric, _ in self.columns.values())
        return {**ranges, ROWS: (1.0, math.inf)} if rated else ranges


def lower_is_better(column: str, settings: EvaluationConfig | None = None) -> bool:
    """True if smaller values of a column of a result table are better.

    Args:
        column: such as `rmse`, `gini@10`, `epsilon` or, of a centralised system, `biased-mf rmse`.
        settings: `[evaluation]` of the experiment, with its added metrics.
    """
    name = column.rpartition(" ")[2].partition("@")[0].removeprefix("validation-")
    if name in _LOWER:
        return True
    classes = [] if settings is None else list(_classes(settings.metrics or ()))
    if name in available_names(METRIC):
        classes.append(resolve(METRIC, name))  # type: ignore[arg-type]
    return next((metric.lower_is_better for metric in classes if metric.name == name), False)


def main_metric(columns: Iterable[str]) -> str | None:
    """Default metric of comparisons: `hits@10`, else the first hit rate, `rmse`, or the first
    column."""
    known = [str(column) for column in columns if column != ROWS]
    hits = [name for name in known if name.startswith("hits@")]
    preferred = [name for name in ("hits@10", *hits, "rmse") if name in known]
    return next(iter([*preferred, *known]), None)


def _check_shown(columns: Iterable[str], added: set[str]) -> None:
    """Check that each column of `evaluation.shown` names a known metric."""
    known = added | set(available_names(METRIC))
    for column in columns:
        name = column.partition("@")[0]
        for prefix in (NEW_OF_ALL, NEW, OLD):
            name = name.removeprefix(prefix)
        if name not in known:
            raise ExperimentError(
                "unknown metric in evaluation.shown",
                expected="a metric with its list length, such as recall@20",
                got=repr(column),
                fix=did_you_mean(name, known),
            )


def _made(section: Section, task: str) -> Any:
    metric = component_of(METRIC, section, at=f"evaluation.metrics.{section.name}")
    if metric.task != task:
        raise ExperimentError(
            f"metric {section.name!r} does not support this task",
            expected=f"task = {metric.task!r}",
            got=f"task = {task!r}",
            fix="leave it out of evaluation.metrics",
        )
    return metric


def _classes(sections: Iterable[Section]) -> Iterable[type[Metric]]:
    """Classes of the metrics that can be imported here."""
    for section in sections:
        try:
            yield resolve(METRIC, section.name)  # type: ignore[misc]
        except ExperimentError:  # of a run elsewhere
            continue


def _per_user(metric: UserMetric, block: RankedBlock, k: int) -> np.ndarray:
    with component_errors(METRIC.name, metric, "in per_user"):
        values = metric.per_user(block, k)
    if not isinstance(values, torch.Tensor) or values.shape != (len(block.scores),):
        expected = f"a tensor [{len(block.scores)}]"
        got = f"{type(values).__name__} {list(getattr(values, 'shape', []))}"
        refuse_wrong(METRIC.name, metric, "from per_user", expected=expected, got=got)
    return values.cpu().numpy()


def _mean(metric: Metric | None, values: np.ndarray, rows: np.ndarray | None) -> float:
    if not isinstance(metric, RatingMetric) or rows is None:
        return float("nan" if np.isnan(values).all() else np.nanmean(values))
    judged = rows > 0
    return metric.pooled(values[judged], rows[judged]) if judged.any() else float("nan")


# Means of per-user metrics over groups of users.
#
# PrivRec (section 4.5.1) calls a user inactive who has fewer than 20 visited items in the test
# half. We count the training half, which is what the system knows about the user; the halves are
# equal, so the two counts differ by at most one.

NEW = "new-"
"""Prefix of metrics of new items that are ranked alone (split `new-items`)."""
NEW_OF_ALL = "new-of-all-"
"""Prefix of metrics of new items among all items."""
OLD = "old-"
"""Prefix of metrics of the other items, ranked alone, of users with new ones."""
UNTRAINED_ITEMS = "items without training rows"
"""Row of group tables: held-out items without rows of training clients."""
_ACTIVE = 20  # known interactions of an active user


def user_groups(
    interactions: Interactions, users: np.ndarray, known_counts: np.ndarray
) -> dict[str, np.ndarray]:
    """Groups of the evaluated users, by activity and by each single-valued user feature.

    Args:
        interactions: the dataset, for its user features.
        users: `int64 [n]`, the evaluated users.
        known_counts: `int64 [n]`, number of interactions in each user's training part.

    Returns:
        `bool [n]` per group: `"inactive"` (less than 20 known interactions), `"active"`, and one
        such as `"gender=F"` per category that occurs. A user without a code belongs to no group of
        that feature.
    """
    inactive = known_counts < _ACTIVE
    groups = {"inactive": inactive, "active": ~inactive}
    for feature in interactions.user_features.features:
        if feature.width != 1:
            continue
        codes = feature.padded()[users, 0]
        for code in np.unique(codes[codes >= 0]):
            groups[f"{feature.name}={feature.categories[code]}"] = codes == code
    return groups


def group_means(
    per_user: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Mean of each metric over each group.

    Args:
        per_user: metrics of the evaluated users, `[users]` each; NaN where a user has no value.
        groups: `bool [users]` per group, as from `user_groups`.

    Returns:
        One row per group, in order; first a column `count`, the number of users in the group who
        have any value, and then the metrics. The mean of an empty group is NaN.
    """
    rows = []
    for member in groups.values():
        values = np.stack([column[member] for column in per_user.values()]).astype(np.float64)
        rows.append([(~np.isnan(values)).any(axis=0).sum(), *known_means(values, axis=1)])
    index = pd.Index(list(groups), name="group")
    table = pd.DataFrame(rows, index, ["count", *per_user], dtype=np.float64)
    return table.astype({"count": np.int64})


def known_means(values: np.ndarray, axis: int) -> np.ndarray:
    """Means `[metrics]` of users' values without NaN, `[users, metrics]` with axis 0 or transposed
    with axis 1; NaN if no user has a value."""
    with np.errstate(invalid="ignore"):
        return np.nansum(values, axis=axis) / (~np.isnan(values)).sum(axis=axis)


def group_gaps(means: pd.DataFrame) -> pd.DataFrame:
    """Gaps between groups of one kind: the largest group mean minus the smallest.

    Args:
        means: one row per group, as a table of `group_means`.

    Returns:
        One row per kind: `"activity"` for active and inactive users, and each user feature; the
        metrics of `means`. Groups without any value do not count. NaN for a kind with fewer than
        two other groups.
    """
    means = means.drop(index=UNTRAINED_ITEMS, errors="ignore")  # no group of users
    kinds = [
        str(name).partition("=")[0] if "=" in str(name) else "activity" for name in means.index
    ]
    grouped = means.drop(columns="count").groupby(np.array(kinds), sort=False)
    highest, lowest, values = (
        pd.DataFrame(frame) for frame in (grouped.max(), grouped.min(), grouped.count())
    )
    return (highest - lowest).where(values > 1).rename_axis("kind")


# Results of an evaluation: one row per user, and sums over users.

GROUP = "group:"
"""Prefix of the columns that hold the members of a group of users, 0 or 1."""
UNTRAINED = "untrained:"
"""Prefix of the columns of metrics over only items without training rows."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Metrics of users, and sums over users.

    Attributes:
        clients: `int64 [users]`.
        columns: `[users]` each: metrics by name, and one `group:NAME` for each group with a member,
            so that means over groups need no features, and `untrained:METRIC` where users have
            held-out items without training rows.
        sums: sums over users for the metrics of all users' lists; empty unless requested.
    """

    clients: np.ndarray
    columns: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Evaluated:
        """Create from a table like `table`."""
        columns = {str(name): table[name].to_numpy() for name in table.columns}
        return cls(table.index.to_numpy(), columns)

    @classmethod
    def joined(cls, parts: Iterable[Evaluated]) -> Evaluated:
        """Join parts, ascending by client; parts without members of a group may lack its column."""
        blocks: list[Evaluated] = []
        sums: dict[str, np.ndarray] = {}
        for part in parts:
            blocks.append(cls(part.clients, part.columns))
            for name, value in part.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        clients = np.concatenate([np.empty(0, np.int64), *(block.clients for block in blocks)])
        order = np.argsort(clients, kind="stable")
        names = dict.fromkeys(name for block in blocks for name in block.columns)
        columns = {
            name: np.concatenate([block._column(name) for block in blocks])[order] for name in names
        }
        return cls(clients[order], columns, sums)

    def _column(self, name: str) -> np.ndarray:
        """Values of a column; a missing group has no members, a missing metric is NaN."""
        if name in self.columns:
            return self.columns[name]
        return np.full(len(self), 0.0 if name.startswith(GROUP) else np.nan)

    def with_groups(self, groups: Mapping[str, np.ndarray]) -> Evaluated:
        """Add a column for each group; its members are `bool [clients]`."""
        columns = {
            name: values if values.dtype.kind == "i" else values.astype(np.float64)
            for name, values in self.columns.items()
        }
        members = {f"{GROUP}{name}": member.astype(np.float64) for name, member in groups.items()}
        return Evaluated(self.clients, columns | members, self.sums)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of metrics over all held-out items, without the groups."""
        others = (GROUP, UNTRAINED)
        return {
            name: values for name, values in self.columns.items() if not name.startswith(others)
        }

    @property
    def table(self) -> pd.DataFrame:
        """Table of all columns, one row per user, indexed by client id."""
        return pd.DataFrame(dict(self.columns), index=pd.Index(self.clients, name="client"))

    @property
    def users(self) -> pd.DataFrame:
        """Metrics over all held-out items, one row per user, without the groups."""
        return pd.DataFrame(self.table[list(self.metrics)])

    def means(self, metrics: Metrics) -> dict[str, float]:
        """Overall metrics of all users; empty without users."""
        columns = self.metrics
        kind = np.result_type(*columns.values()) if columns else np.float64
        columns = {name: values.astype(kind) for name, values in columns.items()}
        return (metrics.means(columns) if len(self) else {}) | metrics.of_sums(self.sums)

    def groups(self) -> pd.DataFrame:
        """Means over each group of users, one row per group, sorted by name, because nodes reply in
        any order and know different groups; and over items without training rows, where there are
        any among the held-out ones."""
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


# Metrics from scores of the catalogue, for federated and centralised systems and attacks.


_Masks = dict[str, Tensor]


class HeldOutLists:
    """Ranked lists of a population's users with held-out items.

    A positive that occurs in several held-out rows counts that often in single-positive lists. With
    `protocol = "reconstruction"` the whole history is held out, and nothing is left out.

    Args:
        population: the clients.
        metrics: metrics of the experiment.
        settings: `[evaluation]` of the experiment.
    """

    def __init__(
        self, population: Population, metrics: Metrics, settings: EvaluationConfig
    ) -> None:
        self._population = population
        self._metrics = metrics
        self._settings = settings
        self._untrained = torch.tensor(population.untrained_items)
        self._new = population.new_items(settings.held_out)

    def measure(self, clients: np.ndarray, scores: Tensor, *, sums: bool = False) -> Evaluated:
        """Compute the metrics of clients.

        Args:
            clients: `int64 [clients]`.
            scores: `float [clients, items]`, higher is better.
            sums: whether to add the sums that metrics of all lists need.
        """
        sums = sums and bool(self._metrics.of_lists)
        scores = scores.cpu().contiguous()
        masks = self._masks(clients)
        block = self._block(scores, masks)
        if sums:
            block.popularity = torch.tensor(self._population.popularity)
            liked = self._population.rows(clients, positive=True)
            block.liked = torch.from_numpy(liked.mask())
        columns = self._metrics.of_block(block) | self._of_untrained_items(block, masks)
        columns |= self._of_new_items(scores, masks)
        return Evaluated(clients, columns, self._metrics.sums(block) if sums else {})

    def _block(self, scores: Tensor, masks: _Masks) -> RankedBlock:
        """The lists of some clients, with the targets of an adversary."""
        adversary = self._population.adversary
        targets = None if adversary is None else torch.from_numpy(adversary.targets)
        return RankedBlock(scores, ks=self._metrics.ks, targets=targets, **masks)

    def _of_untrained_items(self, block: RankedBlock, masks: _Masks) -> dict[str, np.ndarray]:
        """Metrics over only held-out items without training rows, NaN for clients without one;
        empty if no client has one. Other held-out items stay in the lists."""
        users, items, _ = block.positives
        untrained = self._untrained[items]
        if not untrained.any() or self._settings.protocol == "reconstruction":
            return {}
        wanted = torch.zeros_like(block.relevant)
        wanted[users[untrained], items[untrained]] = True
        without = ~wanted.any(1).numpy()
        columns = self._metrics.of_block(self._block(block.scores, {**masks, "relevant": wanted}))
        return {
            UNTRAINED + name: np.where(without, np.nan, values)
            for name, values in columns.items()
            if name.partition("@")[0] not in TARGET_METRICS  # of no held-out item
        }

    def _of_new_items(self, scores: Tensor, masks: _Masks) -> dict[str, np.ndarray]:
        """Metrics of new items, ranked alone and among all items, and of the others, ranked alone;
        NaN for clients without a held-out new item. Nothing without new items."""
        if self._new is None or self._settings.protocol == "reconstruction":
            return {}
        new = torch.from_numpy(self._new)
        nothing = torch.zeros_like(new)
        columns: dict[str, np.ndarray] = {}
        without = ~(masks["relevant"] & new).any(1).numpy()
        for prefix, out, counted in (
            (NEW, ~new, new),
            (NEW_OF_ALL, nothing, new),
            (OLD, new, ~new),
        ):
            changed = {name: masks[name] | out for name in ("seen", "masked")}
            changed["relevant"] = masks["relevant"] & counted
            values = self._metrics.of_block(self._block(scores, {**masks, **changed}))
            columns |= {prefix + name: np.where(without, np.nan, v) for name, v in values.items()}
        return columns

    def _masks(self, clients: np.ndarray) -> _Masks:
        if self._settings.protocol == "reconstruction":
            rows = self._population.rows(clients, "all", positive=True)
            history = torch.from_numpy(rows.mask())
            return {"seen": history, "known": torch.zeros_like(history), "relevant": history}
        lists = self._population.held_out(clients, self._settings.held_out)
        arrays = {
            "seen": lists.seen,
            "known": lists.known,
            "relevant": lists.relevant,
            "masked": lists.masked(self._settings.masked),
            "weights": lists.weight,
        }
        return {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}


def ranking_metrics(
    scores: Tensor,
    *,
    ks: Sequence[int] = (5, 10, 20, 30),
    sampled_items: int | None = None,
    **masks: Any,
) -> dict[str, np.ndarray]:
    """Per-user metrics, `float64 [users]` each, from scores `float [users, items]`; for `masks` see
    `RankedBlock`."""
    settings = EvaluationConfig(ks=tuple(ks), sampled_items=sampled_items)
    return Metrics("ranking", settings).of_block(RankedBlock(scores, ks=ks, **masks))
