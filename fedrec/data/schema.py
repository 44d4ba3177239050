# SPDX-License-Identifier: Apache-2.0
"""The public schema of a dataset, for models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedrec.data.features import FeatureTable
from fedrec.errors import ExperimentError


@dataclass(frozen=True)
class Schema:
    """What a model may know before training.

    Attributes:
        num_items: size of the catalogue.
        item_features: public side features of the items.
        user_features: names of the users' features and their number of categories, in order.
        task: `"ranking"` (labels 0 and 1) or `"rating"` (labels are ratings).
        num_users: number of user ids; for models that know users by id.
        user_words: labels of the categories of each of the users' features, in order.
    """

    num_items: int
    item_features: FeatureTable
    user_features: tuple[tuple[str, int], ...]
    task: Literal["ranking", "rating"]
    num_users: int = 0
    user_words: tuple[tuple[str, ...], ...] = ()

    def described(self, names: Sequence[str] = ()) -> tuple[list[int], list[tuple[str, ...]]]:
        """Positions of the users' features with these names (none: all), and the labels of each
        one's categories.

        Raises:
            ExperimentError: there is no such feature, or there are no features.
        """
        known = [name for name, _ in self.user_features]
        unknown = [name for name in names if name not in known]
        if unknown or not known or len(self.user_words) != len(known):
            raise ExperimentError(
                "users have no such features",
                expected=", ".join(names) or "features of the users",
                got=", ".join(known) or "users without features",
                fix="name features of the dataset, or choose a dataset with features of users",
            )
        places = [known.index(name) for name in names or known]
        return places, [self.user_words[place] for place in places]
