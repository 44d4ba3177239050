# SPDX-License-Identifier: Apache-2.0
"""Splits of rows into training, validation and test."""

import math

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fedrec.components.registry import SPLIT, resolve
from fedrec.components.sections import Section
from fedrec.data.client_data import time_positions
from fedrec.data.interactions import FeatureTable, Interactions, index_rows
from fedrec.data.splits.rules import BoundedConfig, Partition, Split, partition_by, places
from fedrec.errors import DataError, ExperimentError

# Every split on small examples, and the common properties of all splits.


def interactions(users, items=None, times=None, num_users=None) -> Interactions:
    users = np.asarray(users, dtype=np.int64)
    items = np.arange(len(users)) if items is None else np.asarray(items)
    num_users = int(users.max(initial=-1)) + 1 if num_users is None else num_users
    num_items = int(items.max(initial=0)) + 1
    features = FeatureTable(num_users), FeatureTable(num_items)
    return Interactions(
        "hand", users, items, np.arange(num_users), np.arange(num_items), *features, None, times
    )


def make(name: str, seed: int = 0, **options) -> Split:
    split = resolve(SPLIT, name)
    return split(split.Config.parse(options), seed)


def divided(table: Interactions, name: str, seed: int = 0, **options) -> Partition:
    return partition_by(Section.parse({"name": name, **options}), seed, table)


def parts(partition) -> list[list[int]]:
    names = "train_rows", "validation_rows", "test_rows"
    return [getattr(partition, name).tolist() for name in names]


ALL = [
    ("user-holdout", {}),
    ("user-holdout", {"halves": "temporal", "validation-users": 0.3}),
    ("user-holdout", {"split-by": "rows"}),
    ("user-holdout", {"generalisation": "weak"}),
    ("user-holdout", {"folds": 2, "validation-users": 0.3}),
    ("leave-one-out", {}),
    ("leave-one-out", {"order": "random", "validation": False}),
    ("ratio", {}),
    ("ratio", {"train": 0.5, "validation": 0.2, "test": 0.3}),
    ("kfold", {"fold": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), ALL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_disjoint_complete_and_repeatable(name, options, data):
    """And no item of a user is in two parts of a divided table, nor trains later than a held-out
    one of a temporal split."""
    rows = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)), max_size=60)
    users, items, times = np.array([*data.draw(rows), *((u, 9, 0) for u in range(10))]).T
    table = interactions(users, items, times)
    seed = data.draw(st.integers(0, 2**40))
    first, again = (make(name, seed, **options).split(table) for _ in range(2))
    assert np.array_equal(np.sort(np.concatenate(parts(first))), np.arange(len(table)))
    assert parts(first) == parts(again)
    assert np.array_equal(first.training_clients, again.training_clients)
    if name != "kfold":  # there a client may have all of its rows in the fold
        assert set(first.training_clients) <= set(table.users[first.train_rows])
    partition = divided(table, name, seed, **options)
    pairs = [set(zip(users[part], items[part], strict=True)) for part in parts(partition)]
    apart = sum(map(len, pairs)) == len(set.union(*pairs))
    assert apart or options.get("split-by") == "rows"
    temporal = name == "leave-one-out" and options.get("order") != "random"
    for user in range(10) if temporal else ():
        own = ([row for row in part if users[row] == user] for part in parts(partition))
        train, validation, test = (times[rows] for rows in own)
        assert train.max(initial=0) <= np.min([*validation, *test, 3])


@pytest.mark.parametrize(
    ("name", "options"), [("leave-one-out", {}), ("user-holdout", {"halves": "temporal"})]
)
@pytest.mark.parametrize("distinct_times", [10**6, 3, 1])
def test_temporal_split_ignores_the_order_of_rows(name, options, distinct_times):
    """Also of rows of one time."""
    times = np.random.default_rng(0).integers(distinct_times, size=140)
    table = interactions(np.repeat(np.arange(20), 7), times=times)
    shuffle = np.random.default_rng(1).permutation(140)
    moved = interactions(table.users[shuffle], table.items[shuffle], table.times[shuffle])
    expected = make(name, **options).split(table)
    got = make(name, **options).split(moved)
    for here, there in zip(parts(expected), parts(got), strict=True):
        assert sorted(here) == sorted(shuffle[there])


