# SPDX-License-Identifier: Apache-2.0
"""Amazon 5-core reviews (McAuley et al., 2015): one JSON object per line, `.json` or `.json.gz`,
one category per file.

From each review: reviewerID, asin, overall (the rating) and unixReviewTime. Texts are skipped. The
file is streamed; only the distinct ids are kept as text.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from sys import intern

import numpy as np

from fedrec.data.features import FeatureNames
from fedrec.data.files.indexing import index_rows
from fedrec.data.files.published import DatasetSource
from fedrec.data.files.tables import malformed_line
from fedrec.data.interactions import Interactions
from fedrec.data.reader import Reader
from fedrec.errors import DataError
from fedrec.runtime.text_files import MOST_JSON, parse_json

_EXPECTED = "a JSON object with reviewerID, asin, overall and unixReviewTime"


class Amazon5Core(Reader):
    """Reads one category. Import only, and without published counts: they differ by category and
    edition."""

    name = "amazon-5core"
    title = "Amazon 5-core: product reviews of one category"
    paper = (
        "UPC-SDG; J. McAuley et al., Image-based Recommendations on Styles and Substitutes, SIGIR"
        " 2015"
    )
    source = DatasetSource(
        page="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        licence="research use; cite the authors",
        files=(),
        extras=("*.json.gz", "*.json"),
    )

    def read(self) -> Interactions:
        users, items, ratings, times = _read_reviews(self._reviews())
        return index_rows(self.name, users=users, items=items, ratings=ratings, times=times)

    def feature_names(self) -> FeatureNames:
        """None are read."""
        return FeatureNames()

    def _reviews(self) -> Path:
        folder = self.folder()
        if folder.is_file():
            return folder
        files = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
        if len(files) != 1:
            raise DataError(
                f"{folder} does not hold one file of reviews",
                expected="one .json or .json.gz file",
                got=", ".join(path.name for path in files) or "none",
                fix="set dataset.path to the file of the category",
            )
        return files[0]


def _read_reviews(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    users: list[str] = []
    items: list[str] = []
    ratings = array("f")
    times = array("q")
    for number, line in enumerate(_lines(path), start=1):
        try:
            review = parse_json(line, MOST_JSON)
            users.append(intern(review["reviewerID"]))
            items.append(intern(review["asin"]))
            ratings.append(review["overall"])
            times.append(review["unixReviewTime"])
        except (ValueError, KeyError, TypeError, OverflowError):
            shown = line[:200].decode("utf-8", "replace")
            raise malformed_line(path, number, shown, _EXPECTED) from None
    columns = np.array(users, dtype=object), np.array(items, dtype=object)
    return *columns, np.array(ratings), np.array(times)


def _lines(path: Path) -> Iterator[bytes]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            yield from (line.rstrip(b"\r\n") for line in file if line.strip())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged",
            expected="a whole gzip file",
            got=str(error),
            fix="get the file again",
        ) from None
