# SPDX-License-Identifier: Apache-2.0
"""Attribute inference: how well a user's attribute (such as gender) can be inferred from what an
attacker sees of it.

The attacker knows the attribute of some users, trains a classifier on their data, and applies it to
the others. This is done in folds, so that the attribute of every user is predicted once. The result
is balanced accuracy, the mean of the shares of right answers in each class: accuracy alone is high
for a classifier that always answers with the most frequent class.

Where this differs from the poster "targeted DP": it names a neural attacker without further
details. What the attacker sees, its network and its training are ours
(`fedrec.attacks.classifier`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import rankdata

from fedrec.attacks.classifier import Attacker, Classifier, Training
from fedrec.attacks.intervals import mean_of, wilson
from fedrec.attacks.success import Figure
from fedrec.errors import ExperimentError
from fedrec.rng import stream

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
        """All figures as plain numbers."""
        return {**asdict(self), "chance": self.chance}


def infer_attribute(
    described: np.ndarray,
    labels: np.ndarray,
    *,
    attacker: Attacker = "neural",
    scaling: Scaling = "rows",
    folds: int = 5,
    seed: int = 0,
    training: Training | None = None,
) -> Inference:
    """Attack in folds.

    Args:
        described: `float [users, columns]`, what the attacker sees of each user; finite.
        labels: `int64 [users]`, the attribute as codes from 0, each class with at least `folds`
            users.
        attacker: `"neural"` or `"logistic"`.
        scaling: `"rows"` scales each description to length 1, for sets; `"columns"` scales each
            column to mean 0 and standard deviation 1 over the users whose attribute is known, for
            numbers of different size.
        folds: number of folds, at least 2.
        seed: of the streams `"attribute-folds"` and `"attribute-classifier"`.
        training: how the classifier is trained.

    Raises:
        ExperimentError: fewer than two classes, or a class has fewer users than there are folds.
        ValueError: shapes differ, a description is not finite, or there are fewer than two folds.
    """
    described = np.asarray(described, dtype=np.float32)
    if (
        described.ndim != 2
        or len(described) != len(labels)
        or folds < 2
        or not np.isfinite(described).all()
    ):
        raise ValueError("Expected one finite description per label, and two folds or more.")
    counts = np.bincount(labels)
    if len(counts) < 2 or counts.min() < folds:
        raise ExperimentError(
            "a class has too few users for the attack",
            expected=f"two classes or more, of {folds} users or more each",
            got=", ".join(map(str, counts)),
            fix="use fewer folds, or another attribute",
        )
    fold = stratified_folds(labels, folds, seed)
    chances = np.empty((len(labels), len(counts)))
    for place in range(folds):
        known = fold != place
        asked = fold == place
        learn, test = _scaled(described[known], described[asked], scaling)
        model = Classifier(
            attacker, described.shape[1], len(counts), training or Training(), seed, place
        )
        chances[asked] = model.fit(learn, labels[known]).scores(test)
    return judged(chances, labels, fold)


def stratified_folds(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """`int64 [users]`: each user's fold; in every fold each class has its share of users, to within
    one."""
    random = stream(seed, "attribute-folds")
    fold = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        fold[members] = np.arange(len(members)) % folds
    return fold


def _scaled(
    known: np.ndarray, asked: np.ndarray, scaling: Scaling
) -> tuple[np.ndarray, np.ndarray]:
    if scaling == "rows":
        return tuple(
            part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
            for part in (known, asked)
        )  # type: ignore[return-value]
    mean = known.mean(axis=0)
    sd = known.std(axis=0)
    moves = sd > 1e-6 * max(float(sd.max(initial=0)), 1e-30)
    return tuple(
        np.where(moves, (part - mean) / np.where(moves, sd, 1), 0).clip(-10, 10)
        for part in (known, asked)
    )  # type: ignore[return-value]


def judged(chances: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> Inference:
    """The figures of an attacker's answers.

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
    within = [
        float(
            np.mean(
                [right[(fold == place) & (labels == label)].mean() for label in range(len(counts))]
            )
        )
        for place in range(int(fold.max()) + 1)
    ]
    return Inference(
        users=len(labels),
        classes=tuple(counts.tolist()),
        balanced_accuracy=Figure.of(float(np.mean(hits / counts)), mean_of(pairs)),
        folds=tuple(within),
        accuracy=Figure.of(float(right.mean()), wilson(int(right.sum()), len(labels))),
        majority=float(counts.max() / len(labels)),
        auc=_mean_area(chances[:, 1], labels, fold) if len(counts) == 2 else None,
    )


def _mean_area(scores: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> float:
    """Mean over folds of the area under the ROC curve; scores of different classifiers are never
    compared."""
    areas = []
    for place in range(int(fold.max()) + 1):
        own = scores[fold == place]
        positive = labels[fold == place] == 1
        first = int(positive.sum())
        second = int((~positive).sum())
        areas.append((rankdata(own)[positive].sum() - first * (first + 1) / 2) / (first * second))
    return float(np.mean(areas))
