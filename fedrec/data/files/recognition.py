# SPDX-License-Identifier: Apache-2.0
"""Recognises the user, item, rating and time columns of a table, by their names, then by their
contents. The result and its reasons are printed, and each column can be named explicitly.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.parquet import PARQUET, nested_columns
from fedrec.data.files.recognised import ROLES, Recognised
from fedrec.data.files.tables import dates_of, ids_of, numbers_of, read_columns, table_columns
from fedrec.errors import DataError

_NAMES = {
    "user": "kunde kundennr kundennummer nutzer benutzer "
    "user users userid uid u customer customerid client clientid buyer buyerid member "
    "memberid visitor visitorid person reviewer reviewerid account accountid session "
    "sessionid author",
    "item": "artikel artikelnr artikelnummer produkt "
    "item items itemid iid i product productid movie movieid film book bookid isbn track "
    "trackid song songid artist artistid asin sku article articleid place placeid poi venue "
    "venueid location locationid game gameid app appid parentasin content contentid stockcode url",
    "rating": "rating ratings rate score stars star overall reviewoverall bookrating grade "
    "userrating reviewrating ratingscore reviewscore bewertung bewertungen sterne wertung "
    "valoracion calificacion puntuacion etoiles voto valutazione avaliacao",
    "time": "time timestamp ts date datetime day unixreviewtime reviewtime created createdat "
    "ratedat when eventtime orderdate invoicedate purchasedate timestampms "
    "datum zeit zeitpunkt bestelldatum kaufdatum",
}
_CONVERSIONS = {
    b"PK": "spreadsheets and zip archives are not read: export the table as CSV, or unpack it",
    b"\x1f\x8b": "unpack it: gunzip FILE",
    b"PAR1": "a Parquet file needs the ending .parquet",
}
"""First bytes of other files, and what to do with these."""
_SEPARATORS = (",", "\t", ";", "|")
_DATE = r"\d{4}-\d{2}|\d{1,2}\.\d{1,2}\.\d{4}"
_VALUE = rf"-?\d+(\.\d+)?|({_DATE}).*"  # numbers and dates are values, not names
_SCALE = 21  # most distinct values of a rating scale: 0 to 10 in halves
_TOP = 100.0
_SCALES = (5.0, 10.0)  # best ratings of the usual scales, for columns without a name
_FIRST_TIME = 3e8  # seconds since 1970; earlier times than 1979 are more likely to be counts


def recognise(
    path: Path, given: Mapping[str, str] | None = None, *, rated: bool = True
) -> Recognised:
    """Recognise the columns of a table of interactions.

    Args:
        path: a CSV or Parquet file. If all values of the first line are numbers or dates, it is a
            row, and the first two columns that are not `given` hold the users and the items.
        given: by role (`user`, `item`, `rating`, `time`), the columns that are known.
        rated: whether a column may be taken for ratings; otherwise every row counts as liked.

    Raises:
        DataError: there is no such file, an id is missing, a named column is missing, named twice
            or, for ratings, without a number in a row, or the user and item columns are
            ambiguous.
    """
    if not path.is_file():
        raise DataError(
            "there is no table",
            expected="a CSV or Parquet file",
            got=f"{path}, which is {_what(path)}",
            fix="give the path of a file with one interaction per row",
        )
    given = given or {}
    separator = _separator(path)
    names = table_columns(path, separator=separator)
    header = not all(re.fullmatch(_VALUE, name.strip()) for name in names)
    nested = nested_columns(path) if path.suffix in PARQUET else []
    names = [
        name
        for name in table_columns(path, separator=separator, header=header)
        if name not in nested
    ]
    _require_two(path, names)
    frame = read_columns(
        path,
        {name: "--data" for name in names},
        separator=separator,
        inferred=names,
        header=header,
    )
    roles = tuple(role for role in ROLES if rated or role != "rating")
    columns, reasons = _assigned(path, names, frame, given, roles, header=header)
    rating = columns.get("rating")
    if "rating" in given:
        numbers_of(frame[given["rating"]], path)
    threshold = None if rating is None else _threshold(frame[rating])
    users, items = (_codes(frame[columns[role]], path) for role in ("user", "item"))
    pairs = np.unique(users * (items.max() + 1) + items)
    rows = len(users)
    return Recognised(
        separator=separator,
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
        ignored=tuple(name for name in [*names, *nested] if name not in columns.values()),
        unfit=_unfit(names, columns, roles),
        header=header,
    )


def _codes(column: pd.Series, path: Path) -> np.ndarray:
    codes = pd.factorize(column)[0].astype(np.int64)
    if (codes < 0).any():
        ids_of(column, path)  # raises the error that names the row
    return codes


def _at_least_twice(numbers: np.ndarray) -> int:
    return int((np.unique(numbers, return_counts=True)[1] > 1).sum())


def _assigned(
    path: Path,
    names: list[str],
    frame: Mapping[str, pd.Series],
    given: Mapping[str, str],
    roles: Sequence[str],
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
                fix=f"give the name of the column of {role}s",
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
                if role in ("rating", "time") and not _fits(role, frame[name]):
                    continue
                columns[role] = name
                reasons[role] = "by its name"
    for role in ("time",) if header else (role for role in ("time", "rating") if role in roles):
        left = [name for name in names if name not in columns.values()]
        found = [name for name in left if role not in columns and _looks(role, frame[name])]
        if len(found) == 1 and len(left) > 2 - len({"user", "item"} & set(columns)):
            columns[role] = found[0]
            reasons[role] = f"its values look like {role}s"
    _by_content(path, names, frame, columns, reasons)
    return columns, reasons


def _by_content(
    path: Path,
    names: list[str],
    frame: Mapping[str, pd.Series],
    columns: dict[str, str],
    reasons: dict[str, str],
) -> None:
    """Users or items among the remaining columns: the only one, or the first of two."""
    left = [name for name in names if name not in columns.values()]
    ids = [
        name
        for name in left
        if len(left) <= 2 or (1 < frame[name].nunique() < len(frame[name]) and _whole(frame[name]))
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


def _what(path: Path) -> str:
    """What a path that is not that of a file leads to."""
    if path.is_dir():
        return "a folder"
    return "a pipe or a device, which can be read once only" if path.exists() else "not there"


def _separator(path: Path) -> str:
    """The character that separates the first line into most columns."""
    if path.suffix in PARQUET:
        return ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
        counts = {one: len(next(csv.reader([first], delimiter=one), [])) for one in _SEPARATORS}
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} is not UTF-8 text",
            expected="a CSV file in UTF-8, or a Parquet file",
            got=str(error),
            fix=_conversion(path),
        ) from None
    return max(_SEPARATORS, key=lambda one: counts[one])


def _conversion(path: Path) -> str:
    """How a file that is not text becomes a table, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(4)
    known = (fix for first, fix in _CONVERSIONS.items() if start.startswith(first))
    return next(known, "save it as UTF-8, such as by: iconv -f LATIN1 -t UTF-8 FILE > NEW-FILE")


