# SPDX-License-Identifier: Apache-2.0
"""The number of replaced rows, their selection, their substitutes, and individual settings of
users."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from fedrec.config import Config
from fedrec.errors import DataError, ExperimentError
from fedrec.perturb.members.random_replacement import RandomReplacement
from fedrec.perturb.synthesis.preferences import ReplacementConfig, preferences_of
from fedrec.perturb.synthesis.selection import lowest, replaced_counts
from fedrec.perturb.synthesis.substitutes import random_substitutes, scored_substitutes


def replaced(data, seed=0, **settings):
    config = RandomReplacement.Config.parse(settings)
    return RandomReplacement(config, seed).perturb(data)


@pytest.mark.parametrize(
    ("ratio", "rows", "count"),
    [
        (0.0, 7, 0),
        (1.0, 7, 7),
        (0.2, 2, 0),
        (0.2, 3, 1),
        (0.5, 3, 2),
        (0.35, 10, 4),
        (0.8, 5, 4),
        (0.7, 5, 4),
    ],
)
def test_the_count_is_rounded_half_up(make_data, ratio, rows, count):
    data = make_data([0] * rows, list(range(rows)))
    assert replaced_counts(data.rows, np.array([ratio])).tolist() == [count]


def test_the_rows_of_least_score_are_chosen(make_data):
    data = make_data([1, 0, 1, 0, 1], [0, 1, 2, 3, 4])
    chosen = lowest(data.rows, np.array([0.3, 0.1, 0.2, 0.1, 0.9]), np.array([1, 2]))
    assert chosen.tolist() == [1, 2, 0]  # of equal scores the first row


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.8, 1.0])
def test_kept_share_and_distinct_unvisited_substitutes(two_tastes, ratio):
    rows, found = two_tastes.rows, replaced(two_tastes, **{"replacement-ratio": ratio})
    moved = found.rows.items != rows.items
    for user in range(rows.num_users):
        own = rows.rows_of(user)
        assert moved[own].sum() == int(ratio * len(own) + 0.5)
        new = found.rows.items[own][moved[own]]
        assert len(set(new)) == len(new) and not set(new) & set(rows.items[own])
    assert (found.origin == np.arange(len(rows))).all() and (found.rows.users == rows.users).all()
    if ratio == 0:
        assert found.rows.items.tobytes() == rows.items.tobytes()


def test_random_substitutes_are_uniform(make_data):
    """Chi-square over many users who have item 0 of six."""
    users = list(range(3000))
    data = make_data(users, [0] * len(users), len(users), 6)
    found = random_substitutes(data.rows, np.arange(len(users)), seed=1)
    assert chisquare(np.bincount(found, minlength=6)[1:]).pvalue > 1e-3


def test_samples_follow_the_softmax_of_what_the_user_has_not(make_data):
    """Chi-square against the softmax without the user's own item."""
    users = list(range(4000))
    data = make_data(users, [2] * len(users), len(users), 5)
    logits = torch.tensor([0.0, 1.0, 9.0, -1.0, 0.5])
    found = scored_substitutes(
        data.rows, np.arange(len(users)), lambda s: logits.repeat(len(s), 1), "sample", 3
    )
    chance = np.exp(logits.double().numpy())
    chance[2] = 0
    seen = np.bincount(found, minlength=5)
    assert seen[2] == 0
    some = [0, 1, 3, 4]
    assert chisquare(seen[some], chance[some] / chance.sum() * len(users)).pvalue > 1e-3


def test_two_samples_of_a_user_follow_draws_without_replacement(make_data):
    """Of two rows with the same three equally likely items, each pair of different items is equally
    likely."""
    users = np.repeat(np.arange(3000), 2).tolist()
    data = make_data(users, [0, 1] * 3000, 3000, 5)
    found = scored_substitutes(
        data.rows, np.arange(6000), lambda s: torch.zeros(len(s), 5), "sample", 0
    ).reshape(-1, 2)
    assert (found[:, 0] != found[:, 1]).all() and found.min() == 2
    assert chisquare(np.unique(found[:, 0] * 5 + found[:, 1], return_counts=True)[1]).pvalue > 1e-3


