# SPDX-License-Identifier: Apache-2.0
"""The synthetic dataset: its shape, its true preferences, how well they can be learned, and large
sizes."""

import itertools
import tracemalloc
from collections import Counter
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Baseline
from fedrec.components.registry import DATASET, resolve
from fedrec.data.population import Population
from fedrec.data.readers import synthetic
from fedrec.data.readers._planted import PopularityLaw, Truth
from fedrec.data.readers.synthetic import Synthetic
from fedrec.data.splits.user_holdout import UserHoldout
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines


def reader(**options) -> Synthetic:
    settings = {name.replace("_", "-"): value for name, value in options.items()}
    return Synthetic("synthetic", Synthetic.Config.parse(settings))


@pytest.fixture(scope="module")
def default():
    return reader().read()


def explained_share(features, factors) -> float:
    """Share of the variance of `factors` that a linear model on the one-hot features explains."""
    columns = [
        feature.padded()[:, [0]] == np.arange(len(feature.categories)) for feature in features
    ]
    design = np.concatenate(columns, axis=1).astype(float)
    fit = design @ np.linalg.lstsq(design, factors, rcond=None)[0]
    return 1 - np.square(factors - fit).sum() / np.square(factors - factors.mean(0)).sum()


def test_shape(default):
    counts = np.bincount(default.users, minlength=600)
    assert (default.num_users, default.num_items) == (600, 400)
    assert counts.min() >= 8 and counts.max() <= 200 and 32 < counts.mean() < 48
    pairs = default.users * 400 + default.items
    assert len(np.unique(pairs)) == len(pairs)
    assert set(default.ratings) == {1, 2, 3, 4, 5}
    assert 0.45 < (default.ratings > 3).mean() < 0.75


def test_long_tails(default):
    for index, size in ((default.users, 600), (default.items, 400)):
        counts = np.sort(np.bincount(index, minlength=size))[::-1]
        assert counts[: size // 10].sum() > 0.25 * len(default)
        assert np.median(counts) < counts.mean()


def test_features(default):
    assert default.user_features.names == ("gender", "age", "occupation")
    assert default.item_features.names == ("genres",)
    assert all(feature.width == 1 for feature in default.user_features.features)
    genres = default.item_features["genres"]
    table = genres.padded()
    assert genres.width == 3 and np.diff(genres.offsets).min() == 1
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in table)


def test_equal_settings_give_equal_data(default):
    again, other = reader().read(), reader(data_seed=1).read()
    assert again.fingerprint() == default.fingerprint() != other.fingerprint()
    assert np.array_equal(again.times, default.times)


def test_truth_is_that_of_the_data(default):
    """Ratings follow the true affinity, and chosen items have a higher affinity than others."""
    truth = reader().truth()
    affinity = truth.affinity(default.users, default.items)
    assert np.corrcoef(affinity, default.ratings)[0, 1] > 0.85
    anything = truth.affinity(default.users, np.random.default_rng(0).permutation(default.items))
    assert affinity.mean() > anything.mean() + 0.5
    users = np.array([3, 5])
    by_hand = 2.0 * truth.affinity(users, np.array([7, 9])) + truth.log_popularity[[7, 9]]
    np.testing.assert_allclose(truth.scores(users)[[0, 1], [7, 9]], by_hand, rtol=1e-5)
    assert np.exp(truth.log_popularity).sum() == pytest.approx(1, abs=1e-4)


def test_without_noise_ratings_are_steps_of_the_affinity():
    found, truth = reader(noise=0.0).read(), reader(noise=0.0).truth()
    affinity = truth.affinity(found.users, found.items)
    for lower, upper in itertools.pairwise(range(1, 6)):
        assert affinity[found.ratings == lower].max() <= affinity[found.ratings == upper].min()


def test_popular_items_follow_the_popularity():
    truth = reader().truth()
    drawn = (
        np.bincount(truth.popular_items(np.random.default_rng(0).random(1_000_000)), minlength=400)
        / 1_000_000
    )
    np.testing.assert_allclose(drawn, np.exp(truth.log_popularity), atol=6e-4)


def test_a_steeper_law_and_a_higher_selectivity_show_in_the_data(default):
    """Both ends of the popularity, how equal users are, and how well choices follow the truth."""

    def head(table):
        counts = np.sort(np.bincount(table.items, minlength=400))[::-1]
        return counts[:40].sum() / counts.sum()

    def liking(table, **options):
        return float(reader(**options).truth().affinity(table.users, table.items).mean())

    steep = reader(popularity_exponent=3.0).read()
    assert head(steep) > 1.2 * head(default) > 1.2 * head(reader(popularity_head=1.0).read())
    picky, blind = {"selectivity": 4.0}, {"selectivity": 0.0}
    assert liking(reader(**picky).read(), **picky) > liking(default) + 0.1
    assert abs(liking(reader(**blind).read(), **blind)) < 0.1
    equal = np.bincount(reader(activity_spread=0.0).read().users)
    assert equal.min() == equal.max() == 40


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_demographics_explain_their_share(share):
    truth = reader(users=5000, demographics=share).truth()
    assert explained_share(truth.user_features, truth.user_factors) == pytest.approx(
        share, abs=0.05
    )


