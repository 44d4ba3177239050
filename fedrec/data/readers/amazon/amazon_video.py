# SPDX-License-Identifier: Apache-2.0
"""Amazon Instant Video: 63,836 ratings with their times, 8,072 users, 11,830 items, as the public
code of PFedRec brings them.

Times are real, in whole days, so that rows of a user on one day keep the file's order. A row is
`user,item,rating,seconds since 1970`.
"""

from __future__ import annotations

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import TableLayout, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader

_ROWS = 63_836
_RATINGS = TableLayout(
    {"user": str, "item": str, "rating": np.float32, "time": np.int64}, separator=","
)


class AmazonVideo(Reader):
    """Reads `ratings.dat`. Import only: no fixed address."""

    name = "amazon-video"
    title = "Amazon Instant Video: 63,836 ratings with times, 8,072 users, 11,830 items"
    paper = "J. McAuley et al., SIGIR 2015; as in PFedRec (Zhang et al. 2023)"
    source = DatasetSource(
        page="https://github.com/Zhangcx19/IJCAI-23-PFedRec",
        licence="research use",
        files=("ratings.dat",),
        users=8_072,
        items=11_830,
        rows=_ROWS,
        fingerprints=("d696bd35b6e61009c89bb9350e1f17b46d1033275e0f77caa766a13be041b3ed",),
    )

    def feature_names(self) -> FeatureNames:
        """None."""
        return FeatureNames()

    def read(self) -> Interactions:
        rows = read_table(self.file("ratings.dat", lines=_ROWS), _RATINGS)
        return self.verified(
            index_rows(
                self.name,
                users=rows["user"],
                items=rows["item"],
                ratings=rows["rating"],
                times=rows["time"],
            )
        )
