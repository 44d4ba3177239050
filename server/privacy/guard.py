# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of a run: the plan of each phase of its strategy, the total cost of its
rounds, before and during the run, the ledger, the budget, and the report at the end."""

from __future__ import annotations

import io
import json
import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components.registry import STEP, resolve
from fedrec.config import did_you_mean, fits
from fedrec.data.population import POPULATIONS, check_declared_categories, check_independent_clients
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import contributions_of, phase_at
from fedrec.experiment.schema import Experiment
from fedrec.privacy import statement
from fedrec.privacy.accounting.accountant import Accountant, Ledger, Report
from fedrec.privacy.accounting.events import CorrelatedRounds, CoveredRound, Event
from fedrec.privacy.accounting.sampling import FixedSize, Full, Scheduled
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import SIMULATION, caveats
from fedrec.rng import source_of
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import finite, open_atomically, read_json, write_atomically
from fedrec.runtime.ragged import add_prefix, strip_prefix
from server.checkpoint import RunExtension, make_strategy, reading
from server.cohort import SampledCohorts
from strategies.base import CohortStrategy, check_private, more_than_sums, not_private
from strategies.dp import DpFedAvg


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
        strategy = _private_strategy(make_strategy(experiment, cohorts))
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
        if self.config.epsilon is None:
            return len(self.order)
        return bisect_right(  # epsilon grows with every round
            range(1, len(self.order) + 1),
            self.config.epsilon,
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
                f"The budget of epsilon {self.config.epsilon:g} covers {paid} of"
                f" {len(self.order)} rounds."
            )

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


def _private_strategy(strategy: Strategy) -> CohortStrategy:
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
            raise ExperimentError(f"unknown phase {phase!r}", fix=did_you_mean(phase, parts))
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


log = logging.getLogger("fedrec")
_CHARGES = "charges"
_SPENT = "spent"


def guard_of(run: RunFolder, strategy: Strategy) -> Guard | None:
    """Make the guard of a run; None without a `[privacy]` table.

    Raises:
        ExperimentError: the strategy is one of Flower's own, whose sums the guard cannot clip.
    """
    config = run.experiment.privacy
    if config is None:
        return None
    return Guard(run, config, _private_strategy(strategy))


class Guard(RunExtension):
    """Guard that makes a run differentially private and writes its ledger.

    Args:
        run: the run folder; contains the ledger.
        config: the experiment's `[privacy]` table.
        strategy: the strategy; each of its phases gets its own plan.

    Raises:
        ExperimentError: the settings contradict each other, or clients have different weights.
    """

    name = "privacy"

    def __init__(self, run: RunFolder, config: PrivacyConfig, strategy: CohortStrategy) -> None:
        self.run = run
        self.strategy = strategy
        experiment = run.experiment
        self.phases = PhasePlans.of(experiment, config, strategy, self._populations())
        source = source_of(config.mode, experiment.seed)
        order = self.phases.order
        first = {phase: order.index(phase) + 1 for phase in dict.fromkeys(order)}
        self._guarded = {
            phase: DpFedAvg(plan, phase, source, self._charge, first.get(phase, 1))
            for phase, plan in self.phases.plans.items()
        }
        for phase, part in strategy.phases().items():
            part.privacy = self._guarded[phase]
        limit = {"budget": config.epsilon, "delta": self.phases.delta}
        self.ledger = Ledger(run.path / "privacy.jsonl", config.backend, **limit)
        self._lost: set[str] = set()  # phases that lost the noise of earlier rounds
        self._beside: list[str] = []
        self._lines_before = 0  # lines of the ledger before the present round
        if config.mode == "reproducible":
            log.info(
                "privacy mode 'reproducible': a simulation, not a release; noise can be computed"
                " from the seed"
            )

    def begin(self, rounds: int) -> None:
        """Check that the ledger has a charge if rounds were run before.

        Raises:
            RunError: it has none.
        """
        if rounds:
            self._check_charges(1)

    def why_stop(self, round_number: int) -> str:
        """Return the reason to stop if the budget does not cover a round; else empty."""
        exceeds = self.ledger.would_exceed(self._due(round_number))
        return "the privacy budget is spent" if exceeds else ""

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return the epsilon spent so far."""
        return {"epsilon": self._epsilon()}

    def report(self, rounds: int) -> dict[str, Any]:
        """Report the privacy cost of the run."""
        report = self.phases.report(self.ledger.accountant)
        first, *rest = self.phases.lines(report)
        again = self._charged_again()
        missing = self.run.experiment.rounds - rounds if self.why_stop(rounds + 1) else 0
        texts = []
        if again:
            texts.append(
                "Charged again after an interruption, as earlier releases are not refunded:"
                f" round {', '.join(map(str, again))}."
            )
        if missing:
            texts.append(f"The budget ended the run after {rounds} of {rounds + missing} rounds.")
        interruption = " ".join(texts)
        first = f"{first}{self._unit()}"
        words = [first, *filter(None, [interruption]), *self._beside, *rest]
        phases = {f"epsilon of {phase}": value for phase, value in report.phases.items()}
        return {
            **finite({"epsilon": report.epsilon, "attack": report.attack, **phases}),
            "delta": report.delta,
            "method": report.method,
            "releases": report.events,
            "charged-again": len(again),
            "rounds-not-run": missing,
            "interruption": interruption,
            "in words": words,
            "noise": self._beside,
        }

    def _unit(self) -> str:
        """Sentence with the unit of privacy, if it is a column of the user's table."""
        experiment = self.run.experiment
        if experiment.dataset.name != "table":
            return ""
        column = experiment.dataset.options["user"]
        trained = max(self._populations().values())
        return f" It is per value of {column}; {trained:,} of them train."

    def _charged_again(self) -> list[int]:
        """Round of each charge for a repeated round, in the order of the ledger. Covered rounds
        cost nothing and are left out."""
        seen: set[int] = set()
        again = []
        for line in self.ledger.charges:
            if line.round_number in seen and not isinstance(line.event, CoveredRound):
                again.append(line.round_number)
            seen.add(line.round_number)
        return again

    def before_upload(self, round_number: int) -> None:
        """Charge a round before its messages are sent if clients add the noise, so that their
        replies are the release. Central noise is charged by `DpFedAvg`.
        """
        self._lines_before = len(self.ledger.charges)
        phase = self._phase(round_number)
        if self.phases.plans[phase].client_noise_scale:
            self._charge(round_number)
        self._check_joined(phase)

    def _check_joined(self, phase: str) -> None:
        """Check that no clients joined if the cost is that of a schedule of the initial clients.

        Raises:
            RunError: there are new clients.
        """
        plan = self.phases.plans[phase]
        present = len(self.strategy.phases()[phase].cohorts.clients)
        fixed = isinstance(plan.sampling, Scheduled) and not plan.sampling.joining
        if fixed and present != plan.clients:
            raise RunError(
                f"the schedule of phase {phase!r} does not cover new clients",
                expected=f"the {plan.clients} clients at the start of the run",
                got=f"{present}, so that some would take part more often than is charged",
                fix="start a new run; the previous checkpoint is intact",
            )

    def _due(self, round_number: int) -> Event:
        """Event to charge for a round. With correlated noise, the first round is charged for all
        planned rounds, and so is the first one after these if the run is extended; if a round is
        repeated, or the noise of earlier ones is lost, its noise and that of all later ones is
        drawn anew (unless it is a function of the seed), which costs no more than all of them once
        more."""
        phase = self._phase(round_number)
        event = self.phases.event(phase)
        if not isinstance(event, CorrelatedRounds):
            return event
        lines = [line for line in self.ledger.charges if line.event.phase == phase]
        charged = [line.event for line in lines if isinstance(line.event, CorrelatedRounds)]
        if all(earlier.rounds < event.rounds for earlier in charged):
            return event
        anew = lines[-1].round_number >= round_number or phase in self._lost
        return event if anew and self.phases.config.mode == "secure" else CoveredRound(phase)

    def _charge(self, round_number: int) -> None:
        """Charge a round as planned.

        Raises:
            RunError: the budget does not cover it, or the charge could not be written.
        """
        self.ledger.charge(round_number, self._due(round_number))
        self._lost.discard(self._phase(round_number))

    def _phase(self, round_number: int) -> str:
        order = self.phases.order
        return order[min(round_number, len(order)) - 1]

    def check_charged(self, round_number: int) -> None:
        """Check that the round was charged as planned.

        Raises:
            RunError: no line of the ledger since the round's messages were sent has the round and
                its planned event.
        """
        lines = self.ledger.charges[self._lines_before :]
        phase = self._phase(round_number)
        planned = self.phases.event(phase), CoveredRound(phase)
        if not any(line.round_number == round_number and line.event in planned for line in lines):
            raise RunError(
                f"round {round_number} was not charged, so its result may not be used",
                expected=f"a line in {self.ledger.path} with the planned event",
                got=f"{len(lines)} lines since its messages were sent",
                fix=f"strategy {type(self.strategy).__name__!r} has to aggregate by"
                " CohortStrategy.aggregate_train; the previous checkpoint is intact",
            )

    def _epsilon(self) -> float:
        """Epsilon spent so far."""
        return self.ledger.spent(self.phases.delta).epsilon

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Compare the noise of a round with the largest possible sum of clipped updates, in a line
        per phase with noise."""
        plans = self.phases.plans
        self._beside = [
            line
            for phase in dict.fromkeys(self.phases.order)
            for line in _noise_and_signal(phase, plans[phase], theta)
        ]
        return self._beside

    def _populations(self) -> dict[str, int]:
        """Number of clients of each phase at the start of the run, without clients that joined
        later."""
        file = self.run.path / "populations.json"
        if not file.exists():
            counts = {
                phase: len(part.cohorts.clients) for phase, part in self.strategy.phases().items()
            }
            write_atomically(file, json.dumps(counts))
        fix = "restore it from a backup; the guarantee depends on these numbers of clients"
        with reading(file, "JSON as written by fedrec", fix):
            return {str(phase): int(count) for phase, count in read_json(file).items()}

    def memory(self) -> dict[str, np.ndarray]:
        """Return the number of charges and their epsilon. Noise that later rounds cancel goes into
        a separate file."""
        noise = {f"{phase}/": self._guarded[phase].memory for phase in self._keeping()}
        if noise:
            _save_noise(self.run, len(self.ledger.charges), add_prefix(noise))
        return {_CHARGES: np.asarray(len(self.ledger.charges)), _SPENT: np.asarray(self._epsilon())}

    def _check_charges(self, charges: int, spent: float = 0.0) -> None:
        """Check that the ledger has all known charges of the run.

        Args:
            charges: known number of charges.
            spent: their total epsilon.

        Raises:
            RunError: some are missing.
        """
        charged = len(self.ledger.charges)
        if charged < charges or (charges and self._epsilon() < spent * (1 - 1e-9)):
            raise RunError(
                f"{self.ledger.path} does not contain all charges of the run",
                expected=f"at least {charges} charges, as the newest checkpoint says"
                + (f", and epsilon {spent:.6g}" if spent else ""),
                got=f"{charged}, and epsilon {self._epsilon():.6g}",
                fix="restore the file from a backup; without it the privacy spent is unknown",
            )

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore the state that `memory` returned.

        Raises:
            RunError: the ledger has fewer charges than at that time, or the file of noise that
                later rounds cancel is damaged.
        """
        charges = int(memory[_CHARGES])
        self._check_charges(charges, float(memory[_SPENT]))
        noise = self._saved_noise(charges)
        for phase in self._keeping():
            self._guarded[phase].memory = strip_prefix(f"{phase}/", noise)

    def _saved_noise(self, charges: int) -> dict[str, np.ndarray]:
        """Noise that later rounds cancel, at the checkpoint with `charges` charges. If its file is
        missing, as after a finished run, noise is drawn anew and charged once more."""
        keeping = self._keeping()
        noise = _read_noise(self.run, charges) if keeping else {}
        if noise is None:
            self._lost.update(keeping)
            log.warning(
                "%s is missing, as after a finished run: noise of further rounds is drawn anew, and"
                " all rounds of phase %s are charged once more",
                _noise_file(self.run, charges),
                ", ".join(keeping),
            )
        return noise or {}

    def _keeping(self) -> list[str]:
        """Phases whose noise a resumed run needs."""
        return [phase for phase, privacy in self._guarded.items() if privacy.keeps_noise]


