# SPDX-License-Identifier: Apache-2.0
"""Membership attacks, their signals and intervals, and the leak by negatives."""

import io
import math
import re
import sys

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from sklearn import metrics
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder

from fedrec.data.interactions import Feature, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import marked
from fedrec.privacy.statement import attack_ceiling
from fedrec.report.page.sections import report
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.attacks.bounds import clopper_pearson, mean_of
from simulations.attacks.inference import (
    Describer,
    _found_ceiling,
    _judged,
    _stratified_folds,
    fit_signals,
    forest_scores,
    infer_attribute,
    lira_scores,
    measure,
    one_hot,
)
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


# Attribute inference, and the success of attacks.

# Attribute inference against the best possible classifier and scikit-learn, and without any signal.


def profiles(lift, seed=0, share=0.5):
    """Independent items; a third of them is likelier in class 1, a third in class 0. And the log
    odds of class 1."""
    random = np.random.default_rng(seed)
    labels = (random.random(USERS) < share).astype(np.int64)
    chances = np.full((2, ITEMS), 0.2)
    chances[1, : ITEMS // 3] += lift
    chances[0, ITEMS // 3 : 2 * ITEMS // 3] += lift
    table = (random.random((USERS, ITEMS)) < chances[labels]).astype(np.float32)
    odds = table @ (np.log(chances[1]) - np.log(chances[0]))
    odds += (1 - table) @ (np.log(1 - chances[1]) - np.log(1 - chances[0]))
    return table, labels, odds


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["rows", "columns"])
def test_a_planted_signal_is_found_nearly_as_well_as_can_be(scaling):
    table, labels, odds = profiles(0.15)
    best = balanced_accuracy_score(labels, odds > 0)
    found = infer_attribute(table, labels, scaling=scaling)
    assert 0.8 < best < 0.95
    assert best - 0.07 < found.balanced_accuracy.value < best + 0.02
    assert roc_auc_score(labels, odds) - 0.06 < found.auc < roc_auc_score(labels, odds) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.15])
def test_without_a_signal_the_attacker_is_at_chance(share):
    """Also if always predicting the larger class has an accuracy of .85."""
    table, labels, _ = profiles(0.0, seed=1, share=share)
    found = infer_attribute(table, labels)
    smallest = min(found.classes)
    assert abs(found.balanced_accuracy.value - 0.5) < 4 * 0.5 / np.sqrt(smallest) / np.sqrt(2)
    assert abs(found.auc - 0.5) < 4 * 0.6 / np.sqrt(smallest)
    assert found.chance == 0.5


def test_several_classes():
    random = np.random.default_rng(4)
    labels = np.arange(600) % 3
    table = (
        random.random((600, 30)) < 0.15 + 0.25 * (np.arange(30) % 3 == labels[:, None])
    ).astype(np.float32)
    found = infer_attribute(table, labels)
    assert found.chance == pytest.approx(1 / 3)
    assert found.auc is None
    assert found.classes == (200, 200, 200)
    assert found.balanced_accuracy.value > 0.75


def test_figures_are_those_of_scikit_learn():
    random = np.random.default_rng(5)
    labels = (random.random(400) < 0.3).astype(np.int64)
    first = np.clip(random.random(400) * 0.7 + 0.3 * labels, 0, 1)
    fold = _stratified_folds(labels, 4, 0)
    found = _judged(np.column_stack([1 - first, first]), labels, fold)
    answers = first > 0.5
    assert found.balanced_accuracy.value == pytest.approx(balanced_accuracy_score(labels, answers))
    assert found.accuracy.value == pytest.approx((answers == labels).mean())
    parts = [balanced_accuracy_score(labels[fold == p], answers[fold == p]) for p in range(4)]
    assert found.folds == pytest.approx(parts)
    assert found.auc == pytest.approx(
        np.mean([roc_auc_score(labels[fold == p], first[fold == p]) for p in range(4)])
    )
    assert found.majority == pytest.approx(max(np.mean(labels), 1 - np.mean(labels)))
    assert (
        found.balanced_accuracy.low < found.balanced_accuracy.value < found.balanced_accuracy.high
    )


def test_folds_are_stratified_and_everyone_is_asked_once():
    labels = np.repeat([0, 1], [83, 17])
    fold = _stratified_folds(labels, 5, 0)
    for label in (0, 1):
        counts = np.bincount(fold[labels == label], minlength=5)
        assert counts.max() - counts.min() <= 1 and counts.sum() == (labels == label).sum()


