# SPDX-License-Identifier: Apache-2.0
"""A published dataset: its source and statistics, and checks that a copy is the published one.

Damaged copies of well-known datasets circulate (lines added, files cut in the middle), and results
on them are not comparable. So a reader rejects copies whose lines are incomplete or whose counts or
checksum differ, unless the user switches verification off.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedrec.data.interactions import Interactions
from fedrec.errors import DataError

_BLOCK = 1 << 24


@dataclass(frozen=True)
class Archive:
    """One file to download.

    Attributes:
        url: its public address.
        size: bytes.
        sha256: hexadecimal digest of the whole file.
    """

    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class DatasetSource:
    """A published dataset.

    Attributes:
        page: web page with licence and description.
        licence: permitted use, in one sentence.
        files: names of the files that the reader needs, relative to the dataset's folder.
        extras: names or patterns (`*`) of optional files: features, folds, other forms.
        archives: what `fedrec data fetch` downloads; empty when the publisher offers no direct,
            stable download.
        users, items, rows: published counts, checked after every read; None if not published.
        fingerprints: accepted values of `Interactions.fingerprint()`; empty when none is known.
    """

    page: str
    licence: str
    files: tuple[str, ...]
    extras: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()
    users: int | None = None
    items: int | None = None
    rows: int | None = None
    fingerprints: tuple[str, ...] = ()


def require_match(interactions: Interactions, source: DatasetSource) -> None:
    """Check counts first, because they are more informative, then the checksum.

    Raises:
        DataError: the number of rows, users or items, or the fingerprint, is not the published one.
    """
    for what, got in (
        ("rows", len(interactions)),
        ("users", interactions.num_users),
        ("items", interactions.num_items),
    ):
        expected = getattr(source, what)
        if expected is not None and got != expected:
            raise _other(
                interactions,
                source,
                f"the number of {what} differs",
                (f"{expected:,} {what}", f"{got:,} {what}"),
            )
    found = interactions.fingerprint() if source.fingerprints else ""
    if source.fingerprints and found not in source.fingerprints:
        expected = "fingerprint " + " or ".join(source.fingerprints)
        what = "a user, an item or a rating was changed"
        raise _other(interactions, source, what, (expected, f"fingerprint {found}"))


def _other(
    interactions: Interactions, source: DatasetSource, what: str, pair: tuple[str, str]
) -> DataError:
    return DataError(
        f"{interactions.name}: the data are not the published ones, {what}",
        expected=pair[0],
        got=pair[1],
        fix=f"take the data from {source.page} again, or set dataset.verify = false for a"
        " deliberately changed copy",
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
