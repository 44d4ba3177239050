# SPDX-License-Identifier: Apache-2.0
"""Source and published statistics of a public dataset."""

from __future__ import annotations

from dataclasses import dataclass


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
class Source:
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
