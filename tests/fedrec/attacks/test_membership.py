# SPDX-License-Identifier: Apache-2.0
"""Membership attacks, their signals and intervals, and the leak by negatives."""

import io
import re
import sys

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder

from fedrec.attacks.audit import clopper_pearson, mean_of
from fedrec.attacks.inference import (
    Describer,
    fit_signals,
    forest_scores,
    lira_scores,
    measure,
    one_hot,
)
from fedrec.data.interactions import Feature, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import marked
from fedrec.report.page.sections import report
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.attacks.systems import half_members, half_memberships
from simulations.cli.studies import _settings_table as _table
from simulations.studies.search import plan_of
from simulations.studies.sweep import sweep

# The paper's attack on constructed systems: one that recommends what its members like, and one that
# is independent of its members.

USERS, ITEMS = 900, 60


def people(random):
    gender = Feature.single("gender", random.choice(["F", "M"], USERS))
    genres = Feature.multiple(
        "genres", [random.choice(list("abcdef"), random.integers(0, 3)) for _ in range(ITEMS)]
    )
    return FeatureTable(USERS, (gender,)), FeatureTable(ITEMS, (genres,))


def top_ten(scores):
    return np.argsort(-scores, axis=1)[:, :10]


def attack(lists, member):
    """Train on the first third of the users, attack the others."""
    random = np.random.default_rng(1)
    describer = Describer(*people(random), popularity=np.arange(ITEMS)[::-1])
    known, attacked = np.arange(USERS // 3), np.arange(USERS // 3, USERS)
    learned, asked = (describer.describe(users, lists[users]) for users in (known, attacked))
    scores = forest_scores(learned, member[known], asked, seed=5)
    return measure(scores, member[attacked], threshold=0.5)


def test_a_system_that_memorises_its_members_is_detected():
    random = np.random.default_rng(0)
    member = random.random(USERS) < 0.5
    taste = random.normal(size=(USERS, ITEMS))
    # members get the rare items they like, others popular items
    taste[:, 40:] += 1.5 * member[:, None]
    taste[:, :20] += 1.5 * ~member[:, None]
    found = attack(top_ten(taste), member)
    assert (
        found.balanced_accuracy.low > 0.9
        and found.auc.value > 0.97
        and found.members_found.low > 0.5
    )


def test_columns_are_those_of_scikit_learn_and_pooled_ones_by_hand():
    users, _ = people(np.random.default_rng(1))
    items = FeatureTable(3, (Feature.multiple("genres", [["x", "y"], ["y"], []]),))
    describer = Describer(users, items, popularity=np.array([5, 1, 9]))
    lists = np.array([[2, 0], [1, 2]])
    found = describer.describe(np.array([4, 9]), lists)
    labels = np.array(users["gender"].categories)[users["gender"].codes]
    gender = OneHotEncoder(sparse_output=False).fit(labels[:, None]).transform(labels[[4, 9], None])
    shown = MultiLabelBinarizer(classes=[0, 1, 2]).fit_transform(lists.tolist())
    assert np.array_equal(found[:, :-7], np.hstack([gender, shown]))
    # genres x and y: half of the list each; ranks of items 2 and 0 are 0 and 1/2; their mean,
    # smallest and largest
    assert found[0, -7:].tolist() == [0.5, 0.5, 0.0, 0.5, 0.25, 0.0, 0.5]


def test_a_missing_code_is_no_column():
    assert one_hot(np.array([[0, -1], [-1, -1], [2, 0]]), 3).tolist() == [
        [1, 0, 0],
        [0, 0, 0],
        [1, 0, 1],
    ]


def test_a_forest_is_a_function_of_its_seed():
    random = np.random.default_rng(0)
    rows, member = random.normal(size=(80, 5)), random.random(80) < 0.5
    one, same, other = (forest_scores(rows, member, rows[:9] + 0.1, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(ExperimentError) as caught:
        forest_scores(np.zeros((2, 1)), np.array([True, False]), np.zeros((1, 1)), seed=0)
    assert "fedrec[attacks]" in caught.value.fix


# Likelihood ratios, against scipy user by user, and on planted signals.


def planted(shift, users=400, runs=16, seed=7):
    """Signals with a level and noise per user, higher by `shift` standard deviations for
    members."""
    random = np.random.default_rng(seed)
    level, noise = random.normal(0, 3, users), random.uniform(0.5, 2, users)
    masks, member = half_memberships(users, runs, seed=1), half_members(users, seed=1)
    shadows = level + noise * (random.normal(size=masks.shape) + shift * masks)
    return level + noise * (random.normal(size=users) + shift * member), shadows, masks, member


def test_equal_to_scipy_user_by_user():
    target, shadows, masks, _ = planted(1.0, users=12, runs=6)
    inside = [shadows[masks[:, u], u] for u in range(12)]
    outside = [shadows[~masks[:, u], u] for u in range(12)]

    def pooled(groups):
        squares = sum(((g - g.mean()) ** 2).sum() for g in groups)
        return np.sqrt(squares / sum(len(g) - 1 for g in groups))

    expected = [
        stats.norm.logpdf(value, a.mean(), pooled(inside))
        - stats.norm.logpdf(value, b.mean(), pooled(outside))
        for value, a, b in zip(target, inside, outside, strict=True)
    ]
    assert lira_scores(target, shadows, masks) == pytest.approx(expected)


def test_a_planted_leak_is_found():
    target, shadows, masks, member = planted(3.0)
    found = measure(lira_scores(target, shadows, masks), member, threshold=0.0)
    assert found.auc.low > 0.85 and found.balanced_accuracy.low > 0.75
    # differences between users hide the raw signal: only the shadow systems reveal the leak
    assert measure(target, member, threshold=0.0).auc.value < found.auc.low


def test_without_a_leak_it_is_at_chance():
    inside = []
    for seed in range(40):
        target, shadows, masks, member = planted(0.0, seed=seed)
        found = measure(lira_scores(target, shadows, masks), member, threshold=0.0)
        inside.append(
            [figure.low < 0.5 < figure.high for figure in (found.auc, found.balanced_accuracy)]
        )
    assert (np.mean(inside, axis=0) >= 0.85).all()  # intervals of 95 %


def test_a_signal_that_never_varies_is_no_division_by_zero():
    masks = half_memberships(5, 4, seed=0)
    scores = lira_scores(np.ones(5), np.ones((4, 5)), masks)
    assert np.isfinite(scores).all() and np.array_equal(scores, np.zeros(5))


def test_a_user_needs_systems_of_both_kinds():
    with pytest.raises(ValueError, match="two shadow systems"):
        lira_scores(np.ones(5), np.ones((4, 5)), np.ones((4, 5), bool))


# Signals of the small world, by hand.

SCORES = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]).repeat(3, axis=0)
SIGNALS_USERS = np.array([0, 1, 2])


def test_ranking(world):
    # positives of the training rows: user 0 likes item 0, user 1 item 1 (twice), user 2 none
    population = world()
    found = fit_signals(SCORES, population, SIGNALS_USERS)
    assert found == pytest.approx([1 - 20 / 5, 2 - 19 / 5, 0.0])


def test_rating(world):
    # training rows: user 0 rates items 0 and 1 with 5 and 2, user 1 item 1 with 5 and 4, user 2
    # item 5 with 1
    expected = [
        -((1 - 5) ** 2 + (2 - 2) ** 2) / 2,
        -((2 - 5) ** 2 + (2 - 4) ** 2) / 2,
        -((6 - 1) ** 2),
    ]
    assert fit_signals(SCORES, world("rating"), SIGNALS_USERS) == pytest.approx(expected)
    assert fit_signals(SCORES[:1], world("rating"), np.array([3])).tolist() == [0.0]  # no rows


# The leak of held-out items through negatives: off by default, complete when enabled, and always
# reported.


@pytest.fixture
def table(tiny_experiment):
    def make(leaky):
        dataset = {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20}
        split = {"name": "leave-one-out", "leaky-negatives": leaky}
        return tiny_experiment() | {"dataset": dataset, "split": split}

    return make


@pytest.fixture
def pair(table, tmp_path):
    """Two runs that differ in the leak alone."""
    popular = ["evaluation.baselines=['popularity']"]
    for on in (False, True):
        runner.run(table(on), popular, output=tmp_path / str(on))
    return [RunFolder(tmp_path / str(on)).read_result() for on in (False, True)]


def text_of(shown):
    text = io.StringIO()
    Console(width=200, file=text).print(shown)
    return text.getvalue()


def test_the_result_states_the_leak(pair):
    honest, leaky = pair
    assert marked(honest.experiment) == "tiny" and not honest.privacy
    assert marked(leaky.experiment) == "tiny [leak]" and leaky.privacy[0].startswith("LEAK")


def test_the_report_marks_the_system(pair):
    """In its head, in a warning, and in each table but those of the run without the leak alone."""
    html = report(pair)
    assert "<title>tiny, tiny [leak]</title>" in html
    assert re.search(r'class="[^"]*warn[^"]*"[^>]*>\s*tiny \[leak\]', html)
    tables = html.split("<table")[1:]
    named = [table for table in tables if "tiny" in table]
    alone = [table for table in named if "tiny [leak]" not in table]
    assert len(alone) < len(named) and all("tiny: means" in table for table in alone), alone


def test_sweeps_mark_the_runs(table, tmp_path):
    plan = plan_of(table(False) | {"rounds": 1}, vary=["split.leaky-negatives=[false, true]"])
    result = sweep(plan, tmp_path / "sweep")
    assert result.runs["leak"].tolist() == result.settings["leak"].tolist() == [False, True]
    assert text_of(_table(result)).count("[leak]") == 1
    inside = plan_of(table(True), vary=["step.learning-rate=[0.1, 0.2]"])
    assert sweep(inside, tmp_path / "inside").runs["leak"].all()


# Intervals of proportions, against scipy and by their coverage.

CASES = [(0, 10), (1, 10), (5, 10), (10, 10), (3, 250), (499, 500), (17, 1000)]


@pytest.mark.parametrize(("successes", "trials"), CASES)
def test_equal_to_scipy(successes, trials):
    exact = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert clopper_pearson(successes, trials) == pytest.approx((exact.low, exact.high), abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.9, 0.2), (0.05, 0.95)])
def test_the_interval_of_a_mean_of_two_has_about_its_coverage(first, second):
    n, m, covered = 40, 25, 0.0
    for a, chance_a in enumerate(stats.binom.pmf(np.arange(n + 1), n, first)):
        for b, chance_b in enumerate(stats.binom.pmf(np.arange(m + 1), m, second)):
            low, high = mean_of([(a, n), (b, m)])
            covered += chance_a * chance_b * (low <= (first + second) / 2 <= high)
    assert 0.93 < covered < 0.99
