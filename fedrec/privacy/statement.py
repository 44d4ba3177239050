# SPDX-License-Identifier: Apache-2.0
"""Statements about an epsilon: its meaning and caveats, queries of the command line, and values
that papers state."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import DEFAULT_BACKEND, BackendName
from fedrec.privacy.accounting.rdp import amplified
from fedrec.privacy.accounting.sampling import Adjacency, FixedSize, Full, Poisson, Scheduled
from fedrec.privacy.mechanisms import has_memory
from fedrec.privacy.plan import Budget, Plan, PrivacyConfig, default_delta

# Caveats of an epsilon: its assumptions and limits, selected by the plan.

SIMULATION = "This is a simulation, not a release."
"""Printed with every epsilon of noise from a seed."""
_TRUST = {
    "central": (
        "The server is trusted: it sees each client's clipped update. The guarantee holds"
        " against anyone who sees only the model, including other clients."
    ),
    "distributed": (
        "The server must see only the sum (secure aggregation). The accounted noise is what remains"
        " if {dropouts} clients of a cohort fail; colluding clients know their shares and weaken it"
        " further."
    ),
    "local": (
        "Each upload is protected by its own noise, also against the server. The cost is that of a"
        " client in all {rounds} rounds: sampling does not amplify privacy, as the server knows"
        " which clients take part."
    ),
}
_NEIGHBOURS = {
    "replace-one": (
        "Neighbouring datasets differ by replacing all data of one client with another's; the"
        " number of clients is public."
    ),
    "add-remove": (
        "Neighbouring datasets differ by adding or removing one client; not comparable with an"
        " epsilon under replace-one. Nevertheless the number of clients, {honest}, is public: it is"
        " printed with this result, and the sampling rate and a default delta are computed from it."
        " The guarantee does not hide it."
    ),
}


def caveats(plan: Plan, *, backend: str | None = None) -> Iterator[str]:
    """Sentences to report with an epsilon of a plan.

    Args:
        plan: the plan.
        backend: accountant, when it is not the plan's own.
    """
    config = plan.config
    yield from warnings(plan, backend=backend)
    yield _NEIGHBOURS[config.adjacency].format(honest=plan.honest)
    if plan.clip_norm < plan.sensitivity < 2 * plan.clip_norm:
        yield (
            "All contributions are non-negative, so replacing a client changes the sum by at most"
            " sqrt(2) times the clip norm."
        )
    yield _TRUST[config.placement].format(dropouts=config.max_dropouts, rounds=plan.rounds)
    yield from _about_cohorts(plan)
    if has_memory(plan.mechanism):
        stored = (
            "in private/ of the run folder until the run is finished"
            if config.mode == "secure"
            else "which a resumed run draws again from the seed"
        )
        yield (
            "Noise is correlated between rounds: the server keeps that of earlier rounds, arrays of"
            f" the size of the trained parameters in float64, {stored}. Anyone who reads them can"
            " remove noise."
        )
    if config.mode == "reproducible":
        yield (
            "Mode 'reproducible' is a simulation, not a release: noise and cohorts come from the"
            " experiment's seed. Anyone who knows the seed can remove the noise; a release needs"
            " mode 'secure'."
        )
    yield (
        "Not accounted: losses, metrics and numbers of examples that clients report, early"
        " stopping, and choosing settings by looking at results. Publish them only if they come"
        " from public data, or under their own budget."
    )
    yield (
        "The list of items, with their features and vectors, is public: the guarantee does not hide"
        " it, and vectors must not be made from users' data."
    )
    yield (
        "The guarantee is per client: a person with two clients has at least twice the epsilon,"
        " and information about a user in others' data is not covered."
    )


def _about_cohorts(plan: Plan) -> Iterator[str]:
    sampling = plan.sampling
    # devices decide who takes part
    late = isinstance(sampling, Full) and plan.denominator < plan.honest
    late = late and plan.config.placement != "local"
    if isinstance(sampling, Scheduled):
        yield _scheduled(sampling)
    if late:
        yield (
            "Participation depends on the speed and availability of devices, so sampling does not"
            " amplify privacy: the cost is that of a client in every round. Reply times of devices"
            " must not depend on their users' data."
        )
    if plan.config.adjacency == "add-remove" and (late or isinstance(sampling, Scheduled)):
        yield (
            "Add-remove means here that a client sends either its updates or zeros: the other drawn"
            " clients are the same."
        )
    if isinstance(sampling, FixedSize | Poisson):
        drawn = "independently" if isinstance(sampling, Poisson) else "uniformly"
        yield (
            f"Amplification by sampling assumes that cohorts are drawn {drawn} from all"
            f" {plan.clients} clients and are secret. If only some clients are ever available,"
            " N is their number."
        )
    if plan.malicious:
        yield (
            f"An adversary controls {plan.malicious} of the {plan.clients} clients, and knows when"
            f" they are drawn: the guarantee is for the other {plan.honest}, at the rate at which"
            " they are drawn from among themselves."
        )


def warnings(plan: Plan, *, backend: str | None = None) -> Iterator[str]:
    """Caveats without which the number would be misleading, see `caveats`."""
    if backend == "paper":
        yield (
            "This reproduces the arithmetic of PrivRec's tables 4 and 5, which count every client"
            " of a round as a separate release; it is not the cost of the releases. Use it for"
            " comparison only."
        )
    if plan.delta > 1 / plan.honest:
        yield (
            f"delta {plan.delta:g} is above 1/N = {1 / plan.honest:.2g}: publishing all data"
            " of one random client would be allowed. Choose delta below 1/N."
        )


def _scheduled(sampling: Scheduled) -> str:
    joining = "" if sampling.joining else ", and new clients are rejected"
    return (
        "Participation may be known: sampling does not amplify privacy. The cost is that of a"
        f" client that takes part every {sampling.separation} rounds; the sampler guarantees"
        f" that none does more often{joining}."
    )


# Accounting queries of the command line, by numbers of rounds, clients and noise.


class Question(Budget):
    """Parameters of an accounting query; exactly one of `noise-multiplier` and `epsilon`."""

    clients: int = Field(ge=1)
    """Clients that may be drawn (N)."""
    cohort: float = Field(gt=0)
    """Clients per round (M), a whole number unless the sampler is poisson; at most the number of
    clients."""
    rounds: int = Field(ge=1)
    """Number of rounds (T)."""
    sampler: Literal["fixed-size", "poisson", "scheduled"] = "fixed-size"
    """How cohorts are drawn: fixed-size (without replacement) goes with replace-one, poisson with
    add-remove; scheduled: known rounds, for mechanisms that need a separation."""
    separation: int | None = Field(default=None, ge=1)
    """With the sampler scheduled: smallest distance between two rounds of a client; default: 1."""
    backend: BackendName | Literal["paper"] = DEFAULT_BACKEND  # type: ignore[assignment]
    """Accountant: pld is the tightest; paper is the arithmetic of PrivRec's tables, for comparison
    only."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.epsilon is not None and self.backend == "paper":
            raise ValueError(
                "backend autodp or pld: noise is not calibrated to the paper's arithmetic"
            )
        scheduled = self.sampler == "scheduled"
        if self.separation is not None and not scheduled:
            raise ValueError("separation only with the sampler scheduled")
        if scheduled and self.cohort * (self.separation or 1) > self.clients:
            needed = f"{self.cohort:g} x {self.separation or 1}"
            raise ValueError(f"at least {needed} clients (cohort x separation)")
        return self

    @property
    def _failing(self) -> float:
        """Delta of the query, or the default."""
        return default_delta(self.clients) if self.delta is None else self.delta

    def plan(self) -> Plan:
        """Plan of these rounds, with clip norm 1.

        Raises:
            ExperimentError: no bound is proven for these rounds, or no noise reaches the target.
        """
        known = None
        if self.sampler == "scheduled":
            known = Scheduled(self.cohort, self.separation or 1)
        config = PrivacyConfig(
            clip_norm=1.0,
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            # a given noise multiplier has an epsilon at delta 0 too, possibly an infinite one
            delta=self._failing if self.epsilon else self._failing or None,
            mechanism=self.mechanism,
            adjacency=self.adjacency,
            backend=DEFAULT_BACKEND if self.backend == "paper" else self.backend,
        )
        drawn = self.sampler, {"cohort": self.cohort}, self.clients
        return Plan.of(config, *drawn, self.rounds, schedule=known)

    def answer(self, plan: Plan) -> Report:
        """Privacy cost of the rounds of a plan, and the epsilon of the best known attack."""
        return report(plan, backend=self.backend, delta=self._failing)


