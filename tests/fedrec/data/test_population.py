# SPDX-License-Identifier: Apache-2.0
"""Populations of clients, their cache, and malicious users."""

import os
from dataclasses import replace

import numpy as np
import pytest

from fedrec.data import population as population_module
from fedrec.data.client_data import time_positions
from fedrec.data.interactions import FeatureTable, Interactions
from fedrec.data.perturbation import Perturbed
from fedrec.data.population import Population, PopulationCache, read_interactions
from fedrec.data.splits.rules import Partition, partition_by
from fedrec.errors import ComponentError, DataError, ExperimentError
from fedrec.evaluation.central import CentralEvaluation, make_baseline
from fedrec.experiment.schema import load


@pytest.mark.parametrize("task", ["ranking", "rating"])
def test_clients_that_are_asked_for_together_have_what_each_has_in_the_interactions(task):
    random = np.random.default_rng(3)
    users, items = random.integers(0, 12, 300), random.integers(0, 9, 300)
    ratings, times = random.integers(0, 6, 300).astype(np.float32), random.integers(0, 99, 300)
    users[users == 5] = 6  # one has nothing
    features = FeatureTable(12), FeatureTable(9)
    names = np.arange(12), np.arange(9)
    data = Interactions("drawn", users, items, *names, *features, ratings, times)
    rows = np.sort(random.permutation(300)[:200])
    partition = Partition(np.arange(12), rows, np.empty(0, np.int64), np.empty(0, np.int64))
    population = Population(data, partition, task=task, positive_above=3.0)
    asked = np.array([7, 0, 11, 5, 7, 2])
    for client, own in zip(asked.tolist(), population.clients(asked), strict=True):
        mine = rows[users[rows] == client]
        assert own.client == client and own.items.tolist() == items[mine].tolist()
        labels = ratings[mine] > 3 if task == "ranking" else ratings[mine]
        assert own.labels.tolist() == labels.tolist()
        assert (np.diff(times[mine][own.order()]) >= 0).all()
        liked = items[mine][ratings[mine] > 3] if task == "ranking" else items[mine]
        assert own.positives.tolist() == np.unique(liked).tolist()
        assert own.ratings.tolist() == ratings[mine].tolist()
    assert population.clients(np.empty(0, np.int64)) == []


def test_features_are_codes_with_places_for_several(world):
    population = world()
    assert [codes.tolist() for codes in population.client(0).features] == [[0], [0, 1]]
    assert [codes.tolist() for codes in population.client(1).features] == [[1], [-1, -1]]
    gender, hobby = population.feature_codes(np.array([3, 2]))
    assert gender.tolist() == [[1], [0]] and hobby.tolist() == [[0, -1], [1, -1]]
    assert population.schema().user_features == (("gender", 2), ("hobby", 2))


def test_held_out_masks(world):
    found = world().held_out(np.array([1, 0]), "test")
    assert world().held_out(np.array([0, 2]), "test").weight is None  # no held-out row repeats
    assert [np.flatnonzero(row).tolist() for row in found.seen] == [[0, 1, 4], [0, 1, 2, 3]]
    assert [np.flatnonzero(row).tolist() for row in found.known] == [[1], [0, 1]]
    assert [np.flatnonzero(row).tolist() for row in found.relevant] == [[4], [2]]
    assert found.weight.tolist() == [[0, 0, 0, 0, 2, 0], [0, 0, 1, 0, 0, 0]]
    validation = world().held_out(np.array([1]), "validation")
    assert np.flatnonzero(validation.relevant).tolist() == [0]


def test_ratings_are_asked_for_only_where_they_are_needed(world):
    partition = world().partition
    bare = replace(world().interactions, ratings=None)
    population = Population(bare, partition, task="ranking", positive_above=None)
    assert population.client(0).labels.tolist() == [1, 1]
    for task, above in (("ranking", 3.0), ("rating", None)):
        with pytest.raises(DataError, match="world has no ratings"):
            Population(bare, partition, task=task, positive_above=above)


