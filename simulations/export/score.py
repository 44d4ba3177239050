#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Score the catalogue for one user and print the best items, with only numpy and onnxruntime.

    python score.py rows.csv --top 10

The rows are a table with the columns `item`, and `rating` and `time` if the model uses them. They
are the user's history, and their items are not recommended. `user.npz` beside this file has the
data of the user's device: private parameters, and codes of features.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime


class Rows(NamedTuple):
    """A user's rows with known items, `[rows]` each: numbers of items, ratings, times. Without
    ratings all rows are positive; without times they are in order."""

    items: np.ndarray
    ratings: np.ndarray | None
    times: np.ndarray


class Scorer:
    """An exported model.

    Args:
        folder: folder of the export.
    """

    def __init__(self, folder: Path) -> None:
        self.form = json.loads((folder / "scoring.json").read_text(encoding="utf-8"))
        self.ids: list[str] = self.form["items"]
        device = folder / "user.npz"
        self._device = dict(np.load(device, allow_pickle=False)) if device.exists() else {}
        self._number = {name: number for number, name in enumerate(self.ids)}
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
        )

    def read_rows(self, path: Path) -> Rows:
        """Read the rows of a CSV file."""
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            names = table.fieldnames or []
            rows = list(table)
        needed = ["item", *self.form["columns"]]
        missing = [name for name in needed if name not in names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; required: {', '.join(needed)}")
        known = [row for row in rows if row["item"] in self._number]
        if len(known) < len(rows):
            print(f"ignored {len(rows) - len(known)} rows with unknown items", file=sys.stderr)
        ratings = [row["rating"] for row in known] if "rating" in names else None
        times = [int(row["time"]) for row in known] if "time" in names else range(len(known))
        return Rows(
            np.array([self._number[row["item"]] for row in known], dtype=np.int64),
            None if ratings is None else np.array(ratings, dtype=np.float32),
            np.array(times, dtype=np.int64),
        )

    def scores(self, rows: Rows) -> np.ndarray:
        """Scores of the catalogue, `float32 [items]`."""
        history = {"history": self.history(rows)} if self.form["history"] else {}
        (scores,) = self._session.run(["scores"], {**self._device, **history})
        return np.asarray(scores)

    def history(self, rows: Rows) -> np.ndarray:
        """The model's representation of a user: weights of the catalogue `float32 [items]`, or the
        last items `int64 [longest]`, padded with -1."""
        form = self.form["history"]
        above = self.form["positive-above"]
        liked = np.ones(len(rows.items), dtype=bool)  # the positive ones
        if rows.ratings is not None and above is not None:
            liked = rows.ratings > above
        if form["kind"] == "weights":
            return self._weights(rows, liked)
        items = rows.items[liked][np.argsort(rows.times[liked], kind="stable")]
        if form["kind"] == "sequence":
            last = np.full(form["longest"], -1, dtype=np.int64)
            newest = items[-len(last) :]
            last[: len(newest)] = newest
            return last
        recent = np.zeros(len(self.ids), dtype=np.float32)
        for distance in range(min(form["window"], len(items)), 0, -1):
            recent[items[-distance]] = form["decay"] ** (distance - 1)
        return recent

    def best(self, rows: Rows, scores: np.ndarray, top: int) -> list[tuple[str, float]]:
        """Ids and scores of the best items, without those of the rows, from scores `[items]`."""
        left = np.setdiff1d(np.arange(len(scores)), rows.items)
        order = left[np.argsort(-scores[left], kind="stable")][:top]
        return [(self.ids[item], float(scores[item])) for item in order]

    def _weights(self, rows: Rows, liked: np.ndarray) -> np.ndarray:
        form = self.form["history"]
        table = np.zeros(len(self.ids), dtype=np.float32)
        if form["rated"] and rows.ratings is not None:
            for item in np.unique(rows.items[liked]):
                of_item = liked & (rows.items == item)
                ratings = rows.ratings[of_item][np.argsort(rows.times[of_item], kind="stable")]
                weights = np.arange(1, len(ratings) + 1, dtype=np.float64)
                table[item] = ratings.astype(np.float64) @ weights / weights.sum()
        else:
            table[rows.items[liked]] = 1
        others = rows.items[~liked]
        table[others] = np.maximum(table[others], np.float32(form["low-rated"]))
        return table


def main() -> None:
    """Print the best items as `rank,item,score`."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("rows", type=Path, help="the user's rows: item, and rating and time")
    parser.add_argument("--top", type=int, default=10, help="number of items (default: 10)")
    given = parser.parse_args()
    if given.top < 1:
        parser.error("--top must be at least 1")
    try:
        scorer = Scorer(Path(__file__).resolve().parent)
        rows = scorer.read_rows(given.rows)
        best = scorer.best(rows, scorer.scores(rows), given.top)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    writer = csv.writer(sys.stdout)
    writer.writerow(("rank", "item", "score"))
    writer.writerows((rank, *row) for rank, row in enumerate(best, 1))


if __name__ == "__main__":
    main()
