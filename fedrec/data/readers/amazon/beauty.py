# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty as BERT4Rec prepared it: 353,962 rows of 40,226 users and 54,542 items, each user's
in the order of time (Sun et al., CIKM 2019).

The file has no times and no ratings: a row is `user item`, and the place of a row is its time here.
It orders the rows of a user and says nothing of the time between them, nor of different users.
"""

from __future__ import annotations

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import TableLayout, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader

_ROWS = 353_962
_PAIRS = TableLayout({"user": np.int64, "item": np.int64}, separator=" ")


class Beauty(Reader):
    """Reads `beauty.txt`. Import only: no fixed address."""

    name = "beauty"
    title = "Amazon Beauty (BERT4Rec): 353,962 rows in order, 40,226 users, 54,542 items"
    paper = "J. McAuley et al., SIGIR 2015; F. Sun et al., BERT4Rec, CIKM 2019"
    source = DatasetSource(
        page="https://github.com/FeiSun/BERT4Rec",
        licence="research use",
        files=("beauty.txt",),
        users=40_226,
        items=54_542,
        rows=_ROWS,
        fingerprints=("aa68e59cd682fc6c53a5c15e610f861b3857bd50de786bff1554b4359b041a76",),
    )

    def feature_names(self) -> FeatureNames:
        """None."""
        return FeatureNames()

    def read(self) -> Interactions:
        rows = read_table(self.file("beauty.txt", lines=_ROWS), _PAIRS)
        return self.verified(
            index_rows(
                self.name,
                users=rows["user"],
                items=rows["item"],
                times=np.arange(len(rows["user"])),
            )
        )
