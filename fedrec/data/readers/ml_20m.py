# SPDX-License-Identifier: Apache-2.0
"""MovieLens-20M: 20,000,263 ratings in half stars, 138,493 users, 26,744 rated films (Harper and
Konstan, 2015).

The catalogue is the films with a rating; `movies.csv` lists 27,278. The release has no user
features. It has a later edition with the same ratings (October 2016), whose archive is the one
named here.
"""

from __future__ import annotations

import numpy as np

from fedrec.data.features import Feature
from fedrec.data.files.published import Archive, DatasetSource
from fedrec.data.files.tables import Columns, TableLayout
from fedrec.data.readers._movielens import LICENCE, MovieLens, genre_lists


class MovieLens20M(MovieLens):
    """Reads `ratings.csv` and `movies.csv`."""

    name = "ml-20m"
    title = "MovieLens-20M: 20,000,263 ratings, 138,493 users, 26,744 rated films"
    paper = "DP-VAE; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
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
        rows=20_000_263,
    )

    ratings = TableLayout(
        {"userId": np.int32, "movieId": np.int32, "rating": np.float32, "timestamp": np.int64},
        separator=",",
        names="first line",
    )
    films = TableLayout(
        {"movieId": np.int32, "genres": str}, separator=",", names="first line", quoted=True
    )

    def film_features(self, films: Columns) -> list[Feature]:
        return [Feature.multiple("genres", genre_lists(films["genres"]))]
