# SPDX-License-Identifier: Apache-2.0
"""The systems of a run as rows of a table, and which of them are private."""

from __future__ import annotations

import math
from typing import Any

from fedrec.attacks.leaky_negatives import marked
from fedrec.errors import RunError
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result

BEFORE = "before fine-tuning"


def system_rows(result: Result) -> dict[str, dict[str, Any]]:
    """Metrics of the federated system (first, if there is one) and of the baselines, by label."""
    rows: dict[str, dict[str, Any]] = {}
    if result.experiment.federated:
        own = dict(result.metrics)
        if result.epsilon is not None:
            own["epsilon"] = result.epsilon
        rows[marked(result.experiment)] = own
        if result.before_fine_tuning:
            rows[f"  {BEFORE}"] = result.before_fine_tuning
    for label, metrics in result.baselines.items():
        epsilon = baseline_epsilon(result, label)
        rows[label] = dict(metrics) | ({} if epsilon is None else {"epsilon": epsilon})
    return rows


def baseline_epsilon(result: Result, label: str) -> float | None:
    """Epsilon of a private centralised system; None of any other.

    Raises:
        RunError: the result lacks the system.
    """
    if label not in result.baselines:
        raise RunError(
            f"{result.folder / 'result.json'} is damaged",
            expected=f"metrics of {label!r}, of which there is a table",
            got=", ".join(result.baselines) or "no centralised system",
            fix="restore it from a backup, or start the run anew",
        )
    kept = RunFolder(result.folder).read_baseline(label) or {}
    epsilon = kept.get("privacy", {}).get("epsilon", result.baselines[label].get("epsilon"))
    return None if epsilon is None else float(epsilon)


def epsilon_of(result: Result, label: str) -> float | None:
    """Epsilon of a system in a table; None without differential privacy."""
    own = (marked(result.experiment), f"  {BEFORE}")
    if label in own and result.experiment.federated:
        return result.epsilon
    return baseline_epsilon(result, label)


def is_private(result: Result, label: str) -> bool:
    """Whether a row of a table has a finite epsilon."""
    epsilon = epsilon_of(result, label)
    return epsilon is not None and math.isfinite(epsilon)