def test_demographics_show_in_the_data():
    """Men and women choose different items, far more than two random halves."""
    table = reader(users=2000, demographics=0.5).read()
    gender = table.user_features["gender"].codes

    def distance(group):
        shares = [np.bincount(table.items[group[table.users] == g], minlength=400) for g in (0, 1)]
        first, second = (share / share.sum() for share in shares)
        return np.abs(first - second).sum()

    generator = np.random.default_rng(0)
    assert distance(gender) > 1.5 * max(distance(generator.permutation(gender)) for _ in range(20))


def test_popularity_then_ease_then_the_oracle(default):
    """A trained model beats popularity, and the true preferences beat the model."""

    class Oracle(Baseline):
        """Scores by the true preferences; the user follows from the order of the calls."""

        def fit(self, histories):
            self.next = 0

        def scores(self, histories):
            users = tested[self.next : self.next + histories.num_users]
            self.next += histories.num_users
            return torch.from_numpy(truth.scores(users))

    globals()["Oracle"], truth = Oracle, reader().truth()
    partition = UserHoldout(UserHoldout.Config(), 0).split(default)
    tested = np.unique(default.users[partition.test_rows[default.ratings[partition.test_rows] > 3]])
    names = ["popularity", "ease", f"{__name__}:Oracle"]
    population = Population(default, partition, task="ranking", positive_above=3)
    got = evaluate_baselines(names, population, held_out="test", ks=(10,), block=32)
    popularity, ease, oracle = (got[name]["hits@10"] for name in names)
    assert popularity > 2 * 10 / 400
    assert ease > 1.3 * popularity and oracle > 1.1 * ease


@pytest.mark.slow
def test_large_catalogue_needs_little_memory():
    """20,000 users with 1,000,000 items: a matrix would take 80 GB."""
    tracemalloc.start()
    table = reader(users=20_000, items=1_000_000, mean_interactions=20).read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert table.num_items == 1_000_000 and len(table) > 300_000
    assert peak < 600e6


def test_work_in_chunks_covers_every_user_once(monkeypatch):
    monkeypatch.setattr(synthetic, "_CANDIDATES_AT_ONCE", 500)
    counts = np.array([1, 1000, 1, 1, 80, 3, 500])
    parts = list(synthetic._parts(counts, 500))
    assert len(parts) > 2
    assert np.concatenate([np.arange(7)[part] for part in parts]).tolist() == list(range(7))
    table = reader(users=50).read()
    assert np.bincount(table.users, minlength=50).min() >= 8 and (np.diff(table.users) >= 0).all()


@pytest.mark.parametrize("most", [1, 500, 10_000_000])
def test_data_do_not_depend_on_what_stays_in_the_cache(default, monkeypatch, most):
    monkeypatch.setattr(synthetic, "_CANDIDATES_IN_CACHE", most)
    assert reader().read().fingerprint() == default.fingerprint()


@pytest.mark.parametrize("items", [400, 40_000_000])
def test_candidates_are_those_of_a_plain_loop(items):
    """Counted user by user, with numbers of 32 bits and of 64."""
    law = PopularityLaw(items, 1.1, 0.02)
    generator = np.random.default_rng(0)
    counts = np.array([1, 30, 2, 180])
    known = SimpleNamespace(item_factors=range(items), popular_items=law.rank_at)
    truth = cast(Truth, known)
    draws = synthetic._Draws.of(np.arange(4), counts, items, generator)
    found = synthetic._candidates(truth, draws)
    popular = np.split(law.rank_at(draws.chances), np.cumsum(5 * counts)[:-1])
    items_of, weights = np.split(found.items, np.cumsum(found.found)[:-1]), []
    for user, count in enumerate(counts):
        expected = dict[int, float](Counter(popular[user].tolist()))
        for place in range(count):
            item = int((draws.starts[user] + place * draws.steps[user]) % items)
            expected[item] = expected.get(item, 0) + 0.05
        assert sorted(expected) == items_of[user].tolist()
        weights += [expected[item] for item in sorted(expected)]
    np.testing.assert_allclose(found.presence, weights, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"users": 1, "items": 2, "min_interactions": 1, "mean_interactions": 1}, {"items": 16}],
)
def test_smallest(options):
    table = reader(**options).read()
    assert (np.bincount(table.users) == table.num_items // 2).all()


@pytest.mark.parametrize("options", [{"items": 15}, {"mean_interactions": 5}])
def test_settings_that_do_not_fit(options):
    with pytest.raises(ExperimentError, match="min-interactions"):
        reader(**options)


def test_a_popularity_law_without_an_integral_of_that_form():
    with pytest.raises(ExperimentError, match="popularity-exponent"):
        reader(popularity_exponent=1.0)


def test_name():
    assert resolve(DATASET, "synthetic") is Synthetic
