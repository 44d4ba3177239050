# SPDX-License-Identifier: Apache-2.0
"""Held-out users whose rows are split into halves (PrivRec, section 3.3).

A share of the users are test users; all rows of the others train the shared model. Each test user's
rows are divided evenly: one half serves on-device fine-tuning, the other is held out.

Not specified in the paper, and chosen here: the halves are random by default (temporal is an
option), the extra row of an odd count belongs to the training half, and additional users can be
held out for validation.

With random test users, two seeds share some, and validation users of one seed are test users of
another. With `folds` they do not: the folds of all seeds are disjoint, so that results of seeds are
of different users, and the validation users are the same for all seeds and in no fold. They are
those of seed 0 without folds and with the default share of test users. Once settings are chosen on
them they may train like others (`validation-role`), but are never tested.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.own_numbers import user_shares
from fedrec.data.split import Partition, Split
from fedrec.data.splits._order import (
    USERS,
    Order,
    Stream,
    places,
    sort_key,
    users_of,
)
from fedrec.errors import DataError
from fedrec.privacy.adjacency import Adjacency
from fedrec.rng import stream


class UserHoldoutConfig(Config):
    """Settings of the split by users."""

    test_users: float = Field(0.2, gt=0, lt=1)
    """Share of test users, in (0, 1); their number is rounded. Without effect with `folds`."""
    folds: int | None = Field(None, ge=2)
    """Number of folds of users; seed s tests those of fold s modulo this number. The validation
    users are then the same for all seeds, and in no fold. Default: test users are drawn for each
    seed."""
    validation_users: float = Field(0.0, ge=0, lt=1)
    """Share of validation users, in [0, 1), in addition to the test users."""
    validation_role: Literal["held-out", "training"] = "held-out"
    """What validation users do: "held-out" (one half of their rows is for validation), or
    "training" (they train with all of their rows, and there are no validation rows)."""
    halves: Order = "random"
    """How a held-out user's rows are halved: "random", or "temporal" (the earlier half is for
    training)."""
    split_by: Literal["pairs", "rows"] = "pairs"
    """Unit of the halves: "pairs" (all rows of an item are in one half), or "rows", which predicts
    repeated use (an item may be in both halves)."""
    generalisation: Literal["strong", "weak"] = "strong"
    """Whether held-out users take part in training: with "strong" they do not, and their training
    half serves on-device fine-tuning alone (paper); with "weak" they are training users with that
    half."""
    stream: Stream = "dataset"
    """Source of random choices: "dataset" (one permutation of the users, and one shuffle of all
    rows for random halves), or "client" (the seed and the client's name alone, so that no client
    decides what another one does by being there, as add-remove privacy needs; shares are then met
    on average)."""

    @model_validator(mode="after")
    def _leaves_training_users(self) -> Self:
        default = type(self).model_fields["test_users"].default
        if self.folds is not None and self.test_users != default:
            raise ValueError("test-users or folds, not both: a fold is all test users of a seed")
        if self.test_users + self.validation_users >= 1:
            raise ValueError("test-users + validation-users below 1")
        return self


class UserHoldout(Split):
    """Some users train the shared model, the others are tested on one half of their rows."""

    name = "user-holdout"
    Config = UserHoldoutConfig
    paper = "PrivRec (Wang et al. 2021), section 3.3"
    config: UserHoldoutConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """With `stream = "dataset"`: under add-remove the permutation of all users, which one user
        more or less changes; of training users with random halves the shuffle of all rows."""
        if self.config.stream == "client":
            return ""
        if adjacency == "add-remove":
            return "one permutation of all users (split.stream = 'dataset')"
        halved = self.config.generalisation == "weak" and self.config.halves == "random"
        return "one shuffle of all rows (split.stream = 'dataset')" if halved else ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; the test users do not depend on the share of validation users.

        Raises:
            DataError: too few users for one test and one training user, or no times for temporal
                halves.
        """
        test, training = self._user_parts(interactions)
        # Only the rows of held-out users, which are few, are sorted.
        rows = np.flatnonzero(~_members(interactions, training)[interactions.users])
        held_out = rows[self._second_half(interactions, rows)]
        train = np.ones(len(interactions), dtype=bool)
        train[held_out] = False
        of_test_user = _members(interactions, test)[interactions.users[held_out]]
        weak = self.config.generalisation == "weak"
        return Partition(
            training_clients=users_of(interactions, np.flatnonzero(train)) if weak else training,
            train_rows=np.flatnonzero(train),
            validation_rows=held_out[~of_test_user],
            test_rows=held_out[of_test_user],
            repeated_use=self.config.split_by == "rows",
        )

    def _user_parts(self, interactions: Interactions) -> tuple[np.ndarray, np.ndarray]:
        """Test and training users, out of those who have any row; the others are validation
        users."""
        present = users_of(interactions)
        if self.config.stream == "client":
            return self._drawn_one_by_one(interactions, present)
        validation = _rounded(self.config.validation_users * len(present))
        if self.config.folds is not None:
            return self._fold(interactions, present, validation, self.config.folds)
        test = _rounded(self.config.test_users * len(present))
        _refuse_too_few(interactions, test, len(present) - test - validation)
        # One permutation, test users first, so that test users do not depend on the share of
        # validation users.
        shuffled = stream(self.seed, "split", USERS).permutation(present)
        return shuffled[:test], shuffled[test + self._not_training(validation) :]

    def _drawn_one_by_one(
        self, interactions: Interactions, present: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Test and training users by a random number of each."""
        config = self.config
        seed = 0 if config.folds else self.seed
        share = user_shares(interactions, seed, "split", USERS)[present]
        if config.folds is None:
            test = share < config.test_users
            validation = ~test & (share < config.test_users + config.validation_users)
        else:
            # As below: validation users first, in seed 0 those behind the default test users.
            share = (share - type(config).model_fields["test_users"].default) % 1.0
            validation = share < config.validation_users
            share = (share - config.validation_users) / (1 - config.validation_users)
            test = ~validation & ((share * config.folds).astype(int) == self.seed % config.folds)
        _refuse_too_few(interactions, int(test.sum()), int((~(test | validation)).sum()))
        held_out = test if config.validation_role == "training" else test | validation
        return present[test], present[~held_out]

    def _not_training(self, validation: int) -> int:
        """How many of the validation users do not train."""
        return 0 if self.config.validation_role == "training" else validation

    def _fold(
        self, interactions: Interactions, present: np.ndarray, validation: int, folds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Test and training users of this seed's fold; one permutation is for all seeds."""
        shuffled = stream(0, "split", USERS).permutation(present)
        # Validation users first; in seed 0 without folds they follow the default share of test
        # users.
        default = type(self.config).model_fields["test_users"].default
        shuffled = np.roll(shuffled, -_rounded(default * len(present)))
        tested = shuffled[validation:]
        if len(tested) < folds:
            raise DataError(
                f"{interactions.name} has too few users for {folds} folds",
                expected=f"at least {folds} users who are not validation users",
                got=f"{len(tested)}",
                fix="data of more users, or smaller split.folds or split.validation-users",
            )
        parts = np.array_split(tested, folds)
        test = parts.pop(self.seed % folds)
        return test, np.concatenate([shuffled[self._not_training(validation) : validation], *parts])

    def _second_half(self, interactions: Interactions, rows: np.ndarray) -> np.ndarray:
        """`bool [rows]`: which of some users' `rows` (all rows of these users) are held out."""
        key = sort_key(interactions, self.config.halves, self.seed, self.config.stream)[rows]
        users = interactions.users[rows]
        place, count = places(users, key)
        return place >= (count + 1) // 2


def _refuse_too_few(interactions: Interactions, tested: int, training: int) -> None:
    if tested < 1 or training < 1:
        raise DataError(
            f"{interactions.name} has too few users to hold some out",
            expected="at least one test user and one training user",
            got=f"test users: {tested}, training users: {training}",
            fix="data of more users, or another share of test-users or validation-users",
        )


def _members(interactions: Interactions, users: np.ndarray) -> np.ndarray:
    """`bool [num_users]`: whether a user is one of `users`."""
    member = np.zeros(interactions.num_users, dtype=bool)
    member[users] = True
    return member


def _rounded(number: float) -> int:
    return int(number + 0.5)
