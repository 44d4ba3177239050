# SPDX-License-Identifier: Apache-2.0
"""Malicious users in the data: their number, targets, what the adversary knows, and centralised
systems that are fitted to their profiles."""

import numpy as np
import pytest

from fedrec.data.population import Population, read_interactions
from fedrec.data.split import partition_by
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import CentralEvaluation, make_baseline

RANDOM = "adversary={attack='random',clients=3}"


def populations(load_tiny, *overrides):
    return Population.of(load_tiny(RANDOM, *overrides)), Population.of(load_tiny())


def test_they_are_training_users_behind_the_others(load_tiny):
    found, plain = populations(load_tiny)
    honest = plain.interactions.num_users
    assert found.adversary.malicious.tolist() == [honest, honest + 1, honest + 2]
    assert set(found.adversary.malicious) <= set(found.training_clients)
    assert set(found.training_clients) - set(plain.training_clients) == set(
        range(honest, honest + 3)
    )
    features = found.interactions.user_features
    assert features.names == plain.interactions.user_features.names
    for codes, known in zip(
        found.feature_codes(found.adversary.malicious),
        plain.feature_codes(plain.training_clients),
        strict=True,
    ):
        assert {*map(tuple, codes)} <= {*map(tuple, known)}


@pytest.mark.parametrize(
    ("settings", "number"),
    [("share=0.1", 1), ("share=0.5", 9), ("share=0.0", 0), ("share=0.001", 1), ("clients=0", 0)],
)
def test_their_number_is_a_share_of_the_honest_clients(load_tiny, settings, number):
    """Of 18 training users."""
    found = Population.of(load_tiny(f"adversary={{attack='random',{settings}}}"))
    assert len(found.adversary.malicious) == number


def test_share_and_number_together_are_refused(load_tiny):
    with pytest.raises(ExperimentError, match="but not both"):
        load_tiny("adversary={attack='random',share=0.1,clients=2}")


def test_they_like_the_least_popular_item(load_tiny):
    found, plain = populations(load_tiny)
    offsets, items = plain.liked(plain.training_clients)
    rows = plain.interactions.items[plain.partition.train_rows]
    users = plain.interactions.users[plain.partition.train_rows]
    counts = np.bincount(
        rows[np.isin(users, plain.training_clients)], minlength=plain.interactions.num_items
    )
    (target,) = found.adversary.targets.tolist()
    assert counts[target] == counts.min() and len(offsets) > 1 and len(items)
    for client in found.adversary.malicious.tolist():
        assert target in found.client(client).positives


def test_a_target_by_name(load_tiny):
    interactions = read_interactions(load_tiny())
    name = str(interactions.item_ids[7])
    found = Population.of(load_tiny(f"adversary={{attack='random',target-items=['{name}']}}"))
    assert found.adversary.targets.tolist() == [7]
    with pytest.raises(ExperimentError, match="names no item"):
        Population.of(load_tiny("adversary={attack='random',target-items=['nothing']}"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("clients=1000000", "at most the number of honest training clients"),
        ("targets=1000000", "at most the number of items of the dataset"),
        ("target-items=['{name}','{name}']", "each of them once"),
    ],
)
def test_more_than_the_dataset_has_is_refused(load_tiny, settings, expected):
    name = str(read_interactions(load_tiny()).item_ids[7])
    experiment = load_tiny(f"adversary={{attack='random',{settings.format(name=name)}}}")
    with pytest.raises(ExperimentError, match=expected):
        Population.of(experiment)


def test_as_many_as_the_dataset_has_are_allowed(load_tiny):
    interactions = read_interactions(load_tiny())
    honest = len(Population.of(load_tiny()).partition.training_clients)
    many = f"clients={honest},targets={interactions.num_items}"
    known = Population.of(load_tiny(f"adversary={{attack='random',{many}}}")).adversary
    assert len(known.malicious) == honest and len(known.targets) == interactions.num_items


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


def test_a_perturbation_beside_an_adversary_is_refused(load_tiny):
    with pytest.raises(ExperimentError, match="without \\[perturb\\]"):
        load_tiny(RANDOM, "perturb={name='targeted',attribute='gender',epsilon=1.0}")


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
