# SPDX-License-Identifier: Apache-2.0
"""Membership attacks: the shadow system of PrivRec, the likelihood-ratio attack, and the signals of
both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fedrec.data.interactions import FeatureTable
from fedrec.errors import ExperimentError
from fedrec.metrics.ranks import best_items
from fedrec.rng import seed_sequence

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

    from fedrec.data.population import Population


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


def top_lists(scores: np.ndarray, length: int = 10) -> np.ndarray:
    """Items with the highest scores `float [n, items]`, `int64 [n, length]`, best first; ties go to
    the lower index."""
    return best_items(
        torch.from_numpy(np.ascontiguousarray(scores)), min(length, scores.shape[1])
    ).numpy()


def train_forest(
    described: np.ndarray, member: np.ndarray, *, seed: int, trees: int = 100
) -> RandomForestClassifier:
    """Train the attack's random forest.

    Args:
        described: `float32 [n, columns]`, shadow users.
        member: `bool [n]`, members of the shadow system.
        seed: seed of the stream `"attack-forest"`.
        trees: number of trees (not stated in the paper).

    Raises:
        ExperimentError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError as error:
        problem = f"the membership attack needs scikit-learn ({error})"
        raise ExperimentError(problem, fix="pip install 'fedrec[attacks]'") from None
    state = int(seed_sequence(seed, "attack-forest").generate_state(1)[0])
    return RandomForestClassifier(n_estimators=trees, random_state=state).fit(described, member)


def forest_scores(forest: RandomForestClassifier, described: np.ndarray) -> np.ndarray:
    """Probability of "member" by the forest, `float64 [n]`; above 1/2 is its answer."""
    chances = np.asarray(forest.predict_proba(described))
    return chances[:, np.asarray(forest.classes_, dtype=bool)][:, 0]


# The likelihood-ratio attack (Carlini et al. 2022, algorithm 1 and section VI) on federations
# instead of models.
#
# Shadow systems are trained on random halves of the users. For each user, the signals of systems
# that were trained with it and of those that were not are fitted by two normal distributions; the
# attack's score is the log ratio of their densities at the target system's signal (online).
#
# Where this differs from the paper: one "example" is one user with all its data; the signal is a
# mean over the user's positives (`fedrec.attacks.membership`); there is no augmentation, so one
# signal per user and system, and one variance for all users, which is better with few systems.

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
