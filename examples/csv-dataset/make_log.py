# SPDX-License-Identifier: Apache-2.0
"""Writes another dataset of fedrec as a log of plays: `python make_log.py synthetic plays.csv`.

A rating of r becomes r plays, so reading the log gives the same users, items and ratings.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from fedrec.data.interactions import Interactions
from fedrec.data.population import read_interactions
from fedrec.experiment.schema import load


def write_log(data: Interactions, file: Path) -> None:
    """One line per play, in the order of the interactions; the genre is an item's first category,
    if it has one."""
    genres = data.item_features.features[0].padded()[:, 0] if data.item_features.features else None
    names = data.item_features.features[0].categories if genres is not None else ()
    with open(file, "w", newline="", encoding="utf-8") as text:
        table = csv.writer(text)
        table.writerow(["time", "listener", "track", "genre"])
        for row in range(len(data)):
            user = data.users[row]
            item = data.items[row]
            genre = names[genres[item]] if genres is not None and genres[item] >= 0 else ""
            when = 0 if data.times is None else int(data.times[row])
            plays = 1 if data.ratings is None else int(data.ratings[row])
            table.writerows([[when, data.user_ids[user], data.item_ids[item], genre]] * plays)


if __name__ == "__main__":
    name, target = sys.argv[1:]
    write_log(
        read_interactions(load({"name": "log", "rounds": 1, "dataset": {"name": name}})),
        Path(target),
    )
