# SPDX-License-Identifier: Apache-2.0
"""The metrics of an experiment, the columns of its tables, and which values are better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import METRIC, available_names, resolve
from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.base import ListMetric, Metric, RatingMetric, UserMetric
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.rated import RatedBlock

ROWS = "rows"
"""Column of rating tables: number of held-out rows of each user."""
# Groups of metrics: the columns of a group are ordered by list length, and those of one length as
# named here.
_RANKING = (
    ("hits", "ndcg"),
    ("mrr",),
    ("recall", "hit-rate", "precision", "discounted-hits", "map"),
)
_LISTS = ("coverage", "gini", "popularity", "popularity-lift")
_SAMPLED = ("hits-of", "ndcg-of")
_RECONSTRUCTION = (("reconstruction-recall", "reconstruction-ndcg"),)
_RATING = (("mae", "rmse"),)
_LOWER = ("loss", "epsilon", "nominal-epsilon")  # what tables hold beside metrics


class Metrics:
    """The metrics that an experiment is evaluated by.

    Args:
        task: of the experiment.
        settings: its `[evaluation]`.

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
        own = [_made(section, task) for section in settings.metrics or ()]
        groups = [
            [_made(Section(name=name), task) for name in group] for group in _of(task, settings)
        ]
        if settings.sampled_items is not None and task == "ranking" and settings.protocol is None:
            options = {"items": settings.sampled_items}
            groups.append([_made(Section(name=name, **options), task) for name in _SAMPLED])  # type: ignore[arg-type]
        groups += [[metric] for metric in own if not isinstance(metric, ListMetric)]
        self.columns = {
            metric.column(k): (metric, k)
            for group in groups
            for k in (self.ks if group[0].has_k else self.ks[:1])
            for metric in group
        }
        lists = () if settings.protocol or task == "rating" else _LISTS
        self.of_lists: list[ListMetric] = [
            metric
            for metric in (*(_made(Section(name=name), task) for name in lists), *own)
            if isinstance(metric, ListMetric)
        ]
        if settings.shown is not None:
            _refuse_unknown(settings.shown, {metric.name for metric in own})

    def of_block(self, block: RankedBlock) -> dict[str, np.ndarray]:
        """The columns of a table of users, `float64 [users]` each."""
        return {
            column: _per_user(metric, block, k)
            for column, (metric, k) in self.columns.items()
            if isinstance(metric, UserMetric)
        }

    def of_ratings(self, block: RatedBlock) -> dict[str, np.ndarray]:
        """The columns of a table of users: metrics `float64 [users]`, and the number of rows."""
        found = {
            column: metric.per_user(block)
            for column, (metric, _) in self.columns.items()
            if isinstance(metric, RatingMetric)
        }
        return {**found, ROWS: block.counts}

    def sums(self, block: RankedBlock) -> dict[str, np.ndarray]:
        """What the metrics of lists are computed from, `NAME@k`, summed over a block of users."""
        found: dict[str, np.ndarray] = {}
        for metric in self.of_lists:
            for k in self.ks if metric.has_k else self.ks[:1]:
                with component_errors(METRIC.name, metric, "in sums"):
                    sums = metric.sums(block, k).items()
                    found |= {f"{name}@{k}": value.cpu().numpy() for name, value in sums}
        return found

    def of_sums(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The metrics of lists, from the sums over all users; none without sums."""
        by_k = {k: _at(sums, k) for k in self.ks} if sums else {}
        return {
            metric.column(k): metric.value(own)
            for k, own in by_k.items()
            for metric in self.of_lists
            if metric.has_k or k == self.ks[0]
        }

    def means(self, users: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means over users; ratings are pooled over rows, as is usual for MAE and RMSE.

        Args:
            users: the columns of a table of users, `float64 [users]` each.
        """
        rows = users.get(ROWS)
        return {
            column: _mean(self.columns.get(column, (None, 0))[0], np.asarray(values), rows)
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
    """Whether the smaller value of a column of a result table is the better one.

    Args:
        column: such as `rmse`, `gini@10`, `epsilon` or, of a centralised system, `biased-mf rmse`.
        settings: of the experiment, whose own metrics may have any name.
    """
    name = column.rpartition(" ")[2].partition("@")[0].removeprefix("validation-")
    if name in _LOWER:
        return True
    own = {} if settings is None else {one.name: one for one in _classes(settings.metrics or ())}
    if name not in own and name in available_names(METRIC):
        own[name] = resolve(METRIC, name)  # type: ignore[assignment]
    return name in own and own[name].lower_is_better


def main_metric(columns: Iterable[str]) -> str | None:
    """The metric that decides where none is named: `hits@10`, or the first hit rate, or `rmse`, or
    the first column."""
    known = [str(column) for column in columns if column != ROWS]
    hits = [name for name in known if name.startswith("hits@")]
    preferred = [name for name in ("hits@10", *hits, "rmse") if name in known]
    return next(iter([*preferred, *known]), None)


def _refuse_unknown(columns: Iterable[str], own: set[str]) -> None:
    """Refuse a column of `evaluation.shown` that is of no metric, and of none of the experiment's
    own."""
    known = own | set(available_names(METRIC))
    for column in columns:
        name = column.partition("@")[0]
        if name not in known:
            raise ExperimentError(
                "unknown metric in evaluation.shown",
                expected="a metric, with its length, such as recall@20",
                got=repr(column),
                fix=did_you_mean(name, known),
            )


def _of(task: str, settings: EvaluationConfig) -> Sequence[Sequence[str]]:
    if task == "rating":
        return _RATING
    return _RECONSTRUCTION if settings.protocol == "reconstruction" else _RANKING


def _made(section: Section, task: str) -> Any:
    metric_class: type[Metric] = resolve(METRIC, section.name)  # type: ignore[assignment]
    settings = component_settings(METRIC, section, at=f"evaluation.metrics.{section.name}")
    if metric_class.task != task:
        raise ExperimentError(
            f"metric {section.name!r} is not for this task",
            expected=f"task = {metric_class.task!r}",
            got=f"task = {task!r}",
            fix="leave it out of evaluation.metrics",
        )
    with component_errors(METRIC.name, metric_class, "when it was made"):
        return metric_class(settings)


def _classes(sections: Iterable[Section]) -> Iterable[type[Metric]]:
    """The classes of those metrics that can be imported here."""
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


def _at(sums: Mapping[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    parts = [(name.rpartition("@"), value) for name, value in sums.items()]
    return {name: value for (name, _, length), value in parts if length == str(k)}


def _mean(metric: Metric | None, values: np.ndarray, rows: np.ndarray | None) -> float:
    if not isinstance(metric, RatingMetric) or rows is None:
        return float("nan" if np.isnan(values).all() else np.nanmean(values))
    judged = np.asarray(rows) > 0
    if not judged.any():
        return float("nan")
    return metric.pooled(values[judged], np.asarray(rows)[judged])
