# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of a run: the plan of each phase, the ledger, the budget, and what is told at the end."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.privacy import explain
from fedrec.privacy.accounting import Report
from fedrec.privacy.caveats import caveats
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.ledger import Ledger
from fedrec.privacy.mechanisms import source_of
from fedrec.privacy.plan import Plan
from fedrec.runs import RunFolder
from strategies.base import CohortStrategy
from strategies.dp import DpFedAvg

log = logging.getLogger("fedrec")


def guard_of(run: RunFolder, strategy: Strategy) -> Guard | None:
    """The guard of a run; None without a `[privacy]` table.

    Raises:
        ExperimentError: the strategy is one of Flower's own, whose sums are beyond the guard's reach.
    """
    config = run.experiment.privacy
    if config is None:
        return None
    if not isinstance(strategy, CohortStrategy):
        raise ExperimentError(
            f"strategy {type(strategy).__name__!r} cannot be made private",
            expected="one of fedrec's own strategies",
            got="one of Flower's, which averages what clients send as it likes",
            fix="set strategy.name = 'reptile', or 'fedavg' with weighting = 'uniform'",
        )
    return Guard(run, config, strategy)


class Guard:
    """Makes a run private and keeps its accounts.

    Args:
        run: the run folder; holds the ledger.
        config: the experiment's `[privacy]` table.
        strategy: the strategy; each of its parts gets a plan of its own.

    Raises:
        ExperimentError: the settings do not fit together, or clients do not all count the same.
    """

    def __init__(self, run: RunFolder, config: PrivacyConfig, strategy: CohortStrategy) -> None:
        self.run, self.config, self.strategy = run, config, strategy
        experiment = run.experiment
        self.ledger = Ledger(run.path / "privacy.jsonl", config.backend)
        self._refuse_unknown_phases()
        self.plans: dict[str, Plan] = {}
        for phase, part in strategy.parts.items():
            section = part.cohorts.section
            clients = len(part.cohorts.clients)
            rate = float(getattr(part.config, "server_lr", 1.0))
            plan = Plan.of(
                config.in_phase(phase),
                section.name,
                section.options,
                clients,
                experiment.rounds,
                server_lr=rate,
                factor=config.noise_factor(phase),
                mix=self._mix,
            )
            self.plans[phase] = plan
            if config.covers(phase):
                source = source_of(config.mode, experiment.seed)
                part.protect(DpFedAvg(plan, phase, source, self.ledger.charge))
        if config.mode == "reproducible":
            log.info("privacy mode 'reproducible': a simulation, not a release; noise can be computed from the seed")

    @property
    def delta(self) -> float:
        """The largest delta of the phases' plans."""
        return max(plan.delta for plan in self.plans.values())

    def pays(self, round_number: int) -> bool:
        """Whether the budget pays for a round."""
        event = self._event(round_number)
        return not self.ledger.would_exceed(event, self._budget, self.delta)

    def before_upload(self, round_number: int) -> None:
        """Charge a round before clients are asked, where what they send is itself the release.

        That is so without noise, and where clients add it; noise of the server's is charged by what adds it.
        """
        phase = self.strategy.phase(round_number)
        if not self.config.covers(phase) or self.plans[phase].client_noise_scale:
            self.ledger.charge(round_number, self.plans[phase].event(phase))

    def epsilon(self) -> float:
        """What has been spent."""
        return self.ledger.spent(self.delta).epsilon

    def report(self) -> Report:
        """What the run has cost, with the best known attack and everything that the number does not say."""
        said = dict.fromkeys(line for plan in self.plans.values() for line in caveats(plan))
        return self.ledger.accountant.epsilon(self.delta, attack=self._attackable, caveats=said)

    def lines(self) -> list[str]:
        """The report in plain words."""
        report = self.report()
        said = explain.lines(report, self.config.adjacency)
        uncovered = [phase for phase in self.plans if not self.config.covers(phase)]
        for phase, value in report.phases.items():
            if uncovered and self.config.covers(phase):
                said.insert(1, f"Epsilon of phase {phase!r} given what {', '.join(uncovered)} released: {value:.4g}.")
        return said

    def table(self) -> dict[str, Any]:
        """The report as JSON values; an infinite epsilon is the text "inf"."""
        report = self.report()
        numbers = {
            "epsilon": report.epsilon,
            "attack": report.attack,
            **{f"epsilon of {k}": v for k, v in report.phases.items()},
        }
        finite = {key: value if value is None or math.isfinite(value) else "inf" for key, value in numbers.items()}
        rest = {"delta": report.delta, "method": report.method, "releases": report.events, "in words": self.lines()}
        return {**finite, **rest}

    def state(self) -> dict[str, np.ndarray]:
        """What must survive a resumed run, beside the ledger."""
        return {f"{phase}/{name}": value for phase, part in self._guarded() for name, value in part.state().items()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        for phase, part in self._guarded():
            own = {name.removeprefix(f"{phase}/"): v for name, v in state.items() if name.startswith(f"{phase}/")}
            part.restore(own)

    @property
    def _mix(self) -> Counter[float]:
        """Rounds that noise is calibrated for, those of all phases under noise, by their noise factor."""
        rounds = range(1, self.run.experiment.rounds + 1)
        phases = [phase for phase in map(self.strategy.phase, rounds) if self.config.covers(phase)]
        return Counter(map(self.config.noise_factor, phases)) or Counter({1.0: 1})

    def _refuse_unknown_phases(self) -> None:
        for phase in self.config.phases:
            if phase not in self.strategy.parts:
                raise ExperimentError(
                    f"there is no phase {phase!r}",
                    expected="phases of the strategy in privacy.phases",
                    got=repr(phase),
                    fix=did_you_mean(phase, self.strategy.parts),
                )

    def _guarded(self) -> list[tuple[str, DpFedAvg]]:
        return [(phase, part.privacy) for phase, part in self.strategy.parts.items() if part.privacy is not None]

    def _event(self, round_number: int):
        phase = self.strategy.phase(round_number)
        return self.plans[phase].event(phase)

    @property
    def _budget(self) -> float | None:
        """No budget pays for a run with a phase without noise; then only the covered phases are calibrated."""
        covered = all(self.config.covers(phase) for phase in self.plans)
        return next(iter(self.plans.values())).budget if covered else None

    @property
    def _attackable(self) -> bool:
        return self.config.mechanism == "gaussian" and self.config.noise_multiplier != 0
