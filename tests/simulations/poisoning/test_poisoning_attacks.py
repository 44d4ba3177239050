# SPDX-License-Identifier: Apache-2.0
"""Attacks against what they are meant to compute: gradients by hand, clusters, directions."""

import numpy as np
import pytest
import torch

from clients.hosting.malicious import MaliciousBlock
from clients.hosting.node import Node
from fedrec.cohort.batches import OwnData
from fedrec.components.registry import POISONING, resolve
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.rng import stream
from simulations.poisoning.attacks.cluster_attack import clustered
from simulations.poisoning.attacks.fedrec_attack import promotion_gradient
from simulations.poisoning.promotion import learning_rates

MF = ("model={name='mf',factors=4,biases=false}", "step.private-parameters=['user.*']")
NEUMF = ("model={name='neumf',factors=0,tower=[6,3]}", "step.private-parameters=['user.*']")


@pytest.fixture
def block_of(load_tiny, tmp_path):
    """What the three malicious clients of an experiment have in round 2."""

    def make(attack, *overrides):
        settings = f"adversary={{attack='{attack}',clients=3,targets=2,public-share=0.5}}"
        node = Node(load_tiny(settings, *overrides), 0, 1, tmp_path)
        known = node.population.adversary
        step = node.step(node.experiment.step)
        start = node.initial()
        noise = torch.Generator().manual_seed(3)
        moved = {n: v + 0.1 * torch.randn(v.shape, generator=noise) for n, v in start.items()}
        private = step.private_names(list(start))
        data = [node.population.client(client) for client in known.malicious.tolist()]
        members = tuple(OwnData.of(one, stream(0, "client", one.client, 2)) for one in data)
        own = {n: start[n].expand(3, *start[n].shape).clone() for n in private}
        shared = tuple(name for name in start if name not in private)
        return MaliciousBlock(moved, start, shared, node.model, step, known, members, own, 2, 2)

    return make


def attack_of(name, **settings):
    table = Section.model_validate({"name": name, **settings})
    return resolve(POISONING, name)(component_settings(POISONING, table))


def test_the_gradient_of_fedrec_attack_by_hand(block_of):
    """User by user: the tenth item of those that are neither public nor targets, and the loss."""
    block = block_of("fedrec-attack", *MF)
    known = block.known
    table = block.parameters["item.factors"].double()
    users = torch.randn(known.honest, 4, dtype=torch.float64)
    wanted = torch.zeros_like(table)
    for place, user in enumerate(users):
        public = set(known.public[known.offsets[place] : known.offsets[place + 1]].tolist())
        scores = (table @ user).tolist()
        others = [i for i in range(known.items) if i not in public | set(known.targets.tolist())]
        shown = sorted(others, key=lambda item: -scores[item])[9]
        for target in known.targets.tolist():
            if target in public:
                continue
            margin = scores[shown] - scores[target]
            slope = float(np.exp(margin)) if margin < 0 else 1.0
            wanted[shown] += slope * user
            wanted[target] -= slope * user
    torch.testing.assert_close(promotion_gradient(known, table, users), wanted)


def test_rows_of_fedrec_attack_are_few_and_limited(block_of):
    block = block_of("fedrec-attack", *MF)
    found = attack_of(
        "fedrec-attack", rows=5, **{"row-limit": 0.01, "fit-steps": 4, "fit-rate": 0.02}
    ).updates(block)["item.factors"]
    norms = found.norm(dim=2)
    assert (norms > 0).sum(1).max() <= 5
    assert (norms[:, block.known.targets] > 0).all()
    assert norms.max() <= 0.01 * learning_rates(block)["item.factors"] * (1 + 1e-5)


@pytest.mark.parametrize("name", ["a-ra", "a-hum"])
def test_made_up_users_move_every_shared_parameter_towards_the_targets(name, block_of):
    """A step raises the targets' scores."""
    block = block_of(name, *NEUMF)
    found = attack_of(name, users=4, **{"user-std": 0.1}).updates(block)
    assert set(found) == set(block.shared)
    own = torch.zeros(1, 3)
    for place in range(3):
        scores = []
        for factor in (0.0, 1.0):
            after = {
                n: (block.parameters[n] + factor * found[n][place])[None] for n in block.shared
            }
            targets = torch.from_numpy(block.known.targets)[None]
            scores.append(block.model.predict({**after, "user.tower": own}, (), targets).mean())
        assert scores[1] > scores[0]


