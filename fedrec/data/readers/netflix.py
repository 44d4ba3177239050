# SPDX-License-Identifier: Apache-2.0
"""Netflix Prize: 100,480,507 star ratings with dates, 480,189 users, 17,770 films (Bennett and
Lanning, KDD Cup 2007).

Two forms are read: the original `training_set/mv_*.txt` (one film per file) and
`combined_data_*.txt` (the same files one after the other). In both, a line `film:` is followed by
lines `user,rating,date`. Times are midnight (UTC) of the date. `movie_titles.csv` (or `.txt`),
where it is there, gives the year of release as a feature.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.columns import index_rows
from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.published import DatasetSource
from fedrec.data.reader import Reader
from fedrec.data.tables import malformed_line
from fedrec.errors import DataError

_BLOCK = 1 << 26
_FILM = re.compile(rb"(?m)^(\d+):\r?\n")
_LINE = re.compile(rb"\d+:|\d+,[1-5],\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")
_FIELDS = {"user": np.int32, "rating": np.int8, "year": np.int16, "month": np.int8, "day": np.int8}
_DAY = 86_400


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
        films, users, ratings, times = _read_blocks(self._files())
        bare = self.verified(
            index_rows(self.name, users=users, items=films, ratings=ratings, times=times)
        )
        years = self._years(bare.item_ids)
        return (
            bare
            if years is None
            else replace(bare, item_features=FeatureTable(bare.num_items, (years,)))
        )

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


def _read_blocks(files: list[Path]) -> list[np.ndarray]:
    """Films, users, ratings and times of all rows, in small types: 100 million rows take 1.7 GB."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for paths, block in _blocks(files):
        for column, values in zip(columns, _parse(block, paths), strict=True):
            column.append(values)
    return [np.concatenate(column) for column in columns]


def _blocks(files: list[Path]) -> Iterator[tuple[list[Path], bytes]]:
    """Blocks of about 64 MB that begin with a film's line, and the files that they came from."""
    rest = bytearray()
    paths = []
    for path in files:
        paths.append(path)
        with path.open("rb") as file:
            while data := file.read(_BLOCK):
                rest += data
                end = _last_film(rest) if len(rest) >= _BLOCK else 0
                if end:
                    yield paths, bytes(rest[:end])
                    del rest[:end]
                    paths = [path]
        if rest and not rest.endswith(b"\n"):
            rest += b"\n"
    if rest:
        yield paths, bytes(rest)


def _last_film(data: bytearray) -> int:
    """Where the last film's line begins; everything before it is complete."""
    return data.rfind(b"\n", 0, data.rfind(b":")) + 1


def _parse(
    block: bytes, paths: list[Path]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    heads = list(_FILM.finditer(block))
    if not heads or heads[0].start() != 0:
        raise _first_fault(paths, "no film before the first rating")
    starts = [head.end() for head in heads]
    ends = [*(head.start() for head in heads[1:]), len(block)]
    bodies = [block[start:end] for start, end in zip(starts, ends, strict=True)]
    counts = np.array([body.count(b"\n") for body in bodies])
    try:
        frame = _parse_rows(b"".join(bodies).replace(b"-", b","))
    except (ValueError, OverflowError) as error:
        raise _first_fault(paths, str(error)) from None
    if len(frame) != counts.sum() or not (
        frame["rating"].between(1, 5).all() and _are_dates(frame)
    ):
        raise _first_fault(paths, "a blank line, or a rating or date out of range")
    films = np.repeat(np.array([int(head[1]) for head in heads], dtype=np.int32), counts)
    return films, frame["user"].to_numpy(), frame["rating"].to_numpy(), _seconds(frame)


def _parse_rows(text: bytes) -> pd.DataFrame:
    # Three small numbers instead of a date: no Python string is made for any of the rows.
    dtypes: dict = dict(_FIELDS)
    return pd.read_csv(
        io.BytesIO(text), names=list(_FIELDS), dtype=dtypes, na_filter=False, index_col=False
    )


def _are_dates(frame: pd.DataFrame) -> bool:
    return bool(frame["month"].between(1, 12).all() and frame["day"].between(1, 31).all())


def _seconds(frame: pd.DataFrame) -> np.ndarray:
    months = (frame["year"].to_numpy(np.int32) - 1970) * 12 + frame["month"].to_numpy(np.int32) - 1
    days = (
        months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int32)
        + frame["day"].to_numpy()
        - 1
    )
    return (days.astype(np.int32) * np.int32(_DAY)).astype(np.int32)


def _first_fault(paths: list[Path], problem: str) -> DataError:
    """Find the first bad line, slowly: the fast parser does not say which one it was."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip(b"\r\n")
                if not _LINE.fullmatch(text) or (number == 1 and not text.endswith(b":")):
                    return malformed_line(
                        path,
                        number,
                        text[:200].decode("latin-1"),
                        "film: or user,rating,YYYY-MM-DD",
                    )
    return DataError(
        f"{paths[0]} cannot be read",
        expected="film: and user,rating,date lines",
        got=problem,
        fix="get the files again",
    )
