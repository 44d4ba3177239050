# SPDX-License-Identifier: Apache-2.0
"""The centralised systems of a run, one after the other; the result of each is saved in the run
folder.

A resumed run continues with the next system. A private system that was interrupted while it was
fitted is fitted again. In mode `reproducible` the noise is then the same, so it is the same release
and costs nothing more; in mode `secure` the noise differs, and the release is charged again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedrec.baselines.base import Baseline
from fedrec.baselines.private.system import PrivateBaseline
from fedrec.data.independence import check_independent_clients
from fedrec.data.population import POPULATIONS, sample_clients
from fedrec.device import resolve_device
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import (
    CentralEvaluation,
    make_baseline,
    settings_that_fit,
    stated_privacy,
)
from fedrec.evaluation.tables import Evaluated
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.accountant import Report
from fedrec.privacy.accounting.events import Event
from fedrec.privacy.ledger import Ledger
from fedrec.privacy.statement import SIMULATION, sentence
from fedrec.report.privacy_total import systems_together
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.shared_memory import finite
from server.callbacks.base import CallbackList

log = logging.getLogger("fedrec")
LEDGER = "privacy.jsonl"


def run_baselines(run: RunFolder, callback_list: CallbackList) -> dict[str, dict[str, float]]:
    """Metrics of the experiment's baselines, by label; each is computed once per run folder."""
    done = run.read_baselines()
    if done is not None:
        return done
    # the server of a deployment has no data to measure on
    if not run.experiment.evaluation.baselines:
        return {}
    callback_list.on_message("fitting baselines")
    metrics = {}
    evaluation = _evaluation(run.experiment)
    settings = settings_that_fit(
        run.experiment.evaluation.baseline_settings(),
        *evaluation.sizes,
        log.warning,
    )
    for label, options in settings.items():
        _refuse_dependent(run.experiment, label, make_baseline(label, options))
    for number, (label, options) in enumerate(settings.items(), 1):
        kept = run.read_baseline(label)
        if kept is None:
            callback_list.on_baseline(label, number, len(settings))
            kept = _measured(run, evaluation, label, options, callback_list)
        # a baseline without rating predictions has no metrics in rating experiments
        if kept["metrics"]:
            metrics[label] = kept["metrics"]
    run.write_baselines(metrics)
    return metrics


def baseline_privacy(run: RunFolder) -> tuple[str, ...]:
    """Privacy cost of the private baselines, one paragraph per line, and of all private systems of
    the run together; empty without any."""
    found = [run.read_baseline(label) or {} for label in run.read_baselines() or {}]
    said = tuple(line for kept in found for line in kept.get("privacy", {}).get("in words", ()))
    return (*said, *systems_together(run)) if said else ()


def central_result(
    run: RunFolder, metrics: dict[str, dict[str, float]], callback_list: CallbackList
) -> Result:
    """Finish an experiment of centralised systems alone."""
    privacy = baseline_privacy(run)
    users = run.baseline_users()
    nobody = pd.Index([], dtype="int64", name="client")
    clients = next((table.index for table in users.values()), nobody)
    result = Result(
        experiment=run.experiment,
        folder=run.path,
        metrics={},
        before_fine_tuning={},
        baselines=metrics,
        rounds=pd.DataFrame(),
        users=pd.DataFrame(index=clients),
        groups=pd.DataFrame(index=pd.Index([], name="group")),
        privacy=privacy,
        baseline_users=users,
        baseline_groups=run.baseline_groups(),
    )
    run.write_result(result, {"baselines-privacy": {"in words": list(privacy)}} if privacy else {})
    run.set_status("finished", 0)
    callback_list.on_end(result)
    return result


def refuse_central(experiment: Experiment) -> None:
    """Refuse an experiment without a federated system where one is needed.

    Raises:
        ExperimentError: it has none.
    """
    if not experiment.federated:
        raise ExperimentError(
            f"experiment {experiment.name!r} has no federated system",
            expected="rounds = 1 or more",
            got="centralised systems alone",
            fix="`fedrec run` runs it; attacks, audits and deployments need a federated system",
        )


def _refuse_dependent(experiment: Experiment, label: str, baseline: Baseline) -> None:
    """Refuse a baseline whose stated privacy would not hold on the data.

    Raises:
        ExperimentError: rows of one client decide about those of others.
    """
    if isinstance(baseline, PrivateBaseline):
        if baseline.config.noise:
            check_independent_clients(experiment, baseline.config.adjacency, f"baseline {label}")
    elif type(baseline).stated is not Baseline.stated:
        check_independent_clients(experiment, "replace-one", f"baseline {label}")


def _measured(
    run: RunFolder,
    evaluation: CentralEvaluation,
    label: str,
    options: Mapping[str, Any],
    callback_list: CallbackList,
) -> dict[str, Any]:
    """Fit and evaluate one baseline, and save its results, which have no metrics if it is not for
    the experiment's task."""
    experiment = run.experiment
    device = resolve_device(experiment.engine.device)
    baseline = make_baseline(label, options, seed=experiment.seed, device=device)
    ledger = None
    if isinstance(baseline, PrivateBaseline):
        ledger = Ledger(run.baseline_folder(label) / LEDGER, baseline.config.backend)
        baseline.charge = _Charges(ledger, again=baseline.config.mode == "secure")
    seconds: dict[str, float] = {}
    evaluated = Evaluated.joined([])
    if evaluation.takes(baseline):
        started = time.perf_counter()
        evaluation.fit(baseline)
        fitted = time.perf_counter()
        evaluated = evaluation.evaluate(baseline, callback_list.on_evaluation)
        seconds = {"fit": fitted - started, "evaluation": time.perf_counter() - fitted}
    metrics = evaluated.means(evaluation.metrics) | stated_privacy(label, baseline)
    found: dict[str, Any] = {"metrics": metrics, "seconds": seconds}
    if ledger is not None and isinstance(baseline, PrivateBaseline):
        found["privacy"] = _account(label, ledger, baseline)
    run.write_baseline(label, found, evaluated.users, evaluated.groups())
    log.info("baseline %s in %.2f s: %s", label, sum(seconds.values()), metrics)
    return found


def _evaluation(experiment: Experiment) -> CentralEvaluation:
    population = POPULATIONS.population(experiment)
    settings = experiment.evaluation
    known = population.evaluated_clients(settings.held_out)
    clients = sample_clients(known, settings.final_users, experiment.seed)
    return CentralEvaluation(population, settings, clients=clients)


class _Charges:
    """Writes charges to a ledger.

    Args:
        ledger: of one baseline.
        again: whether a release that was charged before is charged again.
    """

    def __init__(self, ledger: Ledger, *, again: bool) -> None:
        self._ledger = ledger
        self._known = (
            set() if again else {(charge.round_number, charge.event) for charge in ledger.charges}
        )

    def __call__(self, number: int, event: Event) -> None:
        if (number, event) not in self._known:
            self._ledger.charge(number, event)


def _account(label: str, ledger: Ledger, baseline: PrivateBaseline) -> dict[str, Any]:
    """Privacy cost of a private baseline by its ledger, as JSON values."""
    report: Report = ledger.spent(baseline.config.delta)
    line = f"{label}: {sentence(report, baseline.config.adjacency)}"
    if baseline.config.mode == "reproducible":
        line = f"{line} {SIMULATION}"
    return {
        "epsilon": finite(report.epsilon),
        "delta": report.delta,
        "releases": report.events,
        "in words": [line],
    }
