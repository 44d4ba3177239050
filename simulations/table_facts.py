# SPDX-License-Identifier: Apache-2.0
"""Facts of a user's own table that determine settings, and the signal of a private personal
model. No other data of the rows reach the settings, so that a private run does not depend on one
user's rows: a threshold or a clip norm that one user can move changes the uploads of all others,
which noise does not cover.

Under privacy each fact is either given by the user, or follows from names of columns, or is public:
the list of items, the number of users, and the mean number of items of a user, rounded to a power
of two. Other dependences on rows are errors, which name the option that gives the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrec.data.recognition import Recognised
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import MAIN
from fedrec.experiment.schema import Experiment
from server.privacy.guard import PhasePlans

_MOST_OF_A_USER = 100  # different items that count, so that one user changes their mean little
_PUBLIC = ("as given", "by its name")  # reasons that need no value of a column


@dataclass(frozen=True)
class TableFacts:
    """Facts of a table that determine settings.

    Attributes:
        user: name of the column of users.
        users: number of its values.
        items: number of items.
        rows_per_user: mean number of rows of a user; under privacy of different items, at most 100
            of each user, rounded to a power of two.
        divisible: number of users with at least two different items; under privacy of all users.
        timed: whether there is a column of times.
        positive_above: a row is positive when its rating is above this; None: every row is.
        private: whether all of this is given or public.
    """

    user: str
    users: int
    items: int
    rows_per_user: float
    divisible: int
    timed: bool
    positive_above: float | None
    private: bool

    @classmethod
    def of(cls, table: Recognised, given: Mapping[str, Any], *, private: bool) -> TableFacts:
        """The facts of a table.

        Args:
            table: its recognised columns.
            given: the user's settings, as a TOML table.
            private: whether the experiment is under privacy.

        Raises:
            ExperimentError: under privacy, a column is recognised by its values, a column of
                times cannot be read, or no threshold of ratings is given.
        """
        users = len(table.items_of)
        divisible = int((table.items_of > 1).sum())
        mean = len(table.data) / users
        threshold = table.positive_above
        if private:
            _check_roles(table)
            mean = float(np.minimum(table.items_of, _MOST_OF_A_USER).mean())
            mean = 2.0 ** round(math.log2(mean))
            divisible = users
            threshold = _required_threshold(table, given)
        return cls(
            user=table.roles["user"].column,
            users=users,
            items=len(table.users_of),
            rows_per_user=mean,
            divisible=divisible,
            timed="time" in table.roles,
            positive_above=threshold,
            private=private,
        )

    @property
    def rows(self) -> int:
        """Number of rows; under privacy that of the rounded mean."""
        return round(self.users * self.rows_per_user)

    def lines(self) -> list[str]:
        """Describe whose data are protected under privacy, and which facts are taken as public."""
        if not self.private:
            return []
        rated = self.positive_above is not None
        return [
            f"the guarantee is per value of {self.user}, {self.users:,} of them; a person with"
            " several has as many times this epsilon",
            f"taken as public: the list of {self.items:,} items, the number of {self.users:,} users"
            f" and a mean of about {self.rows_per_user:g} items each (rounded to a power of two),"
            " from which clip norms follow"
            + (f"; the threshold of ratings, {self.positive_above:g}, is given" if rated else ""),
        ]


def threshold_of(given: Mapping[str, Any]) -> float | None:
    """Threshold of positive ratings in settings; None if it is not set, or not a number, which the
    experiment rejects."""
    value = given.get("positive-above")
    return float(value) if isinstance(value, int | float) else None


def has_private_parts(given: Mapping[str, Any]) -> bool:
    """True if settings make the system, a baseline or the data private."""
    evaluation = given.get("evaluation", {})
    baselines = evaluation.get("baselines", []) if isinstance(evaluation, dict) else []
    private = any(isinstance(entry, dict) and "epsilon" in entry for entry in baselines)
    return "privacy" in given or "perturb" in given or private


def _check_roles(table: Recognised) -> None:
    """Check that no column role depends on the values of a user."""
    guessed = {role: by for role, by in table.roles.items() if by.reason not in _PUBLIC}
    if guessed:
        raise ExperimentError(
            "under privacy, the values of a column must not tell what it holds: one user's row"
            " could change it",
            expected="columns with names such as user_id and item_id, or named by options",
            got=", ".join(f"{role}: {by.column!r} ({by.reason})" for role, by in guessed.items()),
            fix="confirm with " + " ".join(f"--{role} {by.column}" for role, by in guessed.items()),
        )
    if others := table.roles["user"].rivals:
        users = (table.roles["user"].column, *others)
        raise ExperimentError(
            "the column of users is ambiguous, but privacy protects the data of users",
            got=f"possible columns {', '.join(map(repr, users))}",
            fix=", or ".join(f"--user {name}" for name in users),
        )
    for role, name in table.unfit.items():
        raise ExperimentError(
            f"under privacy, column {name!r} must not be left out because of the values of some"
            " rows",
            expected="a number (or a date) in each row, as its name is that of a column of"
            f" {role}s",
            got="a row without one",
            fix="correct these rows, or leave out the column"
            + (", or --no-rating" if role == "rating" else ", or --time-format"),
        )


def _required_threshold(table: Recognised, given: Mapping[str, Any]) -> float | None:
    """Return the given threshold of a table with ratings; None without ratings."""
    if "rating" not in table.roles:
        return None
    threshold = threshold_of(given)
    if threshold is None:
        raise ExperimentError(
            "under privacy, the ratings must not tell which of them count as liked: one user's"
            " lowest or highest rating could change it for everybody",
            expected=f"the threshold of column {table.roles['rating'].column!r}, by what is known"
            " of its scale",
            fix="--set positive-above=3 (ratings above 3 are liked), or --no-rating (every row is)",
        )
    return threshold


LEAST = 0.2
"""The least signal. Chosen on validation users of four tables (Gowalla, MovieLens-100K, Amazon
Video and Office) at epsilon 1 and 5, one seed each: in the two cases below it (.11 and .13) private
popularity was better, in the six above it the personal model was, or level (Office, epsilon 5)."""


@dataclass(frozen=True)
class Signal:
    """Signal of a private personal model, which decides whether it can learn from a table at an
    epsilon. Otherwise private popularity, which releases one number per item instead of one per
    pair of items, is given the whole budget.

    Attributes:
        ratio: mean of the entries of the sum of the clients' products, if every row were of one of
            its items, over the standard deviation of their noise.
        clients: number of training clients.
        items: number of items that the products are about.
    """

    ratio: float
    clients: int
    items: int

    @property
    def suffices(self) -> bool:
        """True if the personal model is trained."""
        return self.ratio >= LEAST

    def lines(self, epsilon: float) -> list[str]:
        """Describe which model is trained, the reason, and how to change it."""
        given = f"epsilon {epsilon:g} with {self.clients:,} training users: "
        measured = (
            f"sums of products of {self.items:,} items are about {self.ratio:.2g} times"
            f" their noise (at least {LEAST:g} is needed)"
        )
        if self.suffices:
            return [
                given + "a personal model is trained (fold-in on private embeddings); " + measured
            ]
        # the signal grows with the number of users, the noise hardly does
        needed = math.ceil(self.clients * LEAST / self.ratio)
        return [
            given + "the whole budget goes to private popularity, one list for everybody, because"
            " noise would cover what a personal model can learn; " + measured,
            f"a personal model needs about {needed:,} training users at this epsilon,"
            " or a larger epsilon (--set rounds=2 trains it nevertheless)",
        ]


def signal_of(experiment: Experiment, users: int, rows_per_user: float) -> Signal:
    """The signal of an experiment with a private model of products, from what is public.

    Args:
        experiment: with `[privacy]`, on an own table of interactions, of two rounds.
        users: number of training users, at least 1.
        rows_per_user: mean number of rows of a user.

    Raises:
        ExperimentError: no noise reaches the target epsilon.
    """
    plan = PhasePlans.before_a_run(experiment, np.arange(users)).plans[MAIN]
    items = experiment.model.options["items"]
    noise = plan.noise_scale / plan.sensitivity
    return Signal(users * rows_per_user / (items**2 * noise), users, items)