@pytest.mark.parametrize("draw", ["best", "sample"])
def test_a_user_can_have_all_rows_replaced(make_data, draw):
    """Twenty rows that all prefer the same item, and exactly twenty other items."""
    data = make_data([0] * 20, list(range(20)), 1, 40)
    scores = torch.arange(40, dtype=torch.float32) * 50
    found = scored_substitutes(
        data.rows, np.arange(20), lambda s: scores.repeat(len(s), 1), draw, 0
    )
    assert sorted(found) == list(range(20, 40))


def test_too_few_other_items_are_an_error(make_data):
    data = make_data([0] * 4 + [1], [0, 1, 2, 3, 4])
    with pytest.raises(
        DataError, match=r"user u0 has too few other items(.*\n)*.*at least 4(.*\n)*.*1 of 5"
    ):
        replaced(data, **{"replacement-ratio": 1.0})


@pytest.mark.parametrize("wrong", [{"replacement-ratio": 1.2}, {"replacement-ratio": -0.1}])
def test_a_ratio_outside_its_range_is_an_error(wrong):
    with pytest.raises(ExperimentError, match="replacement-ratio"):
        ReplacementConfig.parse(wrong)


def test_users_without_training_rows_are_an_error(make_data):
    with pytest.raises(DataError, match=r"users without training rows(.*\n)*.*none of 1 \(u1\)"):
        replaced(make_data([0, 2], [0, 1], clients=np.array([0, 1, 2])))


def test_tested_users_without_training_rows_are_an_error(make_data):
    tested = dataclasses.replace(make_data([0, 2], [0, 1]), tested=np.array([1, 2]))
    with pytest.raises(DataError, match=r"trains or is tested\n.*none of 1 \(u1\)"):
        replaced(tested)


class TestTableOfUsers:
    @pytest.fixture
    def write(self, tmp_path):
        def write(*lines, header="user,replacement-ratio,sensitivity"):
            (tmp_path / "users.csv").write_text("\n".join([header, *lines]) + "\n")
            return str(tmp_path / "users.csv")

        return write

    def test_each_user_gets_its_own(self, make_data, write):
        data = make_data([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2, 3, 20)
        path = write("u1,1,0.25", "u0,0.5,2", "someone-else,0.1,0.1")
        found = preferences_of(ReplacementConfig.parse({"users": path}), data.rows, 0.7)
        assert found.ratio[:2].tolist() == [0.5, 1.0]
        assert found.sensitivity[:2].tolist() == [2.0, 0.25]
        moved = replaced(data, users=path).rows.items != data.rows.items
        assert moved.reshape(2, 4).sum(axis=1).tolist() == [2, 4]

    def test_a_column_that_is_not_there_is_common_to_all(self, make_data, write):
        data = make_data([0, 1], [0, 1])
        path = write("u0,0.5", "u1,0.9", header="user,sensitivity")
        found = preferences_of(
            ReplacementConfig.parse({"users": path, "replacement-ratio": 0.3}), data.rows, 0.7
        )
        assert found.ratio.tolist() == [0.3, 0.3] and found.sensitivity.tolist() == [0.5, 0.9]

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            (["u0,0.5,0.1"], "misses users(.*\n)*.*none for 1 of them: u1"),
            (["u0,0.5,0.1", "u1,1.5,0.1"], "wrong replacement-ratio(.*\n)*.*1.5 for user u1"),
            (["u0,0.5,-0.1", "u1,1,0.1"], "wrong sensitivity(.*\n)*.*-0.1 for user u0"),
            (["u0,0.5,0.1", "u1,much,0.1"], "replacement-ratio(.*\n)*.*a finite number"),
            (["u0,0.5,0.1", "u0,0.5,0.1", "u1,1,1"], "names a user twice"),
        ],
    )
    def test_a_wrong_table_is_an_error(self, make_data, write, lines, words):
        data = make_data([0, 1], [0, 1], 2, 9)
        with pytest.raises(DataError, match=words):
            replaced(data, users=write(*lines))

    def test_a_table_that_is_not_there_is_an_error(self, make_data, tmp_path):
        with pytest.raises(DataError, match="there is no table"):
            replaced(make_data([0], [0], 1, 9), users=str(tmp_path / "nobody.csv"))


def test_the_settings_are_documented():
    assert issubclass(ReplacementConfig, Config)
    assert ReplacementConfig.descriptions().keys() == ReplacementConfig.model_fields.keys()
