# SPDX-License-Identifier: Apache-2.0
"""The contracts of dataset readers, splits, baselines, metrics and attacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.components.registry import ATTACK, BASELINE, DATASET, METRIC, SPLIT
from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population, read_interactions, reader_of
from fedrec.data.splits.rules import Partition
from fedrec.errors import ComponentError, DataError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.evaluation.tables import Evaluated, Metrics
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import Section
from fedrec.experiment.tables import EvaluationConfig
from fedrec.metrics.base import RatedBlock, RatingMetric
from fedrec.metrics.ranks import RankedBlock
from fedrec.report.inputs import low_rated_weights
from simulations.attacks.base import Attack, AttackOutcome, run_attack
from simulations.contracts.base import (
    Contract,
    RunContract,
    assert_close,
    assert_numbers,
    assert_seeded,
    assert_that,
    columns_of,
    fail,
    refused,
    unchanged,
)


class DatasetContract(Contract):
    """Subclass it and set `component` to a `Reader`, with the settings under which it finds its
    data.

    Attributes:
        has_files: whether it reads files; then a missing `path` must be refused.
    """

    kind = DATASET
    has_files: ClassVar[bool] = True

    def small(self, *overrides: str, **sections: Any) -> Experiment:
        """The small experiment with the component in it. Every row is positive, because a dataset
        need not have ratings."""
        experiment = super().small(*overrides, **sections)
        return experiment.model_copy(update={"positive_above": None})

    def read(self) -> Interactions:
        """The dataset."""
        return read_interactions(self.small())

    def test_feature_names_are_those_of_the_data(self) -> None:
        """If it states them; those of users have a row for each."""
        stated = reader_of(self.small()).feature_names()
        data = self.read()
        assert_that(data.user_features.rows == data.num_users, "user features of other users")
        names = FeatureNames.of(data.user_features, data.item_features)
        assert_that(stated in (None, names), f"it states {stated} and gives {names}")

    def test_reading_twice_gives_the_same(self) -> None:
        """The same rows in the same order, whatever the global random generators say."""
        np.random.seed(1)
        first = self.read()
        np.random.seed(2)
        again = self.read()
        assert_that(first.fingerprint() == again.fingerprint(), "two reads give other rows")
        same = np.array_equal(first.users, again.users) and np.array_equal(first.items, again.items)
        same = same and list(first.item_ids) == list(again.item_ids)
        assert_that(same, "two reads give rows in another order")

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        """The error for a missing path names the path."""
        if not self.has_files:
            pytest.skip("has no files")
        gone = tmp_path / "gone"
        with refused(DataError, str(gone), "a missing path"):
            self.cls(self.kind.name, self.config(path=str(gone))).read()

    def test_clients_can_be_trained_on_it(self, tmp_path: Path) -> None:
        """A round of training and an evaluation on a few of its users."""
        from simulations import runner

        changes = ("rounds=1", "evaluation.every=0", "evaluation.final-users=4")
        result = runner.run(self.small(*changes), output=tmp_path / "run")
        assert_that(bool(np.isfinite(result.metrics["hits@5"])), f"metrics {result.metrics}")


class SplitContract(RunContract):
    """Subclass it and set `component` to a `Split`."""

    kind = SPLIT

    def test_parts_are_rows_of_the_data_and_some_are_held_out(self) -> None:
        """Rows and clients in range, no row in two parts, held-out rows, and clients that train."""
        data = read_interactions(self.small())
        partition = self._split(0)
        parts = (partition.train_rows, partition.validation_rows, partition.test_rows)
        rows = np.concatenate(parts)
        inside = rows.min() >= 0 and rows.max() < len(data) and len(np.unique(rows)) == len(rows)
        assert_that(bool(inside), "rows beyond the data, or in two parts")
        clients = partition.training_clients
        known = len(clients) and clients.min() >= 0 and clients.max() < data.num_users
        distinct = len(np.unique(clients)) == len(clients)
        assert_that(bool(known) and distinct, f"training clients {clients[:10]}")
        both = len(partition.train_rows) > 0 and len(partition.test_rows) > 0
        assert_that(both, "no rows to train on, or none to test on")

    def test_it_is_a_function_of_the_seed(self) -> None:
        """The same seed gives the same parts, another seed others; the data stay as they are."""
        assert_seeded(self._split, _same, self.random)

    def test_no_client_decides_about_others_if_it_says_so(self) -> None:
        """A split whose `depends_on` is empty gives other clients the same training rows when one
        client has a row less; private runs rely on it."""
        data = read_interactions(self.small())
        split = self.cls(self.config(), 0)
        if split.depends_on("replace-one"):
            return
        client = int(data.users[0])
        fewer = np.delete(np.arange(len(data)), data.rows_of(client)[-1])
        before = split.split(data)
        after = split.split(data.with_rows(fewer))
        others = np.setdiff1d(before.training_clients, client)
        trained, trained_after = (
            rows[np.isin(data.users[rows], others)]
            for rows in (before.train_rows, fewer[after.train_rows])
        )
        same = np.array_equal(trained, trained_after)
        clients = np.array_equal(before.training_clients, after.training_clients)
        assert_that(same and clients, "parts of others that changed with one client's rows")

    def _split(self, seed: int) -> Partition:
        data = read_interactions(self.small())
        with unchanged(columns_of(data)):
            return self.cls(self.config(), seed).split(data)


def _same(first: Partition, second: Partition) -> bool:
    parts = ("training_clients", "train_rows", "validation_rows", "test_rows")
    return all(np.array_equal(getattr(first, part), getattr(second, part)) for part in parts)


class BaselineContract(Contract):
    """Subclass it and set `component` to a `Baseline`."""

    kind = BASELINE
    random = False
    _once: ClassVar[Baseline]

    def test_fitting_twice_gives_the_same_scores(self) -> None:
        """Two objects, and one object that is fitted again; of a predictor of ratings the same
        predictions. If `random`, another `seed` gives other ones. Histories stay as they are."""
        first = self.cls(self.config())
        scores = _learned(first)
        other = _learned(self.cls(self.config()))
        assert_that(torch.equal(other, scores), "two objects give other scores")
        assert_that(torch.equal(_learned(first), scores), "fitted again, it gives other scores")
        if self.random:
            seeded = _learned(self.cls(self.config(seed=1)))
            assert_that(not torch.equal(seeded, scores), "the seed makes no difference")

    def test_a_users_scores_do_not_depend_on_others(self) -> None:
        """`[users, items]`, numbers, the same alone and among others; also for users who were not
        among the fitted ones, or have no id or no history."""
        histories = _histories()
        part = self._fitted(histories.block(0, 4))
        anonymous = replace(histories, users=None)
        cases = ((self._fitted_once(), histories, 0), (part, histories, 4), (part, anonymous, 4))
        for baseline, asked, first in cases:
            scores = baseline.scores(asked)
            assert_numbers(scores, (histories.num_users, histories.num_items), "scores")
            for user in range(first, histories.num_users):
                alone = baseline.scores(asked.block(user, user + 1))
                what = f"user {user} alone against all"
                assert_close({"scores": alone[0]}, {"scores": scores[user]}, what)

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
        what = f"scores change with {', '.join(described)}, which it does not state"
        assert_that(torch.equal(self._fitted(more).scores(more), wanted), what)

    def test_it_is_evaluated_under_the_protocol(self) -> None:
        """As `evaluation.baselines` names it."""
        name = self.section()["name"]
        settings = {key: value for key, value in self.section().items() if key != "name"}
        if issubclass(self.cls, RatingBaseline):
            split = {"name": "ratio"}
            population = Population.of(self.small(task="rating", positive_above=None, split=split))
            metrics = evaluate_baselines({name: settings}, population)
            assert_that(0 < metrics[name]["rmse"] < 5, f"metrics {metrics}")
            return
        population = Population.of(self.small())
        metrics = evaluate_baselines({name: settings}, population, ks=(5,))
        assert_that(0 <= metrics[name]["hits@5"] <= 1, f"metrics {metrics}")

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
    """Answers of a baseline after it was fitted: scores `[users, items]`, or predictions of all
    ratings `[users items]`."""
    rows = _histories()
    if not isinstance(baseline, RatingBaseline):
        with unchanged({"items": rows.items, "offsets": rows.offsets}):
            baseline.fit(rows)
            return baseline.scores(rows).clone()
    random = np.random.default_rng(4)
    values = random.integers(1, 6, len(rows.items)).astype(np.float64)
    ratings = Ratings(rows.num_users, rows.num_items, rows.rows(), rows.items, values)
    baseline.fit_ratings(ratings)
    everything = np.divmod(np.arange(rows.num_users * rows.num_items), rows.num_items)
    predicted = torch.from_numpy(baseline.predict(ratings, *everything))
    assert_numbers(predicted, (len(everything[0]),), "predictions")
    return predicted


def _feature_table(rows: int = 11) -> FeatureTable:
    """One feature of two categories, of users or items, and a text."""
    labels = [str(row % 2) for row in range(rows)]
    text = Feature.words("title", [f"title of {row // 3}" for row in range(rows)])
    return FeatureTable(rows, (Feature.single("kind", labels),), (text,))


def _histories() -> Histories:
    """Seven users and eleven items; the last user has no history."""
    random = np.random.default_rng(3)
    sizes = (1, 4, 3, 6, 2, 5, 0)
    lists = [np.sort(random.choice(11, size, replace=False)) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Histories(11, offsets, np.concatenate(lists).astype(np.int64), np.arange(7))


KS = (2, 5)
USERS = 9
ITEMS = 12
_OF_ITEMS = ("popularity", "targets")  # masks that are not of users


class MetricContract(Contract):
    """Subclass it and set `component` to a `UserMetric`, a `RatingMetric` or a `ListMetric`."""

    kind = METRIC
    random = False

    def test_values_are_in_its_range_and_users_may_be_measured_in_parts(self) -> None:
        """`float64 [users]`; NaN for a user without held-out rows; one figure for all users, the
        same from the sums of parts of them. The input stays as it is."""
        low, high = self.cls.range
        section = Section.model_validate(self.section())
        metrics = Metrics(self.cls.task, EvaluationConfig(ks=KS, metrics=(section,)))
        if issubclass(self.cls, RatingMetric):
            values = metrics.of_ratings(_ratings())
            means = metrics.means(values)
            in_parts = means
        else:
            scores, masks = _everybody()
            with unchanged({"scores": scores, **masks}):
                users = _evaluated(metrics, scores, masks, slice(0, USERS))
            parts = (slice(0, 4), slice(4, USERS))
            halves = Evaluated.joined(_evaluated(metrics, scores, masks, part) for part in parts)
            values = users.columns
            means = users.means(metrics)
            in_parts = halves.means(metrics)
        metric = self.cls(self.config())
        columns = {metric.column(k) for k in (KS if metric.has_k else KS[:1])}
        wanted = {column: means[column] for column in columns}
        assert_close(in_parts, wanted, "the same users in two parts", 1e-9)
        for column in columns:
            known = np.append(values.get(column, np.empty(0)), means[column])
            known = known[~np.isnan(known)]
            inside = bool(((known >= low - 1e-9) & (known <= high + 1e-9)).all())
            assert_that(len(known) > 0 and inside, f"{column} is not in [{low}, {high}]: {known}")

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
        for label, metrics in {"the run": result.metrics, **result.baselines}.items():
            assert_that(column in metrics, f"{label} has no {column}: {', '.join(metrics)}")


def _everybody() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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


def _evaluated(
    metrics: Metrics, scores: torch.Tensor, masks: dict[str, torch.Tensor], part: slice
) -> Evaluated:
    """Some of the users, by the metric."""
    parts = {name: mask if name in _OF_ITEMS else mask[part] for name, mask in masks.items()}
    block = RankedBlock(scores[part], ks=KS, **parts)
    return Evaluated(np.arange(USERS)[part], metrics.of_block(block), metrics.sums(block))


def _ratings() -> RatedBlock:
    """Ratings of three users, the last of whom has none, and of an item that an adversary promotes,
    which the second has rated."""
    predicted = np.array([3.5, 4.0, 1.0, 2.5])
    actual = np.array([4.0, 2.0, 1.0, 5.0])
    targets = np.array([[3.0], [np.nan], [4.5]])
    return RatedBlock(predicted, actual, np.array([0, 0, 1, 1]), 3, targets)


class AttackContract(Contract):
    """Subclass it and set `component` to an `Attack`."""

    kind = ATTACK

    def test_it_attacks_trained_systems(self, tmp_path: Path) -> None:
        """As `fedrec attack` does: the outcome is saved, and its table has as many cells in each
        row as titles. Suspicion is one finite number per user."""
        outcome = self._outcome(tmp_path)
        cls: type[Attack] = self.cls
        saved = json.loads((tmp_path / cls.file).read_text(encoding="utf-8"))
        assert_that(saved == json.loads(json.dumps(outcome.table)), "another outcome is saved")
        widths = {len(row) for row in outcome.rows}
        assert_that(len(outcome.rows) > 1 and len(widths) == 1, f"rows of {sorted(widths)} cells")
        texts = [cell for row in outcome.rows for cell in row]
        texts += [*outcome.lines, *outcome.reasons]
        assert_that(all(isinstance(text, str) for text in texts), "rows and lines are no texts")
        known = outcome.verdict in ("", "PASS", "WARN", "FAIL")
        assert_that(known, f"verdict {outcome.verdict!r}")

    def test_its_outcome_is_a_function_of_what_it_sees_and_the_seed(self, tmp_path: Path) -> None:
        """Two objects find the same in the same runs."""
        first = self._outcome(tmp_path)
        again = self._outcome(tmp_path)
        assert_that(again.table == first.table, "two objects find something else")

    def _outcome(self, folder: Path) -> AttackOutcome:
        try:
            return run_attack(self.small(), self.section(), folder)
        except ComponentError as error:
            fail(error.text())
