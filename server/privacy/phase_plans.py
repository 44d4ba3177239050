# SPDX-License-Identifier: Apache-2.0
"""Privacy plan of each phase of a strategy, and the total cost of its rounds, before and during a
run."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedrec.components.registry import STEP, resolve
from fedrec.config import did_you_mean, fits
from fedrec.data.population import POPULATIONS, check_declared_categories, check_independent_clients
from fedrec.errors import ExperimentError
from fedrec.experiment.phases import contributions_of, phase_at
from fedrec.experiment.schema import Experiment
from fedrec.privacy import statement
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import CorrelatedRounds, Event
from fedrec.privacy.accounting.sampling import FixedSize, Full
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import SIMULATION, caveats
from server.checkpoint import make_strategy
from server.cohort import SampledCohorts
from strategies.base import CohortStrategy, check_private, more_than_sums, not_private


@dataclass(frozen=True)
class PhasePlans:
    """Plans of all phases, and the phase of each round.

    Attributes:
        config: the experiment's `[privacy]` table.
        plans: plan of each phase, in the order of the strategy's phases.
        order: phase of each round of the experiment, from round 1.
    """

    config: PrivacyConfig
    plans: dict[str, Plan]
    order: tuple[str, ...]

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        config: PrivacyConfig,
        strategy: CohortStrategy,
        populations: Mapping[str, int] | None = None,
    ) -> PhasePlans:
        """Make the plans of an experiment whose strategy knows its clients.

        Args:
            experiment: the experiment.
            config: its `[privacy]` table.
            strategy: its strategy.
            populations: number of clients of each phase for noise and charges; default: the current
                clients.

        Raises:
            ExperimentError: the settings contradict each other or name an unknown phase, or a
                phase's strategy cannot be made private.
        """
        parts = strategy.phases()
        _check_phases(config, parts)
        if config.noise_multiplier != 0:
            check_independent_clients(experiment, config.adjacency, "[privacy]")
            check_declared_categories(experiment, "[privacy]")
        schedule = strategy.schedule(strategy.config, strategy.step)
        order = tuple(phase_at(schedule, n + 1).name for n in range(experiment.rounds))
        mix = config.noise_mix(order)
        malicious = _malicious(experiment)
        compressed = experiment.compression is not None
        plans = {
            phase: Plan.of(
                config.in_phase(phase),
                part.cohorts.section.name,
                part.cohorts.section.options,
                (populations or {}).get(phase, len(part.cohorts.clients)),
                experiment.rounds,
                factor=config.noise_factor(phase),
                mix=mix,
                # of compressed updates, what is decoded may have signs, whatever the step sends
                contributions="signed" if compressed else contributions_of(part.step),
                schedule=part.cohorts.schedule,
                phase_rounds=order.count(phase),
                known=experiment.known_cohorts,
                malicious=int(np.isin(part.cohorts.clients, malicious).sum()),
            )
            for phase, part in parts.items()
        }
        _check_consecutive(plans, order)
        for part in parts.values():
            check_private(part)
        return cls(config, plans, order)

    @classmethod
    def before_a_run(cls, experiment: Experiment, clients: np.ndarray) -> PhasePlans:
        """Make the plans of an experiment with training clients `int64 [clients]`, ascending,
        without nodes.

        Raises:
            ExperimentError: the table `[privacy]` is missing, or see `of`.
        """
        if experiment.privacy is None:
            raise ExperimentError(
                f"experiment {experiment.name!r} has no differential privacy",
                expected="a table [privacy]",
                fix="add [privacy] with clip-norm and noise-multiplier (or epsilon)",
            )
        cohorts = SampledCohorts.without_nodes(experiment, clients)
        strategy = private_strategy(make_strategy(experiment, cohorts))
        return cls.of(experiment, experiment.privacy, strategy)

    def event(self, phase: str) -> Event:
        """Event charged for a round of a phase; with correlated noise, for the first one of all."""
        return self.plans[phase].event(phase)

    @property
    def delta(self) -> float:
        """Largest delta of the phases' plans."""
        return max(plan.delta for plan in self.plans.values())

    def paid_rounds(self) -> int:
        """Number of rounds that the budget covers; further rounds are not run."""
        if self.config.limit is None:
            return len(self.order)
        return bisect_right(  # epsilon grows with every round
            range(1, len(self.order) + 1),
            self.config.limit,
            key=lambda rounds: self._accountant(rounds).epsilon(self.delta).epsilon,
        )

    def forecast(self) -> Report:
        """Compute the cost of all rounds that the budget covers, before the run."""
        return self.report(self.planned())

    def planned(self) -> Accountant:
        """Count the charges of all rounds that the budget covers."""
        return self._accountant(self.paid_rounds())

    def report(self, accountant: Accountant) -> Report:
        """Report of an accountant, with the best known attack and the caveats of all plans."""
        lines = dict.fromkeys(line for plan in self.plans.values() for line in caveats(plan))
        attackable = self.config.noise_multiplier != 0
        return accountant.epsilon(self.delta, attack=attackable, caveats=lines)

    def lines(self, report: Report) -> list[str]:
        """Describe a report in sentences."""
        first, *rest = statement.lines(report, self.config.adjacency)
        if self.config.mode == "reproducible":
            first = f"{first} {SIMULATION}"
        return [first, *rest]

    def phase_lines(self) -> Iterator[str]:
        """Describe each phase in a line, and the rounds that the budget does not cover."""
        paid = self.paid_rounds()
        for phase, rounds in Counter(self.order[:paid]).items():
            plan = self.plans[phase]
            many = "s" if rounds > 1 else ""
            yield f"Phase {phase}: {rounds} round{many}, {_drawn(plan)}; {_noise(plan)}"
        if paid < len(self.order):
            yield (
                f"The budget of epsilon {self.config.limit:g} covers {paid} of"
                f" {len(self.order)} rounds."
            )

    def noise_lines(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Compare the noise of a round with the largest possible sum of clipped updates, in a line
        per phase with noise."""
        return [
            line
            for phase in dict.fromkeys(self.order)
            for line in _noise_and_signal(phase, self.plans[phase], theta)
        ]

    def _accountant(self, rounds: int) -> Accountant:
        accountant = Accountant(self.config.backend)
        for phase, count in Counter(self.order[:rounds]).items():
            accountant.step_rounds(self.event(phase), count)
        return accountant


def _malicious(experiment: Experiment) -> np.ndarray:
    """Clients of a simulation's adversary, `int64 [malicious]`."""
    attacked = experiment.adversary is not None
    adversary = POPULATIONS.population(experiment).adversary if attacked else None
    return np.empty(0, dtype=np.int64) if adversary is None else adversary.malicious


def private_strategy(strategy: Strategy) -> CohortStrategy:
    """Check that a strategy can be made private, and return it.

    Raises:
        ExperimentError: it is one of Flower's own, whose sums cannot be clipped and noised.
    """
    if not isinstance(strategy, CohortStrategy):
        raise not_private(strategy, more_than_sums(type(strategy)))
    return strategy


def _drawn(plan: Plan) -> str:
    """Description of the cohort of a plan."""
    if isinstance(plan.sampling, Full) and plan.denominator == plan.clients:
        return f"all {plan.clients} clients in each"
    drawn = "at most " if plan.sampling.rate == 1 else "on average "
    if isinstance(plan.sampling, FixedSize):
        drawn = ""
    return f"{drawn}{plan.denominator:g} of {plan.clients} clients in each"


def _noise(plan: Plan) -> str:
    """Description of clip norm and noise of a plan."""
    names = ", ".join(plan.config.parameters)
    what = "all parameters" if plan.config.parameters == ("*",) else names
    return (
        f"{what}, clipped to L{plan.clip.order} norm {plan.clip_norm:g}, noise multiplier"
        f" {plan.noise_multiplier:.4g} (standard deviation of the mean's noise:"
        f" {plan.mean_noise_std:.3g} per coordinate)."
    )


def _noise_and_signal(phase: str, plan: Plan, theta: Mapping[str, np.ndarray]) -> list[str]:
    numbers = sum(theta[name].size for name in plan.trained(theta))
    per_number = plan.mean_noise_std * plan.denominator
    noise = per_number * math.sqrt(numbers)
    signal = plan.clip_norm * plan.denominator
    if not noise:
        return []
    return [
        f"Noise of phase {phase} in a round: norm {noise:.4g} over {numbers:,} numbers; the largest"
        f" signal, all {plan.denominator:g} clients alike, has norm {signal:.4g}"
        f" ({signal / noise:.2g} times the noise; on one number at most"
        f" {signal / per_number:.3g} times)."
    ]


def _check_consecutive(plans: Mapping[str, Plan], order: tuple[str, ...]) -> None:
    """Check that the rounds of phases with correlated noise are consecutive. Samplers bound the
    distance of a client's rounds in rounds of the experiment; in rounds of the phase, which are
    those that noise is correlated between, it is less.

    Args:
        plans: plan of each phase.
        order: phase of each round, from round 1.

    Raises:
        ExperimentError: they are not.
    """
    for phase in dict.fromkeys(order):
        rounds = [number for number, name in enumerate(order, 1) if name == phase]
        interrupted = rounds[-1] - rounds[0] >= len(rounds)
        if interrupted and isinstance(plans[phase].event(), CorrelatedRounds):
            raise ExperimentError(
                f"the cost of correlated noise is not known in phase {phase!r}, whose rounds are"
                " not consecutive",
                got=f"rounds {', '.join(map(str, rounds[:4]))}{', ...' if len(rounds) > 4 else ''}",
                fix="set privacy.mechanism = 'gaussian' with sampler.name = 'fixed-size', or choose"
                " a strategy whose phases do not alternate",
            )


def _check_phases(config: PrivacyConfig, parts: Mapping[str, CohortStrategy]) -> None:
    """Check the names in `privacy.phases`, that no phase delegates its rounds to inner strategies
    (clip and noise are set on the strategy that sends the orders), and that none releases only a
    part of what has no signs only together."""
    for phase in config.phases:
        if phase not in parts:
            raise ExperimentError(
                f"unknown phase {phase!r}",
                fix=did_you_mean(phase, parts),
            )
    for phase, part in parts.items():
        if list(part.phases().values()) != [part]:
            raise ExperimentError(
                f"phase {phase!r} delegates its rounds to other strategies, which have no plan",
                fix=f"name all inner strategies in `phases` of {type(part).__name__}",
            )
        together = getattr(resolve(STEP, part.step["name"]), "released_together", ())
        released = [name for name in together if fits(name, config.in_phase(phase).parameters)]
        if 0 < len(released) < len(together):
            raise ExperimentError(
                f"phase {phase!r} releases only a part of {', '.join(together)}, which has signs: a"
                " client moves the sum by more than its noise is for",
                got=", ".join(released),
                fix=f"set privacy.phases.{phase}.parameters = {json.dumps(together)}",
            )