def test_hard_users_score_the_targets_lower_than_random_ones(block_of):
    from simulations.poisoning.promotion import target_scores

    block = block_of("a-hum", *NEUMF)
    shared = {name: block.parameters[name] for name in block.shared}
    users = [
        attack_of("a-hum", **{"hard-steps": steps, "hard-rate": 1.0}).users(
            block, torch.Generator().manual_seed(1)
        )
        for steps in (1, 50)
    ]
    easy, hard = (target_scores(block, shared, one).mean() for one in users)
    assert hard < easy - 0.01


@pytest.mark.parametrize("variant", ["ipe", "uea"])
def test_pieck_moves_targets_alone_and_nothing_in_the_first_round(variant, block_of):
    block = block_of("pieck", *MF)
    attack = attack_of("pieck", variant=variant, popular=4, emphasis=0.5)
    found = attack.updates(block)["item.factors"]
    moved = found.norm(dim=2) > 0
    assert moved.nonzero()[:, 1].unique().tolist() == block.known.targets.tolist()
    still = MaliciousBlock(**{**vars(block), "parameters": block.initial})
    assert not attack.updates(still)["item.factors"].any()


def test_clusters_are_those_of_scikit_learn():
    pytest.importorskip("sklearn")
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    random = np.random.default_rng(0)
    points = np.concatenate([random.normal(at, 0.1, (20, 3)) for at in (0, 3, 9)])
    wanted = KMeans(3, n_init=10, random_state=0).fit(points)
    for seed in range(20):  # some starts end in a local optimum, as Lloyd's algorithm does
        generator = torch.Generator().manual_seed(seed)
        centres, cluster = clustered(torch.from_numpy(points), 3, generator)
        if adjusted_rand_score(wanted.labels_, cluster.numpy()) == 1:
            order = np.argsort(centres[:, 0].numpy())
            expected = np.sort(wanted.cluster_centers_, axis=0)
            np.testing.assert_allclose(centres.numpy()[order], expected, atol=1e-6)
            return
    pytest.fail("no start finds three separate clusters")


def test_cluster_attack_pulls_rows_to_centres_of_clusters(block_of):
    block = block_of("cluster-attack", *MF)
    found = attack_of("cluster-attack", clusters=2).updates(block)["item.factors"]
    table = block.parameters["item.factors"]
    spread = [
        float((points - points.mean(0)).norm())
        for points in (table, table + 0.1 * found[0] / found[0].norm(dim=1, keepdim=True))
    ]
    assert spread[1] < spread[0]


@pytest.mark.parametrize("norm", [1.0, 10.0])
def test_explicit_boosting_has_the_norm_of_its_settings(norm, block_of):
    block = block_of("explicit-boosting")
    found = attack_of("explicit-boosting", norm=norm).updates(block)
    total = sum(value.double().flatten(1).square().sum(1) for value in found.values()).sqrt()
    fresh = block_of("explicit-boosting")
    torch.testing.assert_close(total, norm * fresh.honest_norms, rtol=1e-5, atol=1e-9)
    others = np.setdiff1d(np.arange(block.known.items), block.known.targets)
    assert not found["item.id"][:, others].any()


@pytest.mark.parametrize("name", ["a-ra", "explicit-boosting", "fedrec-attack", "cluster-attack"])
def test_models_of_histories_are_refused(name, run_tiny):
    with pytest.raises(ExperimentError, match=r"cannot attack|whole histories"):
        run_tiny(
            f"adversary={{attack='{name}',clients=3}}",
            "model={name='item-weights',items=12}",
            "step={name='gram'}",
            "strategy={name='gram'}",
            "rounds=1",
            "sampler={name='full'}",
        )