class TestPerturbed:
    """Training rows are (0,0) (0,1) (1,1) (1,1) (2,5); the perturbed ones are five of user 0 and
    one of user 2."""

    @pytest.fixture
    def changed(self, world):
        plain = world()
        rows = plain.interactions.with_rows(np.array([0, 0, 0, 0, 0, 0]))
        columns = {"users": [0] * 5 + [2], "items": [0, 3, 4, 4, 5, 2]}
        rows = replace(rows, ratings=[5, 5, 1, 4, 4, 5], **columns)
        made = Perturbed(rows, np.array([0, 1, -1, -1, -1, 4]))
        return Population(
            plain.interactions, plain.partition, task="ranking", positive_above=3.0, perturbed=made
        )

    def test_clients_learn_from_what_came_out(self, changed):
        data = changed.clients(np.array([0, 1, 2]))
        assert [one.items.tolist() for one in data] == [[0, 3, 4, 4, 5], [], [2]]
        assert data[0].labels.tolist() == [1, 1, 0, 1, 1]
        assert data[0].positives.tolist() == [0, 3, 4, 5]
        offsets, items = changed.rows(np.array([2, 0]), positive=True).lists
        assert offsets.tolist() == [0, 1, 5] and items.tolist() == [2, 0, 3, 4, 5]
        assert changed.histories(np.array([1, 2])).nonzero()[1].tolist() == [2]
        rows = changed.rows(np.array([2]))
        assert [part.tolist() for part in (rows.ids, rows.items, rows.labels)] == [[2], [2], [1.0]]
        assert changed.counts(np.array([0, 1, 2])).tolist() == [5, 0, 1]

    def test_what_is_known_and_held_out_is_real(self, changed, world):
        everyone, plain = np.array([0, 1, 2, 3]), world()
        for name in ("seen", "known", "relevant"):
            mine, real = (getattr(one.held_out(everyone, "test"), name) for one in (changed, plain))
            assert np.array_equal(mine, real)
        for population in (changed, plain):
            assert population.counts(everyone, "known").tolist() == [2, 2, 1, 0]

    def test_three_ways_of_masking(self, changed, world):
        lists, plain = (one.held_out(np.array([0]), "test") for one in (changed, world()))
        ways = {"real": [0, 1], "learned": [0, 3, 4, 5], "both": [0, 1, 3, 4, 5]}
        for how, items in ways.items():
            assert np.flatnonzero(lists.masked(how)[0]).tolist() == items
            assert np.flatnonzero(plain.masked(how)[0]).tolist() == [0, 1]


def test_a_perturbation_that_gives_something_else_is_named(load_tiny, monkeypatch):
    from fedrec.perturb.substitutes import RandomReplacement

    def perturb(self, data):
        items = {"item_ids": np.arange(99), "item_features": FeatureTable(99)}
        return Perturbed(replace(data.rows, **items), data.rows.users)

    monkeypatch.setattr(RandomReplacement, "perturb", perturb)
    with pytest.raises(ComponentError, match=r"perturbation 'RandomReplacement'(.*\n)*.*99"):
        Population.of(load_tiny("perturb.name=random-replacement"))


def test_a_seed_of_the_split_alone_keeps_the_split(load_tiny):
    parts = [
        Population.of(load_tiny(f"seed={seed}", *more)).partition
        for seed, *more in ((3, "split-seed=5"), (4, "split-seed=5"), (5,), (3,))
    ]
    kept, again, usual, other = [part.training_clients.tolist() for part in parts]
    assert kept == again == usual != other


def test_the_seed_of_the_split_orders_rows_of_one_time(load_tiny):
    settings = load_tiny("split-seed=5")
    data = read_interactions(settings)
    data = replace(data, times=np.zeros(len(data)))
    none = np.empty(0, np.int64)
    partition = Partition(np.arange(3), np.arange(len(data)), none, none)
    found = Population.of_parts(settings, data, partition).time_positions
    assert np.array_equal(found, time_positions(data, 5))
    assert not np.array_equal(found, time_positions(data, 0))


