# SPDX-License-Identifier: Apache-2.0
"""Amazon Office as split by the authors of UPC-SDG: 4,874 users, 2,406 items, 37,027 + 15,930
pairs.

The paper states a random 80:10:10 split; the files that the authors released are 70:30 and its
figures agree with those. Pairs have no rating and no time. Rows of `train.csv` come first.

The authors' other Amazon datasets (such as Clothing) have the same format: set `path` to their
folder and `verify` to false.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import TableLayout, read_table
from fedrec.data.readers._published_pairs import PublishedPairs

_PAIRS = TableLayout({"userID": np.int32, "itemID": np.int32}, separator=",", names="first line")


class AmazonUpc(PublishedPairs):
    """Reads `train.csv` and `test.csv`. Import only: no publisher offers these files at a fixed
    address."""

    name = "amazon-upc"
    title = "Amazon Office (UPC-SDG): 52,957 purchases, 4,874 users, 2,406 items"
    paper = (
        "UPC-SDG: F. Liu et al., Privacy-Preserving Synthetic Data Generation for Recommendation,"
        " SIGIR 2022"
    )
    folder_name = "office"
    source = DatasetSource(
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
    train_source: ClassVar[DatasetSource] = replace(
        source,
        rows=37_027,
        fingerprints=("d217ddbd0bd4e228197e73db417e8b104eddec9118fc5fcc58f6b8bb4c2e0a6d",),
    )

    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        frame = read_table(path, _PAIRS)
        return frame["userID"].to_numpy(), frame["itemID"].to_numpy()
