# SPDX-License-Identifier: Apache-2.0
"""Statements about an epsilon: meaning, caveats, questions of the command line, and values that
papers state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, BackendName
from fedrec.privacy.accounting.rdp import amplified
from fedrec.privacy.accounting.sampling import Adjacency, Full, Poisson, Scheduled
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan, default_delta

# Caveats of an epsilon: its assumptions and limits, selected by the plan.

SIMULATION = "This is a simulation, not a release."
"""Printed with every epsilon of noise from a seed."""
_TRUST = {
    "central": (
        "The server is trusted: it sees each client's clipped update. The guarantee is against"
        " everybody who sees the model only, other clients among them."
    ),
    "distributed": (
        "The server must see nothing but the sum (secure aggregation). Accounted is the noise that"
        " is left when {dropouts} clients of a cohort fail; clients that collude know their shares"
        " and weaken it further."
    ),
    "local": (
        "Each upload is protected by its own noise, also against the server. Accounted is a client"
        " that takes part in all {rounds} rounds; sampling does not help, because the server knows"
        " who takes part."
    ),
}


def caveats(plan: Plan, *, backend: str | None = None) -> list[str]:
    """Sentences to report with an epsilon of a plan.

    Args:
        plan: the plan.
        backend: accountant, when it is not the plan's own.
    """
    return [
        *warnings(plan, backend=backend),
        *_about_the_number(plan),
        *_about_the_system(plan),
        *_about_the_rest(plan),
    ]


def warnings(plan: Plan, *, backend: str | None = None) -> Iterator[str]:
    """The sentences without which the number would be misleading, see `caveats`."""
    if backend == "paper":
        yield (
            "This reproduces the arithmetic of PrivRec's tables 4 and 5, which count every client"
            " of a round as a release of its own; it is not what the releases cost. Use it for"
            " comparison only."
        )
    if plan.delta > 1 / plan.honest:
        yield (
            f"delta {plan.delta:g} is above 1/N = {1 / plan.honest:.2g}: publishing one client's"
            " data whole, picked at random, would be allowed. Choose delta below 1/N."
        )


def _about_the_number(plan: Plan) -> Iterator[str]:
    if plan.config.adjacency == "replace-one":
        yield (
            "Neighbours differ in all data of one client, exchanged for another's; the number of"
            " clients is public."
        )
    else:
        yield (
            "Neighbours differ by one client with all its data, there or not; do not compare with"
            f" replace-one. The number of clients, {plan.honest}, is public all the same: it is"
            " printed with this result, and the sampling rate and a default delta are computed from"
            " it. The guarantee does not hide it."
        )
    if plan.clip_norm < plan.sensitivity < 2 * plan.clip_norm:
        yield (
            "No two contributions point away from each other (they have no signs), so exchanging"
            " one moves the sum by at most sqrt(2) times the clip norm, not twice that."
        )
    if plan.config.paper_noise_order:
        yield (
            "Noise is added after the server's learning rate, as in PrivRec's algorithm 2;"
            f" accounted is the multiplier that this leaves, {plan.noise_multiplier:g}."
        )


_ZEROS = (
    "Add-remove means here that a client sends its updates or zeros in their place: who else is"
    " drawn is the same."
)


def _about_the_system(plan: Plan) -> Iterator[str]:
    settings = plan.config
    yield _TRUST[settings.placement].format(dropouts=settings.max_dropouts, rounds=plan.rounds)
    if isinstance(plan.sampling, Scheduled):
        yield _scheduled(plan.sampling)
        if plan.config.adjacency == "add-remove" and plan.sampling.rate == 1:
            yield _ZEROS
    elif isinstance(plan.sampling, Full) and plan.denominator < plan.honest:
        yield from _known(plan)
    elif not isinstance(plan.sampling, Full):
        drawn = "independently" if isinstance(plan.sampling, Poisson) else "uniformly"
        yield (
            f"Amplification by sampling assumes that cohorts are drawn {drawn} from all"
            f" {plan.clients} clients and are kept secret. If only some clients are ever available,"
            " N is their number."
        )
    if plan.malicious:
        yield (
            f"An adversary made up {plan.malicious} of the {plan.clients} clients, and knows when"
            f" they are drawn: the guarantee is for the other {plan.honest}, and accounted is the"
            " probability with which they are drawn from among themselves."
        )
    yield from _remembered(plan)
    if settings.mode == "reproducible":
        yield (
            "Mode 'reproducible' is a simulation, not a release: noise and cohorts come from the"
            " experiment's seed. Whoever knows the seed can remove the noise; a release needs mode"
            " 'secure'."
        )


def _known(plan: Plan) -> Iterator[str]:
    """Who takes part depends on devices, or the server sees each upload by itself."""
    if plan.config.placement == "local":
        return
    yield (
        "Who takes part in a round depends on the speed and availability of devices, so nothing is"
        " gained by sampling: accounted is a client that takes part in every round. That devices"
        " answer early or late must not depend on their users' data."
    )
    if plan.config.adjacency == "add-remove":
        yield _ZEROS


def _scheduled(sampling: Scheduled) -> str:
    most = sampling.participations
    sampled = f" with probability {sampling.rate:.3g}" if sampling.rate < 1 else ""
    often = f"every {sampling.separation} rounds{sampled}" + (
        "" if most is None else f", at most {most} times"
    )
    known = (
        "Who takes part in which round may be known: nothing is gained by sampling."
        if sampling.rate == 1
        else "Whose turn it is may be known; who of these takes part is drawn by independent coin"
        " flips, which amplification assumes to be secret."
    )
    joining = "" if sampling.joining else ", and clients that join are refused"
    return (
        f"{known} Accounted is a client that takes part {often}; the sampler guarantees that none"
        f" does more often{joining}."
    )


def _remembered(plan: Plan) -> Iterator[str]:
    """The memory of correlated noise."""
    kept = plan.mechanism.memory_arrays
    if kept:
        how = (
            "in private/ of the run folder until the run is finished"
            if plan.config.mode == "secure"
            else "which a resumed run draws again from the seed"
        )
        yield (
            f"Noise is correlated between rounds: the server keeps at most {kept} arrays of the"
            f" size of the trained parameters, in float64, {how}. Whoever reads them can remove"
            " noise."
        )


def _about_the_rest(plan: Plan) -> Iterator[str]:
    if "*" not in plan.config.private_phases:
        yield (
            "Only the following phases run under noise:"
            f" {', '.join(plan.config.private_phases) or '(none)'}. A phase without noise makes the"
            " total infinite for those whose data it learns from; item sequences are users' data,"
            " and so is what items have in common because of them."
        )
    yield (
        "Not accounted: losses, metrics and numbers of examples that clients report, early"
        " stopping, and choosing settings by looking at results. Publish them only if they come"
        " from public data, or under their own budget."
    )
    yield (
        "The guarantee is per client: a person with two clients has at least twice the epsilon, and"
        " what others' data tell about somebody is not covered."
    )


# Accounting questions of the command line, by numbers of rounds, clients and noise.


class Question(Config):
    """Parameters of a question; exactly one of `noise-multiplier` and `epsilon`."""

    clients: int = Field(ge=1)
    """Clients that may be drawn (N)."""
    cohort: float = Field(gt=0)
    """Clients per round (M), a whole number unless the sampler is poisson; at most the number of
    clients."""
    rounds: int = Field(ge=1)
    """Number of rounds (T)."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise scale / sensitivity, > 0: the sensitivity is 2S under replace-one and S under
    add-remove."""
    epsilon: float | None = Field(default=None, gt=0)
    """Target for all rounds, > 0."""
    delta: float | None = Field(default=None, ge=0, le=0.1)
    """A probability, 0 <= delta <= 0.1; default: the smaller of N^-1.1 and 1e-5."""
    sampler: Literal["fixed-size", "poisson", "scheduled"] = "fixed-size"
    """How cohorts are drawn: fixed-size (without replacement) goes with replace-one, poisson with
    add-remove; scheduled: known rounds, for mechanisms that need a separation."""
    separation: int | None = Field(default=None, ge=1)
    """With the sampler scheduled: smallest distance between two rounds of a client; default: 1."""
    secret_cohorts: bool = False
    """With the sampler scheduled and add-remove: whether clients whose turn it is take part by
    secret, independent coin flips."""
    adjacency: Adjacency = "replace-one"
    """replace-one (with fixed-size) or add-remove (with poisson)."""
    backend: BackendName | Literal["paper"] = DEFAULT_BACKEND
    """Accountant: pld is the tightest; paper is the arithmetic of PrivRec's tables, for comparison
    only."""
    mechanism: str | dict[str, Any] = "gaussian"
    """Mechanism, see `fedrec list mechanism`: its name, or a table with its name and settings."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("exactly one of noise-multiplier and epsilon")
        if self.epsilon is not None and self.backend == "paper":
            raise ValueError(
                "backend autodp or pld: noise is not calibrated to the paper's arithmetic"
            )
        scheduled = self.sampler == "scheduled"
        if (self.separation is not None or self.secret_cohorts) and not scheduled:
            raise ValueError("separation and secret-cohorts only with the sampler scheduled")
        if scheduled and self.cohort * (self.separation or 1) > self.clients:
            needed = f"{self.cohort:g} x {self.separation or 1}"
            raise ValueError(f"at least {needed} clients, so many in each of as many groups")
        return self

    @property
    def failing(self) -> float:
        """The given or default delta."""
        return default_delta(self.clients) if self.delta is None else self.delta

    def plan(self) -> Plan:
        """The plan of these rounds, with clip norm 1.

        Raises:
            ExperimentError: there is no bound for such rounds, or no noise reaches the target.
        """
        config = PrivacyConfig(
            clip_norm=1.0,
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            # noise that is given has an epsilon at delta 0, too: an infinite one, if need be
            delta=self.failing if self.epsilon else self.failing or None,
            mechanism=self.mechanism,
            adjacency=self.adjacency,
            backend=DEFAULT_BACKEND if self.backend == "paper" else self.backend,
        )
        return Plan.of(
            config,
            self.sampler,
            {"cohort": self.cohort},
            self.clients,
            self.rounds,
            schedule=self.schedule,
        )

    @property
    def schedule(self) -> Scheduled | None:
        """What is known of a client's rounds; None: there is no schedule."""
        if self.sampler != "scheduled":
            return None
        groups = self.separation or 1
        rate = self.cohort * groups / self.clients if self.secret_cohorts else 1.0
        return Scheduled(self.cohort, groups, rate=rate)

    def answer(self, plan: Plan) -> Report:
        """Cost of the rounds of a plan, and the epsilon of the best known attack."""
        return report(plan, backend=self.backend, delta=self.failing)


