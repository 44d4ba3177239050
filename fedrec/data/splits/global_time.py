# SPDX-License-Identifier: Apache-2.0
"""One point of time for everybody: what came before trains, what came after is validated and tested
(Ji et al., A Critical Study on Data Leakage in Recommender System Offline Evaluation, TOIS 2023).

Leave-one-out holds out each user's own last row, so that a system learns from what others did after
it; here no row that trains is later than one that is held out. The points are given, or they follow
from shares: a share `test` of all rows is later, and a share `validation` lies between the two.
Rows of one time are in one part. Users come and go, so that few of them may have rows on both
sides.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition, Split
from fedrec.data.splits._order import places, users_of
from fedrec.data.time_order import TimeOrder, times_of
from fedrec.errors import DataError
from fedrec.privacy.adjacency import Adjacency


class GlobalTimeConfig(Config):
    """Settings of the split by one point of time."""

    test: float = Field(default=0.1, gt=0, lt=1)
    """Share of all rows, the latest ones, that are after the point of test, in (0, 1)."""
    validation: float = Field(default=0.1, ge=0, lt=1)
    """Share of all rows between the point of validation and that of test, in [0, 1); 0: all rows
    before the point of test train."""
    test_from: int | str | None = None
    """Point of test in place of a share: a date (2001-06-30, in UTC), or seconds since 1970. Rows
    from then on are tested. A share depends on the times of all users, which privacy refuses."""
    validation_from: int | str | None = None
    """Point of validation, likewise; default with `test-from`: no validation rows."""
    tested: Literal["all", "first"] = "all"
    """Rows of a user after the point that are held out: "all", or the "first", the next item; the
    others are then in no part."""
    new_users: Literal["left-out", "tested"] = "left-out"
    """Users without a training row: "left-out" of all parts, or "tested" like others, on lists that
    know nothing of them."""

    @field_validator("test_from", "validation_from")
    @classmethod
    def _is_a_time(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str):
            _seconds(value)
        return value

    @model_validator(mode="after")
    def _points_fit(self) -> Self:
        if self.test_from is None and self.validation_from is not None:
            raise ValueError("test-from with validation-from")
        if self.points and self.points[1] > self.points[0]:
            raise ValueError("validation-from before test-from")
        return self

    @property
    def points(self) -> tuple[int, int] | None:
        """The seconds from which rows are tested and validated, if they are given."""
        if self.test_from is None:
            return None
        earlier = self.test_from if self.validation_from is None else self.validation_from
        return _seconds(self.test_from), _seconds(earlier)

    @model_validator(mode="after")
    def _some_rows_train(self) -> Self:
        if self.test + self.validation >= 1:
            raise ValueError("test + validation below 1")
        return self


class GlobalTime(Split):
    """Trains before one point of time, and validates and tests after it; no row that trains is
    later than one that is held out."""

    name = "global-time"
    Config = GlobalTimeConfig
    paper = "Ji et al. 2023"
    config: GlobalTimeConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Shares: the points follow from the times of all rows."""
        return "" if self.config.points else "the times of all rows, of which split.test is a share"

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; every user with a training row is a training client. With given
        points every user is one, so that their number does not tell who has early rows.

        Raises:
            DataError: the interactions have no times, or one time for so many rows that the parts
                are not what was asked for.
        """
        times = times_of(interactions)
        if self.config.points:
            tested_from, validated_from = (n * interactions.second for n in self.config.points)
        else:
            tested_from, validated_from = self._points(interactions)
        train = times < validated_from
        if not train.any():
            raise DataError(
                f"{interactions.name} cannot be split at a point of time",
                expected="rows before the point of validation",
                got=f"{len(times):,} rows, the first of them at that point, or after it",
                fix="lower split.test and split.validation, or set later split.validation-from and"
                " split.test-from, or name another column of times",
            )
        training = users_of(interactions, train)
        counted = np.ones(len(times), dtype=bool)
        if self.config.new_users == "left-out":
            counted = np.isin(interactions.users, training)
        test = counted & (times >= tested_from)
        validation = counted & ~train & (times < tested_from)
        return Partition(
            training_clients=users_of(interactions) if self.config.points else training,
            train_rows=np.flatnonzero(train),
            validation_rows=self._held_out(interactions, np.flatnonzero(validation)),
            test_rows=self._held_out(interactions, np.flatnonzero(test)),
        )

    def _points(self, interactions: Interactions) -> tuple[int, int]:
        """The times at which testing and validation begin; 0 if there are no rows.

        Raises:
            DataError: so many rows have one time that a part has less than half of its share, or
                more than twice of it.
        """
        times = times_of(interactions)
        if not len(times):
            return 0, 0
        ordered = np.sort(times)
        count = len(times)
        asked = {"validation": self.config.validation, "test": self.config.test}
        first = [int(count * (1 - share) + 0.5) for share in (self.config.test, self._held_share)]
        tested, validated = (int(ordered[min(row, count - 1)]) for row in first)
        before = np.searchsorted(ordered, [validated, tested]) / count
        shares = {"validation": before[1] - before[0], "test": 1 - before[1]}
        for part, share in shares.items():
            # a row more or less is no fault of the times
            if not asked[part] / 2 - 1 / count <= share <= 2 * asked[part] + 1 / count:
                raise DataError(
                    f"{interactions.name} has too many rows of one time for a split by shares",
                    expected=f"a share of {asked[part]:g} of the rows for {part}, within a factor"
                    " of 2",
                    got=f"{share:.3g}",
                    fix="give the points of time, split.test-from and split.validation-from, or"
                    " name a finer column of times",
                )
        return tested, validated

    @property
    def _held_share(self) -> float:
        return self.config.test + self.config.validation

    def _held_out(self, interactions: Interactions, rows: np.ndarray) -> np.ndarray:
        """Those of a part's rows that are held out."""
        if self.config.tested == "all" or not len(rows):
            return rows
        positions = TimeOrder(interactions, self.seed).positions[rows]
        return rows[places(interactions.users[rows], positions)[0] == 0]


def _seconds(point: int | str) -> int:
    """A point of time in seconds since 1970.

    Raises:
        ValueError: it is no date.
    """
    if isinstance(point, int):
        return point
    try:
        date = datetime.fromisoformat(point)
    except ValueError:
        raise ValueError(f"a date such as 2001-06-30, not {point!r}") from None
    return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())
