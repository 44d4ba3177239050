# SPDX-License-Identifier: Apache-2.0
"""Writes a table of the shape of MovieLens-20M, as CSV and as Parquet, for `fedrec run --data`.

    python benchmarks/large_table.py /tmp/rows-20m [--rows 20300000]
    python benchmarks/large_table.py /tmp/shop --rows 33000 --users 5000 --items 5200 --likes

Up to 138,493 users with 21 to some 4,600 ratings each (median 72, mean 145), 26,744 items whose
popularity falls with the power 1.1 of their rank; one half of what a user rates is from one of 20
groups of items. A pair of user and item occurs once, so that there are somewhat fewer rows than
asked for: 20,032,189 by default. With `--likes` there are no ratings, so that each row is a like.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

USERS = 138_493
ITEMS = 26_744
_ROWS = 20_000_263  # of MovieLens-20M
_GROUPS = 20
_AT_ONCE = 5000
_RATINGS = [0.012, 0.034, 0.014, 0.072, 0.044, 0.214, 0.11, 0.278, 0.077, 0.145]
"""Shares of 0.5, 1 and so on up to 5."""


def pairs(
    rows: int, users: int, items: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of at most so many rows, `int64 [rows]` each, user by user."""
    counts = np.exp(random.normal(np.log(68), 1.18, users)).clip(20, 9254)
    least = min(20, max(1, rows // (4 * users)))
    counts = np.maximum(least, counts * rows / counts.sum()).astype(int)
    shares = 1 / (np.arange(items) + 30.0) ** 1.1
    groups = random.integers(0, _GROUPS, items)
    found = [
        _drawn(counts[start : start + _AT_ONCE], start, shares, groups, random)
        for start in range(0, users, _AT_ONCE)
    ]
    user, item = (np.concatenate(part)[:rows] for part in zip(*found, strict=True))
    return user, item


def _drawn(
    counts: np.ndarray,
    first: int,
    shares: np.ndarray,
    groups: np.ndarray,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of some users: more than wanted are drawn, and the first different ones kept."""
    who = np.repeat(np.arange(len(counts)), (counts * 2.2 + 20).astype(int))
    taste = random.integers(0, _GROUPS, len(counts))
    own = random.random(len(who)) < 0.5
    items = len(shares)
    item = np.empty(len(who), dtype=np.int64)
    item[~own] = _by_share(shares, (~own).sum(), random)
    for group in range(_GROUPS):
        inside = np.flatnonzero(groups == group)
        places = np.flatnonzero(own & (taste[who] == group))
        item[places] = inside[_by_share(shares[inside], len(places), random)]
    code = pd.unique(who * items + item)
    code = code[np.argsort(code // items, kind="stable")]
    user = code // items
    kept = np.arange(len(user)) - np.searchsorted(user, np.arange(len(counts)))[user] < counts[user]
    return user[kept] + first, code[kept] % items


def _by_share(shares: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    ends = np.cumsum(shares)
    return np.searchsorted(ends, random.random(count) * ends[-1])


def table(rows: int, users: int, items: int) -> pd.DataFrame:
    """User, item, rating and time of at most so many rows, sorted by user and item."""
    random = np.random.default_rng(20)
    user, item = pairs(rows, users, items, random)
    times = 789_652_009 + random.integers(0, 600_000_000, user[-1] + 1)[user]
    times += random.integers(0, 5_000_000, len(user))
    order = np.lexsort((item, user))
    names = random.permutation(131_262)[:items] + 1
    ratings = random.choice(np.arange(1, 11) / 2, len(user), p=_RATINGS)
    columns = {"userId": user + 1, "movieId": names[item], "rating": ratings, "timestamp": times}
    return pd.DataFrame(columns).iloc[order]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="of the files, without .csv and .parquet")
    parser.add_argument("--rows", type=int, default=20_300_000)
    parser.add_argument("--users", type=int, help="default: in proportion to the rows")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--likes", action="store_true")
    given = parser.parse_args()
    users = given.users or min(USERS, round(USERS * given.rows / _ROWS))
    found = table(given.rows, users, given.items)
    if given.likes:
        found = found.drop(columns="rating")
    found.to_csv(f"{given.path}.csv", index=False)
    found.to_parquet(f"{given.path}.parquet", index=False)
    users, items = found["userId"].nunique(), found["movieId"].nunique()
    print(f"{len(found):,} rows, {users:,} users, {items:,} items")


if __name__ == "__main__":
    main()
