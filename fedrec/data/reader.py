# SPDX-License-Identifier: Apache-2.0
"""The interface of dataset readers, and the location of raw data."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from fedrec.config import Config
from fedrec.data.catalogue import read_vectors, vector_files
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.published import DatasetSource, require_complete_lines, require_match
from fedrec.errors import DataError


class ReaderConfig(Config):
    """Settings of all datasets."""

    path: Path | None = None
    """Folder (or file) of the raw data; default: the folder of the dataset's name in the data
    directory."""
    verify: bool = True
    """Whether to reject data whose counts or checksum differ from the published ones; false for a
    deliberately changed copy."""
    item_vectors: tuple[Path, ...] = ()
    """Files of dense vectors of the items, such as embeddings of their texts or images: `.parquet`
    with a column of item ids and one of lists (or several of numbers), or `.npy` beside a `.txt`
    with the id of each row."""
    items_without_vector: Literal["refuse", "mean"] = "refuse"
    """An item that is not in a file of vectors: refused, or has the mean of the others."""


class Reader(ABC):
    """Reads one dataset into `Interactions`.

    A built-in has a `name` and lives in `fedrec/data/readers/`, its configuration class above
    it.

    Attributes:
        title: the dataset in a few words, with its size.
        paper: which paper of `docs/papers` uses it, or who published it.
        source: its origin and published statistics; None for generated data and for a user's own
            table.
        folder_name: name of its folder in the data directory; empty for the dataset's own name.
    """

    Config: ClassVar[type[ReaderConfig]] = ReaderConfig
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    source: ClassVar[DatasetSource | None] = None
    folder_name: ClassVar[str] = ""

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
        """Names of the side features that `read` gives, by the settings, without reading any row;
        None: not stated."""
        return None

    def described(self, interactions: Interactions) -> Interactions:
        """The interactions with the vectors of items that the settings name.

        Raises:
            DataError: see `read_vectors`.
        """
        config = self.config
        if not config.item_vectors:
            return interactions
        complete = config.items_without_vector == "refuse"
        ids = interactions.item_ids
        vectors = (read_vectors(path, ids, complete=complete) for path in config.item_vectors)
        table = replace(interactions.item_features, vectors=tuple(vectors))
        return replace(interactions, item_features=table)

    def undeclared_categories(self) -> tuple[str, ...]:
        """Names of the users' features whose categories are those that occur in the rows, and not
        ones that are declared or published with the dataset; none by default. Models have a row for
        each category, which tells that somebody is in it."""
        return ()

    def stated_features(self) -> FeatureNames | None:
        """`feature_names`, and the names of vectors of items."""
        names = self.feature_names()
        vectors = tuple(path.stem for path in self.config.item_vectors)
        return None if names is None else names._replace(item_vectors=vectors)

    def every_file(self) -> list[Path]:
        """`files`, and those of vectors of items."""
        vectors = (vector_files(path) for path in self.config.item_vectors)
        return [*self.files(), *(file for own in vectors for file in own)]

    def folder(self) -> Path:
        """The folder (or file) with the raw data.

        Raises:
            DataError: it does not exist.
        """
        path = self.config.path or self.default_folder()
        if not path.exists():
            fix = (
                f"fedrec data import {self.name} PATH, or set dataset.path, or set FEDREC_DATA to"
                " the folder above it"
            )
            if self.source is not None and self.source.archives:
                fix = f"fedrec data fetch {self.name}, or " + fix
            raise DataError(
                f"the data of {self.name!r} are not there",
                expected=f"a folder {path}",
                got="nothing",
                fix=fix,
            )
        return path

    def files(self) -> list[Path]:
        """The files that exist of the raw data, down to the folders of its folder; a change of one
        of them is noticed before the next run of a process."""
        path = self.config.path or self.default_folder()
        if not path.is_dir():
            return [path] if path.is_file() else []
        found = (file for depth in ("*", "*/*") for file in path.glob(depth))
        return sorted(filter(Path.is_file, found))

    def default_folder(self) -> Path:
        """Default path of the raw data."""
        return data_directory() / (self.folder_name or self.name)

    def file(self, name: str, *, lines: int | None = None) -> Path:
        """One file of the raw data; `lines` is the published number of its lines, for the error
        message.

        Raises:
            DataError: it is missing, or (unless verification is off) its last line is cut.
        """
        path = self.folder() / name
        if not path.is_file():
            fix = f"complete the folder {path.parent}, or fedrec data import {self.name} PATH"
            raise DataError(
                f"a file of {self.name!r} is missing",
                expected=f"a file {path}",
                got="nothing",
                fix=fix,
            )
        if self.config.verify:
            require_complete_lines(path, lines)
        return path

    def verified(self, interactions: Interactions) -> Interactions:
        """The same interactions, checked against the published counts and checksum unless
        verification is off.

        Raises:
            DataError: a count or the checksum differs.
        """
        if self.config.verify and self.source is not None:
            require_match(interactions, self.source)
        return interactions


def data_directory() -> Path:
    """The data directory: `$FEDREC_DATA`, or `~/.cache/fedrec/data`."""
    given = os.environ.get("FEDREC_DATA")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedrec" / "data"
