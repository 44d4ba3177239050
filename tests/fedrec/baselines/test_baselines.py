# SPDX-License-Identifier: Apache-2.0
"""The centralised baselines one by one, and under the protocol of the held-out users."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedrec.baselines.factorisation.ease import Ease
from fedrec.baselines.private.dp_popularity import DpPopularity
from fedrec.baselines.simple.popularity import Popularity
from fedrec.baselines.simple.repeat import RepeatBaseline
from fedrec.components.registry import BASELINE, builtin_names, resolve
from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.split import Partition
from fedrec.data.splits.user_holdout import UserHoldout
from fedrec.errors import DataError, ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.nn.optimisers import Adam
from tests.fedrec.baselines.histories import histories_of


def fitted(baseline, lists, num_items, **options):
    model = baseline(baseline.Config.parse(options))
    model.fit(histories_of(lists, num_items))
    return model


def dataset(users, items, ratings=None) -> Interactions:
    num_users, num_items = max(users) + 1, max(items) + 1
    tables = FeatureTable(num_users), FeatureTable(num_items)
    ids = np.arange(num_users), np.arange(num_items)
    return Interactions("hand", np.array(users), np.array(items), *ids, *tables, ratings)


def test_popularity_counts():
    model = fitted(Popularity, [[0, 1], [1], []], 4)
    assert model.scores(histories_of([[], [0]], 4)).tolist() == [[1, 2, 0, 0]] * 2


def test_repeat_puts_own_count_first_and_popularity_second():
    model = fitted(RepeatBaseline, [[0, 1, 1], [1]], 4)
    scores = model.scores(histories_of([[2, 2, 0], []], 4))
    assert scores[0].argsort(descending=True, stable=True).tolist() == [2, 0, 1, 3]
    assert scores[1].argsort(descending=True, stable=True).tolist() == [1, 0, 2, 3]


class TestEase:
    def test_closed_form(self):
        generator = np.random.default_rng(0)
        # repeats, and more than one block of users
        lists = [generator.choice(30, 7).tolist() for _ in range(2100)]
        model = fitted(Ease, lists, 30, regularisation=10.0)
        matrix = np.zeros((2100, 30))
        for user, items in enumerate(lists):
            matrix[user, items] = 1
        inverse = np.linalg.inv(matrix.T @ matrix + 10 * np.eye(30))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        got = model.scores(histories_of([[3, 3, 9], []], 30)).numpy()
        np.testing.assert_allclose(got, [weights[3] + weights[9], np.zeros(30)], atol=1e-4)

    def test_no_weight_is_better_than_the_closed_form(self):
        """B is the least-squares solution with a zero diagonal, so any other such B has a larger
        objective."""
        lists = [
            np.random.default_rng(user).choice(12, 4, replace=False).tolist() for user in range(60)
        ]
        model = fitted(Ease, lists, 12, regularisation=5.0)
        data, weights = histories_of(lists, 12).matrix().double(), model._weights.double()

        def objective(candidate):
            return ((data - data @ candidate) ** 2).sum() + 5.0 * (candidate**2).sum()

        for seed in range(20):
            step = (
                torch.randn(12, 12, generator=torch.Generator().manual_seed(seed)).double() * 1e-2
            )
            assert objective(weights + step.fill_diagonal_(0)) > objective(weights)

    def test_refuses_a_large_catalogue_and_states_the_memory(self):
        with pytest.raises(ExperimentError, match=r"40000 items.*17\.9 GiB"):
            fitted(Ease, [[0]], 40_000)

    def test_limit_is_a_setting(self):
        with pytest.raises(ExperimentError, match="at most 5 items"):
            fitted(Ease, [[0]], 6, **{"max-items": 5})


def test_every_baseline_resolves_by_name():
    assert {"popularity", "ease", "repeat"} <= set(builtin_names(BASELINE))
    assert "evaluate" not in builtin_names(BASELINE)
    assert resolve(BASELINE, "ease") is Ease


def evaluated(names, table, partition, *, positive_above, **options):
    population = Population(table, partition, task="ranking", positive_above=positive_above)
    return evaluate_baselines(names, population, **options)


def test_liked_items_follow_the_order_of_clients():
    table = dataset([0, 1, 0, 2, 1], [5, 6, 7, 8, 9], np.array([4, 4, 4, 4, 2]))
    partition = Partition(np.array([0, 1]), np.array([0, 1, 2, 4]), np.array([]), np.array([3]))
    population = Population(table, partition, task="ranking", positive_above=3)
    offsets, items = population.liked(np.array([1, 2, 0]))
    assert offsets.tolist() == [0, 1, 1, 3] and items.tolist() == [6, 5, 7]


def test_low_rated_items_are_those_of_training_rows_that_are_not_positive():
    """User 2's row and its low rating are held out."""
    table = dataset([0, 1, 0, 2, 1], [5, 6, 7, 8, 9], np.array([4, 4, 3, 1, 2]))
    partition = Partition(np.array([0, 1]), np.array([0, 1, 2, 4]), np.array([]), np.array([3]))
    population = Population(table, partition, task="ranking", positive_above=3)
    offsets, items = population.low_rated(np.array([1, 2, 0]))
    assert offsets.tolist() == [0, 1, 1, 2] and items.tolist() == [9, 7]
    everything = Population(table, partition, task="ranking", positive_above=None)
    assert everything.low_rated(np.array([0, 1]))[1].tolist() == []


