# SPDX-License-Identifier: Apache-2.0
"""Netflix Prize: 100,480,507 star ratings with dates, 480,189 users, 17,770 films (Bennett and
Lanning, KDD Cup 2007).

Two forms are read: the original `training_set/mv_*.txt` (one film per file) and
`combined_data_*.txt` (the same files one after the other). In both, a line `film:` is followed by
lines `user,rating,date`. Times are midnight (UTC) of the date. `movie_titles.csv` (or `.txt`),
where it is there, gives the year of release as a feature.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.reader import DatasetSource, Reader
from fedrec.data.tables import malformed_line
from fedrec.errors import DataError


class Netflix(Reader):
    """Reads either form. Import only: the publisher withdrew the download."""

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
        extras=(
            "training_set/mv_*.txt",
            "combined_data_*.txt",
            "movie_titles.csv",
            "movie_titles.txt",
        ),
        users=480_189,
        items=17_770,
        rows=100_480_507,
    )

    def read(self) -> Interactions:
        films, users, ratings, times = _read_rows(self._files())
        rows = self.indexed(users=users, items=films, ratings=ratings, times=times)
        years = self._years(rows.item_ids)
        if years is None:
            return rows
        return replace(rows, item_features=FeatureTable(rows.num_items, (years,)))

    def feature_names(self) -> FeatureNames:
        """Years of films where their titles are there."""
        titled = any(file.stem == "movie_titles" for file in self.files())
        return FeatureNames(items=("year",) if titled else ())

    def _files(self) -> list[Path]:
        folder = self.folder()
        files = sorted(folder.glob("training_set/mv_*.txt")) or sorted(
            folder.glob("combined_data_*.txt")
        )
        if not files:
            raise DataError(
                f"the ratings of {self.name!r} are missing",
                expected=f"training_set/mv_*.txt or combined_data_*.txt in {folder}",
                got="neither",
                fix="unpack training_set.tar there, or import the folder that has the files",
            )
        return files

    def _years(self, ids: np.ndarray) -> Feature | None:
        path = next(self.folder().glob("movie_titles.*"), None)
        if path is None:
            return None
        lines = (
            line.split(",", 2) for line in path.read_text(encoding="latin-1").splitlines() if line
        )
        years = {int(line[0]): line[1] for line in lines if len(line) == 3 and line[0].isdecimal()}
        labels = (years.get(film, "") for film in ids.tolist())
        return Feature.multiple("year", [[label] if label.isdecimal() else [] for label in labels])


def _read_rows(files: list[Path]) -> list[np.ndarray]:
    """Films, users, ratings and times of all rows, in small types: 100 million rows take 1.7 GB."""
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
    """A rating from 1 to 5."""
    return (b"1", b"2", b"3", b"4", b"5").index(text) + 1


@lru_cache
def _seconds(date: bytes) -> int:
    """Midnight of a date, in seconds since 1970."""
    return int(datetime.fromisoformat(f"{date.decode()}T00:00+00:00").timestamp())
