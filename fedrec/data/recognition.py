# SPDX-License-Identifier: Apache-2.0
"""Recognition of the columns of a table, and of the separator and names in its first lines."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedrec.data.interactions import Interactions
from fedrec.data.readers.table import (
    ROLES,
    Table,
    TableConfig,
    dates_of,
    numbers_of,
    repeated_rows,
    typed,
)
from fedrec.data.tables import Columns, OwnLayout, first_rows, format_of, read_table, table_start
from fedrec.errors import DataError
from fedrec.runtime.ragged import distinct

_SEPARATORS = (",", "\t", ";", "|", "::", " ")
_DATE = r"\d{4}-\d{2}|\d{1,2}\.\d{1,2}\.\d{4}"
_VALUE = rf"\s*(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\s*|(?:{_DATE}).*)"


def _layout(path: Path, config: TableConfig) -> OwnLayout:
    """Determine the layout of a table: the separator that splits the first row into most values,
    consistently with the next rows (spaces only if no other fits); and whether the first line has
    names, as it has if one of them names a role, or the line does not look like a row.

    Raises:
        DataError: the file is not readable.
    """
    if format_of(path) != "text":
        return OwnLayout({})

    def fit(layout: OwnLayout) -> tuple[bool, bool, int, int]:
        above, rows = first_rows(path, layout)
        width = len(rows[0]) if rows else 0
        alike = 2 * sum(len(row) == width for row in rows) > len(rows)
        return width > 1 and layout.separator != " ", alike, width, -above

    given = config.model_fields_set
    separators = (config.separator,) if "separator" in given else _SEPARATORS
    layout = max((OwnLayout({}, separator=text) for text in separators), key=fit)
    header = config.header
    if "header" not in given:
        names = table_start(path, layout).names
        named = any(_surest_first(role, names) for role in _ROLES)
        header = named or not _is_row(path, layout, names)
    return layout if header else replace(layout, names="positions")


def _is_row(path: Path, layout: OwnLayout, first: list[str]) -> bool:
    """True if the first line of a user's own table has values. Then all of them are numbers or
    dates; or a number or a date stands above such values, or a text above itself, and no text above
    numbers or dates.
    """
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


_IDS = ("user", "item")
_RARE = 0.01  # share of the rows that may be beyond the scale of ratings
_SCALE = 21  # most distinct values of a rating scale: 0 to 10 in halves
_SCALES = (5.0, 10.0)  # best ratings of the usual scales, for columns without a name
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
    if form is None and (some.empty or not some.str.match(_DATE).all()):
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


def _surest_first(role: str, names: Sequence[str]) -> list[str]:
    """Columns with a name of a role, the surest first."""
    ranks = {name: rank for rank, name in reversed([*enumerate(_ROLES[role].names.split())])}
    return sorted((n for n in names if _plain(n) in ranks), key=lambda n: ranks[_plain(n)])


def _plain(name: str) -> str:
    """Normalise a name: lower-case letters without accents, spaces, digits and signs."""
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", name.lower()))


class _RoleColumn(NamedTuple):
    """The column of a role.

    Attributes:
        column: its name.
        reason: why it was chosen.
        rivals: other columns with a name of that role, which fit as well.
    """

    column: str
    reason: str
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Recognised:
    """Recognised columns of a table.

    Attributes:
        config: settings that read the table.
        roles: the column of each role; `rating` and `time` only if there is one.
        ignored: columns without a role.
        unfit: role -> column named like ratings or times whose values cannot be read as such, if no
            column has the role.
        scale: lowest and highest rating, without rare ones far from all others; None without
            ratings.
        beyond: number of rows with a rating outside the scale.
        positive_above: a row is positive when its rating is above this; None: every row is, as
            there are no ratings or they are all the same.
        liked: number of positive rows.
        data: the rows of the table.
        items_of: `int64 [users]`, number of different items of each user.
        users_of: `int64 [items]`, number of different users of each item.
    """

    config: TableConfig
    roles: dict[str, _RoleColumn]
    ignored: tuple[str, ...]
    unfit: dict[str, str]
    scale: tuple[float, float] | None
    beyond: int
    positive_above: float | None
    liked: int
    data: Interactions
    items_of: np.ndarray
    users_of: np.ndarray

    def lines(self) -> list[str]:
        """Describe the result, one statement per line."""
        lines = [self._size()]
        if repeated := repeated_rows(self.data):
            lines.append(repeated)
        if not self.config.header:
            lines.append(
                "the first line is a row: columns are named 1, 2, and so on, and the users come"
                " first"
            )
        for role, (column, reason, rivals) in self.roles.items():
            about = reason + "".join(f"; {name!r} also fits: --{role} {name}" for name in rivals)
            about += self._scaled() if role == "rating" else ""
            used = _TIMES_USED if role == "time" else ""
            lines.append(f"{role}: column {column!r} ({about}){used}")
        lines += [f"no column of {role}s" for role in ROLES if role not in self.roles]
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
            for number, word in (
                (len(self.data), "row"),
                (self.data.num_users, "user"),
                (self.data.num_items, "item"),
            )
        )
        if self.positive_above is None:
            return f"{counts}; every row counts as liked"
        return (
            f"{counts}; the {self.liked:,} rows with a rating above {self.positive_above:g} in"
            f" column {self.roles['rating'].column!r} count as liked (with --no-rating every row"
            " does)"
        )


def recognise(
    path: Path,
    given: Mapping[str, Any] | None = None,
    *,
    rated: bool = True,
    positive_above: float | None = None,
) -> Recognised:
    """Recognise the columns of a table of interactions.

    Args:
        path: a CSV, Parquet or JSON file. If its first line is a row, or all names are numbers or
            dates, the first two columns that are not given hold the users and the items.
        given: settings of the dataset `table`, such as known columns; the others are recognised.
        rated: whether a column may be taken for ratings; otherwise every row counts as liked.
        positive_above: a row is positive when its rating is above this; None: the middle of the
            scale of the ratings, which is from the lowest to the highest, but for the lowest
            and highest hundredth of the rows where these are farther away than the others are wide.

    Raises:
        DataError: the file or an id is missing, a named column is missing or duplicate, a rating
            or a time is wrong, or the user and item columns are ambiguous.
        ExperimentError: a setting is wrong.
    """
    config = TableConfig.parse({**(given or {}), "path": path.resolve()}, at="dataset")
    possible = tuple(role for role in ROLES if rated or role != "rating")
    given_roles = config.model_fields_set
    known = {role: name for role, name in config.columns.items() if role in given_roles}
    features = {*config.user_features, *config.item_features, *config.item_texts}
    features -= {*known.values()}
    layout = _layout(path, config)
    start = table_start(path, layout)
    # a column without a name cannot be given by the user
    nested = start.nested.keys() - features  # refused as features
    names = [name for name in start.names if name and name not in nested]
    telling = layout.names == "first line" and not _are_values(start.names).all()
    if len(names) < 2:
        raise DataError(
            f"{path} has one column" if names else f"{path} has no column with one value per row",
            expected="a column of users and a column of items, separated by , ; | or tabs",
            got=", ".join(names) or "lists, structs or maps",
            fix="write one row for each user and item, in two columns",
        )
    form = config.time_format
    frame = _frame(path, layout, names, known, features & {*names}, form)
    free = {name: column for name, column in frame.items() if name not in features}
    roles = _assigned(path, free, known, possible, telling, form)
    columns = {role: choice.column for role, choice in roles.items()}
    scale = None
    beyond = 0
    liked = None
    if "rating" in columns:
        fix = ", or --no-rating: every row counts as liked"
        ratings = numbers_of(frame[columns["rating"]], path, fix)
        scale = low, high = _scale(ratings)
        beyond = int(((ratings < low) | (ratings > high)).sum())
        if positive_above is None and low < high:
            positive_above = (low + high) / 2
        if positive_above is not None:
            liked = int((ratings.astype(np.float32) > positive_above).sum())
    read = {role: columns.get(role) for role in ROLES}
    if liked is None:
        positive_above = read["rating"] = None
    header = layout.names == "first line"
    config = config.model_copy(update={"separator": layout.separator, "header": header, **read})
    data = Table(Table.name, config).interactions(frame)
    pairs = distinct(data.pairs)
    ignored = [name for name in start.names if name not in {*columns.values(), *features}]
    usable = [name for name in ignored if name in names]
    named = {role: _surest_first(role, usable) for role in possible if role not in roles}
    return Recognised(
        config=config,
        roles={role: roles[role] for role in ROLES if role in roles},
        ignored=tuple(ignored),
        unfit={role: by_name[0] for role, by_name in named.items() if by_name},
        scale=scale,
        beyond=beyond,
        positive_above=positive_above,
        liked=len(data) if liked is None else liked,
        data=data,
        items_of=np.bincount(pairs // data.num_items, minlength=data.num_users),
        users_of=np.bincount(pairs % data.num_items, minlength=data.num_items),
    )


def _frame(
    path: Path,
    layout: OwnLayout,
    names: list[str],
    given: Mapping[str, str],
    features: set[str],
    form: str | None,
) -> Columns:
    """Read the features, and the columns that may have a role: if users and items are known by
    name, only columns named like a role or with times in the first rows, so that other prices and
    texts are not read. Possible ids are read as text, so that "007" does not become 7.

    Raises:
        DataError: a given column is missing.
    """
    named = {role: _surest_first(role, names) for role in _ROLES}
    ids = {name for role, name in given.items() if role in _IDS}
    numbers = {*given.values(), *named["rating"], *named["time"]} - ids - features
    kinds = {name: None if name in numbers else str for name in (*names, *given.values())}
    layout = replace(layout, settings={name: f"--{role}" for role, name in given.items()})
    if layout.names == "first line" and all(role in given or named[role] for role in _IDS):
        first = read_table(path, replace(layout, columns=kinds), _FIRST_ROWS)
        possible = features.union(given.values(), *named.values())
        possible |= {n for n in names if _look_like_times(typed(first[n]), form)}
        kinds = {name: kind for name, kind in kinds.items() if name in possible}
    return read_table(path, replace(layout, columns=kinds))


def _assigned(
    path: Path,
    frame: Columns,
    given: Mapping[str, str],
    possible: Sequence[str],
    telling: bool,
    form: str | None,
) -> dict[str, _RoleColumn]:
    """Assign columns to roles: given ones, then by names, values and order.

    Args:
        path: of the table, for errors.
        frame: its columns.
        given: known columns by role.
        possible: roles that columns may have.
        telling: whether the names may tell what columns hold.
        form: of dates.

    Raises:
        DataError: users or items are ambiguous, or no column has times of the given format.
    """
    roles = {role: _RoleColumn(name, "as given") for role, name in given.items()}
    values = {name: typed(column) for name, column in frame.items()}

    def free() -> list[str]:
        taken = {choice.column for choice in roles.values()}
        return [name for name in frame if name not in taken]

    def missing() -> list[str]:
        return [role for role in _IDS if role not in roles]

    for role in () if telling else missing():
        if free():
            roles[role] = _RoleColumn(free()[0], "by its place")
    for role in possible:
        named = [] if role in roles else _surest_first(role, free())
        fitting = [name for name in named if _ROLES[role].fits(values[name], form)]
        if fitting:
            roles[role] = _RoleColumn(fitting[0], "by its name", tuple(fitting[1:]))
    looks = {"time": _look_like_times} | ({} if telling else {"rating": _look_like_ratings})
    for role in [role for role in looks if role in possible and role not in roles]:
        alike = [name for name in free() if looks[role](values[name], form)]
        if len(alike) == 1 and len(free()) > len(missing()):
            roles[role] = _RoleColumn(alike[0], f"its values look like {role}s")
    ids = [n for n in free() if len(free()) <= 2 or _are_ids(frame[n], values[n])]
    if missing() and len(ids) != len(missing()):
        raise DataError(
            f"cannot tell which column of {path} holds the {missing()[0]}s",
            expected="names such as user_id and item_id",
            got=f"columns {', '.join(map(repr, frame))}",
            fix="add " + " ".join(f"--{role} COLUMN" for role in missing()),
        )
    reason = "the only column of ids left" if len(ids) == 1 else "by its place"
    roles |= {role: _RoleColumn(name, reason) for role, name in zip(missing(), ids, strict=False)}
    if form is not None and "time" not in roles:
        raise DataError(
            f"{path} has no column of times in the format {form!r}",
            expected="the format of all dates of a column, such as '%m/%d/%Y %H:%M'",
            got=form,
            fix="correct --time-format, and name the column with --time",
        )
    return roles


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
