# SPDX-License-Identifier: Apache-2.0
"""Interactions: features, negatives, weights by time, independence of users, and synthetic ones."""

import dataclasses
import tracemalloc
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedrec.components import registry
from fedrec.data.client_data import draw_negatives, hashed_shares, nth_outside, row_numbers
from fedrec.data.interactions import (
    Feature,
    FeatureNames,
    FeatureTable,
    Interactions,
    time_weighted,
)
from fedrec.data.perturbation import TrainingData
from fedrec.data.population import check_independent_clients
from fedrec.data.readers import synthetic
from fedrec.data.readers.synthetic import Synthetic, Truth
from fedrec.data.splits.rules import ROWS
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.schema import DataSettings, load
from tests.fedrec.data.test_splits import interactions, make

# Features of rows.


def test_renumbered_rows_keep_their_categories():
    feature = Feature.multiple("genres", [["b"], ["z", "c"], [], ["a", "b"]])
    other = feature.renumbered(np.array([3, 0, 1, -1]))
    assert other.categories == feature.categories
    words = [[other.categories[code] for code in row if code >= 0] for row in other.padded()]
    assert words == [["a", "b"], ["b"], ["z", "c"], []]


def test_texts_stay_apart_and_follow_their_rows():
    title = Feature.words("title", ["Red shoes", "red hat", ""])
    table = FeatureTable(3, (Feature.single("kind", "aba"),), (title,))
    assert table.names == ("kind",) and table["title"] is title
    names = FeatureNames(items=("kind",), item_texts=("title",))
    assert FeatureNames.of(FeatureTable(9), table) == names
    moved = table.renumbered(np.array([1, -1, 0]))["title"]
    words = [{moved.categories[code] for code in row if code >= 0} for row in moved.padded()]
    assert words == [{"red", "hat"}, set(), {"red", "shoes"}]
    with pytest.raises(DataError, match="duplicate feature"):
        FeatureTable(3, (Feature.single("title", "aba"),), (title,))


# Negatives are exactly uniform, and do not reveal the held-out items.


def test_every_free_item_is_equally_likely():
    positives = np.array([0, 3, 4, 9, 19])
    drawn = draw_negatives(positives, 20, 300_000, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=20)
    assert counts[positives].sum() == 0
    assert chisquare(np.delete(counts, positives)).pvalue > 1e-3


@given(st.data())
def test_each_rank_maps_to_one_free_item(data):
    num_items = data.draw(st.integers(1, 30))
    drawn = data.draw(st.sets(st.integers(0, num_items - 1), max_size=num_items - 1))
    positives = np.array(sorted(drawn), dtype=int)

    class Ranks:
        def integers(self, low, high, size):
            assert (low, size) == (0, high)
            return np.arange(high)

    free = np.setdiff1d(np.arange(num_items), positives)
    assert draw_negatives(positives, num_items, len(free), Ranks()).tolist() == free.tolist()
    assert nth_outside(positives, np.arange(len(free))).tolist() == free.tolist()


@pytest.mark.parametrize("num_items", [0, 1, 4])
def test_all_items_positive(num_items):
    with pytest.raises(DataError, match="no negative item"):
        draw_negatives(np.arange(num_items), num_items, 1, np.random.default_rng(0))


USERS, ITEMS, TRAINED, ROUNDS = 400, 300, 20, 100


