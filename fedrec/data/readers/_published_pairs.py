# SPDX-License-Identifier: Apache-2.0
"""What the readers of pairs that are published as a training and a test file share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published import DatasetSource, require_match
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig


class PublishedPairsConfig(ReaderConfig):
    """Settings of pairs of users and items in two files."""

    part: Literal["all", "train", "test"] = "all"
    """Which file the rows are taken from: all (the training file, then the test file), train, or
    test."""


class PublishedPairs(Reader):
    """Reads a training and a test file of pairs. Whatever `part` is chosen, users and items keep
    their numbers in the whole dataset.

    Attributes:
        source: `files` are the training and the test file.
        train_source: published statistics of the training file alone.
    """

    Config: ClassVar[type[ReaderConfig]] = PublishedPairsConfig
    config: PublishedPairsConfig
    source: ClassVar[DatasetSource]  # pyright: ignore[reportIncompatibleVariableOverride]
    train_source: ClassVar[DatasetSource]

    def read(self) -> Interactions:
        files = [self.pairs(self.file(name)) for name in self.source.files]
        users, items = (np.concatenate(columns) for columns in zip(*files, strict=True))
        whole = self.verified(index_rows(self.name, users=users, items=items))
        split = len(files[0][0])
        whole = replace(whole, published_test=np.arange(len(whole)) >= split)
        if self.config.verify:  # a pair moved from one file to the other leaves the whole as it was
            require_match(whole.with_rows(slice(split)), self.train_source)
        part = {"all": slice(None), "train": slice(split), "test": slice(split, None)}
        return whole.with_rows(part[self.config.part])

    def feature_names(self) -> FeatureNames:
        """None are read."""
        return FeatureNames()

    @abstractmethod
    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Users and items `int [pairs]` of one file.

        Raises:
            DataError: a line is not in the format of the file.
        """
