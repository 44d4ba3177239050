# SPDX-License-Identifier: Apache-2.0
"""The simulated time of an experiment, and what its tables of late devices do not fit."""

from __future__ import annotations

from flwr.serverapp.strategy import Strategy

from fedrec.components import registry
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.personal.noise import PersonalNoise
from server.devices.buffer import BufferedTimeline
from server.devices.closing import SynchronousTimeline
from server.devices.timeline import Timeline
from strategies.base import CohortStrategy, GeneratingStrategy


def timeline_of(experiment: Experiment, strategy: Strategy) -> Timeline | None:
    """The time of a simulation, which decides who takes part in its rounds; None: none is
    simulated.

    Raises:
        ExperimentError: rounds close early and no time is simulated, or the strategy or step does
            not fit.
    """
    refuse_personal(experiment)
    if experiment.devices is None:
        _refuse_without_time(experiment)
        return None
    parts = parts_of(strategy, "devices")
    if experiment.asynchronous is None:
        return SynchronousTimeline(experiment, experiment.devices)
    found = BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)
    weighted_part(parts).staleness = found
    return found


def parts_of(strategy: Strategy, table: str) -> list[CohortStrategy]:
    """The strategies that send orders.

    Args:
        strategy: that of the experiment.
        table: the table that needs them.

    Raises:
        ExperimentError: one of them does not send the global parameters to clients by name.
    """
    found = list(strategy.by_phase.values()) if isinstance(strategy, CohortStrategy) else []
    if not found or any(isinstance(part, GeneratingStrategy) for part in found):
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} does not work with [{table}]",
            expected="a strategy of fedrec's that sends the global parameters to its clients",
            got="one of Flower's, or one that makes parameters for each client",
            fix=f"set strategy.name = 'reptile', or leave out [{table}]",
        )
    return found


def weighted_part(parts: list[CohortStrategy]) -> CohortStrategy:
    """The strategy whose stale answers are weighted.

    Raises:
        ExperimentError: it needs more of them than their weighted sum, or there are several.
    """
    if len(parts) > 1 or not parts[0].uses_only_sums():
        raise ExperimentError(
            f"strategy {type(parts[0]).__name__!r} does not work with [asynchronous]",
            expected="a strategy without phases that uses the sum of its clients' updates alone",
            got=f"{len(parts)} phases" if len(parts) > 1 else "one that aggregates by itself",
            fix="set strategy.name = 'reptile' or 'fed-adam', or leave out [asynchronous]",
        )
    return parts[0]


def refuse_personal(experiment: Experiment) -> None:
    """Refuse budgets of single users, which count those who are asked, where more are asked than
    answer."""
    known = experiment.lateness.known_cohorts
    if known and isinstance(experiment.settings(registry.STEP), PersonalNoise):
        raise ExperimentError(
            "users' own budgets count the rounds in which they are asked, and late devices upload"
            " in others",
            expected="no [closing], [asynchronous] or availability beside users' own noise",
            got=f"step {experiment.step.name!r}",
            fix="leave these tables out, or choose a step without users' own noise",
        )


def _refuse_without_time(experiment: Experiment) -> None:
    table = "closing" if experiment.closing is not None else "asynchronous"
    if experiment.lateness.leaves_late:
        raise ExperimentError(
            f"[{table}] needs the time at which devices answer",
            expected="[devices] in a simulation"
            + (", or real nodes" if table == "closing" else ""),
            got="a simulation without simulated time",
            fix="add [devices], such as --set 'devices={}'",
        )