def _times_drawn(excluded: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """How often each item became a negative in all rounds (four per positive)."""
    drawn = [draw_negatives(excluded, ITEMS, 4 * TRAINED, generator) for _ in range(ROUNDS)]
    return np.bincount(np.concatenate(drawn), minlength=ITEMS)


def _expected_hit(score: np.ndarray, item: int, others: np.ndarray, k: int = 10) -> float:
    """Probability that `item` is in the top k among `others`, ties broken at random."""
    above, equal = np.sum(score[others] > score[item]), np.sum(score[others] == score[item])
    return float(np.clip(k - above, 0, equal + 1) / (equal + 1))


def _hits_of_the_count(leaky: bool) -> tuple[float, float]:
    """Mean Hits@10 of the score -(number of draws): among 99 sampled never-seen items, and among
    all of them."""
    generator = np.random.default_rng(7)
    sampled, full = [], []
    for _ in range(USERS):
        own = generator.choice(ITEMS, TRAINED + 1, replace=False)
        train, held_out = np.sort(own[:-1]), own[-1]
        score = -_times_drawn(np.sort(own) if leaky else train, generator)
        never_seen = np.setdiff1d(np.arange(ITEMS), own)
        others = generator.choice(never_seen, 99, replace=False)
        sampled.append(_expected_hit(score, held_out, others))
        full.append(_expected_hit(score, held_out, never_seen))
    return float(np.mean(sampled)), float(np.mean(full))


def test_the_number_of_draws_reveals_nothing_about_held_out_items():
    """A score without learning is at chance level: within four binomial standard deviations of 400
    users."""
    sampled, full = _hits_of_the_count(leaky=False)
    for hits, chance in ((sampled, 10 / 100), (full, 10 / (ITEMS - TRAINED))):
        assert abs(hits - chance) < 4 * np.sqrt(chance * (1 - chance) / USERS)


def test_drawing_outside_the_held_out_items_would_betray_them():
    """The same score under the leaky rule, which shows that the test above can fail."""
    sampled, full = _hits_of_the_count(leaky=True)
    assert sampled > 0.9 and full > 0.9


# Repeated ratings by loops, and their use in datasets.


@pytest.mark.parametrize("with_times", [True, False])
def test_against_loops(with_times):
    random = np.random.default_rng(0)
    users, items = random.integers(0, 3, 60), random.integers(0, 5, 60)
    ratings, times = random.random(60), random.permutation(60) if with_times else None
    pairs = time_weighted(users, items, ratings, times)
    for user, item, value in zip(*pairs, strict=True):
        rows = np.flatnonzero((users == user) & (items == item))
        rows = rows if times is None else rows[np.argsort(times[rows])]
        m = len(rows)
        wanted = sum(ratings[row] * 2 * (t + 1) / (m * (m + 1)) for t, row in enumerate(rows))
        assert value == pytest.approx(wanted)
    assert len(pairs[0]) == len({*zip(users.tolist(), items.tolist(), strict=True)})


def test_without_ratings_a_repeated_use_counts_one():
    for items, counted in (([1, 1, 1, 2], [1, 1]), ([], [])):
        users = np.zeros(len(items), int)
        assert time_weighted(users, np.array(items, int), None, None)[2] == pytest.approx(counted)


def test_histories_and_devices_agree(world):
    population = world()
    assert population.histories(np.arange(4)).max() == 1
    rated = population.histories(np.arange(4), rated=True)
    for client in range(4):
        data = population.client(client)
        np.testing.assert_array_equal(rated[client, data.positives], data.amounts(rated=True))
        assert (data.amounts(rated=False) == 1).all()
        assert np.count_nonzero(rated[client]) == len(data.positives)
    # User 1 gave item 1 a 5 and then a 4; no times, so in the order of the rows.
    assert rated[1, 1] == pytest.approx(5 / 3 + 8 / 3) and rated[0, 0] == 5


# One client's rows decide nothing about the rows of others, wherever a guarantee needs it.

INDEPENDENCE_USERS, INDEPENDENCE_ITEMS = 30, 12
BOTH, REPLACED = ("replace-one", "add-remove"), ("replace-one",)
BY_CLIENT = {"stream": "client"}
INDEPENDENT = [
    ("ratio", {}, BOTH),
    ("kfold", {"fold": 2, "validation": 0.2}, BOTH),
    ("leave-one-out", {}, BOTH),
    ("leave-one-out", {"order": "random"}, BOTH),
    ("bounded", {"delta": 0.5, "p-min": 0.0}, BOTH),
    ("published", {"validation": 0.3}, BOTH),
    ("new-items", {"validation": 0.2, "old-rows": 0.3}, BOTH),
    ("user-holdout", {"validation-users": 0.2}, REPLACED),
    ("user-holdout", {"folds": 3, "validation-users": 0.2}, REPLACED),
    ("user-holdout", {"halves": "temporal", "generalisation": "weak"}, REPLACED),
    ("user-holdout", {**BY_CLIENT, "validation-users": 0.2}, BOTH),
    ("user-holdout", {**BY_CLIENT, "folds": 3, "validation-users": 0.2}, BOTH),
    ("user-holdout", {**BY_CLIENT, "generalisation": "weak"}, BOTH),
]
DEPENDENT = [
    ("ratio", {"stream": "dataset"}, BOTH),
    ("bounded", {"stream": "dataset", "p-min": 0.0}, BOTH),
    ("bounded", {}, BOTH),
    ("global-time", {}, BOTH),
    ("new-items", {"order": "newest"}, BOTH),
    ("user-holdout", {}, ("add-remove",)),
    ("user-holdout", {"generalisation": "weak"}, BOTH),
]


def cases(table):
    return [(name, options, kind) for name, options, kinds in table for kind in kinds]


def rows_of(user: int, random: np.random.Generator) -> pd.DataFrame:
    count = random.integers(3, 9)
    table = {"user": user, "item": random.integers(0, INDEPENDENCE_ITEMS, count)}
    return pd.DataFrame(table | {"time": random.integers(0, 100, count)})


def data(users: dict[int, pd.DataFrame]) -> Interactions:
    """The rows of all users, and a training and a test file for each; a user keeps its name, and
    numbers are those of who is there."""
    frame = pd.concat(users.values())
    names, index = np.unique(frame["user"], return_inverse=True)
    items = [INDEPENDENCE_ITEMS - 1, *frame["item"][1:]]
    table = interactions(index, items, frame["time"])
    published = frame["time"].to_numpy() % 4 == 0
    return dataclasses.replace(table, user_ids=names, published_test=published)


def neighbours(adjacency: str) -> tuple[dict, list[dict]]:
    """Rows of all users by name, and those in which user 7 has others, or is not there."""
    random = np.random.default_rng(5)
    whole = {user: rows_of(user, random) for user in range(INDEPENDENCE_USERS)}
    if adjacency == "add-remove":
        return whole, [{user: rows for user, rows in whole.items() if user != 7}]
    own = whole[7]
    others = [own[:-1], own[:1], pd.concat([own] * 5), own.assign(time=0), own.assign(time=99)]
    return whole, [{**whole, 7: other} for other in others]


def training_part(split, table: Interactions) -> tuple[list[int], list[tuple]]:
    """Training clients by name, and user, item and time of each row that one trains on, but those
    of user 7. Halves of held-out users, who do not train, may be others."""
    partition = split.split(table)
    part = partition.parts(table)
    names = table.user_ids[table.users]
    rows = zip(names.tolist(), table.items.tolist(), table.times.tolist(), part, strict=True)
    clients = table.user_ids[partition.training_clients].tolist()
    return clients, [row[:3] for row in rows if row[0] != 7 and row[3] == "training"]


@pytest.mark.parametrize(("name", "options", "adjacency"), cases(INDEPENDENT))
def test_parts_of_others_stay_whatever_a_client_has(name, options, adjacency):
    """And who trains, but for that client under add-remove."""
    whole, others = neighbours(adjacency)
    for seed in range(3):
        split = make(name, seed, **options)
        assert split.depends_on(adjacency) == ""
        clients, rows = training_part(split, data(whole))
        assert 0 < len(rows) < len(data(whole))
        for other in others:
            other_clients, other_rows = training_part(split, data(other))
            assert other_rows == rows
            if adjacency == "add-remove":
                clients = [name for name in clients if name != 7]
            assert other_clients == clients


@pytest.mark.parametrize(("name", "options", "adjacency"), cases(DEPENDENT))
def test_a_split_that_depends_on_others_says_so_and_is_refused(name, options, adjacency):
    assert make(name, **options).depends_on(adjacency)
    settings = DataSettings.parse(
        {"dataset": {"name": "synthetic"}, "split": {"name": name, **options}}
    )
    with pytest.raises(ExperimentError, match="one client affect which rows of others") as error:
        check_independent_clients(settings, adjacency, "[privacy]")
    assert "[privacy]" in str(error.value)


def test_numbers_of_rows_and_users_are_uniform_and_of_each_user_alone():
    table = interactions(np.repeat(np.arange(50), 200))
    numbers = row_numbers(table, 1, "split", ROWS) / 2**32
    assert len(np.unique(numbers)) == len(numbers)
    for drawn in (numbers, hashed_shares(interactions(np.arange(9000)).user_ids, 1, "split")):
        observed = np.bincount((drawn * 20).astype(int), minlength=20)
        expected = len(drawn) / 20
        assert np.square(observed - expected).sum() / expected < 43.8  # .999 quantile, 19 degrees
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04
    assert not np.intersect1d(numbers, row_numbers(table, 2, "split", ROWS) / 2**32).size


PERTURBATIONS = [
    ("random-replacement", {}),
    ("randomised-response", {"epsilon": 2.0}),
    ("targeted", {"attribute": "sex", "epsilon": 2.0, "select": "random", "budget": 0.3}),
]
REFUSED = [
    ("targeted", {"attribute": "sex", "epsilon": 2.0}, False),
    ("targeted", {"attribute": "sex", "epsilon": 2.0, "select": "random"}, True),
    ("randomised-response", {"epsilon": 2.0}, True),
    ("upc-sdg", {}, False),
    ("noisy-cooccurrence", {"epsilon": 2.0}, False),
]


def perturbation(name: str, options: dict):
    made = registry.resolve(registry.PERTURBATION, name)
    return made(made.Config.parse(options), 3)


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        (registry.SPLIT, [*INDEPENDENT, *DEPENDENT]),
        (registry.PERTURBATION, [*PERTURBATIONS, *REFUSED]),
    ],
)
def test_none_is_left_out(kind, cases):
    assert {name for name, *_ in cases} == {name for name, _ in registry.available(kind)}


