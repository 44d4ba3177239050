# SPDX-License-Identifier: Apache-2.0
"""The contract of a metric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.components.registry import METRIC
from fedrec.evaluation.tables import Evaluated, Metrics
from fedrec.experiment.sections import Section
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.base import ListMetric, RatedBlock, RatingMetric, UserMetric
from fedrec.metrics.ranks import RankedBlock
from simulations.contracts.base import Contract, assert_that, unchanged

KS = (2, 5)
USERS = 9
ITEMS = 12


class MetricContract(Contract):
    """Subclass it and set `component` to a `UserMetric`, a `RatingMetric` or a `ListMetric`."""

    kind = METRIC
    random = False

    def placed(self) -> dict[str, dict[str, object]]:
        """No section: metrics are named in `evaluation.metrics`."""
        return {}

    def test_it_says_what_it_is(self) -> None:
        """A name that no column of another metric has, and a range."""
        metric = self.cls(self.config())
        low, high = metric.range
        assert_that(bool(metric.name) and "@" not in metric.name, f"its name is {metric.name!r}")
        assert_that(low < high, f"its range is {metric.range}")
        right = isinstance(metric, UserMetric | RatingMetric | ListMetric)
        assert_that(right, "it is neither a UserMetric, nor a RatingMetric, nor a ListMetric")

    def test_values_are_in_its_range(self) -> None:
        """`float64 [users]`; NaN for a user without held-out rows; one figure for all users."""
        found = self._values(*self._everybody())
        low, high = self.cls.range
        for column, values in found.items():
            known = values[~np.isnan(values)]
            assert_that(values.dtype == np.float64, f"{column} is {values.dtype}")
            assert_that(len(known) > 0, f"{column} has no value")
            inside = bool(((known >= low - 1e-9) & (known <= high + 1e-9)).all())
            assert_that(inside, f"{column} is not in [{low}, {high}]: {known}")
        for column, value in self._figures(self._everybody()).items():
            assert_that(low - 1e-9 <= value <= high + 1e-9, f"{column} of all users is {value}")

    def test_users_may_be_measured_in_parts(self) -> None:
        """The same values, and the same figure from the sums of the parts."""
        self._skip_ratings()
        scores, masks = self._everybody()
        halves = [
            (scores[part], {name: _rows(name, mask, part) for name, mask in masks.items()})
            for part in (slice(0, 4), slice(4, USERS))
        ]
        whole = self._figures((scores, masks))
        for column, value in self._figures(*halves).items():
            same = bool(np.isclose(value, whole[column], rtol=1e-9, atol=1e-12, equal_nan=True))
            words = f"{column} is {whole[column]}, and of the same users in two parts {value}"
            assert_that(same, words)

    def test_its_input_is_unchanged(self) -> None:
        """Neither scores nor masks are changed in place."""
        self._skip_ratings()
        scores, masks = self._everybody()
        with unchanged({"scores": scores, **masks}):
            self._figures((scores, masks))

    def test_it_is_measured_in_a_run(self, tmp_path: Path) -> None:
        """As `evaluation.metrics` names it, for the federated system and for a baseline."""
        from simulations import runner

        settings = {"evaluation": {"users": 4, "ks": [5], "metrics": [self.section()]}}
        rated = self.cls.task == "rating"
        baseline = "item-mean" if rated else "popularity"
        settings["evaluation"] |= {"baselines": [baseline], "fine-tune": {"epochs": 0}}
        if rated:
            settings |= {"task": "rating", "positive-above": None, "split": {"name": "ratio"}}
        result = runner.run(self.small(**settings), output=tmp_path / "run")
        column = self.cls(self.config()).column(5)
        for label, found in {"the run": result.metrics, **result.baselines}.items():
            assert_that(column in found, f"{label} has no {column}: {', '.join(found)}")

    def _metrics(self) -> Metrics:
        section = Section.model_validate(self.section())
        return Metrics(self.cls.task, EvaluationConfig(ks=KS, metrics=(section,)))

    def _columns(self) -> list[str]:
        metric = self.cls(self.config())
        return list(dict.fromkeys(metric.column(k) for k in KS))[: None if metric.has_k else 1]

    def _everybody(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Scores and masks of a few users; the last one has no held-out row."""
        random = torch.Generator().manual_seed(5)
        scores = torch.rand(USERS, ITEMS, generator=random)
        draws = torch.rand(USERS, ITEMS, generator=random)
        known = draws < 0.3
        relevant = (draws > 0.3) & (draws < 0.6)
        relevant[-1] = False
        masks = {"seen": known | relevant, "known": known, "relevant": relevant, "liked": known}
        items = {"popularity": known.double().mean(0), "targets": torch.tensor([2, 5])}
        return scores, {**masks, **items}

    def _values(
        self, scores: torch.Tensor, masks: dict[str, torch.Tensor]
    ) -> dict[str, np.ndarray]:
        """Its columns of a table of users."""
        metrics = self._metrics()
        if issubclass(self.cls, RatingMetric):
            found = metrics.of_ratings(_ratings())
        else:
            found = metrics.of_block(RankedBlock(scores, ks=KS, **masks))
        return {name: found[name] for name in self._columns() if name in found}

    def _figures(self, *parts: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> dict[str, float]:
        """Its figures for all users."""
        metrics = self._metrics()
        if issubclass(self.cls, RatingMetric):
            found = metrics.means(metrics.of_ratings(_ratings()))
        else:
            blocks = [RankedBlock(scores, ks=KS, **masks) for scores, masks in parts]
            users = [np.arange(len(block.scores)) for block in blocks]
            found = Evaluated.joined(
                Evaluated(own, metrics.of_block(block), metrics.sums(block))
                for block, own in zip(blocks, users, strict=True)
            ).means(metrics)
        return {name: found[name] for name in self._columns()}

    def _skip_ratings(self) -> None:
        if issubclass(self.cls, RatingMetric):
            pytest.skip("is of ratings; this test is about lists")


def _rows(name: str, mask: torch.Tensor, part: slice) -> torch.Tensor:
    return mask if name in ("popularity", "targets") else mask[part]


def _ratings() -> RatedBlock:
    """Ratings of three users, the last of whom has none, and of an item that an adversary promotes,
    which the second has rated."""
    predicted = np.array([3.5, 4.0, 1.0, 2.5])
    actual = np.array([4.0, 2.0, 1.0, 5.0])
    targets = np.array([[3.0], [np.nan], [4.5]])
    return RatedBlock(predicted, actual, np.array([0, 0, 1, 1]), 3, targets)