def test_clients_with_numbers_of_their_own_have_the_data_of_users_by_index(world):
    """Every question to a population takes client ids, and answers in them."""
    plain = world()
    numbers = np.array([7, 30, 41, 1000])
    given = {"task": "ranking", "positive_above": 3.0, "numbers": numbers}
    own = Population(plain.interactions, plain.partition, **given)
    everyone = np.arange(4)
    assert own.training_clients.tolist() == numbers[plain.training_clients].tolist()
    for part in ("test", "validation"):
        evaluated = numbers[plain.evaluated_clients(part)]
        assert own.evaluated_clients(part).tolist() == evaluated.tolist()
        masks = (own.held_out(numbers, part), plain.held_out(everyone, part))
        np.testing.assert_equal(*map(vars, masks))
    for part in ("training", "known", "test", "validation", "all"):
        rows, wanted = own.rows(numbers, part), plain.rows(everyone, part)
        assert np.array_equal(rows.ids, numbers[wanted.ids])
        np.testing.assert_equal(rows.lists, wanted.lists)
    for name in ("weighted_items", "histories"):
        np.testing.assert_equal(getattr(own, name)(numbers), getattr(plain, name)(everyone))
    for name in ("counts", "feature_codes"):
        np.testing.assert_equal(getattr(own, name)(numbers[2:]), getattr(plain, name)(everyone[2:]))
    assert [data.client for data in own.clients(numbers)] == numbers.tolist()
    np.testing.assert_equal(own.client(30).items, plain.client(1).items)


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_computed_in_parts_is_that_of_plain_loops(monkeypatch, most, grouped):
    monkeypatch.setattr(population_module, "_AT_ONCE", most)
    random = np.random.default_rng(5)
    users, items = random.integers(0, 12, 90), random.integers(0, 40, 90)
    users = np.sort(users) if grouped else users
    ratings = random.integers(1, 6, 90).astype(np.float32)
    features = FeatureTable(12), FeatureTable(40)
    data = Interactions("drawn", users, items, np.arange(12), np.arange(40), *features, ratings)
    order = random.permutation(90)
    partition = Partition(np.arange(9), np.sort(order[:60]), order[60:60], np.sort(order[60:]))
    found = Population(data, partition, task="ranking", positive_above=3.0)
    rows = list(zip(users.tolist(), items.tolist(), (ratings > 3).tolist(), strict=True))
    trained = [rows[row] for row in partition.train_rows if rows[row][0] < 9]
    likes = {(user, item) for user, item, liked in trained if liked}
    assert found.popularity.tolist() == [sum(i == item for _, i in likes) / 9 for item in range(40)]
    assert found.untrained_items.tolist() == [all(i != j for _, j, _ in trained) for i in range(40)]
    tested = {rows[row][0] for row in partition.test_rows if rows[row][2]}
    assert found.evaluated_clients("test").tolist() == sorted(tested)


# The populations that a process keeps, and data that are rewritten between two of its runs.

DATASETS = {
    "table": lambda path: {"name": "table", "path": str(path)},
    "canaries": lambda path: {
        "name": "simulations.attacks.systems:CanaryUsers",
        "base": {"name": "table", "path": str(path)},
        "count": 3,
    },
}


def rewrite(path, users):
    """A table in which each user has eight items; written over what is there."""
    rows = [f"{user},{(user + item) % 12}" for user in range(users) for item in range(8)]
    path.write_text("\n".join(["user,item", *rows]) + "\n")


@pytest.fixture
def table(tiny_experiment):
    """An experiment on data without ratings."""
    return {key: value for key, value in tiny_experiment().items() if key != "positive-above"}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "table.csv"
    rewrite(path, 18)
    return path


@pytest.mark.parametrize("dataset", DATASETS)
def test_rewritten_data_are_read_again_by_what_begins_anew(table, path, dataset):
    table["dataset"] = DATASETS[dataset](path)
    experiment, kept = load(table), PopulationCache()
    first = kept.population(experiment)
    kept.renew(experiment)
    assert kept.population(experiment) is first
    rewrite(path, 25)
    assert kept.population(experiment) is first  # within a run it stays the same
    kept.renew(experiment)
    assert kept.population(experiment).interactions.num_users - first.interactions.num_users == 7


