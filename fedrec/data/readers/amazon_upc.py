# SPDX-License-Identifier: Apache-2.0
"""Amazon Office as split by the authors of UPC-SDG: 4,874 users, 2,406 items, 37,027 + 15,930
pairs.

The paper states a random 80:10:10 split; the files that the authors released are 70:30 and its
figures agree with those. Pairs have no rating and no time. Rows of `train.csv` come first. Whatever
`part` is chosen, users and items keep their numbers in the whole dataset.

The authors' other Amazon datasets (such as Clothing) have the same format: set `path` to their
folder and `verify` to false.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from fedrec.data.files.delimited import Layout, read_delimited
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published_split import Part, keep_part
from fedrec.data.files.source import Source
from fedrec.data.files.verification import require_match
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig

_PAIRS = Layout({"userID": np.int32, "itemID": np.int32}, separator=",", header=True)


class AmazonUpcConfig(ReaderConfig):
    """Settings of the UPC-SDG authors' Amazon files."""

    part: Part = "all"
    """Which file the rows are taken from: all (train.csv, then test.csv), train, or test."""


class AmazonUpc(Reader):
    """Reads `train.csv` and `test.csv`. Import only: no publisher offers these files at a fixed
    address."""

    Config: ClassVar[type[ReaderConfig]] = AmazonUpcConfig
    config: AmazonUpcConfig
    title = "Amazon Office (UPC-SDG): 52,957 purchases, 4,874 users, 2,406 items"
    paper = (
        "UPC-SDG: F. Liu et al., Privacy-Preserving Synthetic Data Generation for Recommendation,"
        " SIGIR 2022"
    )
    folder_name = "office"
    source = Source(
        page="https://github.com/HuilinChenJN/UPC_SDG",
        licence=(
            "derived from the Amazon review data of J. McAuley (UCSD); research use, cite the"
            " source"
        ),
        files=("train.csv", "test.csv"),
        users=4_874,
        items=2_406,
        rows=52_957,
        fingerprints=("09098895a87d69485c1fb544dd0a168a29a74aca745c4d23ca3a3896ff355d84",),
    )
    train_source: ClassVar[Source] = replace(
        source,
        rows=37_027,
        fingerprints=("d217ddbd0bd4e228197e73db417e8b104eddec9118fc5fcc58f6b8bb4c2e0a6d",),
    )

    def read(self) -> Interactions:
        train, test = (
            read_delimited(self.file(name), _PAIRS) for name in ("train.csv", "test.csv")
        )
        users, items = (
            np.concatenate([train[column], test[column]]) for column in ("userID", "itemID")
        )
        whole = self.verified(index_rows(self.name, users=users, items=items))
        if self.config.verify:  # a pair moved from one file to the other leaves the whole as it was
            require_match(
                keep_part(whole, "train", train_rows=len(train["userID"])), self.train_source
            )
        return keep_part(whole, self.config.part, train_rows=len(train["userID"]))
