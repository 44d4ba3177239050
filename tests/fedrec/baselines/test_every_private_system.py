# SPDX-License-Identifier: Apache-2.0
"""What holds for every private system, and those that predict ratings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fedrec.baselines.base import Histories, Ratings
from fedrec.baselines.neighbours import profiles_of
from fedrec.baselines.private.ratings import (
    DpItemMean,
    DpItemMeanConfig,
    _error_bound,
    _inclusion,
    sensitivity,
)
from fedrec.components import registry
from fedrec.data.interactions import Feature, FeatureTable, Interactions
from fedrec.data.perturbation import TrainingData
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from fedrec.neighbourhood import Bounds, Examples, item_means
from fedrec.perturb.noisy_cooccurrence import NoisyCooccurrence, NoisyCooccurrenceConfig
from fedrec.privacy.accounting.events import NonPrivate
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.rng import Reproducible
from tests.captured_noise import Captured, captured, sensitivities
from tests.fedrec.baselines.histories import histories_of, made, spent

USERS, ITEMS, CHOSEN = 14, 16, 6
SMALL = {"items": CHOSEN, "count-clip": 0.5}
GRAM = {**SMALL, "clip-norm": 0.3, "count-share": 0.3}
ALS = {"factors": 3, "item-budget": 0.5, **SMALL}
MF = {"factors": 3, "user-norm": 0.05, "clip-norm": 0.02}
SAMPLED = {"steps": 3, "cohort": USERS, "clip-norm": 0.02}
RANKING: dict[str, tuple[str, dict[str, Any]]] = {
    "popularity": ("dp-popularity", {"clip-norm": 0.5}),
    "popularity, laplace": ("dp-popularity", {"clip-norm": 0.5, "mechanism": "laplace"}),
    "gram, puresvd": ("dp-gram", {**GRAM, "factors": 3}),
    "gram, ease": ("dp-gram", {**GRAM, "model": "ease"}),
    "gram, features": ("dp-gram", {**GRAM, "factors": 3, "public-features": True}),
    "fold-in": ("dp-fold-in", {**GRAM, "factors": 4, "low-rated": 0.3}),
    "als": ("dp-als", ALS),
    "mf": ("dpmf", MF),
    "mf, posterior": ("dpmf", {**MF, "variant": "posterior"}),
    "autoencoder": ("dpae", {**SAMPLED, "hidden": 5, "latent": 3}),
    "svd": ("dp-svd", {**SAMPLED, "factors": 3}),
}
NO_SUMS = {"dpps-mf", "dpps-pnbm", "dpsgd-mf", "dpsgd-pnbm"}
"""Published systems about single ratings, whose stated epsilon is not for a user's data."""
EVERYTHING, NOTHING = list(range(ITEMS)), []
LOW, HIGH, ONE = EVERYTHING[: ITEMS // 2], EVERYTHING[ITEMS // 2 :], [ITEMS - 1]
NEIGHBOURS = [(EVERYTHING, NOTHING), (LOW, HIGH), (ONE, EVERYTHING), (HIGH, ONE)]


@dataclass(frozen=True)
class Fitted:
    """What a fit released, what was charged for it, and what users get from it."""

    releases: Sequence[Captured]
    charged: Sequence[object]
    outcome: np.ndarray


Fit = Callable[[Sequence[list[int]], Sequence[Captured] | None], Fitted]


def users(seed: int) -> list[list[int]]:
    """The items of all users; the most popular ones, and how many users have, differ between
    seeds."""
    random = np.random.default_rng(seed)
    chances = random.permutation(np.geomspace(1, 0.02, ITEMS))
    chances /= chances.sum()
    return [
        sorted(
            random.choice(ITEMS, random.integers(1, 3 + seed), replace=False, p=chances).tolist()
        )
        for _ in range(USERS)
    ]


def histories(lists: Sequence[list[int]]) -> Histories:
    """Users who like these items and rated the next ones low."""
    kinds = Feature.single("kind", ["abc"[item % 3] for item in range(ITEMS)])
    others = [sorted({(item + 1) % ITEMS for item in own} - set(own)) for own in lists]
    features = FeatureTable(ITEMS, (kinds,))
    low_rated = histories_of(others, ITEMS)
    return replace(histories_of(lists, ITEMS), item_features=features, low_rated=low_rated)


PROBES = [LOW, ONE, [0, 5, ITEMS - 1]]


def ranking(name: str, options: dict[str, Any], **more: Any) -> Fit:
    """Fits a system that ranks; the outcome is the scores of users outside the data."""

    def fit(lists, held=None):
        system, charged = made(name, **options, **more, seed=3), []
        system.charge = lambda number, event: charged.append(event)
        with captured(held) as seen:
            system.fit(histories(lists))
        return Fitted(seen, charged, system.scores(histories(PROBES)).numpy().copy())

    return fit


def item_means_of_every_private_system(**_: Any) -> Fit:
    """Fits private item means to extreme ratings; the outcome is predictions."""

    def ratings(lists):
        rows = [(user, item) for user, own in enumerate(lists) for item in own]
        places, items = np.array(rows).T
        values = np.where((items + places) % 2, 5.0, 1.0)
        return Ratings(len(lists), ITEMS, places, items, values)

    def fit(lists, held=None):
        system = made("dp-item-mean", clip_norm=0.5)
        with captured(held) as seen:
            system.fit_ratings(ratings(lists))
        known, asked = ratings(PROBES), np.arange(ITEMS)
        found = [system.predict(known, np.full(ITEMS, user), asked) for user in range(len(PROBES))]
        return Fitted(seen, [system._plan.event()] * len(seen), np.array(found))

    return fit


def synthetic_profiles(**_: Any) -> Fit:
    """Draws synthetic profiles; the outcome is which users have which items."""

    def fit(lists, held=None):
        own = histories(lists)
        names = np.array([f"u{user}" for user in range(USERS)], dtype=object)
        tables = FeatureTable(USERS), FeatureTable(ITEMS)
        rows = Interactions("rows", own.rows(), own.items, names, np.arange(ITEMS), *tables)
        config = NoisyCooccurrenceConfig(epsilon=5.0, items=CHOSEN, clip_items=1, threshold=0.0)
        system = NoisyCooccurrence(config, 3)
        with captured(held) as seen:
            rows = system.perturb(TrainingData(rows, np.arange(USERS), False)).rows
        found = np.zeros((USERS, ITEMS))
        found[rows.users, rows.items] = 1
        return Fitted(seen, [system.plan(USERS).event()] * len(seen), found)

    return fit


RATED = {"item means": item_means_of_every_private_system, "synthetic profiles": synthetic_profiles}
CASES = [
    *((name, adjacency) for name in RANKING for adjacency in ("replace-one", "add-remove")),
    ("item means", "replace-one"),
    ("synthetic profiles", "replace-one"),
]


def fitting(name: str, adjacency: str, **more: Any) -> Fit:
    made = RATED[name] if name in RATED else partial(ranking, *RANKING[name])
    return made(adjacency=adjacency, **more)


def test_no_private_system_is_left_out():
    found = {
        name
        for name, cls in registry.available(registry.BASELINE)
        if isinstance(cls, type) and ".baselines.private." in cls.__module__
    }
    assert found == {name for name, _ in RANKING.values()} | {"dp-item-mean"} | NO_SUMS


@pytest.mark.parametrize(("name", "adjacency"), CASES)
def test_one_users_data_move_the_sums_by_what_is_charged(name, adjacency):
    """For every release, given the releases before and what users draw for themselves; the bound is
    approached, or the users would prove little."""
    # without dropout, which users draw for themselves: here it is drawn for a whole cohort
    more = {"dropout": 0.0} if name == "autoencoder" else {}
    fit, others, nearest = fitting(name, adjacency, **more), users(0)[1:], {}
    for one, other in NEIGHBOURS:
        if name in RATED:  # who has no rows is not among the users
            one, other = (own or [3] for own in (one, other))
        if adjacency == "replace-one":
            # the first user: what the others draw must not depend on the number of its rows
            first, second = ([own, *others] for own in (one, other))
        else:  # the last user: cohorts are drawn by place
            first, second = [*others, one], others
        before = fit(first, None)
        after = fit(second, before.releases)
        assert len(before.releases) == len(before.charged) == len(after.charged) > 0
        for number, event in enumerate(before.charged):
            release = before.releases[number]
            share = release.moved(after.releases[number]) / sensitivities(release, event)
            assert share <= 1 + 1e-4, f"{share:.4g} times what is charged in release {number}"
            nearest[number] = max(share, nearest.get(number, 0.0))
    assert min(nearest.values()) > 0.25, nearest


@pytest.mark.parametrize(("name", "adjacency"), [case for case in CASES if "add" not in case[1]])
def test_what_follows_a_release_depends_on_nothing_else(name, adjacency):
    """All users' data are others, and the releases the same."""
    fit = fitting(name, adjacency)
    before = fit(users(0), None)
    for seed in (1, 2, 3):
        after = fit(users(seed), before.releases)
        moved = [a.moved(b) for a, b in zip(before.releases, after.releases, strict=True)]
        assert min(moved) > 0, "the data should be others"
        np.testing.assert_array_equal(after.outcome, before.outcome)


ORDER = {
    "popularity": ["counts"],
    "gram, puresvd": ["counts", "gram"],
    "fold-in": ["counts", "gram"],
    "als": ["counts", "start", "gram", "matrices", "vectors"],
    "mf": ["quadratic", "linear"] * 2,
    "mf, posterior": ["gradient"] * 2,
    "svd": ["gradients"] * 3,
}
SIGNED = {"vectors", "linear", "gradient", "gradients"}
"""The releases of contributions with signs, which cost 2 S under replace-one."""


def system_of(name: str, **more: Any) -> Any:
    baseline, options = RANKING[name]
    return made(baseline, **options, **more)


@pytest.mark.parametrize("name", RANKING)
def test_the_releases_with_signs_are_these(name):
    parts = system_of(name).parts()
    assert {p.name for p in parts if p.contributions == "signed"} == SIGNED & {
        p.name for p in parts
    }


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("name", [name for name in ORDER if name != "svd"])
def test_all_releases_together_cost_epsilon(name, adjacency):
    """Gaussian parameters mu = sensitivity / sigma add in squares, over kinds and steps; delta is
    that of one release of their sum. The cost of cohorts has tests of its own."""
    system = system_of(name, epsilon=3.0, adjacency=adjacency)
    plans, costs = system.plans(1000), {}
    for part in system.parts():
        factor = 2.0 if part.contributions == "signed" else math.sqrt(2)
        moved = part.clip_norm * (1.0 if adjacency == "add-remove" else factor)
        costs[part.name] = part.releases * (moved / plans[part.name].noise_scale) ** 2
    total = sum(costs.values())
    shares = {part.name: part.share * total for part in system.parts()}
    assert costs == pytest.approx(shares) and sum(shares.values()) == pytest.approx(total)
    mu = math.sqrt(total)
    delta = norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * norm.cdf(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=0.03)
    report = spent(system, 1000)
    assert report.epsilon == pytest.approx(3.0, rel=1e-3) and report.events == len(ORDER[name])


@pytest.mark.parametrize("name", ORDER)
def test_each_release_is_charged_before_its_noise_is_drawn_and_scoring_charges_nothing(
    name, monkeypatch
):
    told = []
    system = system_of(name)
    system.charge = lambda number, event: told.append((number, event.phase))
    draw = Reproducible.gaussian
    monkeypatch.setattr(
        Reproducible, "gaussian", lambda *given: told.append("noise") or draw(*given)
    )
    system.fit(histories(users(0)))
    system.scores(histories(PROBES))
    charges = list(enumerate(ORDER[name], 1))
    assert told == [one for charge in charges for one in (charge, "noise")]


@pytest.mark.parametrize("name", ORDER)
def test_without_noise_epsilon_is_infinite_and_every_charge_says_so(name):
    told = []
    system = system_of(name, noise=False)
    system.charge = lambda number, event: told.append(event)
    system.fit(histories(users(0)))
    assert len(told) == len(ORDER[name])
    assert all(isinstance(event, NonPrivate) for event in told)
    assert math.isinf(spent(system, USERS).epsilon)


@pytest.mark.parametrize("name", ORDER)
def test_noise_follows_the_seed(name):
    def scores(**options):
        system = system_of(name, **options)
        system.fit(histories(users(0)))
        return system.scores(histories(PROBES)).numpy().copy()

    first = scores(seed=1)
    assert np.array_equal(first, scores(seed=1)) and not np.array_equal(first, scores(seed=2))


# Private rating baselines: scales of their noise, their stated epsilons, and their limits without
# noise.


@pytest.fixture(scope="module")
def ratings():
    random = np.random.default_rng(0)
    lists = [random.choice(60, random.integers(8, 50), replace=False) for _ in range(40)]
    users, items = np.repeat(np.arange(40), [len(own) for own in lists]), np.concatenate(lists)
    return Ratings(40, 60, users, items, random.integers(1, 6, len(items)).astype(float))


@pytest.fixture(scope="module")
def profiles(ratings):
    return profiles_of(ratings)


def test_bounds_of_algorithm_one():
    """1.6, 1.2, 1.0 for C = 10 and ratings from 1 to 5."""
    assert [sensitivity(t, 4.0, 10.0) for t in (1, 2, 3)] == pytest.approx([1.6, 1.2, 1.0])
    assert _error_bound(1, 4.0) == 2 and _error_bound(10**9, 4.0) == pytest.approx(0.5)


def test_laplace_noise_of_algorithm_one_has_its_scale(ratings):
    """The noise of one step, off the diagonal: mean 0 and mean magnitude b."""
    step = {"iterations": 1, "start": "constant", "learning_rate": 0.4, "minimum_ratings": 9}
    systems = [made("dpsgd-pnbm", epsilon=epsilon, **step) for epsilon in (2.0, None)]
    for system in systems:
        system.fit_ratings(ratings)
    noise = systems[0].similarity - systems[1].similarity
    assert not noise.diagonal().any()
    noise, scale = noise[~np.eye(60, dtype=bool)], 0.4 * 10 * 1.6 / 2
    assert np.abs(noise).mean() == pytest.approx(scale, rel=0.06)
    assert abs(noise.mean()) < 0.1 * scale
    # a normal one would have 1.57
    assert np.square(noise).mean() == pytest.approx(2 * scale**2, rel=0.12)


def test_what_algorithm_one_states():
    found = made("dpsgd-pnbm", epsilon=1.0, iterations=10, sample=0.01).stated()
    assert found.nominal == 1 and found.exact == pytest.approx(54, rel=0.01)
    assert any("n (n - 1)" in line for line in found.caveats)
    assert made("dpsgd-pnbm", epsilon=None).stated() is None


def test_too_few_ratings_are_refused(ratings):
    with pytest.raises(ExperimentError, match="no user has enough ratings"):
        made("dpsgd-pnbm", minimum_ratings=1000).fit_ratings(ratings)


@pytest.mark.parametrize(("settings", "exact"), [({}, 5 / 0.09), ({"temperature": 1.0}, 5.0)])
def test_what_a_posterior_sample_states(settings, exact):
    """Scaled by epsilon / 4B an exact sample is epsilon / 4-DP; the temperature divides."""
    found = made("dpps-pnbm", epsilon=20.0, **settings).stated()
    assert found.nominal == 20 and found.exact == pytest.approx(exact)


@pytest.mark.parametrize("name", ["dpps-pnbm", "dpps-mf"])
def test_batches_estimate_the_gradient_without_bias(profiles, name):
    """Mean over many batches against a batch of everything, for similarities and for factors."""
    random = np.random.default_rng(1)
    if name == "dpps-pnbm":
        system, start = made(name, batch=2000, epsilon=None), random.random((60, 60))
        examples = Examples(profiles, item_means(profiles))
        exact = examples.gradient(start, np.arange(len(examples)), Bounds(low=1.0, high=5.0))
        exact = exact + 0.02 / _inclusion(profiles, 2000) * start
    else:
        system, start = (
            made(name, batch=2000, factors=3, epsilon=None),
            random.normal(size=(100, 3)),
        )
        means, users = item_means(profiles), profiles.users
        guess = means[profiles.items] + (start[users] * start[40 + profiles.items]).sum(1)
        errors = np.where((guess < 1) | (guess > 5), 0, guess - profiles.values)
        dense = profiles.matrix(errors).toarray()
        exact = np.concatenate([dense @ start[40:], dense.T @ start[:40]]) + 0.02 * start
    estimate = system.gradient(profiles)
    draws = np.array([estimate(start, random) for _ in range(150)])
    half = draws[:75].mean(0) - draws[75:].mean(0)
    assert np.square(draws.mean(0) - exact).sum() < 1.5 * np.square(half / 2).sum()


def test_noise_of_dpsgd_mf_and_what_it_states():
    """Every access to a rating has its share of epsilon: K of them and a third of each average."""
    system = made("dpsgd-mf", epsilon=2.0, epochs=10, average_share=0.1)
    noise = system._noise(np.random.default_rng(0), 100_000, 10 / 0.9)
    assert np.abs(noise).mean() == pytest.approx(4 * 10 / (0.9 * 2), rel=0.02)
    assert system.stated().exact == system.stated().nominal == 2


def test_noisy_item_means(ratings):
    """Without noise and clipping they are damped item means; the plan equals the stated one."""

    class Noiseless(DpItemMean):
        def plan(self, users):
            return Plan.of(PrivacyConfig(clip_norm=1e3, noise_multiplier=0.0), "full", {}, users, 1)

    exact = Noiseless(DpItemMeanConfig(damping=3.0, user_damping=2.0))
    exact.fit_ratings(ratings)
    overall = ratings.values.mean()
    sums = np.bincount(ratings.items, ratings.values, 60)
    counts = np.bincount(ratings.items, minlength=60)
    means = (sums + 3 * overall) / (counts + 3)
    np.testing.assert_allclose(exact._means, means, atol=1e-5)
    left = np.bincount(ratings.users, ratings.values - means[ratings.items])
    left /= np.bincount(ratings.users) + 2
    expected = np.clip(means[ratings.items] + left[ratings.users], 1, 5)
    found = exact.predict(ratings, ratings.users, ratings.items)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    private = made("dp-item-mean", epsilon=1.0, clip_norm=5.0)
    private.fit_ratings(ratings)
    told = private.stated()
    assert told.exact == pytest.approx(1.0, rel=1e-3) and told.nominal == 1
    # replace-one: no two users' contributions have a negative inner product
    assert private.plan(40).sensitivity == pytest.approx(5 * 2**0.5)


def test_numbers_are_shown_with_the_errors(world):
    """`nominal-epsilon` and `epsilon` in the table of results, if the system states them."""
    names = {"dpsgd-mf": {"epsilon": 3.0}, "item-mean": {}}
    found = evaluate_baselines(names, world("rating"), held_out="test")
    assert found["dpsgd-mf"]["nominal-epsilon"] == found["dpsgd-mf"]["epsilon"] == 3
    assert set(found["item-mean"]) == {"mae", "rmse"}