def test_low_rated_items_stay_with_their_users():
    own = replace(
        histories_of([[1, 1], [2], [3, 4]], 9), low_rated=histories_of([[5], [7, 6, 7], []], 9)
    )
    for part, places in ((own.block(1, 3), [1, 2]), (own.take(np.array([2, 0])), [2, 0])):
        assert part.low_rated is not None
        expected = own.low_rated.matrix()[places]
        assert torch.equal(part.low_rated.matrix(), expected)
    assert own.distinct().low_rated.items.tolist() == [5, 6, 7]


class TestEvaluate:
    def test_by_hand(self):
        """Users 0, 1 train; user 2 knows item 0 and liked item 1, which user 0 and 1 have; items 2,
        3 never seen."""
        table = dataset([0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 0, 1], np.array([5, 5, 5, 1, 5, 5]))
        partition = Partition(np.array([0, 1]), np.arange(5), np.array([]), np.array([5]))
        got = evaluated(
            ["popularity"], table, partition, positive_above=3, held_out="test", ks=(1,)
        )
        assert got["popularity"]["hits@1"] == 1 and got["popularity"]["mrr"] == 1

    def test_fits_on_positives_of_training_clients_only(self):
        table = dataset([0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 3, 4], np.array([5, 1, 5, 5, 5, 5]))
        partition = Partition(np.array([0]), np.arange(5), np.array([]), np.array([5]))
        seen = []
        Spy = type(
            "Spy", (Popularity,), {"fit": lambda self, h: (seen.append(h), Popularity.fit(self, h))}
        )
        globals()["Spy"] = Spy
        evaluated([f"{__name__}:Spy"], table, partition, positive_above=3, held_out="test", ks=(1,))
        assert seen[0].items.tolist() == [0] and seen[0].num_users == 1

    def test_repeated_rows_count_each(self):
        """Row level: item 0 is held out three times and reached, item 3 once and not."""
        table = dataset([0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 3])
        partition = Partition(np.array([0]), np.array([0, 1]), np.array([]), np.arange(2, 6))
        got = evaluated(["repeat"], table, partition, positive_above=None, held_out="test", ks=(1,))
        assert got["repeat"]["hits@1"] == pytest.approx((3 * 1 + 1 / 3) / 4)

    def test_block_size_does_not_matter(self):
        generator = np.random.default_rng(0)
        table = dataset(
            np.repeat(np.arange(60), 12).tolist(), generator.integers(0, 50, 720).tolist()
        )
        partition = UserHoldout(UserHoldout.Config.parse({"test-users": 0.4}), 0).split(table)
        options = {"positive_above": None, "held_out": "test", "ks": (5,)}
        small, large = (
            evaluated(["ease"], table, partition, block=b, **options) for b in (5, 1000)
        )
        assert small["ease"] == pytest.approx(large["ease"])

    def test_validation_rows_and_settings(self):
        table = dataset(np.repeat(np.arange(20), 6).tolist(), np.tile(np.arange(6), 20).tolist())
        partition = UserHoldout(UserHoldout.Config.parse({"validation-users": 0.2}), 0).split(table)
        names = {"ease": {"regularisation": 3.0}}
        got = evaluated(
            names, table, partition, positive_above=None, held_out="validation", ks=(3,)
        )
        ranks = {"hits@3", "discounted-hits@3", "recall@3", "precision@3", "ndcg@3", "map@3", "mrr"}
        ranks.add("hit-rate@3")
        assert set(got["ease"]) == ranks | {
            "coverage@3",
            "gini@3",
            "popularity@3",
            "popularity-lift@3",
        }

    def test_wrong_setting_is_named(self):
        table = dataset([0, 1, 1], [0, 0, 1])
        partition = Partition(np.array([0]), np.array([0, 1]), np.array([]), np.array([2]))
        with pytest.raises(ExperimentError, match=r"baselines\.ease\.lambda"):
            evaluated(
                {"ease": {"lambda": 1}},
                table,
                partition,
                positive_above=None,
                held_out="test",
                ks=(1,),
            )

    @pytest.mark.slow
    def test_nothing_to_rank(self):
        table = dataset([0, 1, 1], [0, 0, 1])
        partition = Partition(np.array([0]), np.arange(3), np.array([]), np.array([]))
        with pytest.raises(DataError, match="nothing to rank"):
            evaluated(
                ["popularity"], table, partition, positive_above=None, held_out="test", ks=(1,)
            )


