# SPDX-License-Identifier: Apache-2.0
"""Adjacency of datasets, and sampling schemes of cohorts.

Sampling schemes of cohorts, as needed for accounting.

Amplification by sampling is a statement about a sampler and an adjacency together: sampling a fixed
number without replacement goes with replace-one (the number of clients is public and stays),
Poisson sampling with add-remove.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, PositiveInt

from fedrec.errors import ExperimentError

# Adjacency of datasets, and the sensitivity of a sum of clipped updates.
#
# `replace-one`: all data of one client are replaced by another client's; the number of clients is
# fixed. The sum moves by up to 2S, the diameter of the ball that updates are clipped to (PrivRec
# definition 1, theorem 1). `add-remove`: one client more or less; the sum moves by up to S.
# `fedrec.privacy.clipping.Clip.sensitivity` is the only place where a clip norm becomes a
# sensitivity.
#
# The papers write z for both noise/2S and noise/S. The factor of two is a factor of four in Rényi
# divergence, so a plan keeps noise/S and divides it by the sensitivity under its adjacency.
#
# For contributions that never point in opposite directions, 2S is too large. Let a and b be the
# contributions of two users, both of L2 norm at most S. Replacing one by the other changes the sum
# by |a - b|, and
#
#     |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b> <= 2 S^2    whenever <a, b> >= 0,
#
# so the sensitivity under replace-one is sqrt(2) S. The inner product of any two contributions is
# non-negative when
#
# * all are vectors without a negative coordinate (counts),
# * all are such vectors rotated by the same angle, which changes no length and no inner product:
#   ratings mapped to [-1, 1], each with a 1 beside it, are sqrt(2) times the rotated pairs ((1 + r)
# /   2, (1 - r) / 2), or * all are positive semi-definite matrices with the Frobenius norm, where
# <A, B> = trace(A B) = |A^(1/2) B^(1/2)|^2 >= 0.
#
# Clipping multiplies by a number >= 0, and a failed client counts as zero, so these properties are
# preserved. The bound is reached by two users without a common item. It does not hold for signed
# vectors such as gradients and model updates, where b = -a is possible; nor in the L1 norm, in
# which two users without a common item are 2S apart; and add-remove gains nothing, as |a - 0| = S
# already.

Adjacency = Literal["replace-one", "add-remove"]
Contributions = Literal["signed", "non-negative"]
"""`non-negative`: all vectors without a negative coordinate, or rotations of such vectors, or all
positive semi-definite matrices; `signed`: anything."""


class InLedger:
    """A dataclass that is written to ledgers as JSON: pydantic checks all its fields."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Full(InLedger):
    """Every client takes part in every round, or participation is known: no amplification."""

    name: Literal["full"] = "full"
    rate: ClassVar[float] = 1.0
    """Probability that a given client takes part."""


@dataclass(frozen=True)
class FixedSize(InLedger):
    """A cohort of fixed size, uniformly without replacement.

    Attributes:
        cohort: clients per round (M).
        clients: clients that may be drawn (N).
    """

    cohort: int
    clients: int
    name: Literal["fixed-size"] = "fixed-size"

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.clients:
            raise _wrong_cohort(f"1 to {self.clients} clients", self.cohort)

    @property
    def rate(self) -> float:
        """M / N."""
        return self.cohort / self.clients


@dataclass(frozen=True)
class Poisson(InLedger):
    """Every client takes part independently with the same probability.

    Attributes:
        rate: the probability q, in (0, 1].
    """

    rate: float
    name: Literal["poisson"] = "poisson"

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise _wrong_cohort("a sampling probability, cohort / clients, in (0, 1]", self.rate)


