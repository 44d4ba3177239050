# SPDX-License-Identifier: Apache-2.0
"""The experiment of `fedrec try` for the user's own table of interactions. Models that represent
users by features cannot learn from data without side features. The linear item-to-item model
represents a user by its items; it is computed in two federated rounds, in each of which every
client uploads once (counts, then products), and compared with popularity and centralised EASE. A
fifth of the users are test users, each with a random half of its items held out; a tenth are
validation users for tuning (`--set evaluation.held-out=validation`) and for early stopping
(`[early-stopping]`): if popularity scores better on them than the linear model, popularity is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedrec.data.files.recognised import Recognised

_VALIDATION = 0.1
_FEWEST_USERS = 20


def own_experiment(
    path: Path, found: Recognised, *, epsilon: float | None = None
) -> dict[str, Any]:
    """The experiment on a table of interactions, as a TOML table.

    Args:
        path: the table.
        found: its recognised columns.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
    """
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
        "dataset": dataset,
        "split": {"name": "user-holdout", "split-by": "pairs"}
        | ({"validation-users": _VALIDATION} if found.users >= _FEWEST_USERS else {}),
        **linear_system(epsilon, min(found.items, 1000)),
        "evaluation": {"every": 0, "ks": [10, 20], "baselines": _baselines(epsilon)},
    }
    if found.users >= _FEWEST_USERS:
        table["early-stopping"] = {}
    if found.positive_above is not None:
        table["positive-above"] = found.positive_above
    return table


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


def _baselines(epsilon: float | None) -> list[Any]:
    if epsilon is None:
        return ["popularity", "ease"]
    return [{"name": "dp-popularity", "epsilon": epsilon}, "popularity", "ease"]


def _name(path: Path) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "own-data"
