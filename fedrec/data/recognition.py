# SPDX-License-Identifier: Apache-2.0
"""Recognition of the columns of a table, and of the separator and names in its first lines."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.config import did_you_mean
from fedrec.data.columns import dates_of, dense_index, ids_of, numbers_of, typed, whole_numbers
from fedrec.data.tables import (
    Columns,
    TableLayout,
    column_names,
    is_text,
    nested_columns,
    read_table,
    table_start,
)
from fedrec.errors import DataError
from fedrec.runtime.ragged import distinct

SEPARATORS = (",", "\t", ";", "|", "::", " ")
DATE = r"\d{4}-\d{2}|\d{1,2}\.\d{1,2}\.\d{4}"
_VALUE = rf"\s*(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*|(?:{DATE}).*)"


def separator_of(path: Path) -> str:
    """What separates the first row into most values, and most of the next rows into as many; spaces
    only if nothing else does.

    Raises:
        DataError: the file is not readable.
    """

    def fit(separator: str) -> tuple[bool, bool, int, int]:
        above, rows = table_start(path, TableLayout.own({}, separator=separator))
        width = len(rows[0]) if rows else 0
        alike = 2 * sum(len(row) == width for row in rows) > len(rows)
        return width > 1 and separator != " ", alike, width, -above

    return max(SEPARATORS, key=fit)


def first_line_is_row(path: Path, layout: TableLayout) -> bool:
    """Whether the first line of a user's own table has values. Then all of them are numbers or
    dates; or a number or a date stands above such values, or a text above itself, and no text above
    numbers or dates.
    """
    first = column_names(path, layout)
    names = [str(place + 1) for place in range(len(first))]
    bare = replace(layout, names="places", columns=dict.fromkeys(names, str))
    try:
        verdict = _verdict(first, read_table(path, bare, rows=_FIRST_ROWS))
        # an id may recur in the last line
        return bool(_verdict(first, read_table(path, bare)) if verdict is None else verdict)
    except DataError:  # of a line that has other values than the first
        return False


def _verdict(first: list[str], columns) -> bool | None:
    """Whether the first line is a row by the lines below it; None if these do not tell."""
    if all(are_values(np.array(first))):
        return True
    recurs = False
    for value, column in zip(first, columns.values(), strict=True):
        below = column.iloc[1:].dropna().astype(str)
        if below.empty:
            continue
        if are_values(below).all():
            if value and not are_values(np.array([value]))[0]:
                return False
            recurs = recurs or bool(value)
        else:
            recurs = recurs or bool((below == value).any())
    return True if recurs else None


def are_values(texts) -> np.ndarray:
    """Which texts are numbers or dates, `bool [texts]`."""
    return np.asarray(pd.Series(texts, dtype=str).str.fullmatch(_VALUE, case=False), dtype=bool)


ROLES = ("user", "item", "rating", "time")
_UNFIT = {
    "rating": "no row has a number there",
    "time": "not every row has a number or a date (2024-12-31 or 31.12.2024) there; if all dates"
    " have another form, say which (--time-format '%m/%d/%Y')",
}
_TIMES_USED = (
    "; of test users half of the items are held out by time, and the seed orders items of one time"
    " (--set split.halves=random holds out a random half)"
)
_NAMES = {
    "user": "userid uid user users u nutzer benutzer usuario utilisateur utente gebruiker "
    "personid person customerid customer kundenid kundennr kundennummer kunde kundin cliente klant "
    "buyerid buyer kaufer kaeufer acheteur memberid member reviewerid reviewer "
    "author clientid client accountid account visitorid visitor sessionid session",
    "item": "itemid iid item items i productid product artikelid artikelnr artikelnummer artikel "
    "produktid produktnr produkt produit producto articulo prodotto articolo "
    "movieid movie film bookid isbn book trackid track songid song gameid game appid app "
    "articleid article asin parentasin sku stockcode contentid content poi placeid place "
    "venueid venue locationid location artistid artist url",
    "rating": "rating ratings userrating bookrating reviewrating ratingscore overall reviewoverall "
    "stars star reviewscore score rate grade bewertung bewertungen sterne wertung "
    "valoracion calificacion puntuacion etoiles voto valutazione avaliacao note",
    "time": "timestamp timestampms ts eventtime time datetime unixreviewtime reviewtime ratedat "
    "purchasedate orderdate invoicedate zeitpunkt zeit bestellzeitpunkt bestellzeit bestelldatum "
    "kaufdatum rechnungsdatum fechahora horodatage tijd when date datum fecha data day "
    "createdat created",
}
"""Names of each role, the surest first: where several columns fit, an account may be of several
people, a session is part of what one does, and an account may be created long before it is used."""
_RARE = 0.01  # share of the rows that may be beyond the scale of ratings
_SCALE = 21  # most distinct values of a rating scale: 0 to 10 in halves
_SCALES = (5.0, 10.0)  # best ratings of the usual scales, for columns without a name
_MOST_OF_A_USER = 100
_FIRST_ROWS = 1000  # by which a column shows that it holds no times
_FIRST_TIME = 3e8  # seconds since 1970; earlier times than 1979 are more likely to be counts


@dataclass(frozen=True)
class Recognised:
    """The recognised columns of a table.

    Attributes:
        separator: of a CSV file.
        columns: name of the column of each role; `rating` and `time` only if there is one.
        reasons: the reason, by role.
        rivals: role -> other columns with a name of that role, which fit as well.
        scale: lowest and highest rating, without rare ones far from all others; None without
            ratings.
        beyond: number of rows with a rating outside the scale.
        positive_above: a row is positive when its rating is above this; None: every row is, as
            there are no ratings or they are all the same.
        liked: number of positive rows.
        rows: number of rows.
        repeated: number of rows whose user and item are those of an earlier row.
        users: number of distinct users.
        items: number of distinct items.
        divisible: number of users with at least two different items, of which one can be held out.
        shared: number of items with at least two users.
        items_per_user: mean number of different items of a user, where a user counts as having at
            most 100, so that one user changes it little.
        ignored: the other columns.
        unfit: role -> column that is named like ratings or times and has values that cannot be
            read as such, if no column holds them.
        header: whether the first line of a CSV file has names; otherwise columns are named by their
            positions.
        time_format: form of dates, as given.
        frame: the columns that were read.
    """

    separator: str
    columns: dict[str, str]
    reasons: dict[str, str]
    rivals: dict[str, tuple[str, ...]]
    scale: tuple[float, float] | None
    beyond: int
    positive_above: float | None
    liked: int
    rows: int
    repeated: int
    users: int
    items: int
    divisible: int
    shared: int
    items_per_user: float
    ignored: tuple[str, ...]
    unfit: dict[str, str]
    header: bool = True
    time_format: str | None = None
    frame: Columns = field(default_factory=dict, repr=False, compare=False)

    def lines(self) -> list[str]:
        """The result as text, one finding per line."""
        said = [
            f"{role}: column {self.columns[role]!r} ({self.reasons[role]}"
            + "".join(
                f"; {name!r} fits as well: --{role} {name}" for name in self.rivals.get(role, ())
            )
            + (self._scaled() if role == "rating" else "")
            + (f"){_TIMES_USED}" if role == "time" else ")")
            for role in ROLES
            if role in self.columns
        ]
        said += [f"no column of {role}s" for role in ROLES if role not in self.columns]
        if self.ignored:
            said.append(f"not used: {', '.join(map(repr, self.ignored))}")
        said += [
            f"{name!r} is named like a column of {role}s, but {_UNFIT[role]}; to use it, correct"
            " these rows, or leave them out"
            for role, name in self.unfit.items()
        ]
        bare = (
            "the first line is a row: columns are named 1, 2, and so on, and the users come first"
        )
        repeated = [repeated_rows(self.repeated, self.rows)] if self.repeated else []
        return [self._taken(), *repeated, *([] if self.header else [bare]), *said]

    def _scaled(self) -> str:
        """The scale of ratings, and how many are outside."""
        low, high = self.scale or (0.0, 0.0)
        said = f"; a scale of {low:g} to {high:g}" if low < high else f"; all are {low:g}"
        if not self.beyond:
            return said
        return f"{said}, {self.beyond:,} row{'s are' if self.beyond > 1 else ' is'} outside"

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


def repeated_rows(repeated: int, rows: int) -> str:
    """A sentence on rows of a table that repeat others."""
    return f"{repeated:,} of {rows:,} rows repeat the user and the item of another row"


def recognise(
    path: Path,
    given: Mapping[str, str] | None = None,
    *,
    rated: bool = True,
    header: bool | None = None,
    time_format: str | None = None,
    positive_above: float | None = None,
) -> Recognised:
    """Recognise the columns of a table of interactions.

    Args:
        path: a CSV, Parquet or JSON file. If its first line is a row, or all names are numbers or
            dates, the first two columns that are not `given` hold the users and the items.
        given: by role (`user`, `item`, `rating`, `time`), the columns that are known.
        rated: whether a column may be taken for ratings; otherwise every row counts as liked.
        header: whether the first line of text has names; None: this is recognised, see
            `first_line_is_row`.
        time_format: form of dates, as of `strptime`; None: ISO, or dotted with the day first.
        positive_above: a row is positive when its rating is above this; None: the middle of the
            scale of the ratings, which is from the lowest to the highest, but for the lowest
            and highest hundredth of the rows where these are farther away than the others are wide.

    Raises:
        DataError: there is no such file, an id is missing, a named column is missing or named
            twice, a rating is no number, or the user and item columns are ambiguous.
    """
    given = given or {}
    layout = _layout(path, header)
    nested = nested_columns(path, layout)
    every = column_names(path, layout)
    # a column without a name cannot be asked for
    names = [name for name in every if name and name not in nested]
    _require_two(path, names)
    needed = _needed(path, names, layout, given, time_format)
    types = _types(needed, given)
    frame = read_table(path, replace(layout, columns=types))
    roles = tuple(role for role in ROLES if rated or role != "rating")
    telling = layout.names == "first line" and not are_values(every).all()
    columns, reasons, rivals = _assigned(
        path, needed, frame, given, roles, time_format, telling=telling
    )
    _require_times(path, columns, time_format)
    ratings = _ratings(frame[columns["rating"]], path) if "rating" in columns else None
    scale = None if ratings is None else _scale(ratings)
    threshold = None if scale is None else positive_above
    if threshold is None and scale is not None and scale[0] < scale[1]:
        threshold = (scale[0] + scale[1]) / 2
    users, items = (_codes(frame[columns[role]], path) for role in ("user", "item"))
    pairs = distinct(users * (items.max() + 1) + items)
    items_of = np.bincount(pairs // (items.max() + 1))
    rows = len(users)
    unused = [name for name in names if name not in columns.values()]
    return Recognised(
        separator=layout.separator,
        columns={role: columns[role] for role in ROLES if role in columns},
        reasons=reasons,
        rivals=rivals,
        scale=scale,
        beyond=0
        if ratings is None or scale is None
        else int(((ratings < scale[0]) | (ratings > scale[1])).sum()),
        positive_above=threshold,
        liked=rows
        if ratings is None or threshold is None
        else int((ratings.astype(np.float32) > threshold).sum()),
        rows=rows,
        repeated=rows - len(pairs),
        users=int(users.max()) + 1,
        items=int(items.max()) + 1,
        divisible=int((items_of > 1).sum()),
        shared=int((np.bincount(pairs % (items.max() + 1)) > 1).sum()),
        items_per_user=float(np.minimum(items_of, _MOST_OF_A_USER).mean()),
        ignored=tuple(name for name in every if name not in columns.values()),
        unfit={
            role: surest[0]
            for role in ("rating", "time")
            if role in roles and role not in columns and (surest := _surest_first(role, unused))
        },
        header=layout.names == "first line",
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


def _assigned(
    path: Path,
    names: list[str],
    frame: Columns,
    given: Mapping[str, str],
    roles: Sequence[str],
    time_format: str | None,
    *,
    telling: bool,
) -> tuple[dict[str, str], dict[str, str], dict[str, tuple[str, ...]]]:
    """The column of each role, the reason, and others with such a name; `telling`: whether the
    names may tell what columns hold."""
    columns: dict[str, str] = {}
    reasons: dict[str, str] = {}
    rivals: dict[str, tuple[str, ...]] = {}
    for role, name in given.items():
        if name not in names:
            raise DataError(
                f"{path} has no column {name!r}",
                expected=f"one of {', '.join(map(repr, names))}",
                got=f"--{role} {name}",
                fix=did_you_mean(name, names)
                if telling
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
    for role in () if telling else ("user", "item"):
        free = next((name for name in names if name not in columns.values()), None)
        if role not in columns and free is not None:
            columns[role] = free
            reasons[role] = "by its place"
    for role in roles:
        fitting = [
            name
            for name in _surest_first(role, names)
            if role not in columns
            and name not in columns.values()
            and (role != "time" or _are_times(frame[name], time_format))
            and (role != "rating" or not _are_texts(frame[name]))
        ]
        if fitting:
            columns[role], *others = fitting
            reasons[role] = "by its name"
            rivals[role] = tuple(others)
    for role in ("time",) if telling else (role for role in ("time", "rating") if role in roles):
        left = [name for name in names if name not in columns.values()]
        found = [
            name for name in left if role not in columns and _looks(role, frame[name], time_format)
        ]
        if len(found) == 1 and len(left) > 2 - len({"user", "item"} & set(columns)):
            columns[role] = found[0]
            reasons[role] = f"its values look like {role}s"
    _by_content(path, names, frame, columns, reasons)
    return columns, reasons, rivals


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


def _require_two(path: Path, names: list[str]) -> None:
    """The error for a table with fewer than two columns."""
    if len(names) < 2:
        raise DataError(
            f"{path} has one column" if names else f"{path} has no column with one value per row",
            expected="a column of users and a column of items, separated by , ; | or tabs",
            got=", ".join(names) or "lists, structs or maps",
            fix="write one row for each user and item, in two columns",
        )


def _named(role: str, name: str) -> bool:
    return _plain(name) in _NAMES[role].split()


def _surest_first(role: str, names: Sequence[str]) -> list[str]:
    """The columns with a name of a role."""
    known = _NAMES[role].split()
    return sorted(
        (name for name in names if _named(role, name)), key=lambda n: known.index(_plain(n))
    )


def _plain(name: str) -> str:
    """A name in small letters without accents, spaces, digits and signs."""
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", name.lower()))


def _are_times(column: pd.Series, time_format: str | None) -> bool:
    """Whether a column with the name of times can be read as such."""
    column = typed(column)
    if time_format is not None:
        return _dates(column, time_format)
    return _numeric(column) or _dates(column)


def _are_texts(column: pd.Series) -> bool:
    """Whether a column with the name of ratings, such as "note", has texts: no numbers, and more
    different values than a scale."""
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"))
    return not numbers.notna().any() and column.nunique() > _SCALE


def _numeric(column: pd.Series) -> bool:
    """Whether each row has a finite number."""
    return pd.api.types.is_numeric_dtype(column) and bool(
        np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan)).all()
    )


def _looks(role: str, column: pd.Series, time_format: str | None) -> bool:
    """Whether a column without a known name holds times or, where no column has a name, ratings: a
    usual scale in steps of a half at least. Small numbers in a column with another name are more
    likely to be quantities."""
    column = typed(column)
    if role == "rating":
        if not _numeric(column) or not 0 <= column.min() < column.max():
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


def _ratings(column: pd.Series, path: Path) -> np.ndarray:
    """Ratings, `float64 [rows]`.

    Raises:
        DataError: a row has none.
    """
    try:
        numbers_of(column, path)
        return typed(column).to_numpy(dtype=np.float64)
    except DataError:
        numbers = pd.Series(pd.to_numeric(column, errors="coerce"))
        missing = ~np.isfinite(numbers.to_numpy(dtype=np.float32, na_value=np.nan))
        first = int(missing.argmax())
        value = column.iloc[first]
        raise DataError(
            f"{path}, row {first + 1:,} (line {first + 2:,} of a CSV file): no rating in column"
            f" {column.name!r}, as in {int(missing.sum()):,} of {len(column):,} rows",
            expected="a finite number with a decimal point in each row",
            got="nothing" if pd.isna(value) else repr(value),
            fix="correct these rows or leave them out, or --no-rating: every row counts as liked",
        ) from None


def _scale(ratings: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest rating, without rare ones beyond a gap that is wider than the
    range of all others: typing errors and codes such as -99."""
    values = np.unique(ratings)
    low = np.quantile(ratings, _RARE, method="lower")
    high = np.quantile(ratings, 1 - _RARE, method="higher")
    if low == high:  # nearly all are the same: the others are the other end of the scale
        return float(values[0]), float(values[-1])
    bottom, top = (
        ends[np.argmax(np.append(np.abs(np.diff(ends)) > high - low, True))]
        for ends in (values[values <= low][::-1], values[values >= high])
    )
    return float(bottom), float(top)
