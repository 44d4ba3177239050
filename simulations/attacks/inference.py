# SPDX-License-Identifier: Apache-2.0
"""Inference of membership (PrivRec's shadow system, likelihood ratios, and the signals of both) and
of attributes, and the figures of an attack's success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional as F

from fedrec.data.interactions import FeatureTable
from fedrec.errors import ExperimentError
from fedrec.nn.layers import AdamW, glorot
from fedrec.privacy.statement import attack_ceiling
from fedrec.rng import seed_sequence, stream, torch_stream
from simulations.attacks.bounds import CONFIDENCE, clopper_pearson, mean_of, wilson

if TYPE_CHECKING:
    from fedrec.data.population import Population

# Success of membership attacks: the same figures, with intervals, for all attacks. Accuracy, which
# papers report, says little: it depends on the share of members and on a threshold. So it is
# reported with balanced accuracy, the area under the ROC curve, and the share of members found at a
# small share of false alarms (Carlini et al. 2022, section III), which measures attacks that
# succeed on a few users only.


_WANTED = 0.01  # largest share of false alarms at which members found are counted


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
        `fedrec.privacy.statement.attack_ceiling` and `_found_ceiling`."""
        return {
            "balanced_accuracy": attack_ceiling(epsilon, delta),
            "found": _found_ceiling(self.wanted, epsilon, delta),
        }


def measure(scores: np.ndarray, member: np.ndarray, *, threshold: float) -> Success:
    """Compare an attack's scores with the truth.

    Args:
        scores: `float [users]`, higher where the attacker thinks "member"; none may be NaN.
        member: `bool [users]`, the truth; both kinds must occur.
        threshold: a score above it is the answer "member" (for the two accuracies).

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
    allowed = math.floor(_WANTED * len(outside) + 1e-9)
    cut = float(np.sort(outside)[::-1][allowed])  # smallest with at most that many false alarms
    caught = int((inside > cut).sum())
    return Success(
        *sizes,
        accuracy=Figure(sum(right) / users, *wilson(sum(right), users)),
        majority=max(sizes) / users,
        balanced_accuracy=Figure(balanced, *mean_of(shares)),
        auc=_area(inside, outside),
        members_found=Figure(caught / sizes[0], *clopper_pearson(caught, sizes[0])),
        false_alarms=float((outside > cut).mean()),
        wanted=_WANTED,
    )


def _found_ceiling(false_alarms: float, epsilon: float, delta: float) -> float:
    """Largest share of members found: `min(e^eps FPR + delta, 1 - e^-eps (1 - delta - FPR))`, at
    most 1."""
    if math.isinf(epsilon):
        return 1.0
    rise = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    return float(np.clip(min(rise, 1 - math.exp(-epsilon) * (1 - delta - false_alarms)), 0.0, 1.0))


def _area(inside: np.ndarray, outside: np.ndarray) -> Figure:
    """Area under the ROC curve; its variance from each user's own share of won comparisons."""
    ranks = rankdata(np.concatenate([inside, outside]))
    n = len(inside)
    m = len(outside)
    won = (ranks[:n] - rankdata(inside)) / m
    lost = 1 - (ranks[n:] - rankdata(outside)) / n
    variance = sum(np.var(part, ddof=1) / len(part) for part in (won, lost) if len(part) > 1)
    area = float(won.mean())
    half = float(ndtri((1 + CONFIDENCE) / 2)) * math.sqrt(variance)
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
# details. What the attacker sees, its network and its training are ours.

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
    fold = _stratified_folds(labels, folds, seed)
    chances = np.empty((len(labels), len(counts)))
    for number in range(folds):
        known = fold != number
        asked = fold == number
        learn, test = _scaled(described[known], described[asked], scaling)
        random = torch_stream(seed, "attribute-classifier", number)
        chances[asked] = _classified(learn, labels[known], test, len(counts), random)
    return _judged(chances, labels, fold)


