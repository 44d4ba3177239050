# SPDX-License-Identifier: Apache-2.0
"""The contract of a baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.components.registry import BASELINE
from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.population import Population
from fedrec.evaluation.central import evaluate_baselines
from fedrec.report.inputs import low_rated_weights
from simulations.contracts.base import (
    Contract,
    assert_close,
    assert_numbers,
    assert_that,
    unchanged,
)


class BaselineContract(Contract):
    """Subclass it and set `component` to a `Baseline`."""

    kind = BASELINE
    random = False
    _once: ClassVar[Baseline]

    def placed(self) -> dict[str, dict[str, object]]:
        """No section: a baseline is named in `evaluation.baselines`."""
        return {}

    def test_scores_have_a_row_per_user_and_a_column_per_item(self) -> None:
        """`[users, items]`, numbers, also for a user without a history."""
        histories = _histories()
        found = self._fitted_once().scores(histories)
        assert_numbers(found, (histories.num_users, histories.num_items), "scores")

    def test_fitting_twice_gives_the_same_scores(self) -> None:
        """Two objects, and one object that is fitted again; of a predictor of ratings the same
        predictions. If `random`, another `seed` gives other ones."""
        first = self.cls(self.config())
        other = self.cls(self.config())
        scores = _learned(first)
        assert_that(torch.equal(_learned(other), scores), "two objects give other scores")
        assert_that(torch.equal(_learned(first), scores), "fitted again, it gives other scores")
        if self.random:
            seeded = _learned(self.cls(self.config(seed=1)))
            assert_that(not torch.equal(seeded, scores), "the seed makes no difference")

    def test_a_users_scores_do_not_depend_on_the_block(self) -> None:
        """Alone and among others a user gets the same scores."""
        histories = _histories()
        baseline = self._fitted_once()
        together = baseline.scores(histories)
        for user in range(histories.num_users):
            alone = baseline.scores(histories.block(user, user + 1))
            what = f"user {user} alone against all"
            assert_close({"scores": alone[0]}, {"scores": together[user]}, what)

    def test_unknown_users_are_scored(self) -> None:
        """A user who was not among the fitted ones, and one without an id."""
        histories = _histories()
        baseline = self._fitted(histories.block(0, 4))
        anonymous = replace(histories, users=None)
        for asked in (histories, anonymous):
            found = baseline.scores(asked)
            assert_numbers(found, (7, 11), "scores")
            for user in range(4, 7):
                alone = baseline.scores(asked.block(user, user + 1))
                what = f"unknown user {user} alone against all"
                assert_close({"scores": alone[0]}, {"scores": found[user]}, what)

    def test_it_uses_the_inputs_that_it_states(self) -> None:
        """Without the side features that `features_used` does not name, and without other rated
        items unless a setting `low-rated` weighs them, all scores are the same."""
        self._skip_ratings()
        config = self.config()
        table = _feature_table()
        known = FeatureNames.of(table, table)
        used = self.cls.features_used(config, known)
        named = all(set(some) <= set(every) for some, every in zip(used, known, strict=True))
        assert_that(named, f"it names features {used} of {known}")
        plain = _histories()
        others = Histories(11, plain.offsets, (plain.items + 1) % 11, plain.users)
        described = {
            **({} if used.users else {"user_features": _feature_table(7)}),
            "item_features": table.only(set(known.of_items) - set(used.of_items)),
            **({} if low_rated_weights(config.table()) else {"low_rated": others}),
        }
        wanted = self._fitted_once().scores(plain).clone()
        more = replace(plain, **described)
        found = self._fitted(more).scores(more)
        what = f"scores change with {', '.join(described)}, which it does not state"
        assert_that(torch.equal(found, wanted), what)

    def test_histories_are_unchanged(self) -> None:
        """Neither fitting nor scoring changes them."""
        histories = _histories()
        with unchanged({"items": histories.items, "offsets": histories.offsets}):
            self._fitted(histories).scores(histories)

    def test_it_is_evaluated_under_the_protocol(self) -> None:
        """As `evaluation.baselines` names it."""
        name = self.section()["name"]
        settings = {key: value for key, value in self.section().items() if key != "name"}
        if issubclass(self.cls, RatingBaseline):
            split = {"name": "ratio"}
            population = Population.of(self.small(task="rating", positive_above=None, split=split))
            found = evaluate_baselines({name: settings}, population)
            assert_that(0 < found[name]["rmse"] < 5, f"metrics {found}")
            return
        population = Population.of(self.small())
        found = evaluate_baselines({name: settings}, population, ks=(5,))
        assert_that(0 <= found[name]["hits@5"] <= 1, f"metrics {found}")

    def _fitted_once(self) -> Baseline:
        """Fitted to all histories by the first test that needs it."""
        if "_once" not in vars(type(self)):
            type(self)._once = self._fitted(_histories())
        return type(self)._once

    def _fitted(self, histories: Histories) -> Baseline:
        self._skip_ratings()
        baseline = self.cls(self.config())
        baseline.fit(histories)
        return baseline

    def _skip_ratings(self) -> None:
        if issubclass(self.cls, RatingBaseline):
            pytest.skip("predicts ratings and ranks nothing; this contract is about rankings")


def _learned(baseline: Baseline) -> torch.Tensor:
    """What a baseline answers after it was fitted: scores `[users, items]`, or predictions of all
    ratings `[users items]`."""
    if not isinstance(baseline, RatingBaseline):
        baseline.fit(_histories())
        return baseline.scores(_histories()).clone()
    rows = _histories()
    random = np.random.default_rng(4)
    values = random.integers(1, 6, len(rows.items)).astype(np.float64)
    ratings = Ratings(rows.num_users, rows.num_items, rows.rows(), rows.items, values)
    baseline.fit_ratings(ratings)
    everything = np.divmod(np.arange(rows.num_users * rows.num_items), rows.num_items)
    found = torch.from_numpy(baseline.predict(ratings, *everything))
    assert_numbers(found, (len(everything[0]),), "predictions")
    return found


def _feature_table(rows: int = 11) -> FeatureTable:
    """One feature of two categories, of users or items, and a text."""
    labels = [str(row % 2) for row in range(rows)]
    text = Feature.words("title", [f"title of {row // 3}" for row in range(rows)])
    return FeatureTable(rows, (Feature.single("kind", labels),), (text,))


def _histories() -> Histories:
    """Seven users and eleven items; the last user has no history."""
    random = np.random.default_rng(3)
    own = [np.sort(random.choice(11, size, replace=False)) for size in (1, 4, 3, 6, 2, 5, 0)]
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in own])]).astype(np.int64)
    return Histories(11, offsets, np.concatenate(own).astype(np.int64), np.arange(7))
