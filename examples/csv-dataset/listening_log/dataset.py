# SPDX-License-Identifier: Apache-2.0
"""A log of plays: one line per play, with the columns `time`, `listener`, `track` and, if there is
one, `genre`.

    time,listener,track,genre
    2024-03-01T18:22:00+00:00,ann,Blue in Green,jazz

A listener and a track become one interaction: its rating is the number of plays, its time that of
the last one. Genres become a feature of the tracks. For a table with one line per user and item
there is `dataset.name = "table"` already.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import Field

from fedrec.data.interactions import Feature, FeatureTable, Interactions, index_rows
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.errors import DataError

NEEDED = ("time", "listener", "track")


class ListeningLogConfig(ReaderConfig):
    """Settings of a log; `path` is the file."""

    least_plays: int = Field(default=1, ge=1)
    """A listener's track with fewer plays is left out."""
    least_tracks: int = Field(default=1, ge=1)
    """A listener with fewer tracks, after that, is left out."""


@dataclass
class _Played:
    """What is known of one listener's track."""

    plays: int = 0
    last: int = 0


@dataclass
class _Log:
    """The whole log, summed up: per listener and track, in the order of the first play."""

    pairs: dict[tuple[str, str], _Played] = field(default_factory=dict)
    genres: dict[str, str] = field(default_factory=dict)


class ListeningLog(Reader):
    """Reads the file named by `dataset.path`."""

    Config = ListeningLogConfig
    title = "one line per play: time, listener, track, genre"
    config: ListeningLogConfig

    def read(self) -> Interactions:
        """Read and verify the dataset.

        Raises:
            DataError: the file is missing, lacks a column, or has a line that cannot be understood,
                which is named.
        """
        log = self._summed(self._file())
        kept = {
            pair: played
            for pair, played in log.pairs.items()
            if played.plays >= self.config.least_plays
        }
        tracks = (
            np.unique([listener for listener, _ in kept], return_counts=True) if kept else ([], [])
        )
        enough = {
            one for one, count in zip(*tracks, strict=True) if count >= self.config.least_tracks
        }
        rows = [(*pair, played) for pair, played in kept.items() if pair[0] in enough]
        if not rows:
            raise DataError(
                "nothing is left of the log",
                expected="plays",
                got="none",
                fix="lower dataset.least-plays",
            )
        bare = index_rows(
            self.name,
            users=np.array([listener for listener, _, _ in rows]),
            items=np.array([track for _, track, _ in rows]),
            ratings=np.array([played.plays for _, _, played in rows], dtype=np.float32),
            times=np.array([played.last for _, _, played in rows], dtype=np.int64),
        )
        if not log.genres:
            return bare
        known = [
            [log.genres[track]] if track in log.genres else [] for track in bare.item_ids.tolist()
        ]
        genres = FeatureTable(bare.num_items, (Feature.multiple("genre", known),))
        return replace(bare, item_features=genres)

    def _file(self) -> Path:
        if self.config.path is None:
            raise DataError(
                "no log is named",
                expected="dataset.path",
                got="nothing",
                fix="set dataset.path = ...",
            )
        path = self.folder()
        if not path.is_file():
            raise DataError(f"{path} is not a file", expected="a CSV file", got="a folder")
        return path

    def _summed(self, file: Path) -> _Log:
        log = _Log()
        for number, row in _lines(file):
            listener = row["listener"]
            track = row["track"]
            played = log.pairs.setdefault((listener, track), _Played())
            played.plays += 1
            played.last = max(played.last, _seconds(row["time"], file, number))
            genre = row.get("genre") or ""
            if genre and log.genres.setdefault(track, genre) != genre:
                raise DataError(
                    f"{file}, line {number}: the track {track!r} has two genres",
                    expected=repr(log.genres[track]),
                    got=repr(genre),
                    fix="give each track one genre",
                )
        return log


def _lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and columns of every play."""
    with open(file, newline="", encoding="utf-8") as text:
        table = csv.DictReader(text)
        columns = list(table.fieldnames or ())
        if not set(NEEDED) <= set(columns):
            raise DataError(
                f"{file} lacks a column",
                expected=", ".join(NEEDED),
                got=", ".join(columns) or "an empty file",
                fix="name the columns in the first line",
            )
        for row in table:
            lacking = [name for name in NEEDED if not row.get(name)]
            if lacking or None in row:
                raise DataError(
                    f"{file}, line {table.line_num} is not a play",
                    expected=", ".join(columns),
                    got=f"nothing for {', '.join(lacking)}"
                    if lacking
                    else "more values than columns",
                )
            yield table.line_num, row


def _seconds(text: str, file: Path, number: int) -> int:
    """Seconds since 1970 from an ISO time (UTC where no zone is given) or a number."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        try:
            return int(float(text))
        except ValueError:
            raise DataError(
                f"{file}, line {number}: a time cannot be read",
                expected="an ISO time such as 2024-03-01T18:22:00, or seconds since 1970",
                got=repr(text),
            ) from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
