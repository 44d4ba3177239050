# SPDX-License-Identifier: Apache-2.0
"""The contracts of dataset readers, splits, baselines, metrics and attacks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.components.registry import ATTACK, BASELINE, DATASET, METRIC, SPLIT
from fedrec.components.sections import Section
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions
from fedrec.data.population import Population, read_interactions, reader_of
from fedrec.data.splits.rules import Partition
from fedrec.errors import ComponentError, DataError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.evaluation.tables import Evaluated, Metrics
from fedrec.experiment.schema import EvaluationConfig, Experiment
from fedrec.metrics.base import RatedBlock, RatingMetric
from fedrec.metrics.ranks import RankedBlock
from fedrec.report.inputs import low_rated_weights
from simulations import runner
from simulations.attacks.base import Attack, AttackOutcome, run_attack
from simulations.contracts.base import (
    Contract,
    RunContract,
    assert_close,
    assert_numbers,
    assert_seeded,
    columns_of,
    unchanged,
)


class DatasetContract(Contract):
    """Contract of a dataset: subclass it and set `component` to a `Reader`, and `settings` with its
    data.

    Attributes:
        has_files: whether it reads files; then a missing `path` must raise an error.
    """

    kind = DATASET
    has_files: ClassVar[bool] = True

    def small(self, *overrides: str, **sections: Any) -> Experiment:
        """The small experiment with the component; all rows are positive, because a dataset may
        lack ratings."""
        experiment = super().small(*overrides, **sections)
        return experiment.model_copy(update={"positive_above": None})

    def _read(self) -> Interactions:
        """The dataset."""
        return read_interactions(self.small())

    def test_feature_names_are_those_of_the_data(self) -> None:
        """Check that stated feature names match the data, and that there is a row for each user."""
        stated = reader_of(self.small()).feature_names()
        data = self._read()
        assert data.user_features.rows == data.num_users, "user features do not match the users"
        names = FeatureNames.of(data.user_features, data.item_features)
        assert stated in (None, names), f"stated features {stated}, actual features {names}"

    def test_reading_twice_gives_the_same(self) -> None:
        """Check for the same rows in the same order, for any state of the global random
        generators."""
        np.random.seed(1)
        first = self._read()
        np.random.seed(2)
        again = self._read()
        assert first.fingerprint() == again.fingerprint(), "two reads give different rows"
        same = np.array_equal(first.users, again.users) and np.array_equal(first.items, again.items)
        same = same and list(first.item_ids) == list(again.item_ids)
        assert same, "two reads give rows in a different order"

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        """Check that the error for a missing path names the path."""
        if not self.has_files:
            pytest.skip("has no files")
        gone = tmp_path / "gone"
        with pytest.raises(DataError) as caught:
            self.cls(self.kind.name, self.config(path=str(gone))).read()
        assert str(gone) in caught.value.text(), "the error does not name the path"

    def test_clients_can_be_trained_on_it(self, tmp_path: Path) -> None:
        """Run a round of training and an evaluation with a few of its users."""
        changes = ("rounds=1", "evaluation.every=0", "evaluation.final-users=4")
        result = runner.run(self.small(*changes), output=tmp_path / "run")
        assert np.isfinite(result.metrics["hits@5"]), f"metrics {result.metrics}"


class SplitContract(RunContract):
    """Contract of a split: subclass it and set `component` to a `Split`."""

    kind = SPLIT

    def test_parts_are_rows_of_the_data_and_some_are_held_out(self) -> None:
        """Check for valid rows and clients, disjoint parts, held-out rows, and training clients."""
        data = read_interactions(self.small())
        partition = self._split(0)
        parts = (partition.train_rows, partition.validation_rows, partition.test_rows)
        rows = np.concatenate(parts)
        inside = len(np.intersect1d(rows, np.arange(len(data)))) == len(rows)
        assert inside, "rows outside the data or in two parts"
        clients = partition.training_clients
        known = np.intersect1d(clients, np.arange(data.num_users))
        assert len(known) == len(clients) > 0, f"invalid training clients {clients[:10]}"
        both = len(partition.train_rows) > 0 and len(partition.test_rows) > 0
        assert both, "no training rows or no held-out rows"

    def test_it_is_a_function_of_the_seed(self) -> None:
        """Check that the same seed gives the same parts, another seed different ones, with
        unchanged data."""
        assert_seeded(self._split, _same, self.random)

    def test_no_client_decides_about_others_if_it_says_so(self) -> None:
        """Check that with empty `depends_on` other clients have the same training rows if one
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
        assert same and clients, "other clients' parts change with one client's rows"

    def _split(self, seed: int) -> Partition:
        data = read_interactions(self.small())
        with unchanged(columns_of(data)):
            return self.cls(self.config(), seed).split(data)


