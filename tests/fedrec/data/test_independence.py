# SPDX-License-Identifier: Apache-2.0
"""One client's rows decide nothing about the rows of others, wherever a guarantee needs it."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from fedrec.components import registry
from fedrec.data.independence import refuse_dependent_clients
from fedrec.data.interactions import Interactions
from fedrec.data.own_numbers import row_numbers, user_shares
from fedrec.data.perturbation import TrainingData
from fedrec.data.splits._order import ROWS
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.tables import DataSettings
from tests.fedrec.data.test_splits import interactions, make

USERS, ITEMS = 30, 12
BOTH, REPLACED = ("replace-one", "add-remove"), ("replace-one",)
BY_CLIENT = {"stream": "client"}
INDEPENDENT = [
    ("ratio", {}, BOTH),
    ("ratio", {"order": "temporal", **BY_CLIENT}, BOTH),
    ("kfold", {"fold": 2, "validation": 0.2}, BOTH),
    ("leave-one-out", {}, BOTH),
    ("leave-one-out", {"order": "random"}, BOTH),
    ("bounded", {"omega": 0.5, "delta": 0.5, "dimension": 2.0, "p-min": 0.0}, BOTH),
    ("published", {"validation": 0.3}, BOTH),
    ("global-time", {"test-from": 80, "validation-from": 60}, BOTH),
    ("user-holdout", {"validation-users": 0.2}, REPLACED),
    ("user-holdout", {"folds": 3, "validation-users": 0.2}, REPLACED),
    ("user-holdout", {"halves": "temporal", "generalisation": "weak"}, REPLACED),
    ("user-holdout", {**BY_CLIENT, "validation-users": 0.2}, BOTH),
    ("user-holdout", {**BY_CLIENT, "folds": 3, "validation-users": 0.2}, BOTH),
    ("user-holdout", {**BY_CLIENT, "generalisation": "weak"}, BOTH),
]
DEPENDENT = [
    ("ratio", {"stream": "dataset"}, BOTH),
    ("bounded", {"inner": {"name": "ratio", "stream": "dataset"}, "p-min": 0.0}, BOTH),
    ("bounded", {}, BOTH),
    ("global-time", {}, BOTH),
    ("user-holdout", {}, ("add-remove",)),
    ("user-holdout", {"generalisation": "weak"}, BOTH),
]


def cases(table):
    return [(name, options, kind) for name, options, kinds in table for kind in kinds]


def rows_of(user: int, random: np.random.Generator) -> pd.DataFrame:
    count = random.integers(3, 9)
    table = {"user": user, "item": random.integers(0, ITEMS, count)}
    return pd.DataFrame(table | {"time": random.integers(0, 100, count)})


def data(users: dict[int, pd.DataFrame]) -> Interactions:
    """The rows of all users, and a training and a test file for each; a user keeps its name, and
    numbers are those of who is there."""
    frame = pd.concat(users.values())
    names, index = np.unique(frame["user"], return_inverse=True)
    table = interactions(index, items=[ITEMS - 1, *frame["item"][1:]], times=frame["time"])
    published = frame["time"].to_numpy() % 4 == 0
    return dataclasses.replace(table, user_ids=names, published_test=published)


def neighbours(adjacency: str) -> tuple[dict, list[dict]]:
    """Rows of all users by name, and those in which user 7 has others, or is not there."""
    random = np.random.default_rng(5)
    whole = {user: rows_of(user, random) for user in range(USERS)}
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


def test_no_split_is_left_out():
    names = {name for name, _ in registry.available(registry.SPLIT)}
    assert {name for name, _, _ in INDEPENDENT} == names


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
    with pytest.raises(ExperimentError, match="one client decide which rows of others") as error:
        refuse_dependent_clients(settings, adjacency, "[privacy]")
    assert "[privacy]" in str(error.value)


def test_numbers_of_rows_and_users_are_uniform_and_of_each_user_alone():
    table = interactions(np.repeat(np.arange(50), 200))
    numbers = row_numbers(table, 1, "split", ROWS) / 2**32
    assert len(np.unique(numbers)) == len(numbers)
    for drawn in (numbers, user_shares(interactions(np.arange(9000)), 1, "split")):
        observed = np.bincount((drawn * 20).astype(int), minlength=20)
        expected = len(drawn) / 20
        assert np.square(observed - expected).sum() / expected < 43.8  # .999 quantile, 19 degrees
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04
    assert not np.intersect1d(numbers, row_numbers(table, 2, "split", ROWS) / 2**32).size


PERTURBATIONS = [
    ("random-replacement", {}),
    ("randomised-response", {"epsilon": 2.0}),
    ("targeted", {"attribute": "sex", "epsilon": 2.0, "select": "random", "budget": 0.3}),
    (
        "targeted",
        {
            "attribute": "sex",
            "epsilon": 2.0,
            "select": "random",
            "mechanism": "randomised-response",
        },
    ),
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


def test_no_perturbation_is_left_out():
    names = {name for name, _ in registry.available(registry.PERTURBATION)}
    assert {name for name, *_ in [*PERTURBATIONS, *REFUSED]} == names


@pytest.mark.parametrize(("name", "options"), PERTURBATIONS)
def test_perturbed_rows_of_others_stay_whatever_a_client_has(name, options):
    from fedrec.data.features import Feature, FeatureTable

    whole, others = neighbours("replace-one")
    learned = []
    for rows in (whole, *others):
        table = data({user: own.drop_duplicates("item") for user, own in rows.items()})
        sexes = FeatureTable(USERS, (Feature.single("sex", ["fm"[u % 2] for u in range(USERS)]),))
        table = dataclasses.replace(table, user_features=sexes)
        made = perturbation(name, options)
        assert made.depends_on(False) == ""
        perturbed = made.perturb(TrainingData(table, np.arange(USERS), rated=False)).rows
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
        refuse_dependent_clients(load(table), "replace-one", "[privacy]")