@pytest.mark.parametrize(("name", "options"), PERTURBATIONS)
def test_perturbed_rows_of_others_stay_whatever_a_client_has(name, options):
    whole, others = neighbours("replace-one")
    learned = []
    for rows in (whole, *others):
        table = data({user: own.drop_duplicates("item") for user, own in rows.items()})
        sex = Feature.single("sex", ["fm"[u % 2] for u in range(INDEPENDENCE_USERS)])
        table = dataclasses.replace(table, user_features=FeatureTable(INDEPENDENCE_USERS, (sex,)))
        made = perturbation(name, options)
        assert made.depends_on(False) == ""
        given = TrainingData(table, np.arange(INDEPENDENCE_USERS), rated=False)
        perturbed = made.perturb(given).rows
        assert not np.array_equal(perturbed.items, table.items)
        learned.append(perturbed.items[perturbed.users != 7].tolist())
    assert all(items == learned[0] for items in learned)


@pytest.mark.parametrize(("name", "options", "rated"), REFUSED)
def test_a_perturbation_that_depends_on_others_is_refused_beside_privacy(
    name, options, rated, tiny_experiment
):
    assert perturbation(name, options).depends_on(rated)
    table = tiny_experiment() | {"perturb": {"name": name, **options}}
    if not rated:
        del table["positive-above"]
    with pytest.raises(ExperimentError, match="how rows of others are perturbed"):
        check_independent_clients(load(table), "replace-one", "[privacy]")


