# SPDX-License-Identifier: Apache-2.0
"""Gowalla check-ins as split by the NGCF and LightGCN authors: 29,858 users, 40,981 places, 810,128
+ 217,242 pairs.

Each line of `train.txt` and `test.txt` is a user followed by that user's places. Pairs have no
rating and no time. Rows of `train.txt` come first.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import malformed_line
from fedrec.data.readers._published_pairs import PublishedPairs

_SPACE = b" \t\r\n"


class Gowalla(PublishedPairs):
    """Reads `train.txt` and `test.txt`. Import only: no publisher offers these files at a fixed
    address."""

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
        """Users and items `int64 [pairs]` of a file of lines `user item item ...`.

        Raises:
            DataError: a line holds something other than whole numbers.
        """
        data = path.read_bytes()
        text = np.frombuffer(data, dtype=np.uint8)
        _require_digits(path, data, text)
        blank = text <= 32
        starts = np.flatnonzero(~blank & np.concatenate([[True], blank[:-1]]))
        values = np.fromstring(data, dtype=np.int64, sep=" ")  # type: ignore[call-overload]
        line = np.searchsorted(np.flatnonzero(text == ord("\n")), starts)
        first = np.concatenate([[True], line[1:] != line[:-1]])[: len(values)]
        owner = values[first][np.cumsum(first) - 1]
        return owner[~first], values[~first]


def _require_digits(path: Path, data: bytes, text: np.ndarray) -> None:
    allowed = np.zeros(256, dtype=bool)
    allowed[list(b"0123456789" + _SPACE)] = True
    wrong = ~allowed[text]
    if wrong.any():
        number = data.count(b"\n", 0, int(wrong.argmax()))
        line = data.split(b"\n")[number].decode("latin-1")
        raise malformed_line(
            path,
            number + 1,
            line[:200],
            "a user and items, all whole numbers, between single spaces",
        )
