# SPDX-License-Identifier: Apache-2.0
"""Success of membership attacks: the same figures, with intervals, for all attacks. Accuracy, which
papers report, says little: it depends on the share of members and on a threshold. So it is reported
with balanced accuracy, the area under the ROC curve, and the share of members found at a small
share of false alarms (Carlini et al. 2022, section III), which measures attacks that succeed on a
few users only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from fedrec.attacks.intervals import Interval, clopper_pearson, mean_of, wilson
from fedrec.privacy.explain import attack_ceiling


@dataclass(frozen=True)
class Figure:
    """One figure with its interval of 95 % confidence (unless said otherwise).

    Attributes:
        value: in [0, 1].
        low, high: ends of the interval.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, interval: Interval) -> Figure:
        """A figure from a value and an interval."""
        return cls(float(value), float(interval[0]), float(interval[1]))


@dataclass(frozen=True)
class Success:
    """Success of an attack on the users of a target system.

    Attributes:
        members, others: number of attacked users of each kind.
        accuracy: share of right answers (Wilson's interval); always giving the majority answer gets
            `majority`.
        majority: the larger share of the two kinds.
        balanced_accuracy: mean of the shares of right answers among members and among others; 1/2
            is chance.
        auc: area under the ROC curve (interval of DeLong et al. 1988); 1/2 is chance.
        found: share of members whose score lies above the threshold that `alarms` of the others
            pass; Clopper-Pearson at that threshold, whose own uncertainty is not in it. Chance is
            `false_alarms`.
        false_alarms: share of the others that pass it, at most the requested one.
        wanted: the requested largest share of false alarms, such as .01.
    """

    members: int
    others: int
    accuracy: Figure
    majority: float
    balanced_accuracy: Figure
    auc: Figure
    found: Figure
    false_alarms: float
    wanted: float

    def table(self) -> dict[str, Any]:
        """All figures as plain numbers."""
        return asdict(self)

    def ceilings(self, epsilon: float, delta: float) -> dict[str, float]:
        """The most that (epsilon, delta)-DP allows: see
        `fedrec.privacy.explain.attack_ceiling` and `found_ceiling`."""
        return {
            "balanced_accuracy": attack_ceiling(epsilon, delta),
            "found": found_ceiling(self.wanted, epsilon, delta),
        }


def measure(
    scores: np.ndarray,
    member: np.ndarray,
    *,
    threshold: float,
    wanted: float = 0.01,
    confidence: float = 0.95,
) -> Success:
    """Compare an attack's scores with the truth.

    Args:
        scores: `float [users]`, higher where the attacker thinks "member"; none may be NaN.
        member: `bool [users]`, the truth; both kinds must occur.
        threshold: a score above it is the answer "member" (for the two accuracies).
        wanted: largest share of false alarms at which `found` is measured, in [0, 1].
        confidence: of all intervals, in (0, 1).

    Raises:
        ValueError: lengths differ, a score is NaN, or there are no members or no others.
    """
    scores = np.asarray(scores, dtype=np.float64)
    member = np.asarray(member, dtype=bool)
    if (
        scores.shape != member.shape
        or scores.ndim != 1
        or np.isnan(scores).any()
        or member.all()
        or not member.any()
    ):
        raise ValueError("Expected one number per user, and users of both kinds.")
    inside = scores[member]
    outside = scores[~member]
    right_in = int((inside > threshold).sum())
    right_out = int((outside <= threshold).sum())
    sizes = (len(inside), len(outside))
    users = len(scores)
    cut = _cut(outside, wanted)
    caught = int((inside > cut).sum())
    return Success(
        *sizes,
        accuracy=Figure.of(
            (right_in + right_out) / users, wilson(right_in + right_out, users, confidence)
        ),
        majority=max(sizes) / users,
        balanced_accuracy=Figure.of(
            (right_in / sizes[0] + right_out / sizes[1]) / 2,
            mean_of([(right_in, sizes[0]), (right_out, sizes[1])], confidence),
        ),
        auc=_area(inside, outside, confidence),
        found=Figure.of(caught / sizes[0], clopper_pearson(caught, sizes[0], confidence)),
        false_alarms=float((outside > cut).mean()),
        wanted=wanted,
    )


def found_ceiling(false_alarms: float, epsilon: float, delta: float) -> float:
    """Largest share of members found: `min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR))`, at
    most 1."""
    if math.isinf(epsilon):
        return 1.0
    rise = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    return float(np.clip(min(rise, 1 - math.exp(-epsilon) * (1 - delta - false_alarms)), 0.0, 1.0))


def _cut(outside: np.ndarray, wanted: float) -> float:
    """The smallest score of the others (or below all of them) that at most the requested share of
    them exceeds."""
    allowed = math.floor(wanted * len(outside) + 1e-9)
    descending = np.sort(outside)[::-1]
    return -math.inf if allowed >= len(outside) else float(descending[allowed])


def _area(inside: np.ndarray, outside: np.ndarray, confidence: float) -> Figure:
    """Area under the ROC curve; its variance from each user's own share of won comparisons."""
    ranks = rankdata(np.concatenate([inside, outside]))
    n = len(inside)
    m = len(outside)
    won = (ranks[:n] - rankdata(inside)) / m
    lost = 1 - (ranks[n:] - rankdata(outside)) / n
    variance = sum(np.var(part, ddof=1) / len(part) for part in (won, lost) if len(part) > 1)
    area = float(won.mean())
    half = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance)
    return Figure(area, max(0.0, area - half), min(1.0, area + half))
