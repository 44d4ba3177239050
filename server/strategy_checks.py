# SPDX-License-Identifier: Apache-2.0
"""Checks of a strategy before a run, and of its parameters after a round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components.errors import component_errors, finite, named, refuse_other_arrays
from fedrec.components.registry import STRATEGY
from fedrec.errors import ClientError, ExperimentError
from strategies.base import CohortStrategy


def refuse_to_wait(strategy: Strategy, nodes: int) -> None:
    """Refuse a strategy that waits for more nodes than there are: Flower's strategies would wait
    forever.

    Raises:
        ExperimentError: its minimum is above `nodes`.
    """
    needed = max(
        getattr(strategy, "min_available_nodes", 0), getattr(strategy, "min_train_nodes", 0)
    )
    if needed > nodes:
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} waits for more nodes than there are",
            expected=f"at least {needed} nodes",
            got=f"{nodes}",
            fix="set engine.nodes, or strategy.min-available-nodes and strategy.min-train-nodes",
        )


def refuse_non_finite(
    parameters: Mapping[str, np.ndarray], number: int, strategy: Strategy
) -> None:
    """Refuse parameters with NaN or infinity after a round.

    Raises:
        ClientError: NaN or infinity is in one of them.
    """
    for name, array in parameters.items():
        if not finite(array):
            raise ClientError(
                f"training diverged in round {number}",
                expected="finite parameters",
                got=f"NaN or infinity in {name!r} from {named(STRATEGY.name, strategy)}",
                fix=(
                    "lower step.learning-rate or strategy.server-lr, or fix that file; "
                    "the previous checkpoint is intact"
                ),
            )


def strategy_errors(strategy: Strategy, doing: str) -> AbstractContextManager[None]:
    """Errors within name the strategy and what it was doing, see `component_errors`."""
    return component_errors(STRATEGY.name, strategy, doing)


def refuse_other_parameters(
    strategy: Strategy, number: int, found: ArrayRecord, before: ArrayRecord
) -> None:
    """Refuse aggregated parameters whose names or shapes differ from those before the round.

    Raises:
        ComponentError: they differ.
    """
    shapes = {name: tuple(array.shape) for name, array in before.items()}
    refuse_other_arrays(STRATEGY.name, strategy, f"in round {number}", found, shapes)


def refuse_non_additive(strategy: Strategy) -> None:
    """Refuse a strategy that needs more of a round than the sum of its clients' updates.

    Raises:
        ExperimentError: it is one of Flower's own, sends each client parameters of its own, or
            aggregates by itself.
    """
    parts = list(strategy.by_phase.values()) if isinstance(strategy, CohortStrategy) else [strategy]
    for part in parts:
        if not isinstance(part, CohortStrategy) or not part.uses_only_sums():
            raise ExperimentError(
                f"strategy {type(part).__name__!r} needs more than the sum, which is all that"
                " secure aggregation provides",
                expected="one of fedrec's additive strategies, such as 'reptile' or 'fedavg'",
                got="a strategy that needs the replies of single nodes or clients",
                fix="set strategy.name = 'reptile', or leave out secure-aggregation",
            )
