# SPDX-License-Identifier: Apache-2.0
"""Interface of dataset readers, location of raw data, and verification of published datasets.

Damaged copies of well-known datasets circulate (lines added, files cut in the middle), and results
on them are not comparable. So a reader rejects copies whose lines are incomplete or whose counts or
checksum differ, unless the user switches verification off.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd

from fedrec.config import Config
from fedrec.data.catalogue import read_vectors, vector_files
from fedrec.data.columns import index_rows
from fedrec.data.interactions import FeatureNames, Interactions
from fedrec.data.tables import Columns, TableLayout, read_table
from fedrec.errors import DataError, missing_file


@dataclass(frozen=True)
class Archive:
    """A file to download.

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
        folder: name of the dataset's folder in the data directory; empty for the dataset's name.
        archives: what `fedrec data fetch` downloads; empty when the publisher offers no direct,
            stable download.
        users, items, rows: published counts, checked after every read; None if not published.
        fingerprints: accepted values of `Interactions.fingerprint()`; empty when none is known.
    """

    page: str
    licence: str
    files: tuple[str, ...]
    extras: tuple[str, ...] = ()
    folder: str = ""
    archives: tuple[Archive, ...] = ()
    users: int | None = None
    items: int | None = None
    rows: int | None = None
    fingerprints: tuple[str, ...] = ()

    def check(self, interactions: Interactions) -> None:
        """Check the counts, whose errors are more informative, then the checksum.

        Raises:
            DataError: the number of rows, users or items, or the fingerprint, is not the published
                one.
        """
        counts = {
            "rows": len(interactions),
            "users": interactions.num_users,
            "items": interactions.num_items,
        }
        for name, count in counts.items():
            published = getattr(self, name)
            if published not in (None, count):
                values = f"{published:,} {name}", f"{count:,} {name}"
                raise self._changed(interactions, f"the number of {name} differs", *values)
        if (
            self.fingerprints
            and (fingerprint := interactions.fingerprint()) not in self.fingerprints
        ):
            values = " or ".join(self.fingerprints), fingerprint
            what = "a user, an item or a rating was changed"
            raise self._changed(interactions, what, *map("fingerprint {}".format, values))

    def _changed(self, interactions: Interactions, what: str, expected: str, got: str) -> DataError:
        return DataError(
            f"{interactions.name}: the data are not the published ones, {what}",
            expected=expected,
            got=got,
            fix=f"get the data again from {self.page}, or set dataset.verify = false for a"
            " deliberately changed copy",
        )


class ReaderConfig(Config):
    """Settings of all datasets."""

    path: Path | None = None
    """Folder (or file) of the raw data; default: the folder of the dataset's name in the data
    directory."""
    verify: bool = True
    """Whether to reject data whose counts or checksum differ from the published ones; false for a
    deliberately changed copy."""
    item_vectors: tuple[Path, ...] = ()
    """Files of dense vectors of the items, such as embeddings of their texts or images: `.npy`
    beside a `.txt` with the id of each row. Relative paths that are not there are looked up in the
    dataset's folder."""
    items_without_vector: Literal["refuse", "mean"] = "refuse"
    """Items missing in a file of vectors: "refuse" (an error), or "mean" (of the others)."""


