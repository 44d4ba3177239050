# SPDX-License-Identifier: Apache-2.0
"""The public part of a dataset: items, their features and vectors, and the names of user features.

In a simulation it is part of the dataset. Real clients only have their own interactions, and item
17 must be the same item for all of them, so the operator of a deployment writes this file for all
nodes.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import pandas as pd

from fedrec.data.interactions import Feature, FeatureTable, Interactions, Vectors
from fedrec.errors import DataError
from fedrec.runtime.files import read_json, write_atomically


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The public part of a dataset.

    Attributes:
        item_ids: `[items]`, names of the items as text, distinct; an item's index is its position.
        item_features: public side features of the items.
        user_features: names and categories of the users' features, without the values of any user.
        rated: whether interactions carry ratings.
        timed: whether they carry times.
    """

    item_ids: np.ndarray
    item_features: FeatureTable
    user_features: tuple[tuple[str, tuple[str, ...]], ...]
    rated: bool
    timed: bool

    @classmethod
    def of(cls, interactions: Interactions) -> Catalogue:
        """Return the public catalogue of a dataset."""
        return cls(
            item_ids=interactions.item_ids.astype(str),
            item_features=interactions.item_features,
            user_features=tuple(
                (f.name, f.categories) for f in interactions.user_features.features
            ),
            rated=interactions.ratings is not None,
            timed=interactions.times is not None,
        )

    def write(self, path: Path) -> None:
        """Write the catalogue as JSON.

        Raises:
            RunError: the file cannot be written.
        """
        table = {
            "items": self.item_ids.tolist(),
            "item-features": [_table(feature) for feature in self.item_features.features],
            "item-texts": [_table(text) for text in self.item_features.texts],
            "item-vectors": [_packed(vectors) for vectors in self.item_features.vectors],
            "user-features": [
                {"name": name, "categories": names} for name, names in self.user_features
            ],
            "rated": self.rated,
            "timed": self.timed,
        }
        write_atomically(path, json.dumps(table))

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """Read a file written by `write`.

        Raises:
            DataError: the file is missing or not a catalogue.
        """
        try:
            table = read_json(path)
            items = np.array(table["items"], dtype=np.str_)
            features = FeatureTable(
                len(items),
                tuple(_feature(entry) for entry in table["item-features"]),
                tuple(_feature(entry) for entry in table.get("item-texts", ())),
                tuple(_vectors(entry) for entry in table.get("item-vectors", ())),
            )
            users = tuple(
                (str(entry["name"]), tuple(entry["categories"])) for entry in table["user-features"]
            )
            if items.ndim != 1 or len(np.unique(items)) < len(items):
                raise ValueError("items must be unique names")
            if len(dict(users)) < len(users):
                raise ValueError("duplicate feature name")
            labels = [*dict(users).values(), *(feature.categories for feature in features.every)]
            if not all(isinstance(label, str) for categories in labels for label in categories):
                raise ValueError("categories must be strings")
            return cls(items, features, users, bool(table["rated"]), bool(table["timed"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
            raise DataError(
                f"{path} is not a catalogue",
                expected="a file as `fedrec deploy init --experiment` writes it",
                got=f"{type(error).__name__}: {error}",
                fix="ask the operator of the deployment for it",
            ) from None


def _table(feature: Feature) -> dict[str, Any]:
    return {
        "name": feature.name,
        "categories": list(feature.categories),
        "offsets": feature.offsets.tolist(),
        "codes": feature.codes.tolist(),
    }


def _feature(entry: dict[str, Any]) -> Feature:
    offsets = np.array(entry["offsets"], dtype=np.int64)
    codes = np.array(entry["codes"], dtype=np.int64)
    return Feature(str(entry["name"]), tuple(entry["categories"]), offsets, codes)


def _packed(vectors: Vectors) -> dict[str, Any]:
    """Encode the vectors of known rows as little-endian `float32` bytes."""
    known = vectors.values[vectors.known].astype("<f4")
    return {
        "name": vectors.name,
        "width": vectors.values.shape[1],
        "known": np.flatnonzero(vectors.known).tolist(),
        "items": vectors.rows,
        "values": base64.b64encode(known.tobytes()).decode("ascii"),
    }


def _vectors(entry: dict[str, Any]) -> Vectors:
    known = np.zeros(int(entry["items"]), dtype=bool)
    known[np.array(entry["known"], dtype=np.int64)] = True
    values = np.zeros((len(known), int(entry["width"])), dtype=np.float32)
    numbers = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f4")
    values[known] = numbers.reshape(-1, values.shape[1])
    return Vectors(str(entry["name"]), values, known)


# Files of dense vectors of items, such as embeddings of their texts or images: `NAME.npy`, an array
# `[items, width]`, and beside it `NAME.txt` with the id of each of its rows, one per line.

_SHOWN = 3


def read_vectors(path: Path, ids: np.ndarray, *, complete: bool) -> Vectors:
    """Read vectors of items from a file; rows of other items are ignored.

    Args:
        path: the file; its stem is the name of the vectors.
        ids: ids of the items, `[items]`; compared as texts.
        complete: whether an item without a vector is an error.

    Raises:
        DataError: a file is missing or damaged, a value is not finite, an id is duplicate, or no
            item (`complete`: not every item) has a vector.
    """
    listed, values = read_rows(path)
    index = listed.get_indexer(pd.Index(ids.astype(str)))
    missing = ids[index < 0]
    if len(missing) and (complete or len(missing) == len(ids)):
        shown = ", ".join(map(repr, missing[:_SHOWN].tolist()))
        expected = f"a vector for each of {len(ids):,} items, named as in the data"
        raise _wrong(path, expected, f"none for {len(missing):,} of them, such as {shown}")
    return Vectors(path.stem, values, np.ones(len(values), dtype=bool)).renumbered(index)


def read_rows(path: Path) -> tuple[pd.Index, np.ndarray]:
    """All rows of a file of vectors: ids, `[items]`, and vectors, `float32 [items, width]`.

    Raises:
        DataError: see `read_vectors`.
    """
    names = path.with_suffix(".txt")
    try:
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
        listed = pd.Index(names.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the last two: bad header
        raise _wrong(path, f"an array, and {names.name} with the id of each row", error) from None
    with np.errstate(over="ignore"):  # overflow becomes infinity
        values = values.astype(np.float32) if values.dtype.kind in "iuf" else values
    if values.ndim != 2 or len(values) != len(listed) or values.dtype.kind != "f":
        got = f"{len(listed):,} ids and an array {list(values.shape)} of {values.dtype}"
        raise _wrong(path, "numbers [items, width], and an id for each row", got)
    if not np.isfinite(values).all():
        raise _wrong(path, "finite numbers of 32 bits", "NaN or infinity")
    if listed.has_duplicates:
        raise _wrong(path, "one vector per item", f"duplicate {listed[listed.duplicated()][0]!r}")
    return listed, values


def vector_files(path: Path) -> list[Path]:
    """Existing files of a set of vectors: the array and its ids."""
    return [file for file in (path, path.with_suffix(".txt")) if file.is_file()]


def _wrong(path: Path, expected: str, got: object) -> DataError:
    return DataError(
        f"{path}: invalid item vectors",
        expected=expected,
        got=str(got),
        fix="correct both files, or set dataset.items-without-vector = 'mean'",
    )