def _stratified_folds(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
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


def _judged(chances: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> Inference:
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
        areas.append(_area(first, second).value)
    return float(np.mean(areas))


# The membership attack of PrivRec (Wang et al. 2021, section 4.6), with a shadow system and a
# random forest.
#
# A user is described by what the paper gives the attacker: its features and its top-10
# recommendation list. A random forest learns, from users of a shadow system of whom the attacker
# knows membership, which descriptions belong to members.
#
# Where this differs from the paper:
#
# - The encoding of the list for the forest is not stated there; `Describer` joins two.
# - Members are 80 % of the shadow users but 50 % of the attacked ones; a forest that has learned
#   nothing then answers "member" nearly always. The paper reports accuracy only. We also report
#   balanced accuracy and AUC.
# - Whether lists hold items that a user already has, and whether the model is fine-tuned first, is
#   not stated. The stated knowledge of the attacker (features, global model) suggests neither.


class Describer:
    """Encoding of users and their lists: a 0/1 column for each category of a user and for each
    item, the share of the list's items with each item category, and the popularity rank (0 most
    popular, 1 least) at each position of the list, with its mean, smallest and largest.

    Args:
        users: features of the users.
        items: features of the items.
        popularity: `float [items]`, popularity of each item among the users that the attacker
            knows.
    """

    def __init__(self, users: FeatureTable, items: FeatureTable, popularity: np.ndarray) -> None:
        self.users = users
        self._items = np.concatenate(
            [
                np.empty((items.rows, 0), np.float32),
                *(one_hot(f.padded(), len(f.categories)) for f in items.features),
            ],
            axis=1,
        )
        order = np.argsort(-np.asarray(popularity, dtype=np.float64), kind="stable")
        self._rank = np.empty(items.rows, dtype=np.float32)
        self._rank[order] = np.arange(items.rows) / max(1, items.rows - 1)

    def describe(self, users: np.ndarray, lists: np.ndarray) -> np.ndarray:
        """Descriptions `float32 [n, columns]` of users `int64 [n]` and their lists `int64 [n, k]`,
        best item first."""
        columns = [one_hot(f.padded()[users], len(f.categories)) for f in self.users.features]
        ranks = self._rank[lists]
        columns.append(one_hot(lists, len(self._rank)))
        columns.append(self._items[lists].mean(axis=1))
        columns.append(np.column_stack([ranks, ranks.mean(1), ranks.min(1), ranks.max(1)]))
        return np.concatenate(columns, axis=1, dtype=np.float32)


def one_hot(codes: np.ndarray, categories: int) -> np.ndarray:
    """Multi-hot encoding `float32 [n, categories]` of codes `int64 [n, width]`; -1 is no
    category."""
    table = np.zeros((len(codes), categories + 1), dtype=np.float32)
    np.put_along_axis(table, codes, 1.0, axis=1)  # -1 is the last column, which goes
    return table[:, :categories]


def forest_scores(
    known: np.ndarray, member: np.ndarray, asked: np.ndarray, *, seed: int, trees: int = 100
) -> np.ndarray:
    """Train the attack's random forest on shadow users, and ask it about others.

    Args:
        known: `float32 [n, columns]`, shadow users.
        member: `bool [n]`, members of the shadow system.
        asked: `float32 [users, columns]`, the others.
        seed: seed of the stream `"attack-forest"`.
        trees: number of trees (not stated in the paper).

    Returns:
        Probability of "member", `float64 [users]`; above 1/2 is the forest's answer.

    Raises:
        ExperimentError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError as error:
        problem = f"the membership attack needs scikit-learn ({error})"
        raise ExperimentError(problem, fix="pip install 'fedrec[attacks]'") from None
    state = int(seed_sequence(seed, "attack-forest").generate_state(1)[0])
    forest = RandomForestClassifier(n_estimators=trees, random_state=state).fit(known, member)
    chances = np.asarray(forest.predict_proba(asked))
    return chances[:, np.asarray(forest.classes_, dtype=bool)][:, 0]


# The likelihood-ratio attack (Carlini et al. 2022, algorithm 1 and section VI) on federations
# instead of models.
#
# Shadow systems are trained on random halves of the users. For each user, the signals of systems
# that were trained with it and of those that were not are fitted by two normal distributions; the
# attack's score is the log ratio of their densities at the target system's signal (online).
#
# Where this differs from the paper: one "example" is one user with all its data; the signal is a
# mean over the user's positives (`fit_signals`); there is no augmentation, so one signal per user
# and system, and one variance for all users, which is better with few systems.

_SMALLEST_SD = 1e-12


def lira_scores(target: np.ndarray, shadows: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Scores of the likelihood-ratio attack; higher means "member".

    Args:
        target: `float [users]`, signals under the target system.
        shadows: `float [runs, users]`, signals under the shadow systems.
        member: `bool [runs, users]`, members of each system; each user needs two systems of each
            kind.

    Returns:
        `float64 [users]`: log density ratio; 0 is undecided.

    Raises:
        ValueError: a user has too few systems of a kind.
    """
    target = np.asarray(target, np.float64)
    shadows = np.asarray(shadows, np.float64)
    return _log_density(target, shadows, member) - _log_density(target, shadows, ~member)


def _log_density(value: np.ndarray, signals: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Log density of each user's value `[users]`, up to a constant, by a normal distribution fitted
    to the chosen runs `[runs, users]` of each user."""
    counts = chosen.sum(axis=0)
    if counts.min(initial=2) < 2:
        raise ValueError("Expected at least two shadow systems of each kind for every user.")
    mean = np.where(chosen, signals, 0.0).sum(axis=0) / counts
    squares = np.where(chosen, np.square(signals - mean), 0.0).sum(axis=0)
    sd = max(float(np.sqrt(squares.sum() / (counts - 1).sum())), _SMALLEST_SD)
    return -np.log(sd) - np.square((value - mean) / sd) / 2


# Membership signals: one number per user, larger if a model fits the user's data better.
#
# Carlini et al. 2022 use `log(p / (1 - p))` of the right class, because it is nearly normal. Our
# models' scores for ranking are that number already. A user has several positives: we take their
# mean, and subtract that of all other items, which removes the general level of a model's logits.


def fit_signals(scores: np.ndarray, population: Population, users: np.ndarray) -> np.ndarray:
    """Fit of scores to the users' training rows.

    Args:
        scores: `float [n, items]`, the model's scores of the catalogue for each user: logits, or
            predicted ratings.
        population: the users' data.
        users: `int64 [n]`.

    Returns:
        `float64 [n]`: the mean logit of a user's positives minus that of all other items, or for
        ratings minus the mean squared error; 0 for a user without positives (without rows, for
        ratings).
    """
    signals = np.zeros(len(users))
    for index, user in enumerate(users.tolist()):
        data = population.client(user)
        logits = scores[index].astype(np.float64)
        if population.task == "rating" and len(data.items):
            signals[index] = -np.square(logits[data.items] - data.labels).mean()
        elif population.task != "rating" and len(data.positives):
            signals[index] = logits[data.positives].mean()
            if len(data.positives) < len(logits):
                signals[index] -= np.delete(logits, data.positives).mean()
    return signals