@pytest.mark.slow
@pytest.mark.real_data
def test_movielens_1m_under_the_protocol_of_privrec():
    """Hits@5, 10, 20, 30 on ML-1M, measured by another implementation on another sample of test
    users."""
    reader = resolve_reader("ml-1m")
    table = reader.read()
    partition = UserHoldout(UserHoldout.Config(), 0).split(table)
    ks = (5, 10, 20, 30)
    got = evaluated(
        ["popularity", "ease"], table, partition, positive_above=3, held_out="test", ks=ks
    )
    hits = {name: [values[f"hits@{k}"] for k in ks] for name, values in got.items()}
    np.testing.assert_allclose(hits["popularity"], [0.062, 0.102, 0.158, 0.199], atol=0.006)
    np.testing.assert_allclose(hits["ease"], [0.168, 0.241, 0.338, 0.401], atol=0.006)


def resolve_reader(name: str):
    from fedrec.components.registry import DATASET

    reader = resolve(DATASET, name)
    return reader(name, reader.Config())


def test_private_popularity_costs_its_epsilon_and_has_that_noise():
    """One Gaussian release of replace-one sensitivity sqrt(2) S: Balle and Wang's analytic
    calibration gives its noise.

    The exact delta of noise sigma = sqrt(2) S / mu at epsilon is Phi(mu/2 - eps/mu) - e^eps
    Phi(-mu/2 - eps/mu).
    """
    items = 40_000
    model = fitted(DpPopularity, [[]] * 50, items, epsilon=2.0, delta=1e-5, clip_norm=3.0)
    noise = model.scores(histories_of([[]], items))[0].numpy()
    mu = np.sqrt(2) * 3.0 / model.plan(50).noise_std
    exact = norm.cdf(mu / 2 - 2 / mu) - np.exp(2) * norm.cdf(-mu / 2 - 2 / mu)
    assert exact == pytest.approx(1e-5, rel=0.02)
    assert noise.std() == pytest.approx(np.sqrt(2) * 3.0 / mu, rel=5 / np.sqrt(2 * items))
    assert abs(noise.mean()) < 0.2
    assert model.spent(50).epsilon == pytest.approx(2.0, rel=1e-3)


