# SPDX-License-Identifier: Apache-2.0
"""Whether the ids of a text file can be read as numbers without a loss: 7 is the text of a number,
"007", "+7" and "7.0" are not. One look at the bytes takes a tenth of the time that texts take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedrec.runtime.compilation import compiled

_QUOTE, _MINUS, _ZERO, _RETURN, _LINE = b'"-0\r\n'
_MOST_DIGITS = 18  # of a number of 63 bits


def all_plain(
    path: Path, separator: str, columns: Sequence[int], *, header: bool, quoted: bool
) -> bool:
    """Whether some columns have nothing but the decimal texts of whole numbers of at most 63 bits,
    in every line.

    Args:
        path: a text file.
        separator: one character of ASCII.
        columns: the places of the columns, from 0.
        header: whether the first line has names.
        quoted: whether values may stand in double quotes.
    """
    wanted = np.zeros(max(columns) + 1, dtype=bool)
    wanted[list(columns)] = True
    text = np.memmap(path, dtype=np.uint8, mode="r")
    start = 0
    while header and start < len(text) and text[start] != _LINE:
        start += 1
    if header and start == len(text):
        return False  # lines end in another way
    return bool(plain_values(text, start + header, ord(separator), wanted, quoted))


@compiled
def plain_values(text, start, separator, wanted, quoted):
    """The same of bytes `uint8 [n]` from a start, for `wanted` `bool [columns]`."""
    column = digits = size = 0
    first = 0
    inside = closed = minus = other = False
    for place in range(start, len(text) + 1):
        byte = text[place] if place < len(text) else _LINE
        if quoted and byte == _QUOTE and (inside or closed or size == 0):
            other = other or closed  # a quote within quotes
            inside = not inside
            closed = not inside
            size += 1
            continue
        ends = byte == _LINE
        if inside or (byte != separator and not ends):
            if byte == _RETURN and place + 1 < len(text) and text[place + 1] == _LINE:
                continue
            if byte == _MINUS and digits == 0 and not minus:
                minus = True
            elif _ZERO <= byte < _ZERO + 10:
                first = byte if digits == 0 else first
                digits += 1
            else:
                other = True
            size += 1
            continue
        empty_line = ends and column == 0 and size == 0
        if not empty_line and column < len(wanted) and wanted[column]:
            padded = first == _ZERO and (digits > 1 or minus)
            if other or padded or not 0 < digits <= _MOST_DIGITS:
                return False
        if ends and not empty_line and column + 1 < len(wanted):
            return False
        column = 0 if ends else column + 1
        digits = size = 0
        inside = closed = minus = other = False
    return True
