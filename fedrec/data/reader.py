# SPDX-License-Identifier: Apache-2.0
"""The interface of dataset readers, and the catalogue, the public part of a dataset.

Damaged copies of well-known datasets circulate (lines added, files cut in the middle), and results
on them are not comparable. So a reader rejects copies whose lines are incomplete or whose counts or
checksum differ, unless the user switches verification off."""

from __future__ import annotations

import base64
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from fedrec.config import Config
from fedrec.data.interactions import (
    Feature,
    FeatureNames,
    FeatureTable,
    Interactions,
    Vectors,
    index_rows,
)
from fedrec.data.tables import Columns, TableLayout, read_table
from fedrec.errors import DataError, missing_file
from fedrec.runtime.files import read_json, write_atomically

# The catalogue: items, their features and vectors, and the names of user features.
#
# In a simulation it is part of the dataset. Real clients only have their own interactions, and item
# 17 must be the same item for all of them, so the operator of a deployment writes this file for all
# nodes.


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The public part of a dataset.

    Attributes:
        item_ids: `[items]`, names of the items as text, distinct; an item's index is its position.
        item_features: public side features of the items.
        user_features: names and categories of the users' features, without the values of any user.
        rated: whether interactions carry ratings.
        timed: whether they carry times.
    """

    item_ids: np.ndarray
    item_features: FeatureTable
    user_features: tuple[tuple[str, tuple[str, ...]], ...]
    rated: bool
    timed: bool

    @classmethod
    def of(cls, interactions: Interactions) -> Catalogue:
        """Return the public catalogue of a dataset."""
        return cls(
            item_ids=interactions.item_ids.astype(str),
            item_features=interactions.item_features,
            user_features=tuple(
                (f.name, f.categories) for f in interactions.user_features.features
            ),
            rated=interactions.ratings is not None,
            timed=interactions.times is not None,
        )

    def write(self, path: Path) -> None:
        """Write the catalogue as JSON.

        Raises:
            RunError: the file cannot be written.
        """
        table = {
            "items": self.item_ids.tolist(),
            "item-features": [_table(feature) for feature in self.item_features.features],
            "item-texts": [_table(text) for text in self.item_features.texts],
            "item-vectors": [_packed(vectors) for vectors in self.item_features.vectors],
            "user-features": [
                {"name": name, "categories": names} for name, names in self.user_features
            ],
            "rated": self.rated,
            "timed": self.timed,
        }
        write_atomically(path, json.dumps(table))

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """Read a file written by `write`.

        Raises:
            DataError: the file is missing or not a catalogue.
        """
        try:
            table = read_json(path)
            items = np.array(table["items"], dtype=np.str_)
            features = FeatureTable(
                len(items),
                tuple(_feature(entry) for entry in table["item-features"]),
                tuple(_feature(entry) for entry in table.get("item-texts", ())),
                tuple(_vectors(entry) for entry in table.get("item-vectors", ())),
            )
            users = tuple(
                (str(entry["name"]), tuple(entry["categories"])) for entry in table["user-features"]
            )
            if items.ndim != 1 or len(np.unique(items)) < len(items):
                raise ValueError("items must be unique names")
            if len(dict(users)) < len(users):
                raise ValueError("duplicate feature name")
            labels = [*dict(users).values(), *(feature.categories for feature in features.every)]
            if not all(isinstance(label, str) for categories in labels for label in categories):
                raise ValueError("categories must be strings")
            return cls(items, features, users, bool(table["rated"]), bool(table["timed"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
            raise DataError(
                f"{path} is not a catalogue",
                expected="a file as `fedrec deploy init --experiment` writes it",
                got=f"{type(error).__name__}: {error}",
                fix="ask the operator of the deployment for it",
            ) from None


def _table(feature: Feature) -> dict[str, Any]:
    return {
        "name": feature.name,
        "categories": list(feature.categories),
        "offsets": feature.offsets.tolist(),
        "codes": feature.codes.tolist(),
    }


def _feature(entry: dict[str, Any]) -> Feature:
    offsets = np.array(entry["offsets"], dtype=np.int64)
    codes = np.array(entry["codes"], dtype=np.int64)
    return Feature(str(entry["name"]), tuple(entry["categories"]), offsets, codes)


def _packed(vectors: Vectors) -> dict[str, Any]:
    """Encode the vectors of known rows as little-endian `float32` bytes."""
    known = vectors.values[vectors.known].astype("<f4")
    return {
        "name": vectors.name,
        "width": vectors.values.shape[1],
        "known": np.flatnonzero(vectors.known).tolist(),
        "items": vectors.rows,
        "values": base64.b64encode(known.tobytes()).decode("ascii"),
    }


def _vectors(entry: dict[str, Any]) -> Vectors:
    known = np.zeros(int(entry["items"]), dtype=bool)
    known[np.array(entry["known"], dtype=np.int64)] = True
    values = np.zeros((len(known), int(entry["width"])), dtype=np.float32)
    numbers = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f4")
    values[known] = numbers.reshape(-1, values.shape[1])
    return Vectors(str(entry["name"]), values, known)


# Files of dense vectors of items, such as embeddings of their texts or images: `NAME.npy`, an array
# `[items, width]`, and beside it `NAME.txt` with the id of each of its rows, one per line.

_SHOWN = 3


def read_vectors(path: Path, ids: np.ndarray, *, complete: bool) -> Vectors:
    """Read vectors of items from a file; rows of other items are ignored.

    Args:
        path: the file; its stem is the name of the vectors.
        ids: ids of the items, `[items]`; compared as texts.
        complete: whether an item without a vector is an error.

    Raises:
        DataError: a file is missing or damaged, a value is not finite, an id is duplicate, or no
            item (`complete`: not every item) has a vector.
    """
    listed, values = read_rows(path)
    index = listed.get_indexer(pd.Index(ids.astype(str)))
    missing = ids[index < 0]
    if len(missing) and (complete or len(missing) == len(ids)):
        shown = ", ".join(map(repr, missing[:_SHOWN].tolist()))
        expected = f"a vector for each of {len(ids):,} items, named as in the data"
        raise _wrong(path, expected, f"none for {len(missing):,} of them, such as {shown}")
    return Vectors(path.stem, values, np.ones(len(values), dtype=bool)).renumbered(index)


def read_rows(path: Path) -> tuple[pd.Index, np.ndarray]:
    """All rows of a file of vectors: ids, `[items]`, and vectors, `float32 [items, width]`.

    Raises:
        DataError: see `read_vectors`.
    """
    names = path.with_suffix(".txt")
    try:
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
        listed = pd.Index(names.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the last two: bad header
        raise _wrong(path, f"an array, and {names.name} with the id of each row", error) from None
    with np.errstate(over="ignore"):  # overflow becomes infinity
        values = values.astype(np.float32) if values.dtype.kind in "iuf" else values
    if values.ndim != 2 or len(values) != len(listed) or values.dtype.kind != "f":
        got = f"{len(listed):,} ids and an array {list(values.shape)} of {values.dtype}"
        raise _wrong(path, "numbers [items, width], and an id for each row", got)
    if not np.isfinite(values).all():
        raise _wrong(path, "finite numbers of 32 bits", "NaN or infinity")
    if listed.has_duplicates:
        raise _wrong(path, "one vector per item", f"duplicate {listed[listed.duplicated()][0]!r}")
    return listed, values


def _vector_files(path: Path) -> list[Path]:
    """Existing files of a set of vectors: the array and its ids."""
    return [file for file in (path, path.with_suffix(".txt")) if file.is_file()]


def _wrong(path: Path, expected: str, got: object) -> DataError:
    return DataError(
        f"{path}: invalid item vectors",
        expected=expected,
        got=str(got),
        fix="correct both files, or set dataset.items-without-vector = 'mean'",
    )


# Published datasets, and readers.


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
        archive: what `fedrec data fetch` downloads; None when the publisher offers no direct,
            stable download.
        rows: published number of rows, checked after every read; None if not published.
        fingerprint: `Interactions.fingerprint()`, checked likewise; empty when it is not known.
    """

    page: str
    licence: str
    files: tuple[str, ...]
    extras: tuple[str, ...] = ()
    folder: str = ""
    archive: Archive | None = None
    rows: int | None = None
    fingerprint: str = ""

    def check(self, interactions: Interactions) -> None:
        """Check the number of rows, whose error is more informative, then the checksum.

        Raises:
            DataError: the number of rows or the fingerprint is not the published one.
        """
        if self.rows not in (None, len(interactions)):
            values = f"{self.rows:,} rows", f"{len(interactions):,} rows"
            raise self._changed(interactions, "the number of rows differs", *values)
        fingerprint = interactions.fingerprint() if self.fingerprint else ""
        if fingerprint != self.fingerprint:
            values = f"fingerprint {self.fingerprint}", f"fingerprint {fingerprint}"
            raise self._changed(interactions, "a user, an item or a rating was changed", *values)

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
        vectors = (file for vector in self._vectors() for file in _vector_files(vector))
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
            offered = self.source is not None and self.source.archive
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
        self, layout: TableLayout, roles: Sequence[str] = ("users", "items", "ratings", "times")
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
