# SPDX-License-Identifier: Apache-2.0
"""The public part of a dataset: the items, their features, and the names of user features.

In a simulation it is part of the dataset. Real clients only have their own interactions, and item
17 must be the same item for all of them, so the operator of a deployment writes this file for all
nodes.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.data.features import Feature, FeatureNames, FeatureTable, Vectors
from fedrec.data.interactions import Interactions
from fedrec.errors import DataError
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.text_files import read_json


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The public part of a dataset.

    Attributes:
        item_ids: `[items]`, names of the items as text, distinct; an item's index is its place.
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
            raise ValueError("items are a list in which an item stands once")
        names = (
            FeatureNames.of(FeatureTable(0), self.item_features).of_items,
            [name for name, _ in self.user_features],
        )
        if any(len(set(own)) < len(own) for own in names):
            raise ValueError("a feature stands once")
        known = [categories for _, categories in self.user_features]
        for categories in [
            *known,
            *(feature.categories for feature in self.item_features.every),
        ]:
            if not all(isinstance(category, str) for category in categories):
                raise ValueError("categories are texts")

    def write(self, path: Path) -> None:
        """Write the catalogue as JSON.

        Raises:
            RunError: the file cannot be written.
        """
        table = {
            "items": self.item_ids.tolist(),
            "item-features": [_table(feature) for feature in self.item_features.features],
            "item-texts": [_table(text) for text in self.item_features.texts],
            "item-vectors": [_packed(one) for one in self.item_features.vectors],
            "user-features": [
                {"name": name, "categories": list(known)} for name, known in self.user_features
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
            found = cls(
                items,
                features,
                users,
                bool(table["rated"]),
                bool(table["timed"]),
            )
            found.check()
            return found
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            AttributeError,
        ) as error:
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
    own = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f4")
    values[known] = own.reshape(-1, values.shape[1])
    return Vectors(str(entry["name"]), values, known)