def _same(first: Partition, second: Partition) -> bool:
    parts = ("training_clients", "train_rows", "validation_rows", "test_rows")
    return all(np.array_equal(getattr(first, part), getattr(second, part)) for part in parts)


class BaselineContract(Contract):
    """Contract of a baseline: subclass it and set `component` to a `Baseline`."""

    kind = BASELINE
    random = False
    _once: ClassVar[Baseline]

    def test_fitting_twice_gives_the_same_scores(self) -> None:
        """Check for the same scores (or predicted ratings) of two objects and of one that is fitted
        again. If `random`, another `seed` gives different ones. Histories stay unchanged."""
        first = self.cls(self.config())
        scores = _learned(first)
        other = _learned(self.cls(self.config()))
        assert torch.equal(other, scores), "two objects give different scores"
        assert torch.equal(_learned(first), scores), "fitting again gives different scores"
        if self.random:
            seeded = _learned(self.cls(self.config(seed=1)))
            assert not torch.equal(seeded, scores), "the seed makes no difference"

    def test_a_users_scores_do_not_depend_on_others(self) -> None:
        """Check that scores `[users, items]` are numbers, the same alone and among others, also for
        new users and users without id or history."""
        histories = _histories()
        part = self._fitted(histories.block(0, 4))
        anonymous = replace(histories, users=None)
        cases = ((self._fitted_once(), histories, 0), (part, histories, 4), (part, anonymous, 4))
        for baseline, asked, first in cases:
            scores = baseline.scores(asked)
            assert_numbers(scores, (histories.num_users, histories.num_items), "scores")
            for user in range(first, histories.num_users):
                alone = baseline.scores(asked.block(user, user + 1))
                what = f"user {user} alone and among all"
                assert_close({"scores": alone[0]}, {"scores": scores[user]}, what)

    def test_it_uses_the_inputs_that_it_states(self) -> None:
        """Check that scores do not depend on features missing in `features_used`, nor on items with
        low ratings without a setting `low-rated`."""
        self._skip_ratings()
        config = self.config()
        table = _feature_table()
        known = FeatureNames.of(table, table)
        used = self.cls.features_used(config, known)
        named = all(set(some) <= set(every) for some, every in zip(used, known, strict=True))
        assert named, f"unknown features among {used}; known: {known}"
        plain = _histories()
        others = Histories(11, plain.offsets, (plain.items + 1) % 11, plain.users)
        described = {
            **({} if used.users else {"user_features": _feature_table(7)}),
            "item_features": table.only(set(known.of_items) - set(used.of_items)),
            **({} if low_rated_weights(config.table()) else {"low_rated": others}),
        }
        wanted = self._fitted_once().scores(plain).clone()
        more = replace(plain, **described)
        what = f"scores change with {', '.join(described)}, which is not stated"
        assert torch.equal(self._fitted(more).scores(more), wanted), what

    def test_it_is_evaluated_under_the_protocol(self) -> None:
        """Evaluate it as named in `evaluation.baselines`."""
        name = self.section()["name"]
        settings = {key: value for key, value in self.section().items() if key != "name"}
        if issubclass(self.cls, RatingBaseline):
            split = {"name": "ratio"}
            population = Population.of(self.small(task="rating", positive_above=None, split=split))
            metrics = evaluate_baselines({name: settings}, population)
            assert 0 < metrics[name]["rmse"] < 5, f"metrics {metrics}"
            return
        population = Population.of(self.small())
        metrics = evaluate_baselines({name: settings}, population, ks=(5,))
        assert 0 <= metrics[name]["hits@5"] <= 1, f"metrics {metrics}"

    def _fitted_once(self) -> Baseline:
        """Baseline fitted to all histories, once for all tests."""
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
            pytest.skip("predicts ratings; this contract is for rankings")


def _learned(baseline: Baseline) -> torch.Tensor:
    """Fit a baseline, and return its scores `[users, items]`, or all predicted ratings `[users
    items]`."""
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
    """Feature table of users or items with a feature of two categories and a text."""
    labels = [str(row % 2) for row in range(rows)]
    text = Feature.words("title", [f"title of {row // 3}" for row in range(rows)])
    return FeatureTable(rows, (Feature.single("kind", labels),), (text,))


