# SPDX-License-Identifier: Apache-2.0
"""Events that accountants count: one per release, independently of the cohort size.

Where this differs from the paper: tables 4 and 5 of PrivRec count every client of a round as a
release of its own (found by reproducing all 36 cells). The server adds noise once to the sum, so a
round is one event here.

An event is a value: equal events have equal cost. Floats survive JSON exactly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

from fedrec.errors import ExperimentError, RunError
from fedrec.privacy.accounting import sampling as samplings
from fedrec.privacy.accounting.sampling import Sampling
from fedrec.privacy.adjacency import Adjacency

TRAINING = "training"
LEAST_MULTIPLIER = 1e-9
MOST_MULTIPLIER = 1e9
"""Noise multipliers beyond these leave the range of the accountants' floating-point numbers; their
epsilons are above 1e17, and practically 0."""


@dataclass(frozen=True)
class Release:
    """The parameters of an event that accountants need.

    Attributes:
        mechanism: distribution of the noise.
        sampling: how the cohort was drawn.
        adjacency: which data sets are neighbours.
        noise_multiplier: noise scale / sensitivity under that adjacency, in [1e-9, 1e9].

    Raises:
        ExperimentError: the noise multiplier is outside of that range, or no bound is proven for
            the sampling under that adjacency.
    """

    mechanism: Literal["gaussian", "laplace"]
    sampling: Sampling
    adjacency: Adjacency
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not LEAST_MULTIPLIER <= self.noise_multiplier <= MOST_MULTIPLIER:
            raise ExperimentError(
                "invalid noise multiplier",
                expected=f"a noise multiplier from {LEAST_MULTIPLIER:g} to {MOST_MULTIPLIER:g}",
                got=f"{self.noise_multiplier:g}",
                fix="0 is for no noise at all",
            )
        samplings.refuse_unproven(self.sampling, self.adjacency)
        object.__setattr__(self, "sampling", samplings.simplest(self.sampling))


@dataclass(frozen=True)
class GaussianRound:
    """A sum of clipped updates with Gaussian noise; with adaptive clipping also a noisy count of
    the same cohort.

    Attributes:
        sampling: how the cohort was drawn.
        adjacency: which data sets are neighbours.
        noise_multiplier: standard deviation of the sum's noise / its L2 sensitivity.
        count_multiplier: the same for the count released beside it; None without one.
        phase: name of the training phase.
    """

    sampling: Sampling
    adjacency: Adjacency
    noise_multiplier: float
    count_multiplier: float | None = None
    phase: str = TRAINING

    @property
    def release(self) -> Release:
        """Sum and count of one cohort are one Gaussian release: squared sensitivities in units of
        noise add up."""
        own = Release("gaussian", self.sampling, self.adjacency, self.noise_multiplier)
        if self.count_multiplier is None:
            return own
        precision = self.noise_multiplier**-2 + self.count_multiplier**-2
        return replace(own, noise_multiplier=precision**-0.5)


@dataclass(frozen=True)
class LaplaceRound:
    """A sum of updates clipped in the L1 norm, with Laplace noise.

    Attributes:
        sampling: how the cohort was drawn.
        adjacency: which data sets are neighbours.
        noise_multiplier: Laplace scale b / L1 sensitivity; one round without sampling is (1 /
            this)-DP.
        phase: name of the training phase.
    """

    sampling: Sampling
    adjacency: Adjacency
    noise_multiplier: float
    phase: str = TRAINING

    @property
    def release(self) -> Release:
        return Release("laplace", self.sampling, self.adjacency, self.noise_multiplier)


@dataclass(frozen=True)
class QuantileEstimate:
    """A noisy count from a cohort of its own (a count of a round's own cohort belongs into its
    `GaussianRound`).

    Attributes:
        sampling: how the cohort was drawn.
        adjacency: which data sets are neighbours.
        noise_multiplier: standard deviation of the count's noise / its sensitivity.
        phase: name of the training phase.
    """

    sampling: Sampling
    adjacency: Adjacency
    noise_multiplier: float
    phase: str = TRAINING

    @property
    def release(self) -> Release:
        return Release("gaussian", self.sampling, self.adjacency, self.noise_multiplier)


@dataclass(frozen=True)
class NonPrivate:
    """Something computed from users' data was used or released without noise: the total epsilon is
    infinite.

    Attributes:
        reason: description of the release and the reason.
        phase: name of the training phase.
    """

    reason: str
    phase: str = TRAINING

    release: ClassVar[None] = None


@dataclass(frozen=True)
class Volunteered:
    """A release without noise, computed only from the data of users who agreed to it. It costs
    nothing for other users; for the volunteers the total epsilon is infinite.

    Attributes:
        who: description of the clients.
        phase: name of the training phase.
    """

    who: str
    phase: str = TRAINING

    release: ClassVar[None] = None


Event = GaussianRound | LaplaceRound | QuantileEstimate | NonPrivate | Volunteered
KINDS: dict[str, type[Event]] = {
    "gaussian-round": GaussianRound,
    "laplace-round": LaplaceRound,
    "quantile-estimate": QuantileEstimate,
    "non-private": NonPrivate,
    "volunteered": Volunteered,
}


def to_record(event: Event) -> dict[str, Any]:
    """An event as a JSON object; `from_record` gives back an equal event."""
    kind = next(name for name, cls in KINDS.items() if isinstance(event, cls))
    record = {"kind": kind, **asdict(event)}
    if not isinstance(event, NonPrivate | Volunteered):
        record["sampling"] = samplings.to_record(event.sampling)
    return record


def from_record(record: dict[str, Any]) -> Event:
    """The event described by a JSON object.

    Raises:
        RunError: the object was not written by `to_record`.
    """
    values = dict(record)
    try:
        cls = KINDS[values.pop("kind")]
        if "sampling" in values:
            values["sampling"] = samplings.from_record(values["sampling"])
        needed = {field.name for field in fields(cls)}
        if set(values) != needed:
            raise KeyError(f"keys {sorted(values)} instead of {sorted(needed)}")
        return cls(**values)
    except (KeyError, TypeError) as error:
        raise RunError(
            "this is not a privacy event",
            expected="a record written by fedrec",
            got=f"{record!r} ({error})",
        ) from None