class TestRowsOfOneTime:
    def test_the_seed_decides_their_order_within_their_time(self):
        users = np.repeat(np.arange(300), 8)
        times = np.tile([0, 1, 1, 1, 1, 1, 1, 2], 300)
        table = interactions(users, np.tile(np.arange(8), 300), times)
        seeds = [time_positions(table, seed).reshape(300, 8) for seed in range(2)]
        assert not np.array_equal(*seeds)
        for positions in seeds:
            assert (np.sort(positions) == np.arange(8)).all()
            assert (positions[:, [0, 7]] == [0, 7]).all()
            # each of the six is the last of its time for a sixth of 300 users, 50 (deviation 6.5)
            assert np.ptp(np.bincount(positions[:, 1:7].argmax(1), minlength=6)) < 40


class TestRepeatedPairs:
    """User 0 has items 3 and 0 again at the end, and item 1 twice at once."""

    ITEMS = (0, 1, 1, 2, 3, 4, 3, 0, 0, 0)
    TABLE = interactions([0] * 10, ITEMS, times=[0, 1, 1, 2, 3, 4, 5, 6, 7, 8])

    def test_the_last_new_item_is_tested_and_later_repeats_are_in_no_part(self):
        assert parts(divided(self.TABLE, "leave-one-out")) == [[0, 1, 2, 3], [4], [5]]

    def test_a_table_that_is_there_three_times_is_divided_as_if_it_were_there_once(self):
        users = np.repeat(np.arange(10), 5)
        table = interactions(users, np.tile(np.arange(5), 10), times=np.arange(50)[::-1])
        thrice = table.with_rows(np.tile(np.arange(50), 3))
        for name, options in ALL:
            once, again = divided(table, name, **options), divided(thrice, name, **options)
            if options.get("split-by") != "rows" and name != "kfold":
                assert once.test_rows.tolist() == again.test_rows.tolist()
                assert np.array_equal(np.unique(again.train_rows % 50), once.train_rows)

    @pytest.mark.parametrize(
        ("name", "options"),
        [("ratio", {}), ("leave-one-out", {"order": "random"}), ("kfold", {"folds": 2})],
    )
    def test_what_one_user_repeats_changes_no_part_of_another(self, name, options):
        """User 1 has one item twice; the other has each item once, or one of them twice."""
        repeated = interactions([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 0, 1, 2, 2], np.arange(8))
        once = repeated.with_rows(np.delete(np.arange(8), 3))
        for seed in range(40):
            of_user_1 = [
                [table.times[part][table.users[part] == 1].tolist() for part in parts(partition)]
                for table in (repeated, once)
                for partition in [divided(table, name, seed, **options)]
            ]
            assert of_user_1[0] == of_user_1[1]

    def test_repeated_use_is_predicted_on_request(self):
        users, items = np.repeat([0, 1, 2, 3], 40), np.tile(np.repeat(np.arange(10), 4), 4)
        options = {"test-users": 0.25, "split-by": "rows"}
        partition = divided(interactions(users, items), "user-holdout", **options)
        assert partition.repeated_use and len(partition.test_rows) == 20
        assert set(items[partition.test_rows]) & set(items[partition.train_rows])


