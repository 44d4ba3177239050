# SPDX-License-Identifier: Apache-2.0
"""A sensible experiment for somebody's own table of interactions.

Data without side features leave a model that knows users by features nothing to learn. Here a user
is what it likes: a linear item-to-item model, found by two federated rounds in which every client
uploads once each (counts, then products), beside popularity and centralised EASE. A fifth of the
users are tested, each on a random half of its items; a tenth are held out for choosing settings
(`--set evaluation.held-out=validation`), and by them training ends (`[early-stopping]`): should
popularity serve them better than the linear model, popularity is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedrec.data.files.recognition import Recognised

_VALIDATION = 0.1
_FEWEST_USERS = 20


def own_experiment(
    path: Path, found: Recognised, *, epsilon: float | None = None
) -> dict[str, Any]:
    """The table of an experiment on a table of interactions.

    Args:
        path: the table.
        found: what its columns are.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
    """
    dataset = {"name": "table", "path": str(path.resolve()), **found.columns}
    if found.separator != ",":
        dataset["separator"] = found.separator
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
        items: number of items with weights under noise, where fewer stand more.
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