def test_private_popularity_clips_each_user():
    """At epsilon 1e4 there is hardly any noise: a user with nine items adds 2 / sqrt(9) to each,
    repeats count once."""
    lists = [list(range(9)), [1, 1, 2]]
    model = fitted(DpPopularity, lists, 12, epsilon=1e4, clip_norm=2.0, backend="autodp")
    wide, expected = model.plan(2).noise_std, np.zeros(12)
    expected[:9] += 2 / 3
    expected[[1, 2]] += 1.0
    assert model.scores(histories_of([[]], 12))[0].numpy() == pytest.approx(expected, abs=6 * wide)
    assert wide < 0.25


def test_private_popularity_with_laplace_noise():
    """b = 2 S / epsilon in the L1 norm; delta is nearly irrelevant for one release."""
    model = fitted(
        DpPopularity, [[0, 1], [1]], 20_000, epsilon=4.0, clip_norm=5.0, mechanism="laplace"
    )
    noise = model.scores(histories_of([[]], 20_000))[0].numpy()[2:]
    assert np.abs(noise).mean() == pytest.approx(2.5, rel=0.04)


class TestTooLarge:
    """A baseline for which the data are too large is skipped with a message, and another one
    replaces it."""

    def setup_method(self):
        generator = np.random.default_rng(0)
        table = dataset(
            np.repeat(np.arange(30), 8).tolist(), generator.integers(0, 40, 240).tolist()
        )
        partition = UserHoldout(UserHoldout.Config.parse({"test-users": 0.4}), 0).split(table)
        self.population = Population(table, partition, task="ranking", positive_above=None)
        self.said = []

    def measured(self, names):
        return evaluate_baselines(
            names, self.population, held_out="test", ks=(5,), say=self.said.append
        )

    def test_ials_replaces_ease(self):
        alone = self.measured(["ials"])
        found = self.measured({"popularity": {}, "ease": {"max-items": 10}})
        assert list(found) == ["popularity", "ials"] and found["ials"] == alone["ials"]
        assert len(self.said) == 1 and "ease is left out: 40 items would take" in self.said[0]
        assert self.said[0].endswith("; ials stands in")

    def test_its_own_settings_are_kept(self):
        settings = {"factors": 3, "seed": 5}
        found = self.measured({"ease": {"max-items": 10}, "ials": settings})
        assert found == self.measured({"ials": settings})

    def test_nothing_is_reported_for_data_that_fit(self):
        assert list(self.measured(["ease"])) == ["ease"] and not self.said


@pytest.fixture
def threads_of_steps(monkeypatch):
    """The numbers of PyTorch's threads, of two, that Adam's steps find."""
    taken = []
    step = Adam.step

    def counted(*given):
        taken.append(torch.get_num_threads())
        return step(*given)

    monkeypatch.setattr(Adam, "step", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield taken
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vae", {"epochs": 1}),
        ("mf", {"epochs": 1}),
        ("lightgcn", {"epochs": 1}),
        ("central", {"epochs": 1}),
        ("dpae", {"steps": 2, "noise": False}),
        ("dp-svd", {"steps": 2, "noise": False}),
    ],
)
def test_small_gradient_steps_take_one_thread(threads_of_steps, liked, others, name, options):
    """Several would wait for each other after each operation; all are there again afterwards."""
    kind = resolve(BASELINE, name)
    model = kind(kind.Config.parse(options))
    model.fit(liked)
    model.scores(others)
    assert set(threads_of_steps) == {1} and torch.get_num_threads() == 2


def test_long_gradient_steps_take_all_threads(threads_of_steps, monkeypatch, liked):
    monkeypatch.setattr("fedrec.baselines.histories._MANY", 10_000)
    kind = resolve(BASELINE, "vae")
    kind(kind.Config.parse({"epochs": 1})).fit(liked)
    assert set(threads_of_steps) == {2}