@pytest.mark.parametrize(
    ("name", "options"),
    [("leave-one-out", {}), ("user-holdout", {"halves": "temporal"}), ("global-time", {})],
)
def test_temporal_split_needs_times(name, options):
    with pytest.raises(DataError, match="by time") as error:
        make(name, **options).split(interactions([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    assert "dataset.time" in str(error.value)


class TestGlobalTime:
    """Ten rows at times 0 to 9; users 0 and 1 begin before the points, user 2 after them."""

    TABLE = interactions([0, 1, 0, 1, 0, 1, 2, 0, 2, 0], times=np.arange(10))

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"test": 0.3, "validation": 0.2}, [[0, 1, 2, 3, 4], [5], [7, 9]]),
            ({"test": 0.3, "validation": 0.0}, [[0, 1, 2, 3, 4, 5, 6], [], [7, 8, 9]]),
        ],
    )
    def test_rows_are_divided_at_two_points(self, options, expected):
        found = make("global-time", **options).split(self.TABLE)
        assert parts(found) == expected
        assert found.training_clients.tolist() == np.unique(self.TABLE.users[expected[0]]).tolist()

    def test_rows_of_one_time_are_in_one_part(self):
        table = interactions([0, 1, 0, 1, 0, 1], times=np.array([1, 1, 2, 3, 3, 3]))
        assert parts(make("global-time", test=0.2, validation=0.2).split(table))[2] == [3, 4, 5]

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_nothing_that_trains_is_later_than_what_is_held_out(self, data):
        rows = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=20, max_size=60)
        users, times = np.array([*data.draw(rows), (0, -1)]).T
        table = interactions(users, times=times)
        try:
            train, validation, test = parts(make("global-time", test=0.2).split(table))
        except DataError as error:  # too many rows of one time
            assert "equal times" in str(error)
            reject()
        before, between = (table.times[part].max(initial=-1) for part in (train, validation))
        assert (table.times[validation] > before).all()
        assert (table.times[test] > max(before, between)).all()

    @pytest.mark.parametrize("times", [[0], [0] * 10, [0] * 3 + [1] * 7])
    def test_shares_that_rows_of_one_time_make_impossible_are_refused(self, times):
        table = interactions([0] * len(times), times=np.array(times))
        with pytest.raises(DataError, match="equal times"):
            make("global-time", test=0.1, validation=0.1).split(table)


class TestUserHoldout:
    def test_sizes(self):
        table = interactions(np.repeat(np.arange(10), 5))
        options = {"test-users": 0.2, "validation-users": 0.1}
        partition = make("user-holdout", **options).split(table)
        assert len(partition.training_clients) == 7
        for rows, users in ((partition.test_rows, 2), (partition.validation_rows, 1)):
            counts = np.bincount(table.users[rows], minlength=10)
            assert np.bincount(counts).tolist() == [10 - users, 0, users]
        training = np.isin(table.users, partition.training_clients)
        assert np.isin(np.flatnonzero(training), partition.train_rows).all()

    def test_weak_generalisation_has_the_same_rows_and_all_users_train(self):
        table = interactions(np.repeat(np.arange(10), 5))
        strong, weak = (
            make("user-holdout", generalisation=kind, **{"validation-users": 0.1}).split(table)
            for kind in ("strong", "weak")
        )
        for part in ("train_rows", "validation_rows", "test_rows"):
            assert np.array_equal(getattr(strong, part), getattr(weak, part))
        assert weak.training_clients.tolist() == list(range(10))

    @pytest.mark.parametrize("halves", ["random", "temporal"])
    def test_test_part_does_not_depend_on_validation_users(self, halves):
        table = interactions(np.repeat(np.arange(100), 6), times=np.arange(600))
        without, with_some = (
            make("user-holdout", halves=halves, **{"validation-users": share}).split(table)
            for share in (0.0, 0.3)
        )
        assert np.array_equal(without.test_rows, with_some.test_rows)
        assert set(with_some.training_clients) < set(without.training_clients)

    def test_folds_of_all_seeds_are_disjoint_and_their_validation_users_the_same(self):
        table = interactions(np.repeat(np.arange(43), 4))
        of = {"folds": 5, "validation-users": 0.1}
        splits = [make("user-holdout", seed, **of).split(table) for seed in range(6)]
        tested = [set(table.users[split.test_rows].tolist()) for split in splits]
        validation = [set(table.users[split.validation_rows].tolist()) for split in splits]
        assert [len(users) for users in tested] == [8, 8, 8, 8, 7, 8]
        assert tested[5] == tested[0] and len(set.union(*tested)) == 39
        assert validation == [validation[0]] * 6 and len(validation[0]) == 4
        assert not validation[0] & set.union(*tested)
        for split, users in zip(splits, tested, strict=True):
            assert set(range(43)) - users - validation[0] == set(split.training_clients.tolist())
        of_seed_0 = make("user-holdout", **{"validation-users": 0.1}).split(table)
        assert set(table.users[of_seed_0.validation_rows].tolist()) == validation[0]

    @pytest.mark.parametrize("folds", [{}, {"folds": 5}])
    def test_validation_users_may_train_and_are_never_tested(self, folds):
        table = interactions(np.repeat(np.arange(43), 4))
        of = {"validation-users": 0.1, **folds}
        for seed in range(5):
            held_out = make("user-holdout", seed, **of).split(table)
            role = {"validation-role": "training"}
            training = make("user-holdout", seed, **of, **role).split(table)
            assert np.array_equal(training.test_rows, held_out.test_rows)
            assert len(training.validation_rows) == 0
            validated = np.unique(table.users[held_out.validation_rows])
            others = np.concatenate([held_out.training_clients, validated])
            assert sorted(others) == sorted(training.training_clients)
            assert np.isin(table.users[training.train_rows], validated).sum() == 4 * len(validated)

    def test_too_few_users(self):
        for seed, options in ((2, {"folds": 3}), (0, {}), (0, {"stream": "client"})):
            with pytest.raises(DataError, match="too few users"):
                make("user-holdout", seed, **options).split(interactions([0, 0, 1, 1][: seed + 2]))
        make("user-holdout", folds=3, **{"test-users": 0.2})  # as in resolved experiments

    def test_temporal_pairs_are_ordered_by_their_first_row(self):
        table = interactions([0] * 4 + [1] * 4, [7, 8, 9, 7] * 2, [4, 2, 3, 1] * 2)
        partition = divided(table, "user-holdout", halves="temporal", **{"test-users": 0.5})
        assert table.items[partition.test_rows].tolist() == [9]


