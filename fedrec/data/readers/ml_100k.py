# SPDX-License-Identifier: Apache-2.0
"""MovieLens-100K: 100,000 star ratings, 943 users, 1,682 films (Harper and Konstan, 2015).

Ages are given in years; they are banded as MovieLens-1M does, so that a model with an age feature
reads both. The zip code is dropped. The publisher's five folds lie in the same folder;
`fedrec.data.splits.kfold` reads them.
"""

from __future__ import annotations

import numpy as np

from fedrec.data.features import Feature
from fedrec.data.files.published import Archive, DatasetSource
from fedrec.data.files.tables import Columns, TableLayout
from fedrec.data.readers._movielens import LICENCE, RATINGS, MovieLens

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip


class MovieLens100K(MovieLens):
    """Reads `u.data`, `u.user` and `u.item`."""

    name = "ml-100k"
    title = "MovieLens-100K: 100,000 ratings, 943 users, 1,682 films"
    paper = "DP-VAE, PNBM; F. M. Harper, J. A. Konstan, The MovieLens Datasets, ACM TiiS 2015"
    source = DatasetSource(
        page="https://grouplens.org/datasets/movielens/100k/",
        licence=LICENCE,
        files=("u.data", "u.user", "u.item"),
        extras=("README", "u[1-5].base", "u[1-5].test"),
        archives=(
            Archive(
                url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
                size=4_924_029,
                sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
            ),
        ),
        users=943,
        items=1_682,
        rows=100_000,
        fingerprints=("33caa63b1f96eb36dbe5d712b44ef39aa3ba8252027c98507131ca06498f48fd",),
    )

    ratings = TableLayout(RATINGS)
    films = TableLayout(
        {
            "id": np.int32,
            "title": str,
            "released": str,
            "video": str,
            "page": str,
            **dict.fromkeys(_GENRES, np.int8),
        },
        separator="|",
        encoding="latin-1",
    )
    users = TableLayout(
        {"id": np.int32, "age": np.int32, "gender": str, "occupation": str, "zip": str},
        separator="|",
    )

    def film_features(self, films: Columns) -> list[Feature]:
        flags = np.stack([films[genre] for genre in _GENRES], axis=1)
        genres = [[_GENRES[place] for place in np.flatnonzero(row)] for row in flags]
        return [Feature.multiple("genres", genres)]
