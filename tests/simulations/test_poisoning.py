# SPDX-License-Identifier: Apache-2.0
"""Poisoning attacks, defences, and adversaries beside neighbourhood models."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.malicious import MaliciousBlock
from clients.node import Node
from clients.step import private_names
from fedrec.components.registry import POISONING, resolve
from fedrec.components.sections import Section, component_settings
from fedrec.data.population import Known
from fedrec.errors import ExperimentError
from fedrec.nn.layers import kaiming
from fedrec.privacy.accounting import events
from fedrec.rng import stream
from fedrec.training.block import OwnData
from simulations import poisoning, runner
from tests.captured_noise import Captured, captured, sensitivities

# Attacks against what they are meant to compute: gradients by hand, clusters, directions.

MF = ("model={name='mf',factors=4,biases=false}", "step.private-parameters=['user.*']")
NEUMF = ("model={name='neumf',factors=0,tower=[6,3]}", "step.private-parameters=['user.*']")


@pytest.fixture
def block_of(load_tiny, tmp_path):
    """What the three malicious clients of an experiment have in round 2."""

    def make(attack, *overrides):
        settings = f"adversary={{attack='{attack}',share=0.17,targets=2,public-share=0.5}}"
        node = Node(load_tiny(settings, *overrides), 0, 1, tmp_path)
        known = node.population.adversary
        step = node.step(node.experiment.step)
        start = node.initial()
        noise = torch.Generator().manual_seed(3)
        moved = {n: v + 0.1 * torch.randn(v.shape, generator=noise) for n, v in start.items()}
        private = private_names(step, start)
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
    torch.testing.assert_close(poisoning._promotion_gradient(known, table, users), wanted)


def test_rows_of_fedrec_attack_are_few_and_limited(block_of, monkeypatch):
    monkeypatch.setattr(poisoning, "_ROWS", 5)
    monkeypatch.setattr(poisoning, "_ROW_LIMIT", 0.01)
    block = block_of("fedrec-attack", *MF)
    found = attack_of("fedrec-attack").updates(block)["item.factors"]
    norms = found.norm(dim=2)
    assert (norms > 0).sum(1).max() <= 5
    assert (norms[:, block.known.targets] > 0).all()
    assert norms.max() <= 0.01 * poisoning._learning_rates(block)["item.factors"] * (1 + 1e-5)


@pytest.mark.parametrize("name", ["a-ra", "a-hum"])
def test_made_up_users_move_every_shared_parameter_towards_the_targets(name, block_of, monkeypatch):
    """A step raises the targets' scores."""
    monkeypatch.setattr(poisoning, "_USER_STD", 0.1)
    block = block_of(name, *NEUMF)
    found = attack_of(name).updates(block)
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


def test_hard_users_score_the_targets_lower_than_random_ones(block_of, monkeypatch):
    monkeypatch.setattr(poisoning, "_HARD_RATE", 1.0)
    block = block_of("a-hum", *NEUMF)
    shared = {name: block.parameters[name] for name in block.shared}
    scores = []
    for steps in (1, 50):
        monkeypatch.setattr(poisoning, "_HARD_STEPS", steps)
        users = attack_of("a-hum").users(block, torch.Generator().manual_seed(1))
        scores.append(poisoning._target_scores(block, shared, users).mean())
    assert scores[1] < scores[0] - 0.01


def test_pieck_moves_targets_alone_and_nothing_in_the_first_round(block_of):
    block = block_of("pieck", *MF)
    attack = attack_of("pieck")
    found = attack.updates(block)["item.factors"]
    moved = found.norm(dim=2) > 0
    assert moved.nonzero()[:, 1].unique().tolist() == block.known.targets.tolist()
    still = MaliciousBlock(**{**vars(block), "parameters": block.initial})
    assert not attack.updates(still)["item.factors"].any()


def test_clusters_are_those_of_scikit_learn():
    pytest.importorskip("sklearn")
    from sklearn.cluster import KMeans

    random = np.random.default_rng(0)
    points = np.concatenate([random.normal(at, 0.1, (20, 3)) for at in (0, 3, 9)])
    wanted = KMeans(3, n_init=10, random_state=0).fit(points)
    for seed in range(20):  # some starts end in a local optimum, as Lloyd's algorithm does
        generator = torch.Generator().manual_seed(seed)
        centres = poisoning._centres(torch.from_numpy(points), 3, generator).numpy()
        whole = np.ptp(centres.reshape(3, 20, 3), axis=1).max() == 0
        if whole and len(np.unique(centres, axis=0)) == 3:
            expected = wanted.cluster_centers_[wanted.labels_]
            np.testing.assert_allclose(centres, expected, atol=1e-6)
            return
    pytest.fail("no start finds three separate clusters")


