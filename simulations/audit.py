# SPDX-License-Identifier: Apache-2.0
"""The canary audit of an experiment: run it with canary clients, watch what each round releases, test the claim.

The audited experiment is the given one with four wrappers: a dataset with k more users, a split in which they train, a
model with k more rows per item table, and a step that plants their updates. Sampler, strategy, messages, clip and
noise are untouched: they are what is tested. What a round released is read off the global parameters before and after
it, so any strategy can be audited that adds `server-lr` times a noisy mean of updates to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.attacks.audit.canaries import CanaryPlan, reserved_table
from fedrec.attacks.audit.mechanism import Mechanism
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.verdict import Audit, audit
from fedrec.data.population import Population, read_interactions
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment import Experiment
from fedrec.registry import MODEL, SAMPLER, resolve
from fedrec.runs import Result, RunFolder
from server.callbacks.base import Callback
from simulations.attacks.federations import QUICK, derived, run_once, section, seed_of

_FILE = "canaries.npz"


@dataclass(frozen=True)
class Claim:
    """What the experiment claims of itself.

    Attributes:
        clip: S, largest L2 norm of one client's update.
        noise_std: standard deviation of the noise in each coordinate of the mean update.
        delta: of the claimed epsilon.
        epsilon: the claim, for the population with canaries; None: that of T Gaussian releases without amplification.
        denominator: M, what the sum is divided by; None: the sampler's cohort.
    """

    clip: float
    noise_std: float
    delta: float = 1e-5
    epsilon: float | None = None
    denominator: float | None = None


def audit_experiment(
    experiment: Experiment,
    claim: Claim,
    output: Path,
    *,
    canaries: int = 1000,
    seeds: int = 1,
    overshoot: float = 10.0,
    significance: float = 0.05,
    callbacks: Sequence[Callback] = (),
) -> Audit:
    """Run the experiment with canaries and audit its claim.

    Args:
        experiment: the experiment, resolved.
        claim: what is audited.
        output: folder of the runs; runs that are there already are taken.
        canaries: k, in each run.
        seeds: number of runs.
        overshoot: canaries upload so many times S, which the clip must bring down to S.
        significance: chance that the audit wrongly FAILs.
        callbacks: told what happens in the runs.

    Raises:
        ExperimentError: the experiment cannot be audited.
        FedrecError: see `simulations.runner.run`.
    """
    _refuse(experiment)
    users = read_interactions(experiment).num_users
    runs, rate = [], 1.0
    for number in range(seeds):
        seed = seed_of(experiment, "audit-run", number)
        plan = CanaryPlan(first=users, count=canaries, magnitude=overshoot * claim.clip, seed=seed)
        seen, rate = _observe(with_canaries(experiment, plan, seed), plan, output / f"run-{number + 1:02d}", callbacks)
        runs.append(seen)
    return audit(runs, mechanism_of(experiment, claim, rate), significance=significance, seed=experiment.seed)


def with_canaries(experiment: Experiment, plan: CanaryPlan, seed: int) -> Experiment:
    """The experiment with canary clients, and an evaluation that costs nothing."""
    step = section(experiment, "step")
    changes = {
        "dataset": {"name": "canaries", "base": section(experiment, "dataset"), "count": plan.count},
        "split": {"name": "canaries", "base": section(experiment, "split"), "count": plan.count},
        "model": {"name": "reserved", "base": section(experiment, "model"), "rows": plan.count},
        "step": {**step, "name": "canary", "base": step["name"], "canaries": plan.table()},
    }
    return derived(experiment, "audit", seed, changes, **QUICK)


def mechanism_of(experiment: Experiment, claim: Claim, rate: float) -> Mechanism:
    """The claim on one release, with the number of releases and the sampling rate of the audited runs."""
    cohort = float(experiment.sampler.options["cohort"])
    denominator = cohort if claim.denominator is None else claim.denominator
    parts = (claim.clip, denominator, claim.noise_std, rate, experiment.rounds, claim.delta)
    epsilon = claim.epsilon
    if epsilon is None:
        epsilon = Mechanism(*parts, epsilon=float("inf")).known_epsilon(experiment.rounds)
    return Mechanism(*parts, epsilon=epsilon)


class Watch(Callback):
    """Writes down what each round releases along the canaries' directions, and saves it when the run is finished.

    Args:
        plan: the canaries.
        experiment: the audited experiment.
        file: where the releases go.
    """

    def __init__(self, plan: CanaryPlan, experiment: Experiment, file: Path) -> None:
        self._plan, self._file, self._released = plan, file, []
        self._tables = tuple(resolve_tables(experiment))
        self._rate = float(experiment.strategy.options.get("server-lr", 1.0))

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """See `Callback.on_start`.

        Raises:
            RunError: the run is a continued one, whose earlier releases nobody wrote down.
        """
        if first_round > 1:
            raise RunError(
                f"the audited run {run.path} was broken off",
                expected="a run that is watched from its first round",
                got=f"a run that continues with round {first_round}",
                fix=f"remove {run.path} and start again",
            )

    def on_update(self, round_number: int, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
        """See `Callback.on_update`."""
        table = reserved_table(self._tables, {name: value.shape for name, value in after.items()})
        change = after[table][-self._plan.count :].astype(np.float64) - before[table][-self._plan.count :]
        self._released.append(self._plan.project(change) / self._rate)

    def on_end(self, result: Result) -> None:
        """See `Callback.on_end`."""
        np.savez(self._file, released=np.array(self._released))


def resolve_tables(experiment: Experiment) -> Sequence[str]:
    """Names of the item tables of an experiment's model, which is a model with reserved rows."""
    base: dict[str, Any] = experiment.model.options["base"]
    return resolve(MODEL, base["name"]).item_tables  # type: ignore[attr-defined]


def _observe(
    experiment: Experiment, plan: CanaryPlan, folder: Path, callbacks: Sequence[Callback]
) -> tuple[Observations, float]:
    """What an audited run showed, and its sampling rate."""
    watch = Watch(plan, experiment, folder / _FILE)
    run = run_once(experiment, folder, [watch, *callbacks])
    with np.load(folder / _FILE) as file:
        released = file["released"]
    clients = Population.of(run.experiment).partition.training_clients
    sampler = resolve(SAMPLER, experiment.sampler.name)(experiment.settings(SAMPLER), clients, experiment.seed)
    canaries = plan.first + np.arange(plan.count)
    cohorts = [sampler.sample(number) for number in range(1, experiment.rounds + 1)]
    taking_part = np.array([np.isin(canaries, cohort) for cohort in cohorts])
    rate = min(1.0, float(experiment.sampler.options["cohort"]) / len(clients))
    return Observations(released, taking_part, plan.signs()), rate


def _refuse(experiment: Experiment) -> None:
    if experiment.engine.name == "flower":
        raise ExperimentError(
            "the flower engine cannot be watched",
            expected="engine serial or ray",
            got="flower",
            fix="--engine serial",
        )
    if "cohort" not in experiment.sampler.options:
        raise ExperimentError(
            f"sampler {experiment.sampler.name!r} has no rate that an audit knows",
            expected="a sampler with the setting 'cohort'",
            got=", ".join(experiment.sampler.options) or "no settings",
        )