def test_a_table_of_the_same_size_and_a_table_of_features_are_noticed(table, path):
    features = path.with_name("sorts.csv")
    features.write_text("item,sort\n0,a\n1,b\n")
    table["dataset"] = {"name": "table", "path": str(path), "item-features": ["sorts.csv"]}
    experiment, kept = load(table), PopulationCache()
    for changed in (path, features):
        first = kept.population(experiment)
        changed.write_bytes(changed.read_bytes())
        os.utime(changed, ns=(1, 1))
        kept.renew(experiment)
        assert kept.population(experiment) is not first


def test_populations_from_elsewhere_are_kept(table, path):
    """A node of a cluster has the data from the object store, and perhaps no file."""
    table["dataset"] = DATASETS["table"](path)
    experiment, kept, other = load(table), PopulationCache(), PopulationCache()
    other.hold(experiment, kept.population(experiment))
    path.unlink()
    other.renew(experiment)
    assert other.cached(experiment) is kept.cached(experiment)


# Malicious users in the data: their number, targets, what the adversary knows, and centralised
# systems that are fitted to their profiles.


@pytest.mark.parametrize(
    ("settings", "number"),
    [("share=0.1", 1), ("share=0.5", 9), ("share=0.0", 0), ("share=0.001", 1), ("share=0.17", 3)],
)
def test_they_are_training_users_behind_the_others(load_tiny, settings, number):
    """A share of 18 honest users, with the features of some of them, who like the target."""
    found = Population.of(load_tiny(f"adversary={{attack='random',{settings}}}"))
    plain = Population.of(load_tiny())
    honest = plain.interactions.num_users
    assert found.adversary.malicious.tolist() == [*range(honest, honest + number)]
    added = set(found.training_clients) - set(plain.training_clients)
    assert added == set(found.adversary.malicious)
    features = found.interactions.user_features
    assert features.names == plain.interactions.user_features.names
    for codes, known in zip(
        found.feature_codes(found.adversary.malicious),
        plain.feature_codes(plain.training_clients),
        strict=True,
    ):
        assert {*map(tuple, codes)} <= {*map(tuple, known)}
    rows = plain.rows(plain.training_clients, "known").items
    counts = np.bincount(rows, minlength=plain.interactions.num_items)
    (target,) = found.adversary.targets.tolist()  # the least popular item
    assert counts[target] == counts.min()
    for client in found.adversary.malicious.tolist():
        assert target in found.client(client).positives


def test_more_targets_than_items_are_refused(load_tiny):
    with pytest.raises(ExperimentError, match="at most the number of items of the dataset"):
        Population.of(load_tiny("adversary={attack='random',targets=1000000}"))


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_public_rows_are_a_share_of_each_clients_training_rows(load_tiny, share):
    settings = load_tiny(f"adversary={{attack='random',public-share={share}}}")
    known = Population.of(settings).adversary
    interactions = read_interactions(settings)
    partition = partition_by(settings.split, settings.seed, interactions)
    for place, user in enumerate(partition.training_clients.tolist()):
        rows = partition.train_rows[interactions.users[partition.train_rows] == user]
        own = known.public[known.offsets[place] : known.offsets[place + 1]]
        assert len(own) == np.ceil(share * len(rows))
        assert set(own) <= set(interactions.items[rows])


@pytest.mark.parametrize("name", ["popularity", "ease", "ials"])
def test_profiles_reach_centralised_systems(name, load_tiny):
    """Half as many malicious as honest users raise the targets' places in honest users' lists."""
    found = {}
    for share in (0.0, 0.5):
        settings = load_tiny(f"adversary={{attack='random',share={share},public-share=1.0}}")
        evaluation = CentralEvaluation(Population.of(settings), settings.evaluation)
        measured = evaluation.measure(make_baseline(name, {}))
        assert not set(measured.table.index) & set(range(24, 33))  # malicious users
        found[share] = measured.means(evaluation.metrics)
    assert found[0.0]["exposure@5"] == 0
    assert found[0.5]["target-rank"] < found[0.0]["target-rank"] - 0.1