def test_cluster_attack_pulls_rows_to_centres_of_clusters(block_of, monkeypatch):
    monkeypatch.setattr(poisoning, "_CLUSTERS", 2)
    block = block_of("cluster-attack", *MF)
    found = attack_of("cluster-attack").updates(block)["item.factors"]
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
    with pytest.raises(ExperimentError, match="cannot attack"):
        run_tiny(
            f"adversary={{attack='{name}',share=0.17}}",
            "model={name='item-weights',items=12}",
            "step={name='gram'}",
            "strategy={name='gram'}",
            "rounds=1",
            "sampler={name='full'}",
        )


# Made-up profiles: how many items of which kind.

ITEMS = 200
TARGETS = np.array([7, 150])
PUBLIC = np.repeat(np.arange(ITEMS), np.arange(ITEMS)[::-1] // 10)  # item 0 is the most popular


def profile(name, seed=0, **settings):
    known = Known(ITEMS, TARGETS, np.array([9]), 1, 30, np.array([0, len(PUBLIC)]), PUBLIC, seed=0)
    return attack_of(name, **settings).profile(known, np.random.default_rng(seed))


@pytest.mark.parametrize("name", ["random", "bandwagon", "popular"])
@pytest.mark.parametrize(("settings", "number"), [({}, 30), ({"items": 12}, 12), ({"items": 1}, 2)])
def test_a_profile_has_the_targets_and_as_many_items_as_usual(name, settings, number):
    items = profile(name, **settings)
    assert len(set(items.tolist())) == len(items) == number
    assert set(TARGETS) <= set(items)


def test_popular_profiles_are_the_most_popular_items():
    others = [item for item in profile("popular", items=22).tolist() if item not in TARGETS]
    assert sorted(others) == [item for item in range(21) if item != 7]


def test_a_tenth_of_bandwagon_profiles_is_popular():
    """Beside the random items, a tenth of which is popular by chance."""
    share = 0.1
    counts = [
        len({item for item in profile("bandwagon", seed, items=42).tolist() if item <= 20} - {7})
        for seed in range(40)
    ]
    expected = 40 * share + (40 - 40 * share) * (20 - 40 * share) / (198 - 40 * share)
    assert np.mean(counts) == pytest.approx(expected, abs=1.0)


# Each robust rule stops few loud attackers, which the mean does not, and none stops a coalition as
# large as the honest cohort; UNION also stops those that draw the items' embeddings together.

BASE = {
    "name": "defences",
    "seed": 2,  # the target is at the end of lists without an attack
    "rounds": 12,
    "positive-above": 3.0,
    "dataset": {
        "name": "synthetic", "users": 120, "items": 60, "mean-interactions": 20,
        "min-interactions": 10,
    },
    "model": {"name": "privrec", "embedding": 8, "hidden": [8]},
    "sampler": {"name": "fixed-size", "cohort": 40},
    "evaluation": {"every": 0, "ks": [5], "baselines": [], "fine-tune": {"epochs": 0}},
    "engine": {"name": "serial", "nodes": 1, "threads": 1, "device": "cpu"},
}  # fmt: skip
LOUD = "adversary={attack={name='explicit-boosting',norm=50.0},share=0.025}"
CLUSTERING = "adversary={attack={name='cluster-attack',norm=20.0},share=0.1}"
MANY = "adversary={attack={name='explicit-boosting',norm=3.0},share=1.0}"
RULES = {
    "median": "{name='median'}",
    "trimmed-mean": "{name='trimmed-mean',cut=0.25}",
    "norm-bound": "{name='norm-bound'}",
    "krum": "{name='krum',malicious=0.2}",
    "multi-krum": "{name='krum',malicious=0.2,keep=20}",
    "bulyan": "{name='bulyan',malicious=0.2}",
    "union": "{name='union'}",
}


@pytest.fixture
def result(tmp_path):
    """The result of a run with a strategy against an adversary."""

    def found(strategy, adversary):
        overrides = [f"strategy={strategy}", adversary]
        return runner.run(BASE, overrides, output=tmp_path / f"{len(list(tmp_path.iterdir()))}")

    return found


@pytest.fixture
def place(result):
    """Mean place of the target in honest users' lists, as a share of their length."""
    return lambda strategy, adversary: result(strategy, adversary).metrics["target-rank"]


def mean_distance(found):
    """Mean distance between the items' embeddings, scaled to unit length."""
    table = found.parameters["item.id"]
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=2)
    return apart.sum() / (len(unit) * (len(unit) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_it_stops_few_loud_attackers_and_not_a_coalition_of_half(rule, place):
    assert place(RULES[rule], LOUD) > 0.9
    assert place(RULES[rule], MANY) < 0.05


@pytest.mark.slow
def test_the_mean_does_not_stop_few_loud_attackers(place):
    assert place("{name='reptile'}", "adversary={attack='random',share=0.0}") > 0.9
    assert place("{name='reptile'}", LOUD) < 0.05


@pytest.mark.slow
def test_union_keeps_items_apart_where_the_mean_does_not(result):
    without = mean_distance(result("{name='reptile'}", "adversary={attack='random',share=0.0}"))
    assert mean_distance(result("{name='reptile'}", CLUSTERING)) < 0.9 * without
    assert mean_distance(result(RULES["union"], CLUSTERING)) > 0.99 * without


# FedRecAttack and A-hum on the splits of their authors, against the exposure that they log.
#
# An iteration of their code passes over all clients in batches of 256, whose gradients are added.
# Here a round of FedRecAttack is a batch drawn at random; the sum is 256 times the mean.

DATA = Path(os.environ.get("FEDREC_DATA", Path.home() / ".cache/fedrec/data")) / "attacks"
PUBLISHED_LOGS_BASE = {
    "split": {"name": "published"},
    "strategy": {"name": "reptile", "server-lr": 256.0},
    "sampler": {"name": "fixed-size", "cohort": 256},
    "evaluation": {"every": 0, "ks": [5, 20], "baselines": [], "fine-tune": {"epochs": 0}},
    "engine": {"name": "serial", "threads": 1, "device": "cpu"},
}
STEP = {
    "name": "sgd", "epochs": 1, "batch-size": 100_000, "private-parameters": ["user.*"],
}  # fmt: skip
FEDREC_ATTACK = {
    **PUBLISHED_LOGS_BASE,
    "name": "fedrec-attack",
    "rounds": 20,  # 5 iterations of 990 clients
    "model": {"name": "mf", "factors": 32, "biases": False},
    # their loss is a sum over about 200 rows, ours a mean
    "step": {**STEP, "learning-rate": 0.01, "negatives": 1, "rates": {"*": 200.0}},
    "adversary": {"attack": "fedrec-attack", "share": 0.05, "public-share": 0.01},
}
A_HUM = {
    **PUBLISHED_LOGS_BASE,
    "name": "a-hum",
    # 24 batches are an iteration of 6,046 clients, each of which is in one of them
    "strategy": {"name": "reptile", "server-lr": 251.0},
    "sampler": {"name": "min-separation", "separation": 24, "cohort": 251},
    "model": {"name": "neumf", "factors": 0, "tower": [16, 8, 8]},
    "step": {**STEP, "learning-rate": 0.001, "negatives": 4, "private-std": 0.01},
    "adversary": {
        "attack": "a-hum",
        "share": 0.001,
    },
}  # fmt: skip


@pytest.fixture
def exposure(tmp_path, monkeypatch):
    """Exposure at the end of a run on an authors' split, whose files have the given names."""

    def measured(table, folder, *overrides, k, suffix="txt"):
        source = DATA / folder
        if not source.is_dir():
            pytest.skip(f"no data in {source}")
        for name in ("train", "test"):
            shutil.copy(source / f"{name}.{suffix}", tmp_path / f"{name}.txt")
        table = {**table, "dataset": {"name": "gowalla", "path": str(tmp_path), "verify": False}}
        monkeypatch.setattr("fedrec.models.mf.INIT_STD", 0.01)
        monkeypatch.setattr("fedrec.nn.layers.glorot", kaiming)
        found = runner.run(table, overrides, output=tmp_path / f"run{len(overrides)}")
        return found.metrics[f"exposure@{k}"]

    return measured


@pytest.mark.slow
@pytest.mark.real_data
def test_fedrec_attack_reaches_the_exposure_of_its_log(exposure, monkeypatch):
    """.781 after iteration 5, with 5 % malicious clients; none without. Their loss is a sum over
    about 200 rows, ours a mean."""
    monkeypatch.setattr(poisoning, "_ROW_LIMIT", 1 / 200)
    folder = "fedrecattack-ml-100k"
    assert exposure(FEDREC_ATTACK, folder, k=5) >= 0.72
    assert exposure(FEDREC_ATTACK, folder, "adversary.share=0.0", k=5) < 0.01


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.timeout(1200)
def test_a_hum_reaches_the_exposure_of_its_log(exposure):
    """1.0 after iteration 10, with six malicious clients beside 6,040."""
    overrides = ("rounds=240", "evaluation.final-users=500")
    assert exposure(A_HUM, "a-hum-ml-1m", *overrides, k=20, suffix="dat") >= 0.95


# Whole private runs on two tables that differ in one client: for every split and perturbation that
# private runs accept, and for central and federated systems, the exact sums move by at most what
# the ledger charges.

USERS, ADVERSARIAL_NEIGHBOURS_ITEMS, EXCHANGED = 24, 12, 5
Row = tuple[str, int, float, int]

GRAM = (
    "model={name='item-weights', items=6}",
    "step={name='gram', exponent=0.5}",
    "strategy={name='popularity-start', main={name='gram', solution='ease'}}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.3, parameters=['item.weights'],"
    " phases={popularity={parameters=['item.bias'], clip-norm=0.5}}}",
)
MEANS = (
    "task=rating",
    "model={name='pnbm', items=6, rank=2}",
    "step={name='pnbm'}",
    "strategy={name='means-start', main={name='reptile'}}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.02, parameters=['similarity*'],"
    " phases={means={parameters=['item.*'], clip-norm=0.5}}}",
)
ADD_REMOVE = "privacy.adjacency=add-remove"
SPLITS = [
    "{name='ratio'}",
    "{name='kfold', fold=2, validation=0.2}",
    "{name='leave-one-out'}",
    "{name='leave-one-out', order='random'}",
    "{name='bounded', delta=0.5, p-min=0.0}",
    "{name='user-holdout'}",
    "{name='user-holdout', stream='client'}",
]
PERTURBED = [
    "{name='random-replacement'}",
    "{name='randomised-response', epsilon=3.0}",
    "{name='targeted', attribute='group', epsilon=3.0, select='random'}",
]


def table_of(exchanged: Sequence[Row] | None) -> list[Row]:
    """Rows (user, item, rating, time) of all users; the first one has all items, so that their list
    is the same whatever the exchanged user has. None: that user is not there."""
    random = np.random.default_rng(2)
    rows: list[Row] = [("u00", item, 4.0, item) for item in range(ADVERSARIAL_NEIGHBOURS_ITEMS - 1)]
    for user in range(1, USERS):
        items = random.choice(
            ADVERSARIAL_NEIGHBOURS_ITEMS - 1, random.integers(4, 9), replace=False
        )
        rated = [(f"u{user:02}", int(item), float(random.integers(1, 6))) for item in items]
        drawn = [(*row, int(random.integers(100))) for row in rated]
        if user == EXCHANGED:
            drawn = [] if exchanged is None else list(exchanged)
        rows += drawn
    return [*rows, ("u00", ADVERSARIAL_NEIGHBOURS_ITEMS - 1, 5.0, 99)]


def rows_of_client(items: Sequence[int], rating: float = 5.0) -> list[Row]:
    return [(f"u{EXCHANGED:02}", item, rating, 7 * item) for item in items]


OWN = rows_of_client([1, 2, 3, 4, 5, 6])
NEIGHBOURS = [
    OWN[:-1],
    OWN[:1],
    rows_of_client(range(ADVERSARIAL_NEIGHBOURS_ITEMS - 1)),
    rows_of_client([7, 8, 9], 1.0),
]


@pytest.fixture
def play(tiny_experiment, tmp_path):
    """Runs settings on a table: the releases, and the events in the ledger, by round."""

    def run(rows, settings, held=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        lines = [f"{u},{i},{rating},{time},{'ab'[int(u[1:]) % 2]}" for u, i, rating, time in rows]
        (folder / "data.csv").write_text("\n".join(["user,item,rating,time,group", *lines, ""]))
        columns = {"rating": "rating", "time": "time", "user-features": ["group"]}
        dataset = {"name": "table", "path": str(folder / "data.csv"), **columns}
        made = {**tiny_experiment(), "dataset": dataset}
        del made["positive-above"]
        overrides = ["sampler={name='full'}", "evaluation.every=0", "engine.nodes=1", *settings]
        with captured(held) as seen:
            runner.run(made, overrides, output=folder / "run")
        charged = {}
        for ledger in (folder / "run").rglob("privacy.jsonl"):
            for line in map(json.loads, ledger.read_text().splitlines()):
                charged[line["round"]] = events.from_record(line["event"])
        return seen, charged

    return run


def largest_share(
    before: tuple[Sequence[Captured], dict], after: tuple[Sequence[Captured], dict]
) -> float:
    """The largest move of an exact sum / what is charged for it."""
    assert before[1] == after[1]
    shares = [
        one.moved(other) / sensitivities(one, before[1][one.address[0]])
        for one, other in zip(before[0], after[0], strict=True)
    ]
    return max(shares)


CENTRAL = ("dp-popularity', clip-norm=0.5", "dp-gram', items=6")
CHARGED = [
    *([*system, f"split={split}"] for system in (GRAM, MEANS) for split in SPLITS),
    *([*GRAM, "split={name='leave-one-out'}", f"perturb={one}"] for one in PERTURBED),
    *(
        [*GRAM[:3], f"split={split}", f"evaluation.baselines=[{{name='{system}}}]"]
        for system in CENTRAL
        for split in SPLITS
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", CHARGED, ids=lambda settings: " ".join(settings[-2:]))
def test_sums_move_by_what_is_charged(play, settings):
    before = play(table_of(OWN), settings)
    assert all(any(value.any() for value in release.exact.values()) for release in before[0])
    shares = [
        largest_share(before, play(table_of(other), settings, before[0])) for other in NEIGHBOURS
    ]
    assert max(shares) <= 1 + 1e-4, shares


@pytest.mark.slow
def test_sums_move_by_what_is_charged_when_a_client_is_removed(play):
    """The held-out users are then the same ones by name."""
    settings = [*GRAM, ADD_REMOVE, "split={name='user-holdout', stream='client', test-users=0.3}"]
    before = play(table_of(OWN), settings)
    assert largest_share(before, play(table_of(None), settings, before[0])) <= 1 + 1e-4


SHUFFLED = "split={name='ratio', stream='dataset'}"
REFUSED = {
    "[privacy]": [*GRAM, SHUFFLED],
    "[privacy], perturbed": [*GRAM, "perturb={name='upc-sdg'}"],
    "baseline dp-popularity": [SHUFFLED, "evaluation.baselines=['dp-popularity']"],
    "baseline dpsgd-mf": [SHUFFLED, "task=rating", "evaluation.baselines=['dpsgd-mf']"],
    "step dpvae": [SHUFFLED, "model={name='vae', latent=4, hidden=8}", "step={name='dpvae'}"],
    "add-remove": [*GRAM, ADD_REMOVE],
}
PRIVREC = (
    "model={name='privrec', embedding=4, hidden=[8]}",
    "step={name='sgd', epochs=1}",
    "privacy={noise-multiplier=1.0, delta=1e-5, clip-norm=0.5}",
    "split={name='user-holdout', test-users=0.3}",
)


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_a_guarantee_that_would_not_hold_is_refused(play, settings):
    with pytest.raises(ExperimentError, match="does not hold with") as error:
        play(table_of(OWN), settings)
    assert "one client affect" in str(error.value)


def test_categories_that_are_collected_from_rows_are_refused_and_declared_ones_are_not(play):
    """A model's rows are those of the declared categories, whoever is in them."""
    with pytest.raises(ExperimentError, match="does not protect the categories") as error:
        play(table_of(OWN), PRIVREC)
    assert "dataset.user-categories.group" in str(error.value)
    play(table_of(OWN), [*PRIVREC, "model.features=false"])
    declared = [*PRIVREC, "dataset.user-categories={group=['b', 'c']}"]
    releases, _ = play(table_of(OWN), declared)
    assert {len(release.exact["user.group"]) for release in releases} == {3}  # b, c and other
