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

from fedrec.data.features import Feature, FeatureNames, FeatureTable, Vectors
from fedrec.data.interactions import Interactions
from fedrec.data.tables import is_parquet, read_parquet
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
        """The catalogue of a dataset that has been read."""
        return cls(
            item_ids=interactions.item_ids.astype(str),
            item_features=interactions.item_features,
            user_features=tuple(
                (f.name, f.categories) for f in interactions.user_features.features
            ),
            rated=interactions.ratings is not None,
            timed=interactions.times is not None,
        )

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: an item or a feature is named twice, or is not a list of names.
        """
        if self.item_ids.ndim != 1 or len(np.unique(self.item_ids)) < len(self.item_ids):
            raise ValueError("items must be unique")
        items = self.item_features
        users = dict(self.user_features)
        names = FeatureNames.of(FeatureTable(0), items).of_items
        if len(set(names)) < len(names) or len(users) < len(self.user_features):
            raise ValueError("duplicate feature name")
        for categories in [*users.values(), *(feature.categories for feature in items.every)]:
            if not all(isinstance(category, str) for category in categories):
                raise ValueError("categories must be strings")

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
            catalogue = cls(items, features, users, bool(table["rated"]), bool(table["timed"]))
            catalogue.check()
            return catalogue
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
    """The known rows as bytes, little-endian `float32`."""
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


# Files of dense vectors of items, such as embeddings of their texts or images.
#
# * Parquet: a column of item ids, the first one, and either one column of lists of numbers or
# several   columns of numbers. * `NAME.npy`, an array `[items, width]`, and beside it `NAME.txt`
# with the id of each of its rows,   one per line.

_SHOWN = 3


def read_vectors(path: Path, ids: np.ndarray, *, complete: bool) -> Vectors:
    """The vectors of some items; those of other items in the file are left out.

    Args:
        path: the file; its name without the ending is that of the vectors.
        ids: of the items, `[items]`; compared as texts.
        complete: whether an item without a vector is refused.

    Raises:
        DataError: a file is missing or damaged, vectors differ in length or have a value that is no
            finite number, an id stands twice, no item has a vector, or (`complete`) one has none.
    """
    names, values = read_rows(path)
    index = names.get_indexer(pd.Index(ids.astype(str)))
    known = index >= 0
    missing = ids[~known]
    if not known.any() or (complete and len(missing)):
        shown = ", ".join(map(repr, missing[:_SHOWN].tolist()))
        raise _wrong(
            path,
            f"a vector for each of {len(ids):,} items",
            f"none for {len(missing):,} of them, such as {shown}",
            "add them, or set dataset.items-without-vector = 'mean'"
            if known.any()
            else "name items as the data do",
        )
    vectors = np.zeros((len(ids), values.shape[1]), dtype=np.float32)
    vectors[known] = values[index[known]]
    return Vectors(path.stem, vectors, known)


def read_rows(path: Path) -> tuple[pd.Index, np.ndarray]:
    """All rows of a file of vectors: ids, `[items]`, and vectors, `float32 [items, width]`.

    Raises:
        DataError: see `read_vectors`.
    """
    names, values = _npy(path) if path.suffix == ".npy" else _parquet(path)
    if names.duplicated().any():
        twice = names[names.duplicated()][0]
        raise _wrong(path, "one vector per item", f"two of {twice!r}", "leave one of them out")
    with np.errstate(over="ignore"):  # what is too large becomes infinity
        values = values.astype(np.float32)
    if values.ndim != 2 or not np.isfinite(values).all():
        got = "NaN or infinity" if values.ndim == 2 else f"an array of shape {list(values.shape)}"
        raise _wrong(path, "finite numbers of 32 bits, [items, width]", got, "correct the vectors")
    return names, values


def vector_files(path: Path) -> list[Path]:
    """The files that vectors are read from, those that exist."""
    wanted = [path, _ids_of(path)] if path.suffix == ".npy" else [path]
    return [file for file in wanted if file.is_file()]


def _ids_of(path: Path) -> Path:
    return path.with_suffix(".txt")


def _npy(path: Path) -> tuple[pd.Index, np.ndarray]:
    try:
        values = np.load(path, allow_pickle=False)
        lines = _ids_of(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the latter two: of its header
        expected = f"an array of numbers, and {_ids_of(path).name} with the id of each row"
        raise _wrong(path, expected, str(error), "write both files again") from None
    if len(lines) != len(np.atleast_1d(values)) or values.dtype.kind not in "iuf":
        got = f"{len(lines):,} ids and an array {list(values.shape)} of {values.dtype}"
        raise _wrong(path, "numbers, and an id for each row", got, "write both files again")
    return pd.Index(lines), values


def _parquet(path: Path) -> tuple[pd.Index, np.ndarray]:
    if not is_parquet(path):
        raise _wrong(path, "a file .npy or .parquet", f"{path.suffix!r}", "save it as one of these")
    frame = read_parquet(path)
    ids, *columns = (frame[name] for name in frame)
    try:
        lists = [np.stack([*columns[0]])] if len(columns) == 1 else []
        wide = columns and not (lists and lists[0].ndim == 2)
        values = np.column_stack(columns) if wide else lists[0]
        return pd.Index(ids.astype(str)), values.astype(np.float64)
    except (ValueError, TypeError, IndexError) as error:
        expected = "ids in the first column, and one of lists of equal length or several of numbers"
        raise _wrong(path, expected, str(error) or "other columns", "correct the table") from None


def _wrong(path: Path, expected: str, got: str, fix: str) -> DataError:
    return DataError(f"{path}: these vectors cannot be used", expected=expected, got=got, fix=fix)