class TestLeaveOneOut:
    TABLE = interactions([0, 0, 0, 0, 1, 1], times=[1, 8, 9, 2, 5, 6])

    def test_last_rows_by_time(self):
        assert parts(make("leave-one-out").split(self.TABLE)) == [[0, 3, 4, 5], [1], [2]]
        whole = make("leave-one-out", validation=False).split(self.TABLE)
        assert parts(whole) == [[0, 1, 3, 4, 5], [], [2]]


class TestRatio:
    @pytest.mark.parametrize(
        ("rows", "shares", "sizes"),
        [
            (1, (0.8, 0.1, 0.1), [1, 0, 0]),
            (4, (0.8, 0.1, 0.1), [4, 0, 0]),
            (5, (0.8, 0.1, 0.1), [3, 1, 1]),
            (100, (0.8, 0.1, 0.1), [80, 10, 10]),
            (2, (0.1, 0.4, 0.5), [1, 0, 1]),  # one row always trains
        ],
    )
    def test_sizes(self, rows, shares, sizes):
        options = dict(zip(("train", "validation", "test"), shares, strict=True))
        found = parts(make("ratio", **options).split(interactions([0] * rows)))
        assert list(map(len, found)) == sizes


class TestKfold:
    def test_validation_rows_are_a_share_of_the_other_folds(self):
        """The test fold does not change, and none of its rows is among the validation rows."""
        table = interactions(np.repeat(np.arange(11), 300))
        splits = (make("kfold", fold=2, validation=share) for share in (0.0, 0.25))
        plain, held = (split.split(table) for split in splits)
        assert np.array_equal(plain.test_rows, held.test_rows) and len(plain.validation_rows) == 0
        share = len(held.validation_rows) / len(plain.train_rows)
        assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(plain.train_rows)) ** 0.5
        assert np.array_equal(np.union1d(held.train_rows, held.validation_rows), plain.train_rows)

    @pytest.mark.parametrize("folds", [2, 5, 7])
    def test_folds_partition_the_rows_evenly(self, folds):
        rows = 3300
        table = interactions(np.repeat(np.arange(11), rows // 11))
        splits = (make("kfold", folds=folds, fold=fold + 1) for fold in range(folds))
        tests = [split.split(table).test_rows for split in splits]
        assert np.array_equal(np.sort(np.concatenate(tests)), np.arange(rows))
        deviation = (rows * (1 / folds) * (1 - 1 / folds)) ** 0.5
        assert max(abs(len(test) - rows / folds) for test in tests) < 4 * deviation

    def test_shipped_fold(self, tmp_path):
        (tmp_path / "u2.test").write_text("1\t0\t5\t9\n0\t0\t5\t9\n")
        split = make("kfold", folder=tmp_path, fold=2)
        table = interactions([0, 0, 1, 1], [0, 1, 0, 1])
        assert parts(split.split(table)) == [[1, 3], [], [0, 2]]


def test_places_are_those_of_a_sort_by_two_keys():
    """Also where user and key do not fit into one number."""
    random = np.random.default_rng(1)
    users = random.integers(0, 40, 300)
    key = random.integers(0, 30, 300)
    key[7] = 2**62
    place, count = places(users, key)
    for user in range(40):
        rows = np.flatnonzero(users == user).tolist()
        ordered = sorted(rows, key=lambda row: (key[row], row))
        assert place[ordered].tolist() == list(range(len(rows)))
        assert set(count[rows].tolist()) <= {len(rows)}


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("global-time", {"test": 0.6, "validation": 0.4}, "below 1"),
        ("user-holdout", {"test-users": 0.6, "validation-users": 0.4}, "below 1"),
        ("user-holdout", {"folds": 3, "test-users": 0.3}, "test-users or folds"),
        ("ratio", {"train": 0.8, "validation": 0.1, "test": 0.2}, "equal to 1"),
        ("kfold", {"fold": 6}, "inconsistent settings"),
        ("kfold", {"folder": "x", "folds": 4}, "inconsistent settings"),
    ],
)
def test_settings_that_do_not_fit_together(name, options, problem):
    with pytest.raises(ExperimentError, match=problem):
        make(name, **options)


