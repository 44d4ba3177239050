# SPDX-License-Identifier: Apache-2.0
"""Events that accountants count, one per release independently of the cohort size.

Where this differs from the paper: tables 4 and 5 of PrivRec count every client of a round as a
release of its own (found by reproducing all 36 cells). The server adds noise once to the sum, so a
round is one event here.

An event is a value: equal events have equal cost. Floats survive JSON exactly. Rounds whose noise
is correlated have a cost only together: the first one is charged for all that are planned, and the
others are recorded as covered.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, TypeAdapter

from fedrec.errors import ExperimentError, RunError
from fedrec.privacy.accounting import sampling as samplings
from fedrec.privacy.accounting.sampling import Adjacency, InLedger, Sampling

TRAINING = "training"
GAUSSIAN = "gaussian"
LAPLACE = "laplace"
LEAST_MULTIPLIER = 1e-9
MOST_MULTIPLIER = 1e9
"""Noise multipliers beyond these leave the range of the accountants' floating-point numbers; their
epsilons are above 1e17, and practically 0."""


@dataclass(frozen=True)
class Release(InLedger):
    """Parameters of an event that accountants need.

    Attributes:
        mechanism: its noise, `gaussian` or `laplace`.
        sampling: how the cohort was drawn.
        adjacency: definition of neighbouring datasets.
        noise_multiplier: noise scale / sensitivity under that adjacency, in [1e-9, 1e9].

    Raises:
        ExperimentError: the noise is unknown, the noise multiplier is out of range, or no bound is
            proven for the sampling under that adjacency.
    """

    mechanism: str
    sampling: Annotated[Sampling, Field(discriminator="name")]
    adjacency: Adjacency
    noise_multiplier: float

    def __post_init__(self) -> None:
        if self.mechanism not in (GAUSSIAN, LAPLACE):
            raise ExperimentError(
                "unknown noise mechanism",
                expected=f"{GAUSSIAN} or {LAPLACE}",
                got=self.mechanism,
                fix="account for the run with the version of fedrec that wrote it",
            )
        if not LEAST_MULTIPLIER <= self.noise_multiplier <= MOST_MULTIPLIER:
            raise ExperimentError(
                "invalid noise multiplier",
                expected=f"a noise multiplier from {LEAST_MULTIPLIER:g} to {MOST_MULTIPLIER:g}",
                got=f"{self.noise_multiplier:g}",
                fix="use 0 for no noise",
            )
        samplings.check_proven(self.sampling, self.adjacency)
        object.__setattr__(self, "sampling", samplings.simplest(self.sampling))


@dataclass(frozen=True)
class NoisyRound(InLedger):
    """A sum of clipped updates under noise.

    Attributes:
        mechanism: the noise, `gaussian` or `laplace`.
        sampling: how the cohort was drawn.
        adjacency: definition of neighbouring datasets.
        noise_multiplier: noise scale (standard deviation, or Laplace's b) of the sum / its
            sensitivity in the norm of the clip.
        phase: name of the training phase.
    """

    mechanism: str
    sampling: Annotated[Sampling, Field(discriminator="name")]
    adjacency: Adjacency
    noise_multiplier: float
    phase: str = TRAINING
    kind: Literal["noisy-round"] = "noisy-round"

    @property
    def release(self) -> Release:
        """What accountants need of the round."""
        return Release(self.mechanism, self.sampling, self.adjacency, self.noise_multiplier)


@dataclass(frozen=True)
class CorrelatedRounds(InLedger):
    """All rounds of a phase, whose noise is correlated; charged with the first of them.

    Attributes:
        mechanism: name of the mechanism.
        adjacency: definition of neighbouring datasets.
        rounds: number of rounds.
        counted: number of times of each release that they cost together.
        phase: name of the training phase.
    """

    mechanism: str
    adjacency: Adjacency
    rounds: PositiveInt
    counted: tuple[tuple[Release, PositiveInt], ...]
    phase: str = TRAINING
    kind: Literal["correlated-rounds"] = "correlated-rounds"


@dataclass(frozen=True)
class CoveredRound(InLedger):
    """A further round of `CorrelatedRounds`, whose cost is charged already.

    Attributes:
        phase: name of the training phase.
    """

    phase: str = TRAINING
    kind: Literal["covered-round"] = "covered-round"


@dataclass(frozen=True)
class NonPrivate(InLedger):
    """Something computed from users' data was used or released without noise: the total epsilon is
    infinite.

    Attributes:
        reason: description of the release and the reason.
        phase: name of the training phase.
    """

    reason: str
    phase: str = TRAINING
    kind: Literal["non-private"] = "non-private"


Event = NoisyRound | CorrelatedRounds | CoveredRound | NonPrivate
_RECORDS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def releases_in(event: Event) -> Mapping[Release, int]:
    """Number of times of each release of an event; empty for events without noise."""
    if isinstance(event, NoisyRound):
        return {event.release: 1}
    return dict(event.counted) if isinstance(event, CorrelatedRounds) else {}


def to_record(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object; `from_record` returns an equal event."""
    return _RECORDS.dump_python(event, mode="json")


def from_record(record: dict[str, Any]) -> Event:
    """Return the event described by a JSON object.

    Raises:
        RunError: the object was not written by `to_record`.
    """
    try:
        event = _RECORDS.validate_json(json.dumps(record, allow_nan=False), strict=True)
        releases_in(event)  # raises an error without a proven bound
    except (ValueError, TypeError, ArithmeticError, ExperimentError) as error:
        raise RunError(
            "invalid privacy event",
            got=f"{record!r} ({error})",
            fix="restore the ledger from a backup; without it the privacy spent is unknown",
        ) from None
    return event


BackendName = Literal["autodp", "pld"]
"""Backends that give valid upper bounds, the second tighter."""
DEFAULT_BACKEND: BackendName = "pld"
"""Default backend of experiments, baselines, the command line and Python callers."""