def _require_two(path: Path, names: list[str]) -> None:
    """The error for a table with fewer than two columns."""
    if len(names) < 2:
        raise DataError(
            f"{path} has one column" if names else f"{path} has no column with one value per row",
            expected="a column of users and a column of items, separated by , ; | or tabs",
            got=", ".join(names) or "lists, structs or maps",
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
    return re.sub(r"[^a-z]", "", name.lower()) in _NAMES[role].split()


def _fits(role: str, column: pd.Series) -> bool:
    """Whether a column with that name can be read in that role."""
    numeric = pd.api.types.is_numeric_dtype(column) and bool(
        np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan)).all()
    )
    return numeric or (role == "time" and _dates(column))


def _looks(role: str, column: pd.Series) -> bool:
    """Whether a column without a known name holds times or, where no column has a name, ratings: a
    usual scale in steps of a half at least. Small numbers in a column with another name are more
    likely to be quantities."""
    if role == "rating":
        if not _fits(role, column) or _threshold(column) is None:
            return False
        return float(column.max()) in _SCALES and bool((column.astype(float) * 2 % 1 == 0).all())
    if pd.api.types.is_numeric_dtype(column):
        return not column.isna().any() and float(column.min()) > _FIRST_TIME
    return _dates(column)


def _dates(column: pd.Series) -> bool:
    if pd.api.types.is_datetime64_any_dtype(column):
        return True
    some = column.dropna().head(1000).astype(str)
    if some.empty or not some.str.match(_DATE).all():
        return False
    return bool(dates_of(some).notna().all())


def _whole(column: pd.Series) -> bool:
    """Whether no value of a column has decimals: prices have them, ids do not."""
    return not pd.api.types.is_float_dtype(column) or bool((column.dropna() % 1 == 0).all())


def _threshold(ratings: pd.Series) -> float | None:
    """The middle of a rating scale; None if the values are not ratings but constant, counts or
    prices."""
    values = np.unique(ratings.to_numpy(dtype=np.float64))
    if not 1 < len(values) <= _SCALE or values[0] < -_TOP or values[-1] > _TOP:
        return None
    return float((values[0] + values[-1]) / 2)