def report(plan: Plan, *, backend: str | None = None, delta: float | None = None) -> Report:
    """Privacy cost of all rounds of a plan.

    Args:
        plan: the plan.
        backend: accountant; default: the plan's own.
        delta: default: the plan's own.
    """
    accountant = Accountant(backend or plan.config.backend)
    accountant.step_rounds(plan.event(), plan.rounds)
    at = plan.delta if delta is None else delta
    return accountant.epsilon(at, attack=True, caveats=caveats(plan, backend=backend))


def attack_ceiling(epsilon: float, delta: float) -> float:
    """Largest accuracy of any membership attack on a fair coin: (e^epsilon + delta) / (1 +
    e^epsilon), at most 1."""
    chance = 1 / (1 + math.exp(-epsilon))
    return min(1.0, chance + delta * (1 - chance))


_WORDS = {
    "replace-one": (
        "all data of a user",
        "whether the run used a user's data or another user's",
        "with another user's data in place of one's own",
    ),
    "add-remove": ("a user's taking part", "whether a user took part", "without one's data"),
}
"""For each adjacency: the protected unit, the attacker's guess, and the neighbour."""
_STRENGTHS = {1: "strong", 3: "moderate", 10: "weak", math.inf: "very weak"}
"""Words for a guarantee, by the largest epsilon."""