# Theorem 1 of DP-VAE as a split: the paper's number, the training users, and unchanged held-out
# rows.

COUNTS = (3, 400, 1900, 2500)


def test_the_default_is_the_papers_largest_bound():
    assert round(BoundedConfig().bound(1.0)) == 1772
    assert BoundedConfig(delta=0.2).bound(0.3) == pytest.approx(6 * (86.2974 + math.log(5)))


def test_what_is_held_out_stays_and_training_is_thinned():
    users = np.repeat(np.arange(4), COUNTS)
    table = interactions(users, np.concatenate([np.arange(count) for count in COUNTS]))
    whole = make("ratio", 3).split(table)
    # at most 1739 rows, at least 174
    part = make("bounded", 3, **{"delta": 0.5, "p-min": 0.1}).split(table)
    np.testing.assert_array_equal(part.test_rows, whole.test_rows)
    np.testing.assert_array_equal(part.validation_rows, whole.validation_rows)
    assert set(part.train_rows) <= set(whole.train_rows)
    before, after = (np.bincount(users[p.train_rows], minlength=4) for p in (whole, part))
    np.testing.assert_array_equal(after, np.minimum(before, 1739))
    assert part.training_clients.tolist() == [1, 2, 3] and before[3] > 1739


# The test folds that MovieLens-100K ships.


PAIRS = index_rows("small", users=np.array([5, 5, 9, 9]), items=np.array([1, 3, 3, 1]))
TWICE = index_rows("small", users=np.array([5, 5]), items=np.array([1, 1]))


@pytest.mark.parametrize(
    ("text", "table", "problem"),
    [
        ("9\t1\t3\t0\n9\t7\t3\t0\n", PAIRS, r"u1\.test, line 2(.*\n)*.*got: user 9, item 7"),
        ("9\t1\t3\t0\n6\t1\t3\t0\n", PAIRS, r"u1\.test, line 2(.*\n)*.*got: user 6, item 1"),
        ("9\t1\t3\t0\n5\t2\t3\t0\n", PAIRS, r"u1\.test, line 2(.*\n)*.*got: user 5, item 2"),
        ("9\t1\t3\t0\n5\t3\t3\t88", PAIRS, "cut off"),
        ("5\t1\t3\t0\n", TWICE, "pair once"),
        (None, PAIRS, "file of fold 1 is missing"),
    ],
)
def test_folds_of_other_data_and_damaged_ones_are_refused(tmp_path, text, table, problem):
    if text is not None:
        (tmp_path / "u1.test").write_text(text)
    with pytest.raises(DataError, match=problem):
        make("kfold", folder=tmp_path).split(table)
