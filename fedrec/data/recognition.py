# SPDX-License-Identifier: Apache-2.0
"""Recognition of the columns of a table, and of the separator and names in its first lines."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.columns import dates_of, ids_of, numbers_of, typed
from fedrec.data.tables import (
    Columns,
    TableLayout,
    column_names,
    format_of,
    nested_columns,
    read_table,
    table_start,
)
from fedrec.errors import DataError, did_you_mean
from fedrec.runtime.ragged import distinct

SEPARATORS = (",", "\t", ";", "|", "::", " ")
DATE = r"\d{4}-\d{2}|\d{1,2}\.\d{1,2}\.\d{4}"
_VALUE = rf"\s*(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*|(?:{DATE}).*)"


def separator_of(path: Path) -> str:
    """Find the separator that splits the first row into most values, consistently with the next
    rows; spaces only if no other separator fits.

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
    """True if the first line of a user's own table has values. Then all of them are numbers or
    dates; or a number or a date stands above such values, or a text above itself, and no text above
    numbers or dates.
    """
    first = column_names(path, layout)
    names = [str(number) for number in range(1, len(first) + 1)]
    bare = replace(layout, names="positions", columns=dict.fromkeys(names, str))
    for rows in (_FIRST_ROWS, None):  # an id may recur in the last line
        try:
            verdict = _verdict(first, read_table(path, bare, rows))
        except DataError:  # a line has other types than the first
            return False
        if verdict is not None:
            return verdict
    return False


def _verdict(first: list[str], columns: Columns) -> bool | None:
    """True if the first line is a row, judged by the lines below it; None if undecided."""
    are_values = _are_values(first)
    recurs = bool(are_values.all())
    for value, is_value, column in zip(first, are_values, columns.values(), strict=True):
        below = column.iloc[1:].dropna().astype(str)
        above_values = len(below) > 0 and bool(_are_values(below).all())
        if above_values and value and not is_value:
            return False
        recurs = recurs or (bool(value) if above_values else bool((below == value).any()))
    return True if recurs else None


def _are_values(texts) -> np.ndarray:
    """Mask `bool [texts]` of numbers and dates."""
    return np.asarray(pd.Series(texts, dtype=str).str.fullmatch(_VALUE, case=False), dtype=bool)


ROLES = ("user", "item", "rating", "time")
_RARE = 0.01  # share of the rows that may be beyond the scale of ratings
_SCALE = 21  # most distinct values of a rating scale: 0 to 10 in halves
_SCALES = (5.0, 10.0)  # best ratings of the usual scales, for columns without a name
_MOST_OF_A_USER = 100
_FIRST_ROWS = 1000  # by which a column shows that it holds no times
_FIRST_TIME = 3e8  # seconds since 1970; earlier times than 1979 are more likely to be counts
_TIMES_USED = (
    "; of test users half of the items are held out by time, and the seed orders items of one time"
    " (--set split.halves=random holds out a random half)"
)


def _dates(column: pd.Series, form: str | None) -> bool:
    """True if the first rows are dates, in the given format if there is one."""
    if form is None and pd.api.types.is_datetime64_any_dtype(column):
        return True
    some = column.dropna().head(_FIRST_ROWS).astype(str)
    if form is None and (some.empty or not some.str.match(DATE).all()):
        return False
    return bool(dates_of(some, form).notna().all())


def _numeric(column: pd.Series) -> bool:
    """True if each row has a finite number."""
    return pd.api.types.is_numeric_dtype(column) and bool(
        np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan)).all()
    )


def _are_times(column: pd.Series, form: str | None) -> bool:
    """True if a column named like times can be read as times."""
    return _dates(column, form) or (form is None and _numeric(column))


def _look_like_times(column: pd.Series, form: str | None) -> bool:
    """True if a column not named like times contains times."""
    if form is None and pd.api.types.is_numeric_dtype(column):
        return not column.isna().any() and float(column.min()) > _FIRST_TIME
    return _dates(column, form)


def _are_ratings(column: pd.Series, _: str | None) -> bool:
    """True unless a column named like ratings, such as "note", contains texts: values that are not
    numbers and more varied than a scale."""
    numbers = pd.Series(pd.to_numeric(column, errors="coerce"))
    return bool(numbers.notna().any()) or column.nunique() <= _SCALE


def _look_like_ratings(column: pd.Series, _: str | None) -> bool:
    """True if a column of a table without names contains ratings: a usual scale in steps of at
    least a half. Small numbers in a column with another name are more likely to be quantities."""
    if not _numeric(column) or not 0 <= column.min() < column.max():
        return False
    return float(column.max()) in _SCALES and bool((column.astype(float) * 2 % 1 == 0).all())


