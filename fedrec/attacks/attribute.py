# SPDX-License-Identifier: Apache-2.0
"""Attribute inference: the attack, its classifier, and the figures of its success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional as F

from fedrec.attacks.bounds import clopper_pearson, mean_of, wilson
from fedrec.errors import ExperimentError
from fedrec.nn.layers import AdamW, glorot
from fedrec.privacy.statement import attack_ceiling
from fedrec.rng import stream, torch_stream

# Success of membership attacks: the same figures, with intervals, for all attacks. Accuracy, which
# papers report, says little: it depends on the share of members and on a threshold. So it is
# reported with balanced accuracy, the area under the ROC curve, and the share of members found at a
# small share of false alarms (Carlini et al. 2022, section III), which measures attacks that
# succeed on a few users only.


@dataclass(frozen=True)
class Figure:
    """A figure with its confidence interval, of 95 % unless stated otherwise.

    Attributes:
        value: in [0, 1].
        low, high: ends of the interval.
    """

    value: float
    low: float
    high: float


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
        members_found: share of members whose score lies above the threshold that `alarms` of the
            others pass; Clopper-Pearson at that threshold, without its uncertainty. Chance is
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
    members_found: Figure
    false_alarms: float
    wanted: float

    def table(self) -> dict[str, Any]:
        """Return all figures as plain numbers."""
        table = asdict(self)
        return {**table, "found": table.pop("members_found")}

    def ceilings(self, epsilon: float, delta: float) -> dict[str, float]:
        """Upper bounds implied by (epsilon, delta)-DP, see
        `fedrec.privacy.statement.attack_ceiling` and `found_ceiling`."""
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
        confidence: confidence of all intervals, in (0, 1).

    Raises:
        ValueError: a score is NaN, or there are no members or no others.
    """
    scores = np.asarray(scores, dtype=np.float64)
    member = np.asarray(member, dtype=bool)
    if np.isnan(scores).any() or member.all() or not member.any():
        raise ValueError("Expected a number for each user, and users of both kinds.")
    inside = scores[member]
    outside = scores[~member]
    sizes = (len(inside), len(outside))
    users = len(scores)
    right = int((inside > threshold).sum()), int((outside <= threshold).sum())
    shares = list(zip(right, sizes, strict=True))
    balanced = sum(hits / size for hits, size in shares) / 2
    cut = _cut(outside, wanted)
    caught = int((inside > cut).sum())
    return Success(
        *sizes,
        accuracy=Figure(sum(right) / users, *wilson(sum(right), users, confidence)),
        majority=max(sizes) / users,
        balanced_accuracy=Figure(balanced, *mean_of(shares, confidence)),
        auc=_area(inside, outside, confidence),
        members_found=Figure(caught / sizes[0], *clopper_pearson(caught, sizes[0], confidence)),
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
    """Smallest threshold among the others' scores (or -infinity) with at most the requested share
    of false alarms."""
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


# The attribute attacker's classifier: a network with one hidden layer.
#
# Trained by Adam on class-balanced cross-entropy. Early stopping on a part of the training users
# makes tuning unnecessary, so that an overfitting attacker is not mistaken for a private system.

_HIDDEN = 128
_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 1e-2
_BATCH = 128  # users per step
_EPOCHS = 60
_PATIENCE = 8  # passes without a better validation loss after which training stops
_VALIDATION = 0.15  # share of the training users for early stopping


def _classified(
    known: np.ndarray, labels: np.ndarray, asked: np.ndarray, classes: int, random: torch.Generator
) -> np.ndarray:
    """Train a classifier on the known users with early stopping, and apply it to the others.

    Args:
        known: `float32 [users, columns]`, descriptions of the known users.
        labels: `int64 [users]`, each in `[0, classes)`.
        asked: `float32 [others, columns]`, descriptions of the others.
        classes: number of classes.
        random: generator of the initial values and of the order of users.

    Returns:
        Probability of each class, `float64 [others, classes]`.
    """
    inputs = torch.from_numpy(known)
    targets = torch.from_numpy(labels)
    leaves: list[Tensor] = []
    for rows, columns in ((known.shape[1], _HIDDEN), (_HIDDEN, classes)):
        leaves += [glorot(rows, columns, random), torch.zeros(columns)]
    counts = torch.bincount(targets, minlength=classes).clamp(min=1)
    weight = len(labels) / (classes * counts.float())
    order = torch.randperm(len(labels), generator=random)
    check, learn = order.tensor_split([max(1, round(_VALIDATION * len(labels)))])
    optimiser = AdamW(
        [leaf.requires_grad_() for leaf in leaves], lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
    )

    def logits_of(users: Tensor, values: Sequence[Tensor]) -> Tensor:
        weights, bias, last_weights, last_bias = values
        return F.relu(users @ weights + bias) @ last_weights + last_bias

    def loss_of(users: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(inputs[users], leaves), targets[users], weight=weight)

    best = float("inf")
    best_leaves = [leaf.detach().clone() for leaf in leaves]
    waited = 0
    for _ in range(_EPOCHS):
        for batch in learn[torch.randperm(len(learn), generator=random)].split(_BATCH):
            optimiser.zero_grad()
            loss_of(batch).backward()
            optimiser.step()
        with torch.no_grad():
            loss = float(loss_of(check))
        if loss < best:
            best = loss
            best_leaves = [leaf.detach().clone() for leaf in leaves]
            waited = 0
        elif (waited := waited + 1) > _PATIENCE:
            break
    return torch.softmax(logits_of(torch.from_numpy(asked), best_leaves).double(), 1).numpy()


# Attribute inference: success in inferring a user's attribute (such as gender) from an attacker's
# observations.
#
# The attacker knows the attribute of some users, trains a classifier on their data, and applies it
# to the others. This is done in folds, so that the attribute of every user is predicted once. The
# result is balanced accuracy, the mean of the shares of right answers in each class: accuracy alone
# is high for a classifier that always answers with the most frequent class.
#
# Where this differs from the poster "targeted DP": it names a neural attacker without further
# details. What the attacker sees, its network and its training are ours
# (`fedrec.attacks.attribute`).

Scaling = Literal["rows", "columns"]


@dataclass(frozen=True)
class Inference:
    """Result of an attribute attack.

    Attributes:
        users: number of attacked users.
        classes: number of users in each class.
        balanced_accuracy: over all users, each predicted by the fold that was not trained on it;
            MOVER interval from the classes' Wilson intervals. Random guessing gives 1 over the
            number of classes.
        folds: balanced accuracy within each fold; their spread includes that of the training.
        accuracy: share of right answers; always answering the largest class gives `majority`.
        majority: share of the largest class.
        auc: with two classes, mean over folds of the area under the ROC curve; None with more.
    """

    users: int
    classes: tuple[int, ...]
    balanced_accuracy: Figure
    folds: tuple[float, ...]
    accuracy: Figure
    majority: float
    auc: float | None

    @property
    def chance(self) -> float:
        """Balanced accuracy of random guessing."""
        return 1 / len(self.classes)

    def table(self) -> dict[str, Any]:
        """Return all figures as plain numbers."""
        return {**asdict(self), "chance": self.chance}


def infer_attribute(
    described: np.ndarray,
    labels: np.ndarray,
    *,
    scaling: Scaling = "rows",
    folds: int = 5,
    seed: int = 0,
) -> Inference:
    """Run the attribute attack by cross-validation.

    Args:
        described: `float [users, columns]`, finite descriptions of users as the attacker sees them.
        labels: `int64 [users]`, the attribute as codes from 0, each class with at least `folds`
            users.
        scaling: `"rows"` scales each description to length 1, for sets; `"columns"` scales each
            column to mean 0 and standard deviation 1 over the users whose attribute is known, for
            numbers of different size.
        folds: number of folds, at least 2.
        seed: seed of the streams `"attribute-folds"` and `"attribute-classifier"`.

    Raises:
        ExperimentError: fewer than two classes, or a class has fewer users than there are folds.
        ValueError: a description is not finite.
    """
    described = np.asarray(described, dtype=np.float32)
    if not np.isfinite(described).all():
        raise ValueError("Expected finite descriptions.")
    counts = np.bincount(labels)
    if len(counts) < 2 or counts.min() < folds:
        raise ExperimentError(
            "too few users of a class for the attack",
            expected=f"at least two classes of at least {folds} users each",
            got=", ".join(map(str, counts)),
            fix="use fewer folds, or another attribute",
        )
    fold = stratified_folds(labels, folds, seed)
    chances = np.empty((len(labels), len(counts)))
    for number in range(folds):
        known = fold != number
        asked = fold == number
        learn, test = _scaled(described[known], described[asked], scaling)
        random = torch_stream(seed, "attribute-classifier", number)
        chances[asked] = _classified(learn, labels[known], test, len(counts), random)
    return judged(chances, labels, fold)


def stratified_folds(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Fold of each user, `int64 [users]`; folds have equal numbers of each class, to within one."""
    random = stream(seed, "attribute-folds")
    fold = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        fold[members] = np.arange(len(members)) % folds
    return fold


def _scaled(
    known: np.ndarray, asked: np.ndarray, scaling: Scaling
) -> tuple[np.ndarray, np.ndarray]:
    mean = known.mean(axis=0)
    sd = known.std(axis=0)
    moves = sd > 1e-6 * max(float(sd.max(initial=0)), 1e-30)

    def scaled(part: np.ndarray) -> np.ndarray:
        if scaling == "rows":
            return part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
        return np.where(moves, (part - mean) / np.where(moves, sd, 1), 0).clip(-10, 10)

    return scaled(known), scaled(asked)


def judged(chances: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> Inference:
    """Compute the figures of an attacker's answers.

    Args:
        chances: `float [users, classes]`; the largest is the answer.
        labels: `int64 [users]`, the truth.
        fold: `int64 [users]`, the fold in which each user was asked about; every class occurs in
            each.
    """
    right = chances.argmax(axis=1) == labels
    counts = np.bincount(labels)
    hits = np.bincount(labels[right], minlength=len(counts))
    pairs = list(zip(hits.tolist(), counts.tolist(), strict=True))
    within = []
    for number in range(int(fold.max()) + 1):
        classes = (right[(fold == number) & (labels == code)] for code in range(len(counts)))
        within.append(float(np.mean([answers.mean() for answers in classes])))
    return Inference(
        users=len(labels),
        classes=tuple(counts.tolist()),
        balanced_accuracy=Figure(float(np.mean(hits / counts)), *mean_of(pairs)),
        folds=tuple(within),
        accuracy=Figure(float(right.mean()), *wilson(int(right.sum()), len(labels))),
        majority=float(counts.max() / len(labels)),
        auc=_mean_area(chances[:, 1], labels, fold) if len(counts) == 2 else None,
    )


def _mean_area(scores: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> float:
    """Mean over folds of the area under the ROC curve; scores of different classifiers are never
    compared."""
    areas = []
    for number in range(int(fold.max()) + 1):
        first, second = (scores[(fold == number) & (labels == label)] for label in (1, 0))
        areas.append(_area(first, second, 0.95).value)
    return float(np.mean(areas))
