# SPDX-License-Identifier: Apache-2.0
"""Datasets published as a training and a test file: selection of the rows of one or both."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedrec.data.interactions import Interactions

Part = Literal["all", "train", "test"]


def keep_part(whole: Interactions, part: Part, *, train_rows: int) -> Interactions:
    """The rows of one part, marked with the file that they are from; users and items keep their
    indices.

    Args:
        whole: rows of the training file, then rows of the test file.
        part: the rows to keep.
        train_rows: number of rows of the training file.
    """
    rows = {"all": slice(None), "train": slice(0, train_rows), "test": slice(train_rows, None)}[
        part
    ]
    return replace(whole, published_test=np.arange(len(whole)) >= train_rows).with_rows(rows)