_Test = Callable[[pd.Series, str | None], bool]


@dataclass(frozen=True)
class _Role:
    """Rules that recognise the column of a role.

    Attributes:
        names: names of such columns, the surest first: an account may be shared by several people,
            a session is a part of a user's activity, and an account may be created long before it
            is used.
        fits: whether a column with such a name can have the role, by its values and the given form
            of dates.
        misfit: reason why a column with such a name is not used.
    """

    names: str
    fits: _Test = lambda column, form: True
    misfit: str = ""

    def surest_first(self, names: Sequence[str]) -> list[str]:
        """Columns with a name of this role, the surest first."""
        ranks = {name: rank for rank, name in reversed([*enumerate(self.names.split())])}
        return sorted((n for n in names if _plain(n) in ranks), key=lambda n: ranks[_plain(n)])


_ROLES = {
    "user": _Role(
        "userid uid user users u nutzer benutzer usuario utilisateur utente gebruiker "
        "personid person customerid customer kundenid kundennr kundennummer kunde kundin cliente "
        "klant buyerid buyer kaufer kaeufer acheteur memberid member reviewerid reviewer "
        "author clientid client accountid account visitorid visitor sessionid session"
    ),
    "item": _Role(
        "itemid iid item items i productid product artikelid artikelnr artikelnummer artikel "
        "produktid produktnr produkt produit producto articulo prodotto articolo "
        "movieid movie film bookid isbn book trackid track songid song gameid game appid app "
        "articleid article asin parentasin sku stockcode contentid content poi placeid place "
        "venueid venue locationid location artistid artist url"
    ),
    "rating": _Role(
        "rating ratings userrating bookrating reviewrating ratingscore overall reviewoverall "
        "stars star reviewscore score rate grade bewertung bewertungen sterne wertung "
        "valoracion calificacion puntuacion etoiles voto valutazione avaliacao note",
        _are_ratings,
        "no row has a number there",
    ),
    "time": _Role(
        "timestamp timestampms ts eventtime time datetime unixreviewtime reviewtime ratedat "
        "purchasedate orderdate invoicedate zeitpunkt zeit bestellzeitpunkt bestellzeit "
        "bestelldatum kaufdatum rechnungsdatum fechahora horodatage tijd when date datum fecha "
        "data day createdat created",
        _are_times,
        "not every row has a number or a date (2024-12-31 or 31.12.2024) there; if all dates have"
        " another format, set it (--time-format '%m/%d/%Y')",
    ),
}


def _plain(name: str) -> str:
    """Normalise a name: lower-case letters without accents, spaces, digits and signs."""
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", name.lower()))