def test_a_users_own_label_is_never_learned_from():
    """Each user's description is unique: only a classifier that was trained on the user can know
    its label."""
    labels = np.random.default_rng(6).integers(0, 2, 300)
    found = infer_attribute(np.eye(300, dtype=np.float32), labels)
    assert abs(found.auc - 0.5) < 0.15


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_and_leaves_torchs_generator_alone():
    import torch

    table, labels, _ = profiles(0.15)
    state = torch.random.get_rng_state()
    first, again = infer_attribute(table, labels, seed=3), infer_attribute(table, labels, seed=3)
    assert first == again != infer_attribute(table, labels, seed=4)
    assert torch.equal(state, torch.random.get_rng_state())


def test_constant_columns_do_no_harm():
    table, labels, _ = profiles(0.15)
    padded = np.concatenate([table, np.full((USERS, 5), 7e6, np.float32)], axis=1)
    assert infer_attribute(padded, labels, scaling="columns").balanced_accuracy.value > 0.75


def test_too_few_users_of_a_class_are_explained():
    with pytest.raises(ExperimentError, match="too few users"):
        infer_attribute(np.eye(10), np.array([0] * 8 + [1] * 2))
    with pytest.raises(ExperimentError, match="too few users"):
        infer_attribute(np.eye(10), np.zeros(10, dtype=np.int64))
    with pytest.raises(ValueError, match="finite"):
        infer_attribute(np.full((10, 2), np.nan), np.array([0, 1] * 5), folds=2)


# Figures of an attack, against scikit-learn and against mechanisms whose limits are known.


@pytest.fixture(params=[False, True], ids=["distinct", "ties"])
def attacked(request):
    """Scores and membership of 300 users; members score slightly higher."""
    random = np.random.default_rng(4)
    member = random.random(300) < 0.6
    scores = random.normal(size=300) + 0.7 * member
    return (np.round(scores) if request.param else scores), member


def test_equal_to_scikit_learn(attacked):
    scores, member = attacked
    found = measure(scores, member, threshold=0.3)
    answer = scores > 0.3
    assert found.accuracy.value == pytest.approx(metrics.accuracy_score(member, answer))
    assert found.balanced_accuracy.value == pytest.approx(
        metrics.balanced_accuracy_score(member, answer)
    )
    assert found.auc.value == pytest.approx(metrics.roc_auc_score(member, scores))
    alarms, hits, _ = metrics.roc_curve(member, scores, drop_intermediate=False)
    assert found.members_found.value == pytest.approx(hits[alarms <= 0.01].max())
    assert found.false_alarms == pytest.approx(alarms[alarms <= 0.01].max())
    assert found.majority == max(member.mean(), 1 - member.mean())
    caught = round(found.members_found.value * found.members)
    exact = clopper_pearson(caught, found.members)
    assert (found.members_found.low, found.members_found.high) == exact


def test_the_interval_of_the_area_is_that_of_all_pairs(attacked):
    scores, member = attacked
    inside, outside = scores[member][:, None], scores[~member][None]
    won = (inside > outside) + 0.5 * (inside == outside)
    variance = won.mean(1).var(ddof=1) / len(inside) + won.mean(0).var(ddof=1) / outside.shape[1]
    area = measure(scores, member, threshold=0.0).auc
    assert area.value == pytest.approx(won.mean())
    assert (area.high - area.low) / 2 == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize(
    ("scores", "member"), [([1.0, 2.0], [True, True]), ([1.0, np.nan], [True, False])]
)
def test_wrong_input_is_refused(scores, member):
    with pytest.raises(ValueError, match="users of both kinds"):
        measure(np.array(scores), np.array(member), threshold=0.5)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
def test_randomised_response_reaches_the_ceilings_and_nothing_passes_them(epsilon):
    assert attack_ceiling(math.inf, 0.0) == _found_ceiling(0.0, math.inf, 0.0) == 1.0
    assert _found_ceiling(0.01, 1000.0, 0.0) == 1.0
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))  # pure DP: answers truly with this chance
    assert attack_ceiling(epsilon, 0.0) == pytest.approx(truth)
    assert _found_ceiling(1 - truth, epsilon, 0.0) == pytest.approx(truth)
    mu = 1.3  # a Gaussian mechanism, at the delta that it has for this epsilon
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )
    for alarms in np.linspace(0, 1, 101):
        found = stats.norm.cdf(stats.norm.ppf(alarms) + mu)
        assert found <= _found_ceiling(alarms, epsilon, delta) + 1e-12
    assert stats.norm.cdf(mu / 2) <= attack_ceiling(epsilon, delta) + 1e-12
