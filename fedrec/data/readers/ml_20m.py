# SPDX-License-Identifier: Apache-2.0
"""MovieLens-20M: 20,000,263 ratings in half stars, 138,493 users, 26,744 rated films (Harper and
Konstan, 2015).

The catalogue is the films with a rating; `movies.csv` lists 27,278. The release has no user
features. It has a later edition with the same ratings (October 2016), whose archive is the one
named here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedrec.data.features import Feature, FeatureTable
from fedrec.data.files.delimited import Layout, read_delimited
from fedrec.data.files.source import Archive, Source
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader
from fedrec.data.readers._movielens import LICENCE, genre_lists, read_ratings, rows_of

_ROWS = 20_000_263
_RATINGS = Layout(
    {"userId": np.int32, "movieId": np.int32, "rating": np.float32, "timestamp": np.int64},
    separator=",",
    header=True,
)
_FILMS = Layout({"movieId": np.int32, "genres": str}, separator=",", header=True, quoted=True)


class MovieLens20M(Reader):
    """Reads `ratings.csv` and `movies.csv`."""

    title = "MovieLens-20M: 20,000,263 ratings, 138,493 users, 26,744 rated films"
    paper = "DP-VAE; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = Source(
        page="https://grouplens.org/datasets/movielens/20m/",
        licence=LICENCE,
        files=("ratings.csv", "movies.csv"),
        extras=("README.txt",),
        archives=(
            Archive(
                url="https://files.grouplens.org/datasets/movielens/ml-20m.zip",
                size=198_702_078,
                sha256="96f243c338a8665f6bcc89c53edf6ee39162a846940de6b7c8c48aeada765ff3",
            ),
        ),
        users=138_493,
        items=26_744,
        rows=_ROWS,
    )

    def read(self) -> Interactions:
        path = self.file("ratings.csv", lines=_ROWS + 1)
        columns = {"users": "userId", "items": "movieId", "ratings": "rating", "times": "timestamp"}
        bare = read_ratings(self, path, _RATINGS, columns)
        return replace(bare, item_features=self._item_features(bare.item_ids))

    def _item_features(self, ids: np.ndarray) -> FeatureTable:
        path = self.file("movies.csv")
        films = rows_of(ids, read_delimited(path, _FILMS), path, key="movieId")
        return FeatureTable(len(ids), (Feature.multiple("genres", genre_lists(films["genres"])),))
