# SPDX-License-Identifier: Apache-2.0
"""Whole datasets: the perturbed users, the unchanged rows, and that devices train on the result."""

import dataclasses

import numpy as np
import pytest

from fedrec.data.cache import POPULATIONS
from fedrec.data.perturbation import TrainingData
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.perturb.targeted import profiles
from fedrec.perturb.targeted.config import TargetedConfig
from fedrec.perturb.targeted.guarantee import guarantee
from fedrec.perturb.targeted.profiles import perturb_profiles
from fedrec.perturb.targeted.report import summary

TARGETED = ["perturb.name=targeted", "perturb.attribute=gender", "perturb.epsilon=0.1"]


def training(interactions, partition, rated=True):
    return TrainingData(
        interactions.with_rows(partition.train_rows), partition.training_clients, rated
    )


def done(world, *, with_ratings=True, **settings):
    """The training rows of the small world, and their perturbation."""
    data = training(world().interactions, world().partition, with_ratings)
    config = TargetedConfig.parse({"attribute": "gender", "epsilon": 0.1, **settings})
    return data, perturb_profiles(data, config, 7)


def test_only_item_and_rating_change(world):
    data, found = done(world)
    assert (found.learned.users == data.rows.users).all()
    assert found.protected.tolist() == list(range(len(data.rows)))
    assert (found.learned.items != data.rows.items).any()


def test_fakes_are_unvisited_and_ratings_are_of_the_scale(world):
    data = training(world().interactions, world().partition)
    real, config = data.rows, TargetedConfig(attribute="gender", epsilon=0.1)
    for seed in range(50):
        learned = perturb_profiles(data, config, seed).learned
        for row in range(len(real)):
            own = real.items[real.users == real.users[row]]
            assert learned.items[row] == real.items[row] or learned.items[row] not in own
        assert set(learned.ratings) <= set(real.ratings)


def test_each_client_has_its_own_stream(world):
    """A client's result does not depend on the other clients' data."""
    data, found = done(world, with_ratings=False, select="random")
    for client in found.clients:
        rows = np.flatnonzero(data.rows.users == client)
        again = perturb_profiles(
            dataclasses.replace(data, rows=data.rows.with_rows(rows)), found.config, 7
        )
        assert (again.learned.items == found.learned.items[rows]).all()


def test_the_most_stereotypical_rows_are_protected(load_tiny):
    population = Population.of(load_tiny())
    data, partition = population.interactions, population.partition
    config = TargetedConfig(attribute="gender", epsilon=0.1, budget=0.6)
    protected = partition.train_rows[
        perturb_profiles(training(data, partition), config, 0).protected
    ]
    gender = data.user_features["gender"].padded()[:, 0]
    trains = np.isin(data.users, partition.training_clients)
    in_train = np.isin(np.arange(len(data)), partition.train_rows)

    def share(item, group):
        members = {u for u in partition.training_clients if (gender[u] == gender_of) == group}
        having = {
            u
            for u, i in zip(
                data.users[in_train & trains], data.items[in_train & trains], strict=True
            )
            if i == item
        }
        return len(members & having) / len(members)

    for user in range(data.num_users):
        gender_of = gender[user]
        rows = np.flatnonzero(in_train & (data.users == user))
        score = np.array(
            [
                (share(i, True) - share(i, False)) / max(share(i, True), share(i, False), 1e-9)
                for i in data.items[rows]
            ]
        )
        taken = np.isin(rows, protected)
        assert taken.sum() == -(-4 * len(rows) // 10)
        assert score[taken].min() >= score[~taken].max() - 1e-12


def test_the_devices_learn_from_it_and_are_tested_on_the_truth(load_tiny):
    plain = Population.of(load_tiny())
    changed = Population.of(load_tiny(*TARGETED))
    clients = plain.evaluated_clients("test")
    assert (changed.evaluated_clients("test") == clients).all()
    for name in ("seen", "known", "relevant"):
        assert (
            getattr(plain.held_out(clients, "test"), name)
            == getattr(changed.held_out(clients, "test"), name)
        ).all()
    before, after = plain.client(0), changed.client(0)
    assert len(before.items) == len(after.items) and (before.items != after.items).any()
    assert (after.items == changed.perturbed.rows.items[changed.perturbed.rows.rows_of(0)]).all()
    assert set(after.positives) <= set(after.items) and (np.diff(after.positives) > 0).all()
    offsets, liked = changed.liked(np.array([0]))
    assert sorted(liked[: offsets[1]]) == sorted(after.items[after.labels > 0])
    again = Population.of(load_tiny(*TARGETED))
    assert (again.client(0).items == after.items).all()  # the same in every round and on every node


def test_a_budget_of_one_changes_nothing(world):
    data, found = done(world, budget=1.0)
    assert (found.learned.items == data.rows.items).all() and not len(found.protected)


def test_unused_ratings_are_not_checked(world):
    data, found = done(world, with_ratings=False)
    assert (found.learned.ratings == data.rows.ratings).all()
    assert (found.learned.items != data.rows.items).any()


def test_shares_are_among_the_training_clients_alone(world):
    """Group sizes count clients that train; held-out users, who have rows too, do not count."""
    population = world()
    data = population.interactions
    shares = []
    real = profiles.inclination
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            profiles,
            "inclination",
            lambda *a, **k: shares.append((a, real(*a, **k))) or shares[-1][1],
        )
        config = TargetedConfig(attribute="gender", epsilon=0.1)
        perturb_profiles(training(data, population.partition), config, 7)
    (users, items, _), (inside, _) = shares[0]
    gender = data.user_features["gender"].padded()[:, 0]
    for group in (0, 1):
        givers = {user for user in users if gender[user] == group}
        for item in range(data.num_items):
            having = {u for u, i in zip(users, items, strict=True) if i == item and u in givers}
            assert inside[group, item] == pytest.approx(len(having) / max(1, len(givers)))


def test_populations_with_other_perturbations_are_others(load_tiny):
    plain, changed = (POPULATIONS.population(load_tiny(*some)) for some in ([], TARGETED))
    assert plain is not changed and plain.perturbed is None
    assert changed is POPULATIONS.population(load_tiny(*TARGETED))
    assert changed is not POPULATIONS.population(load_tiny(*TARGETED, "perturb.budget=0.5"))


def test_guarantees_are_those_of_each_client(world):
    given, found = done(world)
    data, values = given.rows, len(set(given.rows.ratings))
    for client, one in zip(found.clients, found.guarantees, strict=True):
        own = data.items[data.users == client]
        sizes = {
            "own_items": len(set(own)),
            "rows": len(own),
            "protected": len(own),
            "num_values": values,
        }
        assert one == guarantee(found.config, num_items=6, **sizes)
    table = summary(data, found)
    assert table["protected"] == len(data)
    assert table["epsilon"]["true, whole profile"]["max"] == float("inf")


@pytest.mark.parametrize(
    ("attribute", "problem"), [("sex", "have no feature"), ("hobby", "several categories")]
)
def test_wrong_attributes_are_refused(world, attribute, problem):
    with pytest.raises(ExperimentError, match=problem):
        done(world, attribute=attribute)


def test_a_run_reports_the_guarantee_of_its_perturbation(run_tiny):
    result = run_tiny(*TARGETED, "perturb.budget=0.3")
    assert any("epsilon + ln m" in line for line in result.privacy)
    from fedrec.runs.folder import RunFolder

    assert RunFolder(result.folder).read_result().privacy == result.privacy
    assert load(result.folder / "experiment.toml").perturb.options["budget"] == 0.3