def _histories() -> Histories:
    """Histories of seven users and eleven items; the last user has no history."""
    random = np.random.default_rng(3)
    sizes = (1, 4, 3, 6, 2, 5, 0)
    lists = [np.sort(random.choice(11, size, replace=False)) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Histories(11, offsets, np.concatenate(lists).astype(np.int64), np.arange(7))


_KS = (2, 5)
_USERS = 9
_ITEMS = 12
_OF_ITEMS = ("popularity", "targets")  # masks that are not of users


class MetricContract(Contract):
    """Contract of a metric: subclass it and set `component` to a `UserMetric`, `RatingMetric` or
    `ListMetric`."""

    kind = METRIC
    random = False

    def test_values_are_in_its_range_and_users_may_be_measured_in_parts(self) -> None:
        """Check for values `float64 [users]`, NaN for users without held-out rows, or one value for
        all users, equal from sums over parts. The input stays unchanged."""
        low, high = self.cls.range
        section = Section.model_validate(self.section())
        metrics = Metrics(self.cls.task, EvaluationConfig(ks=_KS, metrics=(section,)))
        if issubclass(self.cls, RatingMetric):
            values = metrics.of_ratings(_ratings())
            means = metrics.means(values)
            in_parts = means
        else:
            scores, masks = _everybody()
            with unchanged({"scores": scores, **masks}):
                users = _evaluated(metrics, scores, masks, slice(0, _USERS))
            parts = (slice(0, 4), slice(4, _USERS))
            halves = Evaluated.joined(_evaluated(metrics, scores, masks, part) for part in parts)
            values = users.columns
            means = users.means(metrics)
            in_parts = halves.means(metrics)
        metric = self.cls(self.config())
        columns = {metric.column(k) for k in (_KS if metric.has_k else _KS[:1])}
        wanted = {column: means[column] for column in columns}
        assert_close(in_parts, wanted, "users in two parts", 1e-9)
        for column in columns:
            known = np.append(values.get(column, np.empty(0)), means[column])
            known = known[~np.isnan(known)]
            inside = bool(((known >= low - 1e-9) & (known <= high + 1e-9)).all())
            assert len(known) > 0 and inside, f"{column} is not in [{low}, {high}]: {known}"


def _everybody() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores and masks of a few users; the last user has no held-out rows."""
    random = torch.Generator().manual_seed(5)
    scores = torch.rand(_USERS, _ITEMS, generator=random)
    draws = torch.rand(_USERS, _ITEMS, generator=random)
    known = draws < 0.3
    relevant = (draws > 0.3) & (draws < 0.6)
    relevant[-1] = False
    masks = {"seen": known | relevant, "known": known, "relevant": relevant, "liked": known}
    items = {"popularity": known.double().mean(0), "targets": torch.tensor([2, 5])}
    return scores, {**masks, **items}


def _evaluated(
    metrics: Metrics, scores: torch.Tensor, masks: dict[str, torch.Tensor], part: slice
) -> Evaluated:
    """Evaluate some of the users with the metric."""
    parts = {name: mask if name in _OF_ITEMS else mask[part] for name, mask in masks.items()}
    block = RankedBlock(scores[part], ks=_KS, **parts)
    return Evaluated(np.arange(_USERS)[part], metrics.of_block(block), metrics.sums(block))


def _ratings() -> RatedBlock:
    """Ratings of three users (the last has none), the second of whom rated an adversary's target
    item."""
    predicted = np.array([3.5, 4.0, 1.0, 2.5])
    actual = np.array([4.0, 2.0, 1.0, 5.0])
    targets = np.array([[3.0], [np.nan], [4.5]])
    return RatedBlock(predicted, actual, np.array([0, 0, 1, 1]), 3, targets)


class AttackContract(Contract):
    """Contract of an attack: subclass it and set `component` to an `Attack`."""

    kind = ATTACK

    def test_it_attacks_trained_systems(self, tmp_path: Path) -> None:
        """Attack as `fedrec attack` does: the outcome is saved, and rows of its table have a cell
        per title. Suspicion is one finite number per user."""
        outcome = self._outcome(tmp_path)
        cls: type[Attack] = self.cls
        saved = json.loads((tmp_path / cls.file).read_text(encoding="utf-8"))
        assert saved == json.loads(json.dumps(outcome.table)), "the saved outcome differs"
        widths = {len(row) for row in outcome.rows}
        assert len(outcome.rows) > 1 and len(widths) == 1, f"rows with {sorted(widths)} cells"
        texts = [cell for row in outcome.rows for cell in row]
        texts += [*outcome.lines, *outcome.reasons]
        assert all(isinstance(text, str) for text in texts), "rows and lines are not texts"
        known = outcome.verdict in ("", "PASS", "WARN", "FAIL")
        assert known, f"unknown verdict {outcome.verdict!r}"

    def test_its_outcome_is_a_function_of_what_it_sees_and_the_seed(self, tmp_path: Path) -> None:
        """Check that two objects have the same outcome for the same runs."""
        first = self._outcome(tmp_path)
        assert self._outcome(tmp_path).table == first.table, "two objects have different outcomes"

    def _outcome(self, folder: Path) -> AttackOutcome:
        try:
            return run_attack(self.small(), self.section(), folder)
        except ComponentError as error:
            pytest.fail(error.text())
