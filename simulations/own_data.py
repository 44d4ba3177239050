# SPDX-License-Identifier: Apache-2.0
"""The experiment of `fedrec try` for the user's own table of interactions. Models that represent
users by features cannot learn from data without side features. The linear item-to-item model
represents a user by its items; it is computed in two federated rounds, in each of which every
client uploads once (counts, then products), and compared with popularity and centralised EASE. A
fifth of the users are test users, each with a random half of its items held out; a tenth are
validation users for tuning (`--set evaluation.held-out=validation`) and for early stopping
(`[early-stopping]`): if popularity scores better on them than the linear model, popularity is kept.
Under privacy, where noise would cover what the linear model can learn, the first round alone is
run: private popularity with the whole budget.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedrec.data.files.recognised import Recognised
from fedrec.errors import DataError
from simulations.private_signal import Signal, signal_of

_VALIDATION = 0.1
_FEWEST_USERS = 20
_TEST_USERS = 0.2  # default of the split
_FEW_TEST_USERS = 25
_EASE_ITEMS = 6000  # a minute or so; it grows with the third power


def own_experiment(
    path: Path, found: Recognised, *, epsilon: float | None = None
) -> dict[str, Any]:
    """The experiment on a table of interactions, as a TOML table.

    Args:
        path: the table.
        found: its recognised columns.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.

    Raises:
        DataError: no user has two different items.
    """
    if not found.divisible:
        raise DataError(
            f"no user in {path} has two different items",
            expected="users with several items: one half is learned from, the other is held out",
            got=f"{found.rows:,} rows, {found.users:,} users, one item each",
            fix="name the column of users with --user (not one of orders or sessions), or take data"
            " with more rows per user",
        )
    dataset: dict[str, Any] = {"name": "table", "path": str(path.resolve()), **found.columns}
    if found.separator != ",":
        dataset["separator"] = found.separator
    if not found.header:
        dataset["header"] = False
    if found.positive_above is None:
        dataset.pop("rating", None)
    table: dict[str, Any] = {
        "name": _name(path) + ("" if epsilon is None else "-private"),
        "title": f"Federated linear item-to-item model on {path.name}"
        + ("" if epsilon is None else f" at epsilon {epsilon:g}"),
        "rounds": 2,
        **({} if found.positive_above is None else {"positive-above": found.positive_above}),
        "dataset": dataset,
        "split": {"name": "user-holdout", "split-by": "pairs"}
        | ({"validation-users": _VALIDATION} if found.divisible >= _FEWEST_USERS else {}),
        **linear_system(epsilon, min(found.items, 1000)),
        "evaluation": {"every": 0, "ks": [10, 20], "baselines": _baselines(epsilon, found.items)},
    }
    if epsilon is not None and not signal(table, found).suffices:
        return _popularity_alone(table, path, epsilon)
    if found.divisible >= _FEWEST_USERS:
        table["early-stopping"] = {}
    return table


def signal(table: dict[str, Any], found: Recognised) -> Signal:
    """What the private linear model of an experiment on a table can learn at most."""
    held_out = table["split"].get("validation-users", 0.0) + _TEST_USERS
    return signal_of(table, max(int(found.users * (1 - held_out)), 1), found.items)


def _popularity_alone(table: dict[str, Any], path: Path, epsilon: float) -> dict[str, Any]:
    """The same experiment without its second round, so that the first one, private popularity, has
    the whole budget; the order of rare items is kept."""
    baselines = ["popularity", "random"]
    return table | {
        "title": f"Private popularity on {path.name} at epsilon {epsilon:g}",
        "rounds": 1,
        "strategy": table["strategy"] | {"estimate": "posterior-mean"},
        "evaluation": table["evaluation"] | {"baselines": baselines},
    }


def linear_system(epsilon: float | None, items: int) -> dict[str, Any]:
    """Model, step, strategy, sampler and privacy of the federated linear item-to-item model.

    Args:
        epsilon: target, > 0; None: no privacy.
        items: number of items with weights under noise; fewer are more robust to it.
    """
    system: dict[str, Any] = {
        "model": {"name": "item-weights"},
        "step": {"name": "gram"},
        "strategy": {"name": "popularity-start", "main": {"name": "gram"}},
        "sampler": {"name": "full"},
    }
    if epsilon is None:
        return system
    system["model"]["items"] = max(1, min(items, 300))
    system["step"]["exponent"] = 0.2
    system["strategy"]["main"] |= {"solution": "puresvd"}
    system["privacy"] = {
        "epsilon": epsilon,
        "backend": "pld",
        "clip-norm": 8.0,
        "parameters": ["item.weights"],
        "phases": {
            "popularity": {"parameters": ["item.bias"], "clip-norm": 6.0, "noise-factor": 2.0}
        },
    }
    return system


def warnings(found: Recognised) -> list[str]:
    """Why results on a table will say little, one reason per line."""
    test = max(int(_TEST_USERS * found.users + 0.5), 1)
    said = []
    if not found.divisible:
        return said  # refused, see `own_experiment`
    if test < _FEW_TEST_USERS:
        said.append(
            f"warning: only {test} test user{'s' if test > 1 else ''}: differences between systems"
            " will be mostly chance"
        )
    if 2 * found.divisible < found.users:
        said.append(
            f"warning: only {found.divisible:,} of {found.users:,} users have two different items;"
            " the others cannot be tested"
        )
    if 2 * found.shared < found.items:
        said.append(
            f"warning: only {found.shared:,} of {found.items:,} items have two users or more;"
            " about the others, nothing can be learned from other users"
        )
    return said


def _baselines(epsilon: float | None, items: int) -> list[Any]:
    ease: Any = "ease" if items <= _EASE_ITEMS else {"name": "ease", "max-items": _EASE_ITEMS}
    if epsilon is None:
        return ["popularity", ease]
    return [{"name": "dp-popularity", "epsilon": epsilon}, "popularity", ease, "random"]


def _name(path: Path) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "own-data"