@dataclass(frozen=True)
class Scheduled(InLedger):
    """Bounded participation: the rounds a client may take part in do not depend on data and need
    not be secret.

    Attributes:
        cohort: clients per round, or their largest number: what sums are divided by.
        separation: smallest distance between two rounds of a client, at least 1.
        joining: whether clients may join without another client's coming more often.
    """

    cohort: float
    separation: PositiveInt = 1
    joining: bool = False
    name: Literal["scheduled"] = "scheduled"
    rate: ClassVar[float] = 1.0
    """Participation may be known, and sampling does not amplify privacy."""

    def most(self, rounds: int) -> int:
        """Largest number of rounds of a client in a run of `rounds` rounds."""
        return -(-rounds // self.separation)


Sampling = Full | FixedSize | Poisson | Scheduled


def simplest(sampling: Sampling) -> Sampling:
    """Return the sampling, or `Full` if it does not amplify privacy."""
    return Full() if sampling.rate == 1 else sampling


def unknown_cost(needed: str, sampling: Sampling) -> ExperimentError:
    """Error for a mechanism whose cost is unknown for a sampling."""
    return ExperimentError(
        f"the privacy cost of this mechanism is unknown for {sampling}",
        expected=needed,
        fix="set another sampler.name, or another privacy.mechanism",
    )


def check_proven(sampling: Sampling, adjacency: Adjacency) -> None:
    """Check that a bound is proven for a sampler and an adjacency.

    Raises:
        ExperimentError: Poisson with replace-one, or a fixed size with add-remove.
    """
    coins = isinstance(sampling, Poisson) and sampling.rate < 1
    fixed = isinstance(sampling, FixedSize) and sampling.rate < 1
    if (coins and adjacency == "replace-one") or (fixed and adjacency == "add-remove"):
        raise ExperimentError(
            f"no privacy bound is proven for sampler {sampling.name!r} with {adjacency} adjacency",
            expected="a cohort of fixed size with replace-one, or coin flips with add-remove",
            fix="set privacy.adjacency, or another sampler.name",
        )


def of_sampler(
    name: str,
    settings: dict[str, Any],
    clients: int,
    schedule: Scheduled | None = None,
    *,
    known: bool = False,
    malicious: int = 0,
) -> tuple[Sampling, float]:
    """Sampling scheme of an experiment's sampler, and the fixed denominator of sums.

    Malicious clients do not amplify the privacy of the H = N - `malicious` honest ones. They know
    when they are drawn. Given that k of them are in a cohort of fixed size M, the others are M - k
    honest clients, drawn uniformly without replacement: an honest one takes part with probability
    (M - k) / H, which is largest, M / H, where k = 0. The cost of a round grows with that
    probability, so that of the rate M / H is an upper bound, whatever the adversary knows of its
    own clients; from M = H on, nothing is gained by sampling. Independent coin flips have the rate
    q = M / N for an honest client, whoever else is drawn. So q would be exact there; M / H is an
    upper bound of it. It is used all the same, so that clients that are made up never lower a
    charge.

    Args:
        name: name of the sampler.
        settings: its settings; `cohort` is the (expected) number of clients per round; `full` needs
            none.
        clients: number of clients that may be drawn (N).
        schedule: participation bound that the sampler guarantees; None: none.
        known: whether participation depends on more than the sampler, or may be known.
        malicious: number of an adversary's fake clients among these.

    Returns:
        The sampling, without amplification if participation is known, and M for a fixed size, qN
        for Poisson or N for all.

    Raises:
        ExperimentError: the sampler is not one of these three and guarantees nothing, or its cohort
            is too large.
    """
    honest = max(1, clients - malicious)
    if schedule is not None:
        return schedule, schedule.cohort
    if name == "full":
        return Full(), float(clients)
    proven = {"fixed-size": "a fixed number of clients", "poisson": "independent coin flips"}
    if name not in proven or "cohort" not in settings:
        raise ExperimentError(
            f"no privacy amplification is proven for the sampler {name!r}",
            expected="; ".join(
                f"{sampler!r} ({how}) with its cohort" for sampler, how in proven.items()
            ),
            got=f"{name!r} with {settings!r}",
            fix="set sampler.name = 'fixed-size' and sampler.cohort",
        )
    cohort = settings["cohort"]
    if known:
        return Full(), float(cohort)
    if name == "fixed-size" and int(cohort) != cohort:
        raise _wrong_cohort("a whole number of clients", cohort)
    if malicious and honest <= cohort <= clients:
        return Full(), float(cohort)
    drawn = FixedSize(int(cohort), honest) if name == "fixed-size" else Poisson(cohort / honest)
    return simplest(drawn), float(cohort)


def _wrong_cohort(expected: str, got: float) -> ExperimentError:
    return ExperimentError(
        "invalid cohort size", expected=expected, got=f"{got:g}", fix="change sampler.cohort"
    )
