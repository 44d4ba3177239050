# SPDX-License-Identifier: Apache-2.0
"""Recognises the user, item, rating and time columns of a table, by their names, then by their
contents. The result and its reasons are printed, and each column can be named explicitly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.columns import dates_of, ids_of, numbers_of, typed, whole_numbers
from fedrec.data.files.first_lines import DATE, first_line_is_row, separator_of
from fedrec.data.files.indexing import dense_index
from fedrec.data.files.tables import (
    Columns,
    TableLayout,
    column_names,
    is_text,
    nested_columns,
    read_table,
)
from fedrec.errors import DataError
from fedrec.runtime.grouping import distinct

ROLES = ("user", "item", "rating", "time")
_UNFIT = {
    "rating": "not every row has a finite number there (with a decimal point)",
    "time": "not every row has a number or a date (2024-12-31 or 31.12.2024) there; if all dates"
    " have another form, say which (--time-format '%m/%d/%Y')",
}
_TIMES_USED = (
    "; of test users the later half of the items is held out"
    " (--set split.halves=random holds out a random half)"
)
_NAMES = {
    "user": "kunde kundin kundenid kundennr kundennummer nutzer benutzer kaufer kaeufer "
    "utilisateur acheteur cliente usuario utente klant gebruiker "
    "user users userid uid u customer customerid client clientid buyer buyerid member "
    "memberid visitor visitorid person reviewer reviewerid account accountid session "
    "sessionid author",
    "item": "artikel artikelid artikelnr artikelnummer produkt produktid produktnr "
    "produit producto articulo prodotto articolo "
    "item items itemid iid i product productid movie movieid film book bookid isbn track "
    "trackid song songid artist artistid asin sku article articleid place placeid poi venue "
    "venueid location locationid game gameid app appid parentasin content contentid stockcode url",
    "rating": "rating ratings rate score stars star overall reviewoverall bookrating grade "
    "userrating reviewrating ratingscore reviewscore bewertung bewertungen sterne wertung "
    "valoracion calificacion puntuacion etoiles voto valutazione avaliacao note",
    "time": "time timestamp ts date datetime day unixreviewtime reviewtime created createdat "
    "ratedat when eventtime orderdate invoicedate purchasedate timestampms "
    "datum zeit zeitpunkt bestelldatum kaufdatum rechnungsdatum fecha "
    "bestellzeit bestellzeitpunkt fechahora horodatage tijd data",
}
_SCALE = 21  # most distinct values of a rating scale: 0 to 10 in halves
_TOP = 100.0
_SCALES = (5.0, 10.0)  # best ratings of the usual scales, for columns without a name
_FIRST_ROWS = 1000  # by which a column shows that it holds no times
_FIRST_TIME = 3e8  # seconds since 1970; earlier times than 1979 are more likely to be counts


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
        time_format: form of dates, as given.
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
    time_format: str | None = None
    frame: Columns = field(default_factory=dict, repr=False, compare=False)

    def lines(self) -> list[str]:
        """The result as text, one finding per line."""
        said = [
            f"{role}: column {self.columns[role]!r} ({self.reasons[role]})"
            + (_TIMES_USED if role == "time" else "")
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


def recognise(
    path: Path,
    given: Mapping[str, str] | None = None,
    *,
    rated: bool = True,
    time_format: str | None = None,
    header: bool | None = None,
) -> Recognised:
    """Recognise the columns of a table of interactions.

    Args:
        path: a CSV, Parquet or JSON file. If its first line is a row, the first two columns that
            are not `given` hold the users and the items.
        given: by role (`user`, `item`, `rating`, `time`), the columns that are known.
        rated: whether a column may be taken for ratings; otherwise every row counts as liked.
        time_format: form of dates, as of `strptime`; None: ISO, or dotted with the day first.
        header: whether the first line of text has names; None: this is recognised, see
            `first_line_is_row`.

    Raises:
        DataError: there is no such file, an id is missing, a named column is missing, named twice
            or, for ratings, without a number in a row, or the user and item columns are
            ambiguous.
    """
    given = given or {}
    layout = _layout(path, header)
    header = layout.names == "first line"
    nested = nested_columns(path, layout)
    every = column_names(path, layout)
    # a column without a name cannot be asked for
    names = [name for name in every if name and name not in nested]
    _require_two(path, names)
    needed = _needed(path, names, layout, given, time_format)
    types = _types(needed, given)
    ids = tuple(name for name, kind in types.items() if kind is str and _is_id(name, given))
    frame = read_table(path, replace(layout, columns=types, ids=ids))
    roles = tuple(role for role in ROLES if rated or role != "rating")
    columns, reasons = _assigned(path, needed, frame, given, roles, time_format, header=header)
    _require_times(path, columns, time_format)
    rating = columns.get("rating")
    if "rating" in given:
        numbers_of(frame[given["rating"]], path)
    threshold = None if rating is None else _threshold(typed(frame[rating]))
    users, items = (_codes(frame[columns[role]], path) for role in ("user", "item"))
    pairs = distinct(users * (items.max() + 1) + items)
    rows = len(users)
    return Recognised(
        separator=layout.separator,
        columns={role: columns[role] for role in ROLES if role in columns},
        reasons=reasons,
        positive_above=threshold,
        liked=rows
        if rating is None or threshold is None
        else int((numbers_of(frame[rating], path) > threshold).sum()),
        rows=rows,
        users=int(users.max()) + 1,
        items=int(items.max()) + 1,
        divisible=_at_least_twice(pairs // (items.max() + 1)),
        shared=_at_least_twice(pairs % (items.max() + 1)),
        ignored=tuple(name for name in every if name not in columns.values()),
        unfit=_unfit(names, columns, roles),
        header=header,
        time_format=time_format,
        frame=frame,
    )


def _needed(
    path: Path,
    names: list[str],
    layout: TableLayout,
    given: Mapping[str, str],
    time_format: str | None,
) -> list[str]:
    """The columns that may be used: if users and items are known by name, those with a name of a
    role or with times, by the first rows; so that prices and texts are not read."""
    by_name = [any(_named(role, name) for name in names) for role in ("user", "item")]
    known = [role in given or found for role, found in zip(("user", "item"), by_name, strict=True)]
    if layout.names != "first line" or not all(known) or not set(given.values()) <= set(names):
        return names
    first = read_table(path, replace(layout, columns=_types(names, given)), rows=_FIRST_ROWS)
    return [
        name
        for name in names
        if name in given.values()
        or any(_named(role, name) for role in ROLES)
        or _looks("time", first[name], time_format)
    ]


def _require_times(path: Path, columns: Mapping[str, str], time_format: str | None) -> None:
    """The error for a form of dates that no column has."""
    if time_format is not None and "time" not in columns:
        raise DataError(
            f"{path} has no column of times of the form {time_format!r}",
            expected="a form that all dates of a column have, such as '%m/%d/%Y %H:%M'",
            got=time_format,
            fix="correct --time-format, and name the column with --time",
        )


def _codes(column: pd.Series, path: Path) -> np.ndarray:
    if whole_numbers(column):
        return dense_index(column.to_numpy())[1]
    codes = pd.factorize(column)[0].astype(np.int64)
    if (codes < 0).any():
        ids_of(column, path)  # raises the error that names the row
    return codes


def _at_least_twice(numbers: np.ndarray) -> int:
    return int((np.bincount(numbers) > 1).sum())


def _assigned(
    path: Path,
    names: list[str],
    frame: Columns,
    given: Mapping[str, str],
    roles: Sequence[str],
    time_format: str | None,
    *,
    header: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """The column of each role, and the reason."""
    columns: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for role, name in given.items():
        if name not in names:
            raise DataError(
                f"{path} has no column {name!r}",
                expected=f"one of {', '.join(map(repr, names))}",
                got=f"--{role} {name}",
                fix=f"give the name of the column of {role}s"
                if header
                else "the first line is a row: name columns by their places, such as --user 1"
                " --item 2; if it has names, add --header",
            )
        if name in columns.values():
            raise DataError(
                f"column {name!r} is given twice",
                expected="a column of its own for each of users, items, ratings and times",
                got=" ".join(f"--{role} {name}" for role, name in given.items()),
                fix=f"give the name of the column of {role}s",
            )
        columns[role] = name
        reasons[role] = "as given"
    for role in () if header else ("user", "item"):
        free = next((name for name in names if name not in columns.values()), None)
        if role not in columns and free is not None:
            columns[role] = free
            reasons[role] = "by its place"
    for role in roles:
        for name in names:
            if role not in columns and name not in columns.values() and _named(role, name):
                if role in ("rating", "time") and not _fits(role, frame[name], time_format):
                    continue
                columns[role] = name
                reasons[role] = "by its name"
    for role in ("time",) if header else (role for role in ("time", "rating") if role in roles):
        left = [name for name in names if name not in columns.values()]
        found = [
            name for name in left if role not in columns and _looks(role, frame[name], time_format)
        ]
        if len(found) == 1 and len(left) > 2 - len({"user", "item"} & set(columns)):
            columns[role] = found[0]
            reasons[role] = f"its values look like {role}s"
    _by_content(path, names, frame, columns, reasons)
    return columns, reasons


def _by_content(
    path: Path,
    names: list[str],
    frame: Columns,
    columns: dict[str, str],
    reasons: dict[str, str],
) -> None:
    """Users or items among the remaining columns: the only one, or the first of two."""
    left = [name for name in names if name not in columns.values()]
    ids = [
        name
        for name in left
        if len(left) <= 2
        or (1 < frame[name].nunique() < len(frame[name]) and _whole(typed(frame[name])))
    ]
    missing = [role for role in ("user", "item") if role not in columns]
    if not missing:
        return
    if len(ids) != len(missing):
        raise DataError(
            f"cannot tell which column of {path} holds the {missing[0]}s",
            expected="names such as user_id and item_id",
            got=f"columns {', '.join(map(repr, names))}",
            fix="say it with " + " ".join(f"--{role} COLUMN" for role in missing),
        )
    for role, name in zip(missing, ids, strict=True):
        columns[role] = name
        reasons[role] = "the only column of ids left" if len(ids) == 1 else "by its place"


def _layout(path: Path, header: bool | None) -> TableLayout:
    """The layout of a table, with its separator. Its first line has names if it is said to, or if
    one of them is that of a role, or if nothing tells that it is a row."""
    if not is_text(path):
        return TableLayout.own({})
    layout = TableLayout.own({}, separator=separator_of(path))
    if header is None:
        named = any(_named(role, name) for role in ROLES for name in column_names(path, layout))
        header = named or not first_line_is_row(path, layout)
    return layout if header else replace(layout, names="places")


def _types(names: Sequence[str], given: Mapping[str, str]) -> dict[str, type | None]:
    """Columns that may be ids are read as text, so that "007" is not 7."""
    ids = [name for role, name in given.items() if role in ("user", "item")]
    numbers = [name for role, name in given.items() if role in ("rating", "time")]
    numbers += [name for name in names if _named("rating", name) or _named("time", name)]
    return {name: None if name in numbers and name not in ids else str for name in names}


def _is_id(name: str, given: Mapping[str, str]) -> bool:
    """Whether a column is that of users or items by its name or as given."""
    return any(name == given.get(role) or _named(role, name) for role in ("user", "item"))


def _require_two(path: Path, names: list[str]) -> None:
    """The error for a table with fewer than two columns."""
    if len(names) < 2:
        raise DataError(
            f"{path} has one column" if names else f"{path} has no column with one value per row",
            expected="a column of users and a column of items, separated by , ; | or tabs",
            got=", ".join(names) or "lists, structs or maps",
            fix="write one row for each user and item, in two columns",
        )


def _unfit(names: list[str], columns: Mapping[str, str], roles: Sequence[str]) -> dict[str, str]:
    """Columns that are named like ratings or times and are not used, for roles without a column."""
    left = [name for name in names if name not in columns.values()]
    return {
        role: next(name for name in left if _named(role, name))
        for role in ("rating", "time")
        if role in roles and role not in columns and any(_named(role, name) for name in left)
    }


def _named(role: str, name: str) -> bool:
    plain = unicodedata.normalize("NFKD", name.lower())  # accents become letters of their own
    return re.sub(r"[^a-z]", "", plain) in _NAMES[role].split()


def _fits(role: str, column: pd.Series, time_format: str | None) -> bool:
    """Whether a column with that name can be read in that role."""
    column = typed(column)
    numeric = pd.api.types.is_numeric_dtype(column) and bool(
        np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan)).all()
    )
    if role == "time" and time_format is not None:
        return _dates(column, time_format)
    return numeric or (role == "time" and _dates(column))


def _looks(role: str, column: pd.Series, time_format: str | None) -> bool:
    """Whether a column without a known name holds times or, where no column has a name, ratings: a
    usual scale in steps of a half at least. Small numbers in a column with another name are more
    likely to be quantities."""
    column = typed(column)
    if role == "rating":
        if not _fits(role, column, None) or _threshold(column) is None:
            return False
        return float(column.max()) in _SCALES and bool((column.astype(float) * 2 % 1 == 0).all())
    if time_format is not None:
        return _dates(column, time_format)
    if pd.api.types.is_numeric_dtype(column):
        return not column.isna().any() and float(column.min()) > _FIRST_TIME
    return _dates(column)


def _dates(column: pd.Series, time_format: str | None = None) -> bool:
    if time_format is not None:
        return bool(dates_of(column.dropna().head(_FIRST_ROWS), time_format).notna().all())
    if pd.api.types.is_datetime64_any_dtype(column):
        return True
    some = column.dropna().head(_FIRST_ROWS).astype(str)
    if some.empty or not some.str.match(DATE).all():
        return False
    return bool(dates_of(some).notna().all())


def _whole(column: pd.Series) -> bool:
    """Whether no value of a column has decimals: prices have them, ids do not."""
    return not pd.api.types.is_float_dtype(column) or bool((column.dropna() % 1 == 0).all())


def _threshold(ratings: pd.Series) -> float | None:
    """The middle of a rating scale; None if the values are not ratings but constant, counts or
    prices."""
    values = np.sort(pd.unique(ratings.to_numpy(dtype=np.float64)))
    if not 1 < len(values) <= _SCALE or values[0] < -_TOP or values[-1] > _TOP:
        return None
    return float((values[0] + values[-1]) / 2)