def sentence(report: Report, adjacency: Adjacency) -> str:
    """State an epsilon in one line: unit, epsilon, delta, adjacency, strength, and its meaning for
    a user."""
    if math.isinf(report.epsilon):
        return f"epsilon is infinite at delta {report.delta:g}: no user has any guarantee."
    unit, question, _ = _WORDS[adjacency]
    ceiling = attack_ceiling(report.epsilon, report.delta)
    # a share that rounds to 100 % is not called a bound
    share = f"at most {ceiling:.1%}" if ceiling < 0.9995 else "up to practically all"
    strength = next(word for most, word in _STRENGTHS.items() if report.epsilon <= most)
    return (
        f"epsilon {report.epsilon:.4g} at delta {report.delta:g} for {unit} ({adjacency}) is"
        f" {strength}: an attacker who guesses {question} is right {share} of"
        " the time (chance: 50%)."
    )


def lines(report: Report, adjacency: Adjacency) -> list[str]:
    """Explain an epsilon in full, one paragraph per line: meaning, phases, method and caveats."""
    if not report.events:
        return ["No round was charged to the privacy ledger: there is no epsilon to report."]
    texts = [sentence(report, adjacency)]
    if math.isfinite(report.epsilon):
        factor = math.exp(report.epsilon) if report.epsilon < 700 else math.inf
        texts.append(
            "Whatever an observer looks for in the model, its probability is at most"
            f" {factor:.3g} times what it would be"
            f" {_WORDS[adjacency][2]}, plus {report.delta:g}. This is about sets of outcomes: the"
            " odds of a single outcome may change by more, with a probability that can exceed"
            " delta."
        )
    if report.attack is not None and math.isfinite(report.epsilon):
        texts.append(
            f"The true epsilon lies between {report.attack:.4g}, what the noise gives away to an"
            f" observer who knows all else, and {report.epsilon:.4g}, which is proven. Neither"
            " tests the code of the run, which an audit does (`fedrec audit`)."
        )
    if len(report.phases) > 1:
        texts += [f"Phase {phase} alone: epsilon {e:.4g}." for phase, e in report.phases.items()]
    return [*texts, f"Method: {report.method}.", *report.caveats]


# Systems whose paper states an epsilon: that epsilon, and the exact cost of the noise schedule.
#
# Pure differential privacy of subsampled releases: a release that is e0-DP on a sample of rate g is
# ln(1 + g (exp(e0) - 1))-DP on the whole (Balle, Barthe and Gaboardi 2018). That is g e0 only where
# e0 is far below 1, and the costs of several releases add up.


@dataclass(frozen=True)
class Stated:
    """Epsilon of a system, as its paper states it and exact.

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
        """Describe both in sentences."""
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
