# SPDX-License-Identifier: Apache-2.0
"""Creates strategies, and saves their state between rounds.

fedrec's own strategies return their state (`state`, `restore`). Flower's keep it in plain
attributes (the moments of `FedAdam`, the momentum of `FedAvgM`), so for them every attribute that
holds arrays is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components.errors import component_errors
from fedrec.components.registry import STRATEGY, resolve
from fedrec.experiment.schema import Experiment
from fedrec.protocol.zero_copy import from_record, to_record, zero_copy_arrays
from strategies.base import Cohorts, CohortStrategy


def make_strategy(experiment: Experiment, cohorts: Cohorts) -> Strategy:
    """The strategy of an experiment, fedrec's or any of Flower's."""
    cls = resolve(STRATEGY, experiment.strategy.name)
    settings = experiment.settings(STRATEGY)
    with component_errors(STRATEGY.name, cls, "when it was made"):
        if issubclass(cls, CohortStrategy):
            return cls(settings, cohorts, {"name": experiment.step.name, **experiment.step.options})
        return cls(**(settings if isinstance(settings, dict) else {"config": settings}))


def strategy_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """The state of a strategy, as named arrays."""
    if isinstance(strategy, CohortStrategy):
        return strategy.state()
    return {
        key: array for name, value in vars(strategy).items() for key, array in _flatten(name, value)
    }


def lasting_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """The same in memory that later rounds leave as it is: a copy, except for what the strategy
    returns as arrays that are neither writable nor views."""
    return {
        name: np.copy(array) if array.flags.writeable or not array.flags.owndata else array
        for name, array in strategy_state(strategy).items()
    }


def restore_strategy(strategy: Strategy, state: Mapping[str, np.ndarray]) -> None:
    """Restore the state that `strategy_state` returned."""
    if isinstance(strategy, CohortStrategy):
        strategy.restore(dict(state))
        return
    attributes: dict[str, dict[str, np.ndarray]] = {}
    for key, array in state.items():
        name, kind, part = key.split("/", 2)
        attributes.setdefault(f"{name}/{kind}", {})[part] = array
    for key, parts in attributes.items():
        name, kind = key.split("/")
        setattr(strategy, name, _restored(kind, parts))


def _flatten(name: str, value: Any) -> list[tuple[str, np.ndarray]]:
    if isinstance(value, ArrayRecord):
        return [(f"{name}/record/{part}", array) for part, array in from_record(value).items()]
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(part, np.ndarray) for part in value.values())
    ):
        return [(f"{name}/dict/{part}", array) for part, array in value.items()]
    if isinstance(value, list) and value and all(isinstance(part, np.ndarray) for part in value):
        return [(f"{name}/list/{place}", array) for place, array in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(f"{name}/array/", value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [(f"{name}/{type(value).__name__}/", np.asarray(value))]
    return []


def _restored(kind: str, parts: dict[str, np.ndarray]) -> Any:
    if kind == "record":
        return to_record(parts)
    if kind == "dict":
        return parts
    if kind == "list":
        return [parts[str(place)] for place in range(len(parts))]
    value = parts[""]
    return value if kind == "array" else {"int": int, "float": float}[kind](value)


def own_memory(
    memory: Mapping[str, np.ndarray], owner: str, extensions: Mapping[str, object]
) -> dict[str, np.ndarray]:
    """The state of the extension of this name in a checkpoint; for an empty name, that of the
    strategy."""
    found: dict[str, np.ndarray] = {}
    for key, array in memory.items():
        name, mark, rest = key.partition(":")
        whose = name if mark and name in extensions else ""
        if whose == owner:
            found[rest if whose else key] = array
    return found


def as_before(
    arrays: ArrayRecord, before: Mapping[str, np.ndarray]
) -> tuple[ArrayRecord, dict[str, np.ndarray]]:
    """Aggregated parameters in the types that they had: some of Flower's strategies (FedAdam) turn
    float32 into float64."""
    parameters = zero_copy_arrays(arrays)
    if all(value.dtype == before[name].dtype for name, value in parameters.items()):
        return arrays, parameters
    parameters = {name: v.astype(before[name].dtype) for name, v in parameters.items()}
    return to_record(parameters), parameters