# The synthetic dataset: its shape, its true preferences, how well they can be learned, and large
# sizes.


def reader(**options) -> Synthetic:
    settings = {name.replace("_", "-"): value for name, value in options.items()}
    return Synthetic("synthetic", Synthetic.Config.parse(settings))


@pytest.fixture(scope="module")
def default():
    return reader().read()


def test_shape(default):
    counts = np.bincount(default.users, minlength=600)
    assert (default.num_users, default.num_items) == (600, 400)
    assert counts.min() >= 8 and counts.max() <= 200 and 32 < counts.mean() < 48
    pairs = default.users * 400 + default.items
    assert len(np.unique(pairs)) == len(pairs)
    assert set(default.ratings) == {1, 2, 3, 4, 5}
    assert 0.45 < (default.ratings > 3).mean() < 0.75


def test_the_data_are_pinned(default):
    """Every result on synthetic data depends on them."""
    assert default.fingerprint().startswith("cd0d7482095a2c03")


def test_truth_is_that_of_the_data(default):
    """Ratings follow the true affinity, and chosen items have a higher affinity than others."""
    truth = Truth.of(600, 400)
    affinity = truth.affinity(default.users, default.items)
    assert np.corrcoef(affinity, default.ratings)[0, 1] > 0.85
    anything = truth.affinity(default.users, np.random.default_rng(0).permutation(default.items))
    assert affinity.mean() > anything.mean() + 0.5


