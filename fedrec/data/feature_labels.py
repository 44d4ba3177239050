# SPDX-License-Identifier: Apache-2.0
"""Categories from the values of a column: a list of several, a number, or one label.

Numbers such as prices, of which nearly every item has one of its own, would be as many categories.
They are put in bands between 1, 2 and 5 times a power of ten. These do not depend on the data, so a
device that has a few rows finds the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from decimal import Decimal, InvalidOperation

from fedrec.data.features import Feature

SEVERAL = "|"
"""Separates several values in one field; ";" is recognised, too."""
_OTHER = ";"
_FEW = 20  # numbers up to which each is a category, such as the years that begin age groups
_BANDS = ((5, 10), (2, 5), (1, 2))


def labelled(name: str, values: Sequence[str | None]) -> tuple[Feature, str]:
    """The feature of a column.

    Args:
        name: of the feature.
        values: of each user or item, `[rows]`; None: nothing is known.

    Returns:
        The feature, and what its values were taken for; empty if each is one category of several
        rows.
    """
    rows = [[] if value is None else _parts(value) for value in values]
    parts = [part for row in rows for part in row]
    lists = sum(len(row) > 1 for row in rows)
    if not lists and _are_amounts(parts):
        bands = {part: band(part) or part for part in set(parts)}
        feature = Feature.multiple(name, [[bands[part] for part in row] for row in rows])
        return (
            feature,
            f"{len(set(parts)):,} numbers in {len(feature.categories):,} bands",
        )
    feature = Feature.multiple(name, rows)
    categories = len(feature.categories)
    if lists:
        return feature, f"lists of {categories:,} categories"
    if categories > max(_FEW, len(parts) / 2):
        return (
            feature,
            f"{categories:,} categories of {len(parts):,} values (texts: dataset.item-texts)",
        )
    return feature, ""


def known_labels(value: str, categories: Collection[str]) -> tuple[list[str], list[str]]:
    """The categories in a value that was written elsewhere, and what is none."""
    known: list[str] = []
    unknown: list[str] = []
    for piece in value.split(SEVERAL):
        for part in [piece] if piece in categories else _parts(piece):
            label = part if part in categories else band(part)
            (known if label in categories else unknown).append(
                label if label in categories else part
            )
    return known, unknown


def band(text: str) -> str | None:
    """The band of a number, such as "20 to 50"; None for other texts."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    if not number:
        return "0"
    low, high = next(ends for ends in _BANDS if number.as_tuple().digits[0] >= ends[0])
    sign = "-" if number < 0 else ""
    power = Decimal(10) ** number.adjusted()
    return f"{sign}{float(low * power):g} to {sign}{float(high * power):g}"


def _parts(value: str) -> list[str]:
    pieces = value.replace(_OTHER, SEVERAL).split(SEVERAL)
    return list(dict.fromkeys(piece.strip() for piece in pieces if piece.strip()))


def _are_amounts(parts: Sequence[str]) -> bool:
    """True if most values are numbers, and too many different ones for categories: with decimals,
    or more than half as many as values."""
    several = {part for part in set(parts) if band(part) is not None}
    if len(several) <= _FEW or 2 * sum(part in several for part in parts) <= len(parts):
        return False
    whole = all(number.lstrip("-").isdecimal() for number in several)
    return not whole or 2 * len(several) > len(parts)
