# SPDX-License-Identifier: Apache-2.0
"""Likelihood ratios, against scipy user by user, and on planted signals."""

import numpy as np
import pytest
from scipy import stats

from fedrec.attacks.lira import lira_scores
from fedrec.attacks.success import measure
from simulations.attacks.members import half_members, half_memberships


def middle(scores, mode):
    return 0.0 if mode == "online" else float(np.median(scores))


def planted(shift, users=400, runs=16, seed=7):
    """Signals with a level and noise per user, higher by `shift` standard deviations for
    members."""
    random = np.random.default_rng(seed)
    level, noise = random.normal(0, 3, users), random.uniform(0.5, 2, users)
    masks, member = half_memberships(users, runs, seed=1), half_members(users, seed=1)
    shadows = level + noise * (random.normal(size=masks.shape) + shift * masks)
    return level + noise * (random.normal(size=users) + shift * member), shadows, masks, member


@pytest.mark.parametrize("variance", ["global", "user"])
def test_equal_to_scipy_user_by_user(variance):
    target, shadows, masks, _ = planted(1.0, users=12, runs=6)
    inside = [shadows[masks[:, u], u] for u in range(12)]
    outside = [shadows[~masks[:, u], u] for u in range(12)]

    def spread(groups):
        pooled = np.sqrt(
            sum(((g - g.mean()) ** 2).sum() for g in groups) / sum(len(g) - 1 for g in groups)
        )
        return [pooled if variance == "global" else g.std(ddof=1) for g in groups]

    fits = zip(target, inside, outside, spread(inside), spread(outside), strict=True)
    online, offline = [], []
    for value, a, b, sd_a, sd_b in fits:
        online.append(
            stats.norm.logpdf(value, a.mean(), sd_a) - stats.norm.logpdf(value, b.mean(), sd_b)
        )
        offline.append(-stats.norm.logsf(value, b.mean(), sd_b))
    assert lira_scores(target, shadows, masks, variance=variance) == pytest.approx(online)
    assert lira_scores(target, shadows, masks, mode="offline", variance=variance) == pytest.approx(
        offline
    )


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("variance", ["global", "user"])
def test_a_planted_leak_is_found(mode, variance):
    target, shadows, masks, member = planted(3.0)
    scores = lira_scores(target, shadows, masks, mode=mode, variance=variance)
    found = measure(scores, member, threshold=middle(scores, mode))
    assert found.auc.low > 0.85 and found.balanced_accuracy.low > 0.75
    # differences between users hide the raw signal: only the shadow systems reveal the leak
    assert measure(target, member, threshold=0.0).auc.value < found.auc.low


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_without_a_leak_it_is_at_chance(mode):
    inside = []
    for seed in range(40):
        target, shadows, masks, member = planted(0.0, seed=seed)
        scores = lira_scores(target, shadows, masks, mode=mode)
        found = measure(scores, member, threshold=middle(scores, mode))
        inside.append(
            [figure.low < 0.5 < figure.high for figure in (found.auc, found.balanced_accuracy)]
        )
    assert (np.mean(inside, axis=0) >= 0.85).all()  # intervals of 95 %


def test_offline_never_looks_at_systems_that_the_user_trained():
    target, shadows, masks, _ = planted(1.0, users=20, runs=6)
    other = np.where(masks, 99.0, shadows)
    assert np.array_equal(
        lira_scores(target, shadows, masks, mode="offline"),
        lira_scores(target, other, masks, mode="offline"),
    )


def test_a_signal_that_never_varies_is_no_division_by_zero():
    masks = half_memberships(5, 4, seed=0)
    scores = lira_scores(np.ones(5), np.ones((4, 5)), masks)
    assert np.isfinite(scores).all() and np.array_equal(scores, np.zeros(5))


def test_wrong_input_is_refused():
    masks = half_memberships(5, 4, seed=0)
    with pytest.raises(ValueError, match=r"\[runs, users\]"):
        lira_scores(np.ones(4), np.ones((4, 5)), masks)
    with pytest.raises(ValueError, match="two shadow systems"):
        lira_scores(np.ones(5), np.ones((4, 5)), np.ones((4, 5), bool))
