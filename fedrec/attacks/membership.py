# SPDX-License-Identifier: Apache-2.0
"""The membership attack of PrivRec (Wang et al. 2021, section 4.6), with a shadow system and a
random forest.

A user is described by what the paper gives the attacker: its features and its top-10 recommendation
list. A random forest learns, from users of a shadow system of whom the attacker knows it, which
descriptions belong to members.

Where this differs from the paper:

- The encoding of the list for the forest is not stated there. `Encoding` selects one; the default
  joins all of them.
- Members are 80 % of the shadow users but 50 % of the attacked ones; a forest that has learned
  nothing then answers "member" nearly always. The paper reports accuracy only. We also report
  balanced accuracy and AUC, and `balanced` weights the two kinds equally.
- Whether lists hold items that a user already has, and whether the model is fine-tuned first, is
  not stated. The stated knowledge of the attacker (features, global model) suggests neither; the
  driver offers both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedrec.data.features import FeatureTable
from fedrec.errors import ExperimentError
from fedrec.metrics.long_rows import best_items
from fedrec.rng import seed_sequence

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier

Encoding = Literal["multi-hot", "pooled", "both"]


class Describer:
    """Turns users and their lists into rows of numbers.

    Args:
        users: features of the users; each category becomes a 0/1 column.
        items: features of the items, for the pooled encoding.
        popularity: `float [items]`, popularity of each item among the users that the attacker
            knows.
        encoding: `"multi-hot"`: one column per item, 1 where it is in the list; `"pooled"`: share
            of the list's items with each item category, and the popularity rank (0 most popular, 1
            least) at each place of the list, with its mean, smallest and largest; `"both"`.
    """

    def __init__(
        self, users: FeatureTable, items: FeatureTable, popularity: np.ndarray, encoding: Encoding
    ) -> None:
        self.users = users
        self.encoding = encoding
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
        """`float32 [n, columns]` of users `int64 [n]` and their lists `int64 [n, k]`, best item
        first."""
        columns = [one_hot(f.padded()[users], len(f.categories)) for f in self.users.features]
        if self.encoding in ("multi-hot", "both"):
            columns.append(one_hot(lists, len(self._rank)))
        if self.encoding in ("pooled", "both"):
            ranks = self._rank[lists]
            columns.append(self._items[lists].mean(axis=1))
            columns.append(np.column_stack([ranks, ranks.mean(1), ranks.min(1), ranks.max(1)]))
        return np.concatenate(columns, axis=1, dtype=np.float32)


def one_hot(codes: np.ndarray, categories: int) -> np.ndarray:
    """`float32 [n, categories]`, 1 where a category is among a row's codes `int64 [n, width]`; -1
    is none."""
    table = np.zeros((len(codes), categories + 1), dtype=np.float32)
    np.put_along_axis(table, codes, 1.0, axis=1)  # -1 is the last column, which goes
    return table[:, :categories]


def top_lists(scores: np.ndarray, length: int = 10) -> np.ndarray:
    """`int64 [n, length]`: items with the highest scores `float [n, items]`, best first; ties go to
    the lower index."""
    return best_items(
        torch.from_numpy(np.ascontiguousarray(scores)), min(length, scores.shape[1])
    ).numpy()


def train_forest(
    described: np.ndarray,
    member: np.ndarray,
    *,
    seed: int,
    trees: int = 100,
    balanced: bool = False,
) -> RandomForestClassifier:
    """The attack model.

    Args:
        described: `float32 [n, columns]`, shadow users.
        member: `bool [n]`, which of them trained the shadow system.
        seed: of the stream `"attack-forest"`.
        trees: number of trees (not stated in the paper).
        balanced: whether members and others have equal total weight, although 80 % are members.

    Raises:
        ExperimentError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError as error:
        raise ExperimentError(
            "the membership attack needs scikit-learn",
            expected="the extra 'attacks'",
            got=str(error),
            fix="pip install 'fedrec[attacks]'",
        ) from None
    state = int(seed_sequence(seed, "attack-forest").generate_state(1)[0])
    weight = "balanced" if balanced else None
    return RandomForestClassifier(n_estimators=trees, class_weight=weight, random_state=state).fit(
        described, member
    )


def forest_scores(forest: RandomForestClassifier, described: np.ndarray) -> np.ndarray:
    """`float64 [n]`: the forest's probability of "member"; above 1/2 is its answer."""
    chances = np.asarray(forest.predict_proba(described))
    return chances[:, np.asarray(forest.classes_, dtype=bool)][:, 0]
