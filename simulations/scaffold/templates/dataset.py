# SPDX-License-Identifier: Apache-2.0
"""Play counts from a CSV with the columns `listener`, `artist` and `plays`; the rating is log(1 +
plays)."""

from __future__ import annotations

import csv

import numpy as np
from pydantic import Field

from fedrec.data.columns import index_rows
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.errors import DataError

COLUMNS = ("listener", "artist", "plays")


class ExampleConfig(ReaderConfig):
    """Settings; `path`, the file, comes from `ReaderConfig`."""

    least: int = Field(default=1, ge=0)
    """Rows with fewer plays are left out."""


class Example(Reader):
    """Reads the file named by `dataset.path`."""

    Config = ExampleConfig
    title = "play counts, listener by artist"
    config: ExampleConfig

    def feature_names(self) -> FeatureNames:
        """The side features that `read` gives, for tables of results: none."""
        return FeatureNames()

    def read(self) -> Interactions:
        """Users and items become indices; ratings are the logarithm of the counts."""
        file = self.folder()  # raises an error if the path does not exist
        with open(file, newline="", encoding="utf-8") as lines:
            table = csv.DictReader(lines)
            if not set(COLUMNS) <= set(table.fieldnames or ()):
                raise DataError(
                    f"{file} lacks a column",
                    expected=", ".join(COLUMNS),
                    got=", ".join(table.fieldnames or ()) or "an empty file",
                    fix="name the columns in the first line",
                )
            rows = [row for row in table if int(row["plays"]) >= self.config.least]
        return index_rows(
            self.name,
            users=np.array([row["listener"] for row in rows]),
            items=np.array([row["artist"] for row in rows]),
            ratings=np.log1p([int(row["plays"]) for row in rows]),
        )
