# SPDX-License-Identifier: Apache-2.0
"""The canary audit of an experiment: run it with canary clients, watch what each round releases,
test the claim.

The audited experiment is the given one with four wrappers: a dataset with k more users, a split in
which they train, a model with k more rows per item table, and a step that sets their updates.
Sampler, strategy, messages, clip and noise are unchanged: they are what is tested. The release of a
round is computed from the global parameters before and after it, so any strategy can be audited
that adds `server-lr` times a noisy mean of updates to them.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.attacks.audit.canaries import CanaryPlan, reserved_table
from fedrec.attacks.audit.checks import check_charges
from fedrec.attacks.audit.observations import Observations
from fedrec.attacks.audit.verdict import Audit, audit
from fedrec.components.registry import MODEL, SAMPLER, STRATEGY, resolve
from fedrec.data.population import Population
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.ledger import Ledger
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.atomic_files import open_atomically
from server.callbacks.base import Callback
from simulations.attacks.claims import Claim, claim_of
from simulations.attacks.federations import QUICK, derived, run_once, section, seed_of
from strategies.base import CohortStrategy

_FILE = "canaries.npz"
_DAMAGED = (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error)


def audit_experiment(
    experiment: Experiment,
    claim: Claim | None,
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
        claim: the audited claim; None: that of the experiment's `[privacy]` table.
        output: folder of the runs; finished runs in it are reused.
        canaries: k, in each run.
        seeds: number of runs.
        overshoot: norm of the canaries' uploads in units of S, which the clip must reduce to S.
        significance: chance that the audit wrongly FAILs.
        callbacks: called on each event of the runs.

    Raises:
        ExperimentError: the experiment cannot be audited.
        FedrecError: see `simulations.runner.run`.
    """
    _refuse(experiment)
    population = Population.of(experiment)
    clients = len(population.partition.training_clients) + canaries
    clip = claim_of(experiment, clients).clip if claim is None else claim.clip
    cohort = expected_cohort(experiment, clients)
    runs = []
    ledgers = []
    for number in range(seeds):
        seed = seed_of(experiment, "audit-run", number)
        first = population.interactions.num_users
        plan = CanaryPlan(first=first, count=canaries, magnitude=overshoot * clip, seed=seed)
        audited = with_canaries(experiment, plan, seed)
        folder = output / f"run-{number + 1:02d}"
        runs.append(_observe(audited, plan, folder, callbacks))
        ledgers.append(Ledger(folder / "privacy.jsonl").charges)
    claim = claim or claim_of(experiment, clients, ledgers[0])
    mechanism = claim.mechanism(cohort, min(1.0, cohort / clients), runs[0].rounds)
    certain = [
        [check_charges(seen.rounds, [charge.round_number for charge in charges])]
        if experiment.privacy is not None
        else []
        for seen, charges in zip(runs, ledgers, strict=True)
    ]
    return audit(runs, mechanism, significance=significance, seed=experiment.seed, certain=certain)


def with_canaries(experiment: Experiment, plan: CanaryPlan, seed: int) -> Experiment:
    """The experiment with canary clients and a minimal evaluation."""
    step = section(experiment, "step")
    changes = {
        "dataset": {
            "name": "canaries",
            "base": section(experiment, "dataset"),
            "count": plan.count,
        },
        "split": {"name": "canaries", "base": section(experiment, "split"), "count": plan.count},
        "model": {"name": "reserved", "base": section(experiment, "model"), "rows": plan.count},
        "step": {**step, "name": "canary", "base": step["name"], "canaries": plan.table()},
    }
    return derived(experiment, "audit", seed, changes, **QUICK)


class Watch(Callback):
    """Records what each round releases along the canaries' directions, and saves it when the run is
    finished.

    Args:
        plan: the canaries.
        experiment: the audited experiment.
        file: where the releases go.
    """

    def __init__(self, plan: CanaryPlan, experiment: Experiment, file: Path) -> None:
        self._plan, self._file, self._released = plan, file, []
        self._tables = tuple(resolve_tables(experiment))
        self._rate = server_rate(experiment)

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """The run begins with round `first_round` (more than 1 when resumed) of `rounds`.

        Raises:
            RunError: the run is resumed, and its earlier releases were not recorded.
        """
        if first_round > 1:
            raise RunError(
                f"the audited run {run.path} was interrupted",
                expected="a run that is watched from its first round",
                got=f"a run that continues with round {first_round}",
                fix=f"remove {run.path} and start again",
            )

    def on_update(
        self, round_number: int, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
    ) -> None:
        """Parameters before and after a round; read-only. Not called on the flower engine."""
        table = reserved_table(self._tables, {name: value.shape for name, value in after.items()})
        change = (
            after[table][-self._plan.count :].astype(np.float64)
            - before[table][-self._plan.count :]
        )
        self._released.append(self._plan.project(change) / self._rate(round_number))

    def on_end(self, result: Result) -> None:
        """The run is finished."""
        with open_atomically(self._file) as file:
            np.savez(file, released=np.array(self._released))


