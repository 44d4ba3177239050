# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of a run: the plan of each phase, the ledger, the budget, and the report
at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.errors import RunError
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.privacy.accounting.events import CorrelatedRounds, CoveredRound, Event
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.plan import PrivacyConfig
from fedrec.rng import source_of
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import finite, read_json, write_atomically
from fedrec.runtime.ragged import add_prefix, strip_prefix
from server.checkpoint import RunExtension, reading
from server.privacy.personal_budgets import noise_file, read_noise, save_noise
from server.privacy.phase_plans import PhasePlans, private_strategy
from strategies.base import CohortStrategy
from strategies.dp import DpFedAvg

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
    return Guard(run, config, private_strategy(strategy))


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
        self.ledger = Ledger(
            run.path / "privacy.jsonl",
            config.backend,
            budget=config.limit,
            delta=self.phases.delta,
        )
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
            self.check_charges(1)

    def why_stop(self, round_number: int) -> str:
        """Return the reason to stop if the budget does not cover a round; else empty."""
        event = self._due(round_number)
        return "the privacy budget is spent" if self.ledger.would_exceed(event) else ""

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return the epsilon spent so far."""
        return {"epsilon": self.epsilon()}

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

    def epsilon(self) -> float:
        """Epsilon spent so far."""
        return self.ledger.spent(self.phases.delta).epsilon

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Compare the noise with the signal, see `PhasePlans.noise_lines`."""
        self._beside = self.phases.noise_lines(theta)
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
            save_noise(self.run, self._charges, add_prefix(noise))
        return {_CHARGES: np.asarray(self._charges), _SPENT: np.asarray(self.epsilon())}

    @property
    def _charges(self) -> int:
        return sum(charge.count for charge in self.ledger.charges)

    def check_charges(self, charges: int, spent: float = 0.0) -> None:
        """Check that the ledger has all known charges of the run.

        Args:
            charges: known number of charges.
            spent: their total epsilon.

        Raises:
            RunError: some are missing.
        """
        if self._charges < charges or (charges and self.epsilon() < spent * (1 - 1e-9)):
            raise RunError(
                f"{self.ledger.path} does not contain all charges of the run",
                expected=f"at least {charges} charges, as the newest checkpoint says"
                + (f", and epsilon {spent:.6g}" if spent else ""),
                got=f"{self._charges}, and epsilon {self.epsilon():.6g}",
                fix="restore the file from a backup; without it the privacy spent is unknown",
            )

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore the state that `memory` returned.

        Raises:
            RunError: the ledger has fewer charges than at that time, or the file of noise that
                later rounds cancel is damaged.
        """
        charges = int(memory[_CHARGES])
        self.check_charges(charges, float(memory[_SPENT]))
        noise = self._saved_noise(charges)
        for phase in self._keeping():
            self._guarded[phase].memory = strip_prefix(f"{phase}/", noise)

    def _saved_noise(self, charges: int) -> dict[str, np.ndarray]:
        """Noise that later rounds cancel, at the checkpoint with `charges` charges. If its file is
        missing, as after a finished run, noise is drawn anew and charged once more."""
        keeping = self._keeping()
        noise = read_noise(self.run, charges) if keeping else {}
        if noise is None:
            self._lost.update(keeping)
            log.warning(
                "%s is missing, as after a finished run: noise of further rounds is drawn anew, and"
                " all rounds of phase %s are charged once more",
                noise_file(self.run, charges),
                ", ".join(keeping),
            )
        return noise or {}

    def _keeping(self) -> list[str]:
        """Phases whose noise a resumed run needs."""
        return [phase for phase, privacy in self._guarded.items() if privacy.keeps_noise]