def report(plan: Plan, *, backend: str | None = None, delta: float | None = None) -> Report:
    """Cost of all rounds of a plan.

    Args:
        plan: what is done.
        backend: accountant; default: the plan's own.
        delta: default: the plan's own.
    """
    accountant = Accountant(backend or plan.config.backend)
    accountant.step_rounds(plan.event(), plan.rounds)
    said = caveats(plan, backend=backend)
    return accountant.epsilon(plan.delta if delta is None else delta, attack=True, caveats=said)


def probability_factor(epsilon: float) -> float:
    """Largest factor between the probabilities of a set of outcomes on neighbouring data, e^epsilon
    (delta aside); infinite if it exceeds the range of floats."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def attack_ceiling(epsilon: float, delta: float) -> float:
    """Largest accuracy of any membership attack on a fair coin: (e^epsilon + delta) / (1 +
    e^epsilon), at most 1."""
    return min(
        1.0, 1 / (1 + math.exp(-epsilon)) + delta * math.exp(-epsilon) / (1 + math.exp(-epsilon))
    )


def sentence(report: Report, adjacency: Adjacency) -> str:
    """One line: unit, epsilon, delta and adjacency, how strong that is, and its meaning for a
    user."""
    if math.isinf(report.epsilon):
        return f"epsilon is infinite at delta {report.delta:g}: nothing is guaranteed to anybody."
    question = (
        "whether the run used a user's data or another user's"
        if adjacency == "replace-one"
        else "whether a user took part"
    )
    unit = "all data of a user" if adjacency == "replace-one" else "a user's taking part"
    return (
        f"epsilon {report.epsilon:.4g} at delta {report.delta:g} for {unit} ({adjacency}) is"
        f" {_strength(report.epsilon)[0]}: who guesses {question} on a fair coin is right in"
        f" {_share(attack_ceiling(report.epsilon, report.delta))} of cases (50% without looking)."
    )


def _share(accuracy: float) -> str:
    """A largest share in words; one that would be rounded to all is not called a bound."""
    return f"at most {accuracy:.1%}" if accuracy < 0.9995 else "up to practically all"


def lines(report: Report, adjacency: Adjacency) -> list[str]:
    """A whole explanation, one paragraph per line: the meaning, the phases, the method, and what is
    not covered."""
    if not report.events:
        return ["No round was charged to the privacy ledger, so nothing is claimed."]
    said = [sentence(report, adjacency)]
    neighbour = (
        "with another user's data in place of one's own"
        if adjacency == "replace-one"
        else "without one's data"
    )
    if math.isfinite(report.epsilon):
        said.append(
            "Whatever an observer looks for in the model, its probability is at most"
            f" {probability_factor(report.epsilon):.3g} times what it would be {neighbour}, plus"
            f" {report.delta:g}. This is about sets of outcomes: the odds of a single outcome may"
            " change by more, with a probability that can exceed delta."
        )
        said.append(_strength(report.epsilon)[1])
    if report.attack is not None and math.isfinite(report.epsilon):
        proven = f"{report.epsilon:.4g}"
        reached = f"{report.attack:.4g}"
        said.append(
            f"The true epsilon is {proven}, to four digits: the proven bound and what the noise"
            " gives away to an observer who knows all else, both computed, agree."
            if proven == reached
            else f"The true epsilon lies between {reached} and {proven}, both computed from the"
            " noise: the former is what an observer who knows all else gets, the latter is proven."
        )
        said.append("Neither tests the code of the run, which an audit does (`fedrec audit`).")
    said += [f"Phase {phase} alone: epsilon {value:.4g}." for phase, value in _told(report.phases)]
    said.append(f"Method: {report.method}.")
    return [*said, *report.caveats]


def _told(phases: dict[str, float]) -> list[tuple[str, float]]:
    return list(phases.items()) if len(phases) > 1 else []


def _strength(epsilon: float) -> tuple[str, str]:
    """How strong a guarantee is: in a word, and as a sentence."""
    if epsilon <= 1:
        return "strong", "That is a strong guarantee."
    if epsilon <= 3:
        return "moderate", (
            "That is a moderate guarantee: the worst attack does far better than chance, and is"
            " still often wrong."
        )
    if epsilon <= 10:
        return "weak", (
            "That is a weak guarantee: it does not rule out an attack that is nearly always right."
        )
    return "very weak", (
        "That is next to no guarantee: it does not rule out an attack that is practically always"
        " right."
    )


# Systems whose paper states an epsilon: the stated epsilon, and the exact cost of the noise
# schedule.
#
# Pure differential privacy of subsampled releases: a release that is e0-DP on a sample of rate g is
# ln(1 + g (exp(e0) - 1))-DP on the whole (Balle, Barthe and Gaboardi 2018). That is g e0 only where
# e0 is far below 1, and the costs of several releases add up.


@dataclass(frozen=True)
class Stated:
    """Stated and exact privacy of a system.

    Attributes:
        nominal: epsilon as the paper states it.
        exact: epsilon that the schedule costs if everything else that the paper assumes were true;
            infinite if a release or the initialisation is without noise.
        unit: the protected unit, such as `one rating's value`.
        caveats: limits of both numbers, as sentences.
    """

    nominal: float
    exact: float
    unit: str
    caveats: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """A description in sentences."""
        return [
            (
                f"epsilon {self.nominal:.4g} as stated, for {self.unit}; the exact total of the"
                f" schedule is {self.exact:.4g}."
            ),
            *self.caveats,
        ]


def schedule_total(nominal: float, steps: int, rate: float) -> float:
    """Pure epsilon of `steps` releases, each `nominal / (steps * rate)`-DP on a sample (PNBM,
    theorem 1)."""
    return steps * amplified(nominal / (steps * rate), rate)
