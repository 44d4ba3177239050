# SPDX-License-Identifier: Apache-2.0
"""The recognised columns of a table of interactions, and how they are described."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedrec.data.files.tables import Columns

ROLES = ("user", "item", "rating", "time")
_UNFIT = {
    "rating": "not every row has a finite number there (with a decimal point)",
    "time": "not every row has a number or a date (2024-12-31 or 31.12.2024) there",
}
_TIMES_UNUSED = (
    "; the default split holds out random items and does not use it"
    " (--set split.halves=temporal holds out the later half)"
)


@dataclass(frozen=True)
class Recognised:
    """The recognised columns of a table.

    Attributes:
        separator: of a CSV file.
        columns: name of the column of each role; `rating` and `time` only if there is one.
        reasons: the reason, by role.
        positive_above: a row is positive when its rating is above this; None: every row is.
        liked: number of positive rows.
        rows: number of rows.
        users: number of distinct users.
        items: number of distinct items.
        divisible: number of users with at least two different items, of which one can be held out.
        shared: number of items with at least two users.
        ignored: the other columns.
        unfit: role -> column with a name of that role, whose values cannot be read as such.
        header: whether the first line of a CSV file has names; otherwise columns are named by their
            positions.
        frame: the columns that were read.
    """

    separator: str
    columns: dict[str, str]
    reasons: dict[str, str]
    positive_above: float | None
    liked: int
    rows: int
    users: int
    items: int
    divisible: int
    shared: int
    ignored: tuple[str, ...]
    unfit: dict[str, str]
    header: bool = True
    frame: Columns = field(default_factory=dict, repr=False, compare=False)

    def lines(self) -> list[str]:
        """The result as text, one finding per line."""
        said = [
            f"{role}: column {self.columns[role]!r} ({self.reasons[role]})"
            + (_TIMES_UNUSED if role == "time" else "")
            for role in ROLES
            if role in self.columns
        ]
        said += [f"no column of {role}s" for role in ROLES if role not in self.columns]
        if self.ignored:
            said.append(f"not used: {', '.join(map(repr, self.ignored))}")
        said += [
            f"{column!r} is named like a column of {role}s, but {_UNFIT[role]}; to use it, correct"
            " these rows, or leave them out"
            for role, column in self.unfit.items()
        ]
        bare = (
            "the first line is a row: columns are named 1, 2, and so on, and the users come first"
        )
        return [self._taken(), *([] if self.header else [bare]), *said]

    def _taken(self) -> str:
        """The size of the table and which rows count as liked."""
        counts = ", ".join(
            f"{number:,} {word}{'s' if number > 1 else ''}"
            for number, word in ((self.rows, "row"), (self.users, "user"), (self.items, "item"))
        )
        if self.positive_above is None:
            return f"{counts}; every row counts as liked"
        return (
            f"{counts}; the {self.liked:,} rows with a rating above {self.positive_above:g} in"
            f" column {self.columns['rating']!r} count as liked (with --no-rating every row does)"
        )
