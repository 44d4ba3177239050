# SPDX-License-Identifier: Apache-2.0
"""Datasets published as a training and a test file: which of the two the rows are taken from."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedrec.data.interactions import Interactions

Part = Literal["all", "train", "test"]


def keep_part(whole: Interactions, part: Part, *, train_rows: int) -> Interactions:
    """The rows of one part; users and items keep their indices, those without a row included.

    Args:
        whole: rows of the training file, then rows of the test file.
        part: what to keep.
        train_rows: number of rows of the training file.
    """
    rows = {"all": slice(None), "train": slice(0, train_rows), "test": slice(train_rows, None)}[part]
    columns = {name: getattr(whole, name) for name in ("users", "items", "ratings", "times")}
    return replace(whole, **{name: values[rows] for name, values in columns.items() if values is not None})