@dataclass(frozen=True)
class Recognised:
    """Recognised columns of a table.

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
        unfit: role -> column named like ratings or times whose values cannot be read as such, if no
            column has the role.
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
        """Describe the result, one statement per line."""
        lines = [self._size()]
        if self.repeated:
            lines.append(repeated_rows(self.repeated, self.rows))
        if not self.header:
            lines.append(
                "the first line is a row: columns are named 1, 2, and so on, and the users come"
                " first"
            )
        for role in filter(self.columns.get, ROLES):
            rivals = (f"; {n!r} also fits: --{role} {n}" for n in self.rivals.get(role, ()))
            about = self.reasons[role] + "".join(rivals)
            about += self._scaled() if role == "rating" else ""
            used = _TIMES_USED if role == "time" else ""
            lines.append(f"{role}: column {self.columns[role]!r} ({about}){used}")
        lines += [f"no column of {role}s" for role in ROLES if role not in self.columns]
        if self.ignored:
            lines.append(f"not used: {', '.join(map(repr, self.ignored))}")
        lines += [
            f"{name!r} is named like a column of {role}s, but {_ROLES[role].misfit}; to use it,"
            " correct or remove these rows"
            for role, name in self.unfit.items()
        ]
        return lines

    def _scaled(self) -> str:
        """Describe the rating scale and the number of ratings outside."""
        low, high = self.scale or (0.0, 0.0)
        text = f"; a scale of {low:g} to {high:g}" if low < high else f"; all are {low:g}"
        rows = "rows are" if self.beyond > 1 else "row is"
        return text + (f", {self.beyond:,} {rows} outside" if self.beyond else "")

    def _size(self) -> str:
        """Describe the size of the table and which rows count as liked."""
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
    """Describe the number of repeated rows in a table."""
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
        given: known columns by role (`user`, `item`, `rating`, `time`).
        rated: whether a column may be taken for ratings; otherwise every row counts as liked.
        header: whether the first line of text has names; None: recognise it (`first_line_is_row`).
        time_format: form of dates, as of `strptime`; None: ISO, or dotted with the day first.
        positive_above: a row is positive when its rating is above this; None: the middle of the
            scale of the ratings, which is from the lowest to the highest, but for the lowest
            and highest hundredth of the rows where these are farther away than the others are wide.

    Raises:
        DataError: the file or an id is missing, a named column is missing or duplicate, a rating
            is not a number, or the user and item columns are ambiguous.
    """
    layout = _layout(path, header)
    every = column_names(path, layout)
    nested = nested_columns(path)
    # a column without a name cannot be given by the user
    names = [name for name in every if name and name not in nested]
    given = given or {}
    telling = layout.names == "first line" and not _are_values(every).all()
    _check_given(path, names, given, telling)
    roles = tuple(role for role in ROLES if rated or role != "rating")
    frame = _frame(path, layout, names, given, time_format)
    columns, reasons, rivals = _assigned(path, frame, given, roles, telling, time_format)
    scale = liked = None
    beyond = 0
    if "rating" in columns:
        fix = ", or --no-rating: every row counts as liked"
        ratings = numbers_of(frame[columns["rating"]], path, fix)
        scale = low, high = _scale(ratings)
        beyond = int(((ratings < low) | (ratings > high)).sum())
        if positive_above is None and low < high:
            positive_above = (low + high) / 2
        if positive_above is not None:
            liked = int((ratings.astype(np.float32) > positive_above).sum())
    users, items = (
        pd.factorize(ids_of(frame[columns[role]], path))[0].astype(np.int64)
        for role in ("user", "item")
    )
    num_items = int(items.max()) + 1
    pairs = distinct(users * num_items + items)
    items_of = np.bincount(pairs // num_items)
    unused = [name for name in names if name not in columns.values()]
    named = {role: _ROLES[role].surest_first(unused) for role in roles if role not in columns}
    return Recognised(
        separator=layout.separator,
        columns={role: columns[role] for role in ROLES if role in columns},
        reasons=reasons,
        rivals=rivals,
        scale=scale,
        beyond=beyond,
        positive_above=None if scale is None else positive_above,
        liked=len(users) if liked is None else liked,
        rows=len(users),
        repeated=len(users) - len(pairs),
        users=len(items_of),
        items=num_items,
        divisible=int((items_of > 1).sum()),
        shared=int((np.bincount(pairs % num_items) > 1).sum()),
        items_per_user=float(np.minimum(items_of, _MOST_OF_A_USER).mean()),
        ignored=tuple(name for name in every if name not in columns.values()),
        unfit={role: by_name[0] for role, by_name in named.items() if by_name},
        header=layout.names == "first line",
        time_format=time_format,
        frame=frame,
    )


def _layout(path: Path, header: bool | None) -> TableLayout:
    """Determine the layout of a table, with its separator. The first line has names if `header` is
    true, or one of them names a role, or the line does not look like a row."""
    if format_of(path) != "text":
        return TableLayout.own({})
    layout = TableLayout.own({}, separator=separator_of(path))
    if header is None:
        names = column_names(path, layout)
        named = any(role.surest_first(names) for role in _ROLES.values())
        header = named or not first_line_is_row(path, layout)
    return layout if header else replace(layout, names="positions")


def _check_given(path: Path, names: list[str], given: Mapping[str, str], telling: bool) -> None:
    """Check the number of usable columns, and the given ones.

    Raises:
        DataError: there are fewer than two, or a given one is missing or has two roles.
    """
    if len(names) < 2:
        raise DataError(
            f"{path} has one column" if names else f"{path} has no column with one value per row",
            expected="a column of users and a column of items, separated by , ; | or tabs",
            got=", ".join(names) or "lists, structs or maps",
            fix="write one row for each user and item, in two columns",
        )
    for role, name in given.items():
        if name not in names:
            raise DataError(
                f"{path} has no column {name!r}",
                expected=f"one of {', '.join(map(repr, names))}",
                got=f"--{role} {name}",
                fix=did_you_mean(name, names)
                if telling
                else "the first line is a row: use column positions, such as --user 1 --item 2; if"
                " it has names, add --header",
            )
        if list(given.values()).count(name) > 1:
            raise DataError(
                f"column {name!r} has two roles",
                expected="different columns for users, items, ratings and times",
                got=" ".join(f"--{role} {name}" for role, name in given.items()),
                fix="give each role a column of its own",
            )


def _frame(
    path: Path, layout: TableLayout, names: list[str], given: Mapping[str, str], form: str | None
) -> Columns:
    """Read the columns that may have a role: if users and items are known by name, only columns
    named like a role or with times in the first rows, so that prices and texts are not read.
    Possible ids are read as text, so that "007" does not become 7."""
    named = {role: by.surest_first(names) for role, by in _ROLES.items()}
    ids = [name for role, name in given.items() if role in ("user", "item")]
    numbers = [name for role, name in given.items() if role not in ("user", "item")]
    numbers = {*numbers, *named["rating"], *named["time"]} - {*ids}
    kinds = {name: None if name in numbers else str for name in names}
    certain = all(role in given or named[role] for role in ("user", "item"))
    if layout.names == "first line" and certain:
        first = read_table(path, replace(layout, columns=kinds), _FIRST_ROWS)
        possible = {*given.values()}.union(*named.values())
        possible |= {n for n in names if _look_like_times(typed(first[n]), form)}
        kinds = {name: kind for name, kind in kinds.items() if name in possible}
    return read_table(path, replace(layout, columns=kinds))


def _assigned(
    path: Path,
    frame: Columns,
    given: Mapping[str, str],
    roles: Sequence[str],
    telling: bool,
    form: str | None,
) -> tuple[dict[str, str], dict[str, str], dict[str, tuple[str, ...]]]:
    """Assign columns to roles: given ones, then by names, values and order.

    Args:
        path: of the table, for errors.
        frame: its columns.
        given: known columns by role.
        roles: that columns may have.
        telling: whether the names may tell what columns hold.
        form: of dates.

    Returns:
        By role the column, the reason, and other columns with a name of that role.

    Raises:
        DataError: users or items are ambiguous, or no column has times of the given format.
    """
    columns = dict(given)
    reasons = dict.fromkeys(given, "as given")
    rivals: dict[str, tuple[str, ...]] = {}
    values = {name: typed(column) for name, column in frame.items()}

    def free() -> list[str]:
        return [name for name in frame if name not in columns.values()]

    def assign(role: str, name: str, reason: str) -> None:
        columns[role] = name
        reasons[role] = reason

    for role in () if telling else ("user", "item"):
        if role not in columns and free():
            assign(role, free()[0], "by its place")
    for role in roles:
        named = _ROLES[role].surest_first(free()) if role not in columns else []
        fitting = [name for name in named if _ROLES[role].fits(values[name], form)]
        if fitting:
            assign(role, fitting[0], "by its name")
            rivals[role] = tuple(fitting[1:])
    looks = {"time": _look_like_times} | ({} if telling else {"rating": _look_like_ratings})
    for role, test in looks.items():
        missing = [id_role for id_role in ("user", "item") if id_role not in columns]
        alike = [name for name in free() if test(values[name], form)]
        if role not in columns and role in roles and len(alike) == 1 and len(free()) > len(missing):
            assign(role, alike[0], f"its values look like {role}s")
    missing = [role for role in ("user", "item") if role not in columns]
    ids = [n for n in free() if len(free()) <= 2 or _are_ids(frame[n], values[n])]
    if missing and len(ids) != len(missing):
        raise DataError(
            f"cannot tell which column of {path} holds the {missing[0]}s",
            expected="names such as user_id and item_id",
            got=f"columns {', '.join(map(repr, frame))}",
            fix="add " + " ".join(f"--{role} COLUMN" for role in missing),
        )
    for role, name in zip(missing, ids, strict=False):
        assign(role, name, "the only column of ids left" if len(ids) == 1 else "by its place")
    if form is not None and "time" not in columns:
        raise DataError(
            f"{path} has no column of times in the format {form!r}",
            expected="the format of all dates of a column, such as '%m/%d/%Y %H:%M'",
            got=form,
            fix="correct --time-format, and name the column with --time",
        )
    return columns, reasons, rivals


def _are_ids(texts: pd.Series, values: pd.Series) -> bool:
    """True if values repeat and none has decimals, as prices do."""
    if not 1 < texts.nunique() < len(texts):
        return False
    return not pd.api.types.is_float_dtype(values) or bool((values.dropna() % 1 == 0).all())


def _scale(ratings: np.ndarray) -> tuple[float, float]:
    """Lowest and highest rating, without rare outliers (typing errors and codes such as -99) beyond
    a gap wider than the range of all others."""
    values = np.unique(ratings)
    low = np.quantile(ratings, _RARE, method="lower")
    high = np.quantile(ratings, 1 - _RARE, method="higher")
    if low == high:  # nearly all are equal: the rare ones are the other end of the scale
        return float(values[0]), float(values[-1])
    bottom, top = (
        ends[np.argmax(np.append(np.abs(np.diff(ends)) > high - low, True))]
        for ends in (values[values <= low][::-1], values[values >= high])
    )
    return float(bottom), float(top)
