# SPDX-License-Identifier: Apache-2.0
"""Items that came after a run, which its model ranks by what is public of them, without training.

Their file has the ids of the items in the column `item` (or as the data call it), and what the run
knows of its own items: a column for each feature, such as `genres` with `Drama|Comedy`, and the
numbers of the vector in all other columns. A file of vectors, `.npy` beside `.txt`, is enough where
the run knows vectors alone. Categories that the run does not have are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.catalogue import read_rows
from fedrec.data.features import Feature, FeatureTable, Vectors, known_labels
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.errors import DataError

_LOG = logging.getLogger("fedrec")


def with_items_of(
    population: Population, path: Path, item: str = "item", *, seed: int = 0
) -> Population:
    """The clients of a run's data, with further items behind those of the run.

    Args:
        population: of the run.
        path: the file of the new items.
        item: name of the column of items in the data.
        seed: of the split.

    Raises:
        DataError: the file is damaged, an id is missing, is there twice or is one of the run's, or
            vectors have another length than the run's.
    """
    return Population(
        _grown(population.interactions, path, item),
        population.partition,
        task=population.task,
        positive_above=population.positive_above,
        perturbed=population.perturbed,
        seed=seed,
        adversary=population.adversary,
    )


def _grown(data: Interactions, path: Path, item: str) -> Interactions:
    """The data with the items of a file behind its own."""
    known = data.item_features
    if path.suffix == ".npy":
        names, values = read_rows(path)
        frame = pd.DataFrame(index=range(len(names)))
    else:
        names, frame, values = _table(path, item, known)
    ids = names.astype(str).str.strip()
    old = ids.isin(data.item_ids.astype(str))
    for wrong, got in ((ids == "", "none"), (ids.duplicated(), "twice"), (old, "in the run")):
        if wrong.any():
            raise _wrong(path, "new ids, each once", f"{ids[wrong][0]!r}: {got}", "correct the ids")
    vectors = tuple(_vectors(path, table, values) for table in known.vectors)
    features, texts = (
        tuple(_feature(feature, frame, words=kind is known.texts) for feature in kind)
        for kind in (known.features, known.texts)
    )
    rows = data.num_items + len(ids)
    numbers = np.issubdtype(data.item_ids.dtype, np.integer) and ids.str.isdecimal().all()
    added = ids.to_numpy(dtype=object).astype(np.int64 if numbers else object)
    return replace(
        data,
        item_ids=np.concatenate(
            [data.item_ids if numbers else data.item_ids.astype(object), added]
        ),
        item_features=FeatureTable(rows, features, texts, vectors),
    )


def _table(
    path: Path, item: str, known: FeatureTable
) -> tuple[pd.Index, pd.DataFrame, np.ndarray | None]:
    """Ids, columns of features, and vectors `[items, width]` of a table."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        ids = pd.Index(frame.pop(item if item in frame else "item"))
        named = [feature.name for feature in known.every if feature.name in frame]
        others = frame.drop(columns=named)
        values = others.to_numpy().astype(np.float32) if known.vectors else None
    except (OSError, ValueError, KeyError) as error:
        names = ", ".join(["item", *(feature.name for feature in known.every)])
        expected = f"a CSV file with the columns {names}, and the numbers of a vector in the others"
        raise _wrong(path, expected, str(error), "correct the table") from None
    return ids, pd.DataFrame(frame[named]), values


def _vectors(path: Path, known: Vectors, values: np.ndarray | None) -> Vectors:
    width = known.values.shape[1]
    if values is None or values.shape[1] != width or not np.isfinite(values).all():
        got = f"{0 if values is None else values.shape[1]} numbers"
        raise _wrong(
            path,
            f"{width} finite numbers of each item, as the vectors {known.name!r} of the run have",
            got if got != f"{width} numbers" else "NaN or infinity",
            "encode the new items like those of the run",
        )
    every = np.concatenate([known.values, values.astype(np.float32)])
    return Vectors(known.name, every, np.concatenate([known.known, np.ones(len(values), bool)]))


def _feature(known: Feature, frame: pd.DataFrame, *, words: bool) -> Feature:
    """A feature of the run's items and of the new ones behind them."""
    texts: Sequence[str] = frame[known.name].tolist() if known.name in frame else [""] * len(frame)
    number = {name: code for code, name in enumerate(known.categories)}
    codes: list[list[int]] = []
    unknown = set[str]()
    for text in texts:
        labels, others = known_labels(text, number) if text and not words else ([], [])
        if words:
            labels = [word for word in Feature.words("", [text]).categories if word in number]
        unknown.update(others)
        codes.append([number[label] for label in dict.fromkeys(labels)])
    if unknown:
        _LOG.warning("%s: the run has no %s; left out", known.name, ", ".join(sorted(unknown)[:5]))
    ends = known.offsets[-1] + np.cumsum([len(row) for row in codes], dtype=np.int64)
    flat = np.array([code for row in codes for code in row], dtype=np.int64)
    return Feature(
        known.name,
        known.categories,
        np.concatenate([known.offsets, ends]),
        np.concatenate([known.codes, flat]),
    )


def _wrong(path: Path, expected: str, got: str, fix: str) -> DataError:
    return DataError(f"{path}: these items cannot be ranked", expected=expected, got=got, fix=fix)
