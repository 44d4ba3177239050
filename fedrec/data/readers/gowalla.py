# SPDX-License-Identifier: Apache-2.0
"""Readers of Gowalla's check-ins and of pairs published as two files.

Gowalla check-ins as split by the NGCF and LightGCN authors: 29,858 users, 40,981 places, 810,128
+ 217,242 pairs.

Each line of `train.txt` and `test.txt` is a user followed by that user's places. Pairs have no
rating and no time. Rows of `train.txt` come first.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.reader import DatasetSource, Reader
from fedrec.data.tables import malformed_line

# Base class of readers of pairs published as a training and a test file.


class PublishedPairs(Reader):
    """Reads a training and a test file of pairs.

    Attributes:
        source: `files` are the training and the test file.
        train_source: published statistics of the training file alone.
    """

    source: ClassVar[DatasetSource]  # pyright: ignore[reportIncompatibleVariableOverride]
    train_source: ClassVar[DatasetSource]

    features = FeatureNames()

    def read(self) -> Interactions:
        files = [self.pairs(self.file(name)) for name in self.source.files]
        users, items = (np.concatenate(columns) for columns in zip(*files, strict=True))
        rows = self.indexed(users=users, items=items)
        split = len(files[0][0])
        rows = replace(rows, published_test=np.arange(len(rows)) >= split)
        if self.config.verify:  # moving pairs between the files leaves their union unchanged
            self.train_source.check(rows.with_rows(slice(split)))
        return rows

    @abstractmethod
    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read users and items `int [pairs]` from one of the files.

        Raises:
            DataError: a line is not in the format of the file.
        """


_NUMBERS = re.compile(rb"[0-9 \t]*")


class Gowalla(PublishedPairs):
    """Reads `train.txt` and `test.txt`. Import only: no direct download."""

    name = "gowalla"
    title = "Gowalla: 1,027,370 check-ins, 29,858 users, 40,981 places"
    paper = "UPC-SDG; X. He et al., LightGCN, SIGIR 2020"
    source = DatasetSource(
        page="https://github.com/gusye1234/LightGCN-PyTorch",
        licence=(
            "collected by E. Cho, S. A. Myers, J. Leskovec (KDD 2011) and published by SNAP; cite"
            " the paper"
        ),
        files=("train.txt", "test.txt"),
        users=29_858,
        items=40_981,
        rows=1_027_370,
        fingerprints=("e747d1fbcd694b9a04bcab83a20e4c6f0392254f692f11171f9b13313c05bbf2",),
    )
    train_source: ClassVar[DatasetSource] = replace(
        source,
        rows=810_128,
        fingerprints=("55a126701da3607f7ae5bfa45ca00d0786f9c8106783579b6db56a20a9a63d7d",),
    )

    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read users and items `int64 [pairs]` from a file of lines `user item item ...`.

        Raises:
            DataError: a line holds something other than whole numbers.
        """
        lines = path.read_bytes().splitlines()
        for number, line in enumerate(lines, start=1):
            if not _NUMBERS.fullmatch(line):
                expected = "a user and items, all whole numbers, between single spaces"
                raise malformed_line(path, number, line[:200].decode("latin-1"), expected)
        values = [np.fromstring(line, dtype=np.int64, sep=" ") for line in lines]
        values = [numbers for numbers in values if len(numbers)]
        users = [np.full(len(numbers) - 1, numbers[0]) for numbers in values]
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *users]), np.concatenate([empty, *(v[1:] for v in values)])
