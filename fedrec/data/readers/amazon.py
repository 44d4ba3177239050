# SPDX-License-Identifier: Apache-2.0
"""Readers of Amazon's ratings as prepared by three publications.

Files of reviews with one JSON object per line, such as the 5-core ones of McAuley et al. (2015),
are read as tables: `user = "reviewerID"`, `item = "asin"`, `rating = "overall"` and
`time = "unixReviewTime"`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.reader import DatasetSource, Reader
from fedrec.data.readers.published import PublishedPairs
from fedrec.data.tables import TableLayout, read_table

# Amazon Instant Video: 63,836 ratings with times, 8,072 users, 11,830 items, as included in the
# public code of PFedRec.
#
# Times are real, in whole days, so that rows of a user on one day keep the file's order. A row is
# `user,item,rating,seconds since 1970`.

_RATINGS = TableLayout(
    {"user": str, "item": str, "rating": np.float32, "time": np.int64}, separator=","
)


class AmazonVideo(Reader):
    """Reads `ratings.dat`. Import only: no direct download."""

    name = "amazon-video"
    title = "Amazon Instant Video: 63,836 ratings with times, 8,072 users, 11,830 items"
    paper = "J. McAuley et al., SIGIR 2015; as in PFedRec (Zhang et al. 2023)"
    source = DatasetSource(
        page="https://github.com/Zhangcx19/IJCAI-23-PFedRec",
        licence="research use",
        files=("ratings.dat",),
        users=8_072,
        items=11_830,
        rows=63_836,
        fingerprints=("d696bd35b6e61009c89bb9350e1f17b46d1033275e0f77caa766a13be041b3ed",),
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        return self.rows(_RATINGS)[0]


# Amazon Office as split by the authors of UPC-SDG: 4,874 users, 2,406 items, 37,027 + 15,930 pairs.
#
# The paper states a random 80:10:10 split; the files that the authors released are 70:30 and its
# figures agree with those. Pairs have no rating and no time. Rows of `train.csv` come first.
#
# The authors' other Amazon datasets (such as Clothing) have the same format: set `path` to their
# folder and `verify` to false.

_PAIRS = TableLayout({"userID": np.int32, "itemID": np.int32}, separator=",", names="first line")


class AmazonUpc(PublishedPairs):
    """Reads `train.csv` and `test.csv`. Import only: no direct download."""

    name = "amazon-upc"
    title = "Amazon Office (UPC-SDG): 52,957 purchases, 4,874 users, 2,406 items"
    paper = (
        "UPC-SDG: F. Liu et al., Privacy-Preserving Synthetic Data Generation for Recommendation,"
        " SIGIR 2022"
    )
    source = DatasetSource(
        page="https://github.com/HuilinChenJN/UPC_SDG",
        licence=(
            "derived from the Amazon review data of J. McAuley (UCSD); research use, cite the"
            " source"
        ),
        files=("train.csv", "test.csv"),
        folder="office",
        users=4_874,
        items=2_406,
        rows=52_957,
        fingerprints=("09098895a87d69485c1fb544dd0a168a29a74aca745c4d23ca3a3896ff355d84",),
    )
    train_source: ClassVar[DatasetSource] = replace(
        source,
        rows=37_027,
        fingerprints=("d217ddbd0bd4e228197e73db417e8b104eddec9118fc5fcc58f6b8bb4c2e0a6d",),
    )

    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        frame = read_table(path, _PAIRS)
        return frame["userID"].to_numpy(), frame["itemID"].to_numpy()


# Amazon Beauty as BERT4Rec prepared it: 353,962 rows of 40,226 users and 54,542 items, each user's
# in the order of time (Sun et al., CIKM 2019).
#
# The file has no times and no ratings: a row is `user item`, and the position of a row is its time
# here. It orders the rows of a user and says nothing of the time between them, nor of different
# users.

_BEAUTY_PAIRS = TableLayout({"user": np.int64, "item": np.int64}, separator=" ")


class Beauty(Reader):
    """Reads `beauty.txt`. Import only: no direct download."""

    name = "beauty"
    title = "Amazon Beauty (BERT4Rec): 353,962 rows in order, 40,226 users, 54,542 items"
    paper = "J. McAuley et al., SIGIR 2015; F. Sun et al., BERT4Rec, CIKM 2019"
    source = DatasetSource(
        page="https://github.com/FeiSun/BERT4Rec",
        licence="research use",
        files=("beauty.txt",),
        users=40_226,
        items=54_542,
        rows=353_962,
        fingerprints=("aa68e59cd682fc6c53a5c15e610f861b3857bd50de786bff1554b4359b041a76",),
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        rows, _ = self.rows(_BEAUTY_PAIRS, ("users", "items"))
        return replace(rows, times=np.arange(len(rows)))