@pytest.mark.slow
def test_large_catalogue_needs_little_memory():
    """20,000 users with 1,000,000 items: a matrix would take 80 GB."""
    tracemalloc.start()
    table = reader(users=20_000, items=1_000_000, mean_interactions=20).read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert table.num_items == 1_000_000 and len(table) > 300_000
    assert peak < 600e6


@pytest.mark.parametrize("most", [1, 500, 10_000_000])
def test_data_do_not_depend_on_what_stays_in_the_cache(default, monkeypatch, most):
    monkeypatch.setattr(synthetic, "_CANDIDATES_IN_CACHE", most)
    assert reader().read().fingerprint() == default.fingerprint()


@pytest.mark.parametrize("num_items", [400, 40_000_000])
def test_candidates_are_those_of_a_plain_loop(num_items):
    """Counted user by user, with numbers of 32 bits and of 64."""
    generator = np.random.default_rng(0)
    counts = np.array([1, 30, 2, 180])
    popular = synthetic._ranks_at(generator.random(5 * counts.sum()), num_items, 1.1, 0.02)
    by_chance = [generator.choice(num_items, count, replace=False) for count in counts]
    number, items_of_all, presence = synthetic._candidates(
        counts, popular, np.concatenate(by_chance), num_items
    )
    ends = np.cumsum(number)[:-1]
    weights = np.split(presence, ends)
    liked = np.split(popular, np.cumsum(5 * counts)[:-1])
    for user, items in enumerate(np.split(items_of_all, ends)):
        expected = dict[int, float](Counter(liked[user].tolist()))
        for item in by_chance[user].tolist():
            expected[item] = expected.get(item, 0) + 0.05
        assert sorted(expected) == items.tolist()
        np.testing.assert_allclose(weights[user], [expected[i] for i in sorted(expected)], 1e-6)


@pytest.mark.parametrize(
    "options",
    [{"users": 1, "items": 2, "min_interactions": 1, "mean_interactions": 1}, {"items": 16}],
)
def test_smallest(options):
    table = reader(**options).read()
    assert (np.bincount(table.users) == table.num_items // 2).all()


@pytest.mark.parametrize(
    "options", [{"items": 15}, {"mean_interactions": 5}, {"popularity_exponent": 1.0}]
)
def test_settings_that_do_not_fit(options):
    with pytest.raises(ExperimentError, match="inconsistent settings"):
        reader(**options)