def server_rate(experiment: Experiment) -> Callable[[int], float]:
    """Factor of a round's noisy mean in the strategy, by the number of the round, from 1."""
    strategy, settings = resolve(STRATEGY, experiment.strategy.name), experiment.settings(STRATEGY)
    if not issubclass(strategy, CohortStrategy):
        return lambda round_number: 1.0
    return lambda round_number: strategy.server_rate(settings, round_number)


def expected_cohort(experiment: Experiment, clients: int) -> float:
    """Mean cohort size of an experiment with `clients` clients.

    Raises:
        ExperimentError: the sampler does not define it, or `clients` is too small for it.
    """
    sampler = resolve(SAMPLER, experiment.sampler.name)
    drawn = sampler(experiment.settings(SAMPLER), np.arange(clients), experiment.seed)
    if drawn.expected_cohort is None:
        raise ExperimentError(
            f"sampler {experiment.sampler.name!r} has no known sampling rate",
            expected="a sampler that states the mean size of its cohorts",
            got=f"no `expected_cohort` in {sampler.__name__}",
            fix="use the sampler full, fixed-size or poisson, or define that property",
        )
    return drawn.expected_cohort


def resolve_tables(experiment: Experiment) -> Sequence[str]:
    """Names of the item tables of an experiment's model, which is a model with reserved rows."""
    base: dict[str, Any] = experiment.model.options["base"]
    return resolve(MODEL, base["name"]).item_tables  # type: ignore[attr-defined]


def _observe(
    experiment: Experiment, plan: CanaryPlan, folder: Path, callbacks: Sequence[Callback]
) -> Observations:
    """The observations of an audited run."""
    watch = Watch(plan, experiment, folder / _FILE)
    run = run_once(experiment, folder, [watch, *callbacks])
    released = _released(folder / _FILE, plan.count)
    if not len(released):
        raise ExperimentError(
            "the run has no rounds to audit",
            expected="at least one round",
            got="a budget that covers none",
            fix="raise privacy.budget or the noise",
        )
    clients = Population.of(run.experiment).partition.training_clients
    sampler = resolve(SAMPLER, experiment.sampler.name)(
        experiment.settings(SAMPLER), clients, experiment.seed
    )
    canaries = plan.first + np.arange(plan.count)
    # the budget may have ended the run early
    cohorts = [sampler.sample(number) for number in range(1, len(released) + 1)]
    taking_part = np.array([np.isin(canaries, cohort) for cohort in cohorts])
    return Observations(released, taking_part, plan.signs())


def _released(file: Path, canaries: int) -> np.ndarray:
    """The releases of the rounds of an audited run, `float64 [rounds, canaries]`.

    Raises:
        RunError: the file is not there, or was not written by an audit.
    """
    shown = "no such file"
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            found = arrays["released"]
        if found.dtype == np.float64 and (not len(found) or found.shape[1:] == (canaries,)):
            return found
        shown = f"{found.dtype} {list(found.shape)}"
    except FileNotFoundError:
        pass
    except _DAMAGED as e:
        shown = str(e) or type(e).__name__
    raise RunError(
        f"{file} does not hold what an audited run released",
        expected=f"the array 'released', float64 [rounds, {canaries}], written when the run ended",
        got=shown,
        fix=f"remove the folder {file.parent} and audit again",
    )


def _refuse(experiment: Experiment) -> None:
    if experiment.engine.name == "flower":
        raise ExperimentError(
            "the flower engine does not support audits",
            expected="engine serial or ray",
            got="flower",
            fix="--engine serial",
        )
    strategy = resolve(STRATEGY, experiment.strategy.name)
    if issubclass(strategy, CohortStrategy) and strategy.by_phase is not CohortStrategy.by_phase:
        raise ExperimentError(
            f"strategy {experiment.strategy.name!r} has phases, whose releases differ",
            expected="a strategy whose rounds are alike",
            got=repr(experiment.strategy.name),
            fix=(
                "audit one phase by itself, with that phase's strategy, step and clip norm and"
                " without privacy.phases"
            ),
        )
    if server_rate(experiment)(experiment.rounds) <= 0:
        raise ExperimentError(
            "the last rounds cannot be audited: their server rate is 0, so the parameters do not"
            " change",
            expected="strategy.anneal-rounds of at least the number of rounds",
            got=(
                f"rounds = {experiment.rounds}, anneal-rounds ="
                f" {experiment.strategy.options.get('anneal-rounds')}"
            ),
            fix=f"--set strategy.anneal-rounds={experiment.rounds}",
        )
