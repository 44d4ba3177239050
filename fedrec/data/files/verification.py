# SPDX-License-Identifier: Apache-2.0
"""Checks that a copy of a dataset is the published one: complete lines, counts, checksum.

Damaged copies of well-known datasets circulate (lines added, files cut in the middle), and results
on them are not comparable. So a reader rejects copies that differ, unless the user switches
verification off.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedrec.data.files.source import Source
from fedrec.data.interactions import Interactions
from fedrec.errors import DataError

_FIX = (
    "take the data from {page} again, or set dataset.verify = false for a deliberately changed copy"
)
_BLOCK = 1 << 24


def require_match(interactions: Interactions, source: Source) -> None:
    """Check counts first, because they are more informative, then the checksum.

    Raises:
        DataError: the number of rows, users or items, or the fingerprint, is not the published one.
    """
    counts = {
        "rows": len(interactions),
        "users": interactions.num_users,
        "items": interactions.num_items,
    }
    for what, got in counts.items():
        expected = getattr(source, what)
        if expected is not None and got != expected:
            raise DataError(
                f"{interactions.name}: the data are not the published ones, the number of {what}"
                " differs",
                expected=f"{expected:,} {what}",
                got=f"{got:,} {what}",
                fix=_FIX.format(page=source.page),
            )
    _require_fingerprint(interactions, source)


def _require_fingerprint(interactions: Interactions, source: Source) -> None:
    if not source.fingerprints:
        return
    got = interactions.fingerprint()
    if got not in source.fingerprints:
        raise DataError(
            f"{interactions.name}: the data are not the published ones, a user, an item or a rating"
            " was changed",
            expected="fingerprint " + " or ".join(source.fingerprints),
            got=f"fingerprint {got}",
            fix=_FIX.format(page=source.page),
        )


def require_complete_lines(path: Path, published: int | None = None) -> None:
    """Check that the last line of a text file is complete; `published` is the expected number of
    lines.

    Raises:
        DataError: the file is empty or does not end with a line end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - 200, 0), os.SEEK_SET)
        tail = file.read()
    if tail.endswith((b"\n", b"\r")):
        return
    last = tail.replace(b"\r", b"\n").rsplit(b"\n", 1)[-1].decode("latin-1")
    raise DataError(
        f"{path} is cut off in the middle of a line",
        expected=(
            "a line end after the last line" if published is None else f"{published:,} whole lines"
        ),
        got=f"{count_lines(path):,} lines, the last one: {last!r}" if size else "an empty file",
        fix="get the file again, or set dataset.verify = false if this is how it is meant to end",
    )


def count_lines(path: Path) -> int:
    """Number of lines of a file; a last line without a line end counts."""
    lines = 0
    last = b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            lines = lines + block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")
