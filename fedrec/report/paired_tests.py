# SPDX-License-Identifier: Apache-2.0
"""Paired tests over users, and over seeds: whether one system is better than another.

A difference of means over users is tested three ways, because metrics of single users are far from
normal: Student's paired t, Wilcoxon's signed ranks, and a bootstrap interval of the mean difference
(Sakai 2014; Smucker, Allan and Carterette 2007). With several comparisons, p-values are corrected
by Holm's step-down procedure.

A test over users holds for the seeds that were run: it treats training and split as given. A test
over seeds treats each seed's mean difference as one value, and so includes their variation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrec.report.bootstrap import bootstrap_intervals


@dataclass(frozen=True)
class PairedTest:
    """A system beside a reference on the same users.

    Attributes:
        users: number of users with a value by both.
        difference: mean of system minus reference.
        low: lower end of the bootstrap interval of the difference.
        high: its upper end.
        t_p: two-sided p-value of the paired t test, in [0, 1]; 1 where nobody differs.
        wilcoxon_p: the same of Wilcoxon's signed-rank test.
        effect: Cohen's d of paired differences (mean / standard deviation); 0 where nobody differs.
        rank_effect: matched-pairs rank-biserial correlation, in [-1, 1]: share of ranks in favour
            minus share against.
        better: number of users whom the system serves better.
        worse: number of users whom it serves worse.
    """

    users: int
    difference: float
    low: float
    high: float
    t_p: float
    wilcoxon_p: float
    effect: float
    rank_effect: float
    better: int
    worse: int


@dataclass(frozen=True)
class SeedTest:
    """A system beside a reference under the same seeds.

    Attributes:
        common_seeds: number of seeds under which both were tested.
        seed_difference: mean over seeds of the mean difference over users.
        seed_p: two-sided p-value of the paired t test over seeds, in [0, 1], with
            `common_seeds` - 1 degrees of freedom; NaN with one seed, or where all seeds have the
            same difference.
    """

    common_seeds: int
    seed_difference: float
    seed_p: float


def seed_test(differences: np.ndarray) -> SeedTest:
    """The paired t test over seeds.

    Args:
        differences: of each seed, system minus reference, the mean over users, `[seeds]`.
    """
    from scipy import stats  # importing it is slow, and a run without baselines tests nothing

    varied = len(differences) > 1 and float(np.ptp(differences)) > 0
    p = float(np.asarray(stats.ttest_1samp(differences, 0.0))[1]) if varied else math.nan
    return SeedTest(len(differences), float(differences.mean()), p)


def paired_tests(
    differences: Sequence[np.ndarray],
    *,
    lower_is_better: bool = False,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[PairedTest]:
    """Several comparisons at once, whose bootstrap intervals share their draws.

    Args:
        differences: of each comparison, system minus reference of each user, `[users]`; NaN for a
            user without a value.
        lower_is_better: whether a negative difference is an improvement.
        resamples: number of bootstrap resamples.
        confidence: of the intervals, in (0, 1).
        seed: of the resamples.

    Raises:
        ValueError: fewer than two users have a value in one of them.
    """
    known = [values[np.isfinite(values)] for values in differences]
    for values in known:
        if len(values) < 2:
            raise ValueError(f"Expected two users or more with both values, got {len(values)}.")
    intervals = bootstrap_intervals(known, resamples=resamples, confidence=confidence, seed=seed)
    return [
        _tested(values, *ends, -1 if lower_is_better else 1)
        for values, ends in zip(known, intervals, strict=True)
    ]


def _tested(differences: np.ndarray, low: float, high: float, sign: int) -> PairedTest:
    from scipy import stats  # likewise

    spread = float(differences.std(ddof=1))
    mean = float(differences.mean())
    moved = bool(differences.any())
    if moved and spread > 0:
        t_p = float(np.asarray(stats.ttest_1samp(differences, 0.0))[1])
        effect = mean / spread
    else:  # all differences are equal
        t_p, effect = (0.0, math.copysign(math.inf, mean)) if moved else (1.0, 0.0)
    wilcoxon_p, rank_effect = wilcoxon(differences)
    return PairedTest(
        users=len(differences),
        difference=mean,
        low=low,
        high=high,
        t_p=t_p,
        wilcoxon_p=wilcoxon_p,
        effect=effect,
        rank_effect=rank_effect,
        better=int((sign * differences > 0).sum()),
        worse=int((sign * differences < 0).sum()),
    )


def wilcoxon(differences: np.ndarray) -> tuple[float, float]:
    """Test whether differences are symmetric about 0 by their signed ranks (Wilcoxon 1945).

    Args:
        differences: finite values, `[users]`; zeros are left out.

    Returns:
        The two-sided p-value, in [0, 1], and the matched-pairs rank-biserial correlation, in
        [-1, 1]: share of ranks of positive differences minus share of the others. 1 and 0 where
        nobody differs.
    """
    from scipy import stats  # likewise

    moved = differences[differences != 0]
    if not len(moved):
        return 1.0, 0.0
    ranks = stats.rankdata(np.abs(moved))
    p = float(np.asarray(stats.wilcoxon(moved))[1])
    return p, float((ranks * np.sign(moved)).sum() / ranks.sum())


def holm(p_values: np.ndarray) -> np.ndarray:
    """P-values `float [n]` corrected for their number (Holm 1979), in the same order, at most 1;
    NaN, where there was no test, stays NaN and does not count."""
    p_values = np.asarray(p_values, dtype=np.float64)
    tested = np.isfinite(p_values)
    if not tested.all():
        found = np.full_like(p_values, np.nan)
        found[tested] = holm(p_values[tested])
        return found
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    corrected = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    found = np.empty_like(corrected)
    found[order] = corrected
    return found