class Reader(ABC):
    """Base class of readers: reads a dataset into `Interactions`.

    A built-in has a `name` and lives in `fedrec/data/readers/`, its configuration class above
    it.

    Attributes:
        title: the dataset in a few words, with its size.
        source: its origin and published statistics; None for generated data and for a user's own
            table.
        features: names of the side features that `read` returns for any settings; None: not stated.
    """

    Config: ClassVar[type[ReaderConfig]] = ReaderConfig
    title: ClassVar[str] = ""
    source: ClassVar[DatasetSource | None] = None
    features: ClassVar[FeatureNames | None] = None

    def __init__(self, name: str, config: ReaderConfig) -> None:
        self.name = name
        self.config = config

    @abstractmethod
    def read(self) -> Interactions:
        """Read and verify the dataset.

        Raises:
            DataError: it is missing, damaged, or not in its documented format.
        """

    def feature_names(self) -> FeatureNames | None:
        """Return the names of the side features that `read` returns, without reading rows; None:
        not stated."""
        return self.features

    def undeclared_categories(self) -> tuple[str, ...]:
        """Names of users' features whose categories are collected from the rows, neither declared
        nor published with the dataset; none by default. Models have a row for each category, which
        reveals that some user is in it."""
        return ()

    def files(self) -> list[Path]:
        """Existing files of the raw data, down to its subfolders, and those of item vectors; the
        next run of a process checks them for changes."""
        path = self.config.path or self.default_folder()
        below = sorted(file for depth in ("*", "*/*") for file in path.glob(depth))
        vectors = (file for vector in self._vectors() for file in vector_files(vector))
        return [*filter(Path.is_file, [path, *below]), *vectors]

    def described(self, interactions: Interactions) -> Interactions:
        """Add the vectors of items that the settings name to interactions.

        Raises:
            DataError: see `read_vectors`.
        """
        config = self.config
        if not config.item_vectors:
            return interactions
        complete = config.items_without_vector == "refuse"
        ids = interactions.item_ids
        vectors = (read_vectors(path, ids, complete=complete) for path in self._vectors())
        table = replace(interactions.item_features, vectors=tuple(vectors))
        return replace(interactions, item_features=table)

    def stated_features(self) -> FeatureNames | None:
        """`feature_names` with the names of item vectors."""
        names = self.feature_names()
        vectors = tuple(path.stem for path in self.config.item_vectors)
        return None if names is None else names._replace(item_vectors=vectors)

    def _vectors(self) -> list[Path]:
        """The files of vectors, those of relative paths here or in the dataset's folder."""
        folder = self.config.path or self.default_folder()
        return [
            path if path.is_absolute() or path.exists() else folder / path
            for path in self.config.item_vectors
        ]

    def default_folder(self) -> Path:
        """Default path of the raw data."""
        return data_directory() / ((self.source and self.source.folder) or self.name)

    def folder(self) -> Path:
        """Return the folder (or file) with the raw data.

        Raises:
            DataError: it does not exist.
        """
        path = self.config.path or self.default_folder()
        if not path.exists():
            offered = self.source is not None and self.source.archives
            raise DataError(
                f"dataset {self.name!r} not found in {path}",
                fix=(f"fedrec data fetch {self.name}, or " if offered else "")
                + f"fedrec data import {self.name} PATH, or set dataset.path, or set FEDREC_DATA to"
                " its parent folder",
            )
        return path

    def file(self, name: str) -> Path:
        """Return the path of a raw data file.

        Raises:
            DataError: it is missing, or (unless verification is off) its last line is cut.
        """
        path = self.folder() / name
        if not path.is_file():
            fix = f"complete the folder {path.parent}, or fedrec data import {self.name} PATH"
            raise missing_file(f"a file of {self.name!r}", path, fix)
        if self.config.verify:
            check_complete_lines(path)
        return path

    def rows(
        self,
        layout: TableLayout,
        roles: Sequence[str] = ("users", "items", "ratings", "times"),
    ) -> tuple[Interactions, Columns]:
        """Read the verified rows of the source's first file, without features, and its columns.

        Args:
            layout: of the file.
            roles: of its first columns.

        Raises:
            DataError: the file is missing or damaged, or not the published one.
        """
        source = self.source or DatasetSource("", "", ())
        columns = read_table(self.file(source.files[0]), layout)
        return self.indexed(**dict(zip(roles, columns.values(), strict=False))), columns

    def indexed(self, **columns: np.ndarray | pd.Series) -> Interactions:
        """Index columns with `index_rows`, and check them against the published counts and checksum
        unless verification is off.

        Raises:
            DataError: a count or the checksum differs.
        """
        interactions = index_rows(self.name, **columns)  # pyright: ignore[reportArgumentType]
        if self.config.verify and self.source is not None:
            self.source.check(interactions)
        return interactions


def data_directory() -> Path:
    """The data directory: `$FEDREC_DATA`, or `~/.cache/fedrec/data`."""
    folder = os.environ.get("FEDREC_DATA")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "fedrec" / "data"


def check_complete_lines(path: Path) -> None:
    """Check that the last line of a text file is complete.

    Raises:
        DataError: the file is empty or does not end with a line end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - 200, 0))
        tail = file.read()
    if tail.endswith((b"\n", b"\r")):
        return
    last = tail.replace(b"\r", b"\n").rsplit(b"\n", 1)[-1].decode("latin-1")
    raise DataError(
        f"{path} is cut off in the middle of a line",
        expected="a line end after the last line",
        got=f"the last line {last!r}" if size else "an empty file",
        fix="get the file again, or set dataset.verify = false if the file is complete",
    )
