# SPDX-License-Identifier: Apache-2.0
"""Netflix Prize: 100,480,507 star ratings with dates, 480,189 users, 17,770 films (Bennett and
Lanning, KDD Cup 2007).

Two forms are read: the original `training_set/mv_*.txt` (one film per file) and
`combined_data_*.txt` (the same files concatenated). In both, a line `film:` is followed by
lines `user,rating,date`. Times are midnight (UTC) of the date.
"""

from __future__ import annotations

from array import array
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.reader import DatasetSource, Reader
from fedrec.data.tables import malformed_line
from fedrec.errors import DataError


class Netflix(Reader):
    """Reads both forms. Import only: the publisher withdrew the download."""

    name = "netflix"
    title = "Netflix Prize: 100,480,507 ratings, 480,189 users, 17,770 films"
    paper = "DP-VAE; J. Bennett, S. Lanning, The Netflix Prize, KDD Cup and Workshop 2007"
    source = DatasetSource(
        page="https://archive.org/details/nf_prize_dataset.tar",
        licence=(
            "research use as granted by the Netflix Prize rules; no redistribution, no"
            " commercial use"
        ),
        files=(),
        extras=("training_set/mv_*.txt", "combined_data_*.txt"),
        users=480_189,
        items=17_770,
        rows=100_480_507,
    )

    features = FeatureNames()

    def read(self) -> Interactions:
        films, users, ratings, times = _read_rows(self._files())
        return self.indexed(users=users, items=films, ratings=ratings, times=times)

    def _files(self) -> list[Path]:
        folder = self.folder()
        for pattern in ("training_set/mv_*.txt", "combined_data_*.txt"):
            if files := sorted(folder.glob(pattern)):
                return files
        raise DataError(
            f"{folder} has neither training_set/mv_*.txt nor combined_data_*.txt",
            fix="unpack training_set.tar there, or import the folder that contains the files",
        )


def _read_rows(files: list[Path]) -> list[np.ndarray]:
    """Read films, users, ratings and times, in small types: 100 million rows take 1.7 GB."""
    columns = [array("i") for _ in range(4)]
    for path in files:
        film = None
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip(b"\r\n")
                try:
                    if text.endswith(b":"):
                        film = int(text[:-1])
                        continue
                    user, rating, date = text.split(b",")
                    if film is None:
                        raise ValueError("a rating before the first film")
                    row = (film, int(user), _stars(rating), _seconds(date))
                    for column, value in zip(columns, row, strict=True):
                        column.append(value)
                except (ValueError, OverflowError):
                    shown = text[:200].decode("latin-1")
                    expected = "film: or user,rating,YYYY-MM-DD"
                    raise malformed_line(path, number, shown, expected) from None
    return [np.array(column) for column in columns]


def _stars(text: bytes) -> int:
    """Parse a rating from 1 to 5."""
    return (b"1", b"2", b"3", b"4", b"5").index(text) + 1


@lru_cache
def _seconds(date: bytes) -> int:
    """Convert a date to seconds since 1970 (at midnight)."""
    return int(datetime.fromisoformat(f"{date.decode()}T00:00+00:00").timestamp())