# Separate files of noise that later rounds cancel: whoever reads it can remove noise from a model,
# so it must not be in a checkpoint, which contains one.
#
# A file belongs to the checkpoint with the same number of charges in the ledger. Noise is charged
# before it is drawn, so that the number identifies it, and a round that is repeated after an
# interruption starts with the same noise. The files are in `private/` of the run folder, readable
# by their owner only; a finished run keeps none (`fedrec.runs.folder`).


def _noise_file(run: RunFolder, charges: int) -> Path:
    """File of the noise of the checkpoint with `charges` charges in the ledger."""
    return run.path / "private" / f"noise-{charges:09d}.npz"


def _save_noise(run: RunFolder, charges: int, noise: Mapping[str, np.ndarray]) -> None:
    """Write the noise of a checkpoint, before the checkpoint itself, and delete that of deleted
    checkpoints.

    Args:
        run: the run folder.
        charges: number of charges in the ledger at this checkpoint.
        noise: named arrays.

    Raises:
        RunError: it cannot be written; the earlier files are intact.
    """
    file = _noise_file(run, charges)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.parent.chmod(0o700)
    with open_atomically(file, mode=0o600) as opened:
        np.savez(opened, **noise)  # pyright: ignore[reportArgumentType]
    # one more than there are checkpoints, as the new one is not yet written
    for old in sorted(file.parent.glob("noise-*.npz"))[: -run.experiment.checkpoint.keep - 1]:
        old.unlink()


def _read_noise(run: RunFolder, charges: int) -> dict[str, np.ndarray] | None:
    """Read the noise of the checkpoint with `charges` charges; None without a file.

    Raises:
        RunError: the file is damaged.
    """
    file = _noise_file(run, charges)
    if not file.exists():
        return None
    expected = "the noise of earlier rounds, as written by fedrec"
    fix = (
        "restore it from a backup, or delete it: later noise is then drawn anew, and all rounds of"
        " its phase are charged once more"
    )
    with (
        reading(file, expected, fix),
        np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive,
    ):
        return dict(archive)
